"""TCOD: a curriculum over how many turns the student plays, at the front or at the back of an episode."""

from __future__ import annotations

from dataclasses import dataclass

from turngym.trainers.algorithm import DepthPlan, DepthState, DepthStats


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthSchedule:
    """Depth that grows by one turn every `eta` steps; the defaults are TCOD's for ALFWorld.

    For WebShop the paper has eta 4 and k_max 15.
    """

    k_start: int = 1
    """Turns in the first step."""
    eta: int = 6
    """Steps per additional turn."""
    k_max: int = 30
    """Greatest depth, turns."""

    def __post_init__(self) -> None:
        if not 1 <= self.k_start <= self.k_max or self.eta < 1:
            raise ValueError(
                f"schedule is k_start {self.k_start}, eta {self.eta}, k_max {self.k_max}; valid is "
                "1 <= k_start <= k_max and eta >= 1"
            )

    def depth(self, n: int) -> int:
        """Turns at step `n`, 0-based: k = min(k_start + floor(n / eta), k_max).

        Errors: ValueError for a negative step. Source: [tcod] eq. 4; docs/algorithms.md#depth-curriculum.
        Differs from the paper: steps count from 0, as in its published code, 1 + n // eta; in the paper from 1.
        """
        if n < 0:
            raise ValueError(f"n is {n}; the schedule counts steps 0, 1, 2, ...")
        return min(self.k_start + n // self.eta, self.k_max)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontToBack:
    """TCOD F2B as a depth controller: the student plays the first k turns, then the episode ends."""

    schedule: DepthSchedule = DepthSchedule()

    def start(self) -> DepthState:
        """The state before step 1."""
        return DepthState(hbar=float(self.schedule.k_start))

    def plan(self, state: DepthState, step: int) -> DepthPlan:
        """k turns at `step`, 1-based."""
        return DepthPlan(cap=self.schedule.depth(step - 1))

    def update(self, state: DepthState, plan: DepthPlan, stats: DepthStats) -> DepthState:
        """The schedule looks at the step alone."""
        return state


@dataclass(frozen=True, slots=True, kw_only=True)
class BackToFront:
    """TCOD B2F as a depth controller: a demonstration plays the first L - k turns (masked), the student the rest."""

    schedule: DepthSchedule = DepthSchedule()
    h_max: int = 50
    """Limit of turns, the demonstration's included."""

    def start(self) -> DepthState:
        """The state before step 1."""
        return DepthState(hbar=float(self.schedule.k_start))

    def plan(self, state: DepthState, step: int) -> DepthPlan:
        """The student takes over k turns before the demonstration's end at `step`, 1-based."""
        return DepthPlan(cap=self.h_max, demonstration_turns=self.schedule.depth(step - 1))

    def update(self, state: DepthState, plan: DepthPlan, stats: DepthStats) -> DepthState:
        """The schedule looks at the step alone."""
        return state
