"""Which demonstrations count, and how many are left out for which reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from turngym.envs.episode import Episode

USED = "used"
REASONS: Mapping[str, str] = {
    "missing": "without a demonstration",
    "failed": "failed (environment or engine)",
    "unsolved": "not solved",
    "low_reward": "worth too little",
    "too_long": "longer than the context",
}
"""Why a task has no demonstration: name in metrics -> words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemonstrationFilter:
    """Says why a demonstration is left out. The first of: failed, unsolved, low_reward, too_long."""

    success: bool = False
    """Only those that succeeded."""
    least: float | None = None
    """Only those that are worth at least this."""
    reward: Callable[[Episode], float] | None = None
    """What one is worth; None: its return."""
    fits: Callable[[Episode], bool] | None = None
    """Whether one fits the student's context; None: not asked."""

    def reason(self, episode: Episode) -> str:
        """One of `REASONS`, or `USED`."""
        if episode.status.is_error or not episode.turns:
            return "failed"
        if self.success and not episode.success:
            return "unsolved"
        if self.least is not None and self._worth(episode) < self.least:
            return "low_reward"
        return USED if self.fits is None or self.fits(episode) else "too_long"

    def _worth(self, episode: Episode) -> float:
        return episode.episode_return if self.reward is None else self.reward(episode)


def left_out(counts: Mapping[str, int]) -> str:
    """`12 of 20 demonstrations are used; left out: 5 not solved, 3 longer than the context`."""
    total, why = (
        sum(counts.values()),
        [f"{counts[name]} {words}" for name, words in REASONS.items() if counts.get(name)],
    )
    return f"{counts.get(USED, 0)} of {total} demonstrations are used" + (
        f"; left out: {', '.join(why)}" if why else ""
    )
