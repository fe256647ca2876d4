"""What a trainer asks of a rollout source for a step: how many episodes, how deep, and what else an algorithm wants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayPlan:
    """What an algorithm may ask of a step's episodes beyond their number and depth.

    The defaults ask for nothing: the student plays every episode from its first turn to the step's depth cap.
    """

    short_episodes: int = 0
    """Number of the step's last episodes that stop at `short_turns` (TurnOPD's partial probes)."""
    short_turns: int | None = None
    """The depth cap of the short episodes; None: no episode is short."""
    leave_loops: int = 0
    """Number of the step's last episodes that end where they begin to loop (`core.loops.loop_end`)."""
    demonstration_turns: int | None = None
    """TCOD B2F: how many turns the student plays at the end; the expert plays the rest. None: the student plays all."""
    prefix_ratios: tuple[tuple[float, ...], ...] = ()
    """LUFFY, one row per group: its first episodes begin with these shares of a demonstration (1.0: all of it)."""
    prefix_unit: Literal["turns", "tokens"] = "turns"
    """What these are shares of: its turns, or the ids of its responses, so that one may end within a response."""
    teacher_turns: float = 0.0
    """Guided-OPD: share of the turns that the teacher plays, whole; a coin of its own decides each turn."""
    states: bool = False
    """GiGPO: note a hash of the environment's exact state before every turn, in `meta["states"]` of each episode."""
    round: int = 0
    """How often the step was asked for before: a later round plays further tasks (GRPO's `refill`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRequest:
    """What a trainer asks of a rollout source for one step."""

    step: int
    """1-based training step; it fixes the tasks and the random streams, so a resumed run collects the same episodes."""
    episodes: int
    max_turns: int
    """Depth cap: the turn in progress at the cap is finished, then the episode ends as `truncated_depth`."""
    temperature: float = 1.0
    group: int = 1
    """Episodes per task: `episodes` / `group` tasks, each played by consecutive samples of one group."""
    plan: PlayPlan = field(default_factory=PlayPlan)
    """What else the algorithm asks of the episodes; by default nothing."""
    share: tuple[int, int] = (0, 1)
    """(i, n): play only every n-th of these episodes, beginning with the i-th; another process plays the others."""

    def own(self, items: Sequence[T]) -> list[T]:
        """Returns those of the step's items, one per episode, that belong to the share."""
        first, every = self.share
        return list(items[first::every])

    def depth_caps(self) -> list[int]:
        """Returns the depth cap of every episode of the step, in order."""
        short = 0 if self.plan.short_turns is None else self.plan.short_episodes
        return [self.max_turns] * (self.episodes - short) + [self.plan.short_turns or self.max_turns] * short

    def loops_left(self) -> list[bool]:
        """Returns for every episode of the step, in order, whether it ends where it begins to loop."""
        left = self.plan.leave_loops
        return [False] * (self.episodes - left) + [True] * left
