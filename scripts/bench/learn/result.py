"""One row of what `turngym bench learn` found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from turngym.agents.evaluation.statistics import Interval
from turngym.scripts.bench.learn.rise import TaskMeans


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One row: an algorithm over its seeds."""

    name: str
    curve: Mapping[int, Interval]
    """Step -> Avg@n over seeds and tasks."""
    by_seed: Mapping[int, Sequence[float]]
    """Step -> Avg@n of each seed."""
    rise: Interval
    """End minus start, paired by seed and task."""
    control: str | None
    against: Interval | None
    """This row's end minus its control's end, paired by seed and task, over the seeds that both have."""
    seconds: float
    """Training of one run, the median over seeds; evaluations excluded."""
    commands: Sequence[str]
    ends: Sequence[TaskMeans] = field(repr=False)

    @property
    def seeds(self) -> int:
        return len(self.ends)

    @property
    def start(self) -> Interval:
        return self.curve[min(self.curve)]

    @property
    def end(self) -> Interval:
        return self.curve[max(self.curve)]

    @property
    def rises(self) -> bool:
        """Whether the interval of the rise lies above zero."""
        return self.rise.low > 0

    def to_json(self) -> dict[str, Any]:
        found = asdict(self)
        del found["ends"]
        return {**found, "seeds": self.seeds, "start": asdict(self.start), "end": asdict(self.end), "rises": self.rises}
