"""Which turns of a session are trained on, which are left out and why, and how old they were."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from turngym.envs.episode import Episode
from turngym.trainers.algorithm import EpisodeFilter
from turngym.trainers.judge.episodes import is_trainable

STALE, TEMPERATURE = "too old", "sampled at another temperature"
NOTHING_DRAWN = "nothing was drawn"


@dataclass(frozen=True, slots=True, kw_only=True)
class Uses:
    """Of the turns of one session, by index."""

    trained: tuple[int, ...]
    left_out: dict[int, str]
    """Index -> why."""

    def as_json(self) -> dict[str, Any]:
        return {"trained": list(self.trained), "left_out": {str(turn): why for turn, why in self.left_out.items()}}


def uses(episode: Episode, select: EpisodeFilter | None) -> Uses:
    """What training does with the turns of a judged session; `select` is the algorithm's."""
    kept = [episode] if select is None else select([episode])
    if kept:
        turns = kept[0].turns
        trained = tuple(turn.index for turn in turns if is_trainable(turn))
        reasons = {turn.index: turn.excluded for turn in turns}
    else:
        # a filter that drops a session does not say why, turn by turn, unless it is asked
        trained = ()
        given: dict[int, str] = getattr(select, "reasons", lambda episode: {})(episode)
        reasons = {turn.index: turn.excluded or given.get(turn.index) for turn in episode.turns}
    left_out = {turn.index: reasons[turn.index] or NOTHING_DRAWN for turn in episode.turns if turn.index not in trained}
    return Uses(trained=trained, left_out=left_out)


def reason_name(why: str) -> str:
    """`why` without the numbers in it: what is counted."""
    if why.endswith("versions old"):
        return STALE
    return TEMPERATURE if why.startswith("sampled at temperature") else why


@dataclass(slots=True, kw_only=True)
class Learned:
    """Counts what was left out, and the ages of what the last step trained on. Safe for several threads."""

    now: Callable[[], float] = time.time
    _left_out: Counter[str] = field(default_factory=Counter, init=False)
    _ages: dict[str, float] = field(default_factory=dict, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def take(self, step: int, episodes: Sequence[Episode], found: Sequence[Uses]) -> dict[str, float]:
        """A step is trained on `episodes`: how many versions and seconds its turns are behind, mean and most."""
        self.leave_out(found)
        behind: list[float] = []
        seconds: list[float] = []
        for episode, one in zip(episodes, found, strict=True):
            behind += [step - 1 - episode.turns[turn].policy_version for turn in one.trained]
            # sessions of older records do not say when
            at = episode.meta.get("at", ())
            seconds += [self.now() - at[turn] for turn in one.trained if turn < len(at) and at[turn]]
        ages = {**_spread("versions_behind", behind), **_spread("age_s", seconds)}
        with self._lock:
            self._ages = ages
        return ages

    def leave_out(self, found: Sequence[Uses]) -> dict[str, float]:
        """Sessions are used up; what of them was left out is counted."""
        with self._lock:
            self._left_out.update(reason_name(why) for one in found for why in one.left_out.values())
        return {}

    @property
    def ages(self) -> dict[str, float]:
        """Of the last step's turns."""
        with self._lock:
            return dict(self._ages)

    @property
    def reasons(self) -> dict[str, int]:
        """How many turns were left out, by reason."""
        with self._lock:
            return dict(sorted(self._left_out.items()))


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {f"{name}_mean": round(sum(values) / len(values), 3), f"{name}_max": round(max(values), 3)}
