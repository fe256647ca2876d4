"""What episodes alone say by turn, without a teacher's scores: survival, refused and repeated actions, surprise."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from turngym.core.episode import Episode, Turn
from turngym.trainers.diagnostics.run_metrics import Column

GROUPS = ("all", "won", "lost")
RATES = ("repeated", "invalid", "surprise", "sampled_kl")
"""repeated: the action was taken before in the episode at the same observation; invalid: refused or unreadable;
surprise: -log p of the sampled ids, nats per token, as sampled; sampled_kl: log p - log q of those sampled ids that are
in the teacher's recorded top-K, nats per token. The first two are proxies of a loop; none of them is a forced share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceCurves:
    """Curves by turn [T], for all episodes, the successful and the others; NaN where nothing was recorded."""

    episodes: Mapping[str, int]
    survivors: Mapping[str, Column]
    rates: Mapping[str, Mapping[str, Column]]
    """Rates by group, then by the names of RATES."""

    @property
    def turns(self) -> int:
        return len(self.survivors["all"])


@dataclass(slots=True)
class TraceSums:
    """Adds up episodes one by one: memory grows with the turns of the longest, not with their number."""

    episodes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(GROUPS, 0))
    _cells: dict[tuple[str, int, str], list[float]] = field(default_factory=dict)
    _turns: int = 0

    def add(self, episode: Episode) -> None:
        """Adds one episode. Episodes that ended in an error are skipped."""
        if episode.status.is_error:
            return
        groups = ("all", "won" if episode.success else "lost")
        seen: set[tuple[str, str]] = set()
        self._turns = max(self._turns, episode.depth)
        for group in groups:
            self.episodes[group] += 1
        for turn in episode.turns:
            taken = (turn.observation, turn.action or turn.response)
            values = {"survivors": (1.0, 1.0), "repeated": (float(taken in seen), 1.0)}
            values |= {"invalid": (float(not turn.verdict.valid), 1.0), **_logps(episode, turn)}
            seen.add(taken)
            for group in groups:
                for name, (total, count) in values.items():
                    cell = self._cells.setdefault((group, turn.index, name), [0.0, 0.0])
                    cell[0] += total
                    cell[1] += count

    def curves(self) -> TraceCurves:
        survivors = {group: np.nan_to_num(self._column(group, "survivors", total=True)) for group in GROUPS}
        rates = {group: {name: self._column(group, name) for name in RATES} for group in GROUPS}
        return TraceCurves(episodes=dict(self.episodes), survivors=survivors, rates=rates)

    def _column(self, group: str, name: str, total: bool = False) -> Column:
        cells = [self._cells.get((group, turn, name), (np.nan, 0.0)) for turn in range(self._turns)]
        return np.array([value if total else value / count if count else np.nan for value, count in cells], np.float64)


def trace_curves(episodes: Iterable[Episode]) -> TraceCurves:
    """The curves of a whole trace, read once."""
    sums = TraceSums()
    for episode in episodes:
        sums.add(episode)
    return sums.curves()


def _logps(episode: Episode, turn: Turn) -> dict[str, tuple[float, float]]:
    """(sum, tokens) of surprise and of log p - log q, where they are recorded."""
    if turn.logprobs is None or not turn.response_length:
        return {}
    logp_R = turn.logprobs.astype(np.float64)
    finite = np.isfinite(logp_R)
    sums = {"surprise": (float(-logp_R[finite].sum()), float(finite.sum()))} if finite.any() else {}
    if turn.teacher is not None:
        hit_RK = turn.teacher.ids == episode.response_ids(turn)[:, None]
        finite &= hit_RK.any(axis=1)
        gap_R = logp_R - np.where(hit_RK, turn.teacher.logp, 0.0).sum(axis=1)
        if finite.any():
            sums["sampled_kl"] = (float(gap_R[finite].sum()), float(finite.sum()))
    return sums
