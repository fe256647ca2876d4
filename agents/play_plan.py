"""What an algorithm may ask of a step's episodes beyond their number and depth.

Trainers fill a `PlayPlan` and put it into `RolloutRequest.plan`; rollout sources read it. The kernel between them
(`envs.core.protocols`) does not look into it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from turngym.envs.core.protocols import RolloutRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayPlan:
    """The contents of `RolloutRequest.plan`.

    The defaults ask for nothing: the student plays every episode from its first turn to the step's depth cap.
    """

    short_episodes: int = 0
    """The last so many of the step's episodes stop at `short_turns` (TurnOPD's partial probes)."""
    short_turns: int | None = None
    """The depth cap of the short episodes; None: no episode is short."""
    leave_loops: int = 0
    """The last so many of the step's episodes end where they begin to loop (`envs.core.episode.loop_end`)."""
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

    @classmethod
    def of(cls, request: RolloutRequest) -> PlayPlan:
        """Returns the plan of `request`, or one that asks for nothing."""
        return cls() if request.plan is None else request.plan


def depth_caps(request: RolloutRequest) -> list[int]:
    """Returns the depth cap of every episode of the step, in order."""
    plan = PlayPlan.of(request)
    short = 0 if plan.short_turns is None else plan.short_episodes
    return [request.max_turns] * (request.episodes - short) + [plan.short_turns or request.max_turns] * short


def loops_left(request: RolloutRequest) -> list[bool]:
    """Returns of every episode of the step, in order, whether it ends where it begins to loop."""
    left = PlayPlan.of(request).leave_loops
    return [False] * (request.episodes - left) + [True] * left
