"""In which order a run plays and learns: each batch before its step, or ahead of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from turngym.envs.episode import Episode
from turngym.envs.protocols import Collect, CollectRequest
from turngym.trainers.algorithm import DepthPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A batch to be played, as it was planned when its episodes began."""

    plan: DepthPlan
    request: CollectRequest


class RolloutSchedule(Protocol):
    """Gives a step its episodes. What it keeps from step to step goes into checkpoints."""

    def __call__(
        self, step: int, planned: Callable[[int], Planned], collect: Collect
    ) -> tuple[Planned, list[Episode]]: ...

    def learned(self, step: int) -> None:
        """The episodes of `step` are in the weights: what a checkpoint holds from now on is without them."""

    def save(self, folder: Path) -> None:
        """Add files to a checkpoint that is being written."""

    def load(self, folder: Path) -> None:
        """Go on from a checkpoint."""

    def close(self) -> None:
        """The run is over, or broken off."""


@dataclass(frozen=True, slots=True)
class Synchronous:
    """Every batch is planned and played when its step comes, by the student as it is then."""

    def __call__(self, step: int, planned: Callable[[int], Planned], collect: Collect) -> tuple[Planned, list[Episode]]:
        now = planned(step)
        return now, collect(now.request)

    def learned(self, step: int) -> None:
        return

    def save(self, folder: Path) -> None:
        return

    def load(self, folder: Path) -> None:
        return

    def close(self) -> None:
        return
