"""One row of `turngym bench learn`: what the evaluations of an algorithm's runs say, over its seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from turngym.agents.evaluation.scores import task_means
from turngym.agents.evaluation.statistics import Interval
from turngym.envs.core.trace import iter_episodes
from turngym.scripts.bench.learn.jobs import Job, metric_rows
from turngym.scripts.bench.learn.recipes import Recipe
from turngym.scripts.bench.learn.rise import TaskMeans, over_seeds, rise


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


def read_result(name: str, recipe: Recipe, jobs: Sequence[Job], earlier: Mapping[str, Result]) -> Result:
    """Read the evaluations of finished runs; `earlier` holds the rows that come before, the control among them."""
    evaluations = [evaluated(job) for job in jobs]
    steps = sorted(evaluations[0])
    means = {step: [evaluation[step] for evaluation in evaluations] for step in steps}
    ends = means[steps[-1]]
    control = earlier.get(recipe.control or "")
    return Result(
        name=name,
        curve={step: over_seeds(values) for step, values in means.items()},
        by_seed={step: [sum(run.values()) / len(run) for run in values] for step, values in means.items()},
        rise=rise(means[steps[0]], ends),
        control=recipe.control,
        against=None if control is None else _against(control.ends, ends),
        seconds=median(trained_seconds(job) for job in jobs),
        commands=[job.command for job in jobs],
        ends=ends,
    )


def _against(control: Sequence[TaskMeans], ends: Sequence[TaskMeans]) -> Interval:
    """Over the seeds that both have."""
    both = min(len(control), len(ends))
    return rise(control[:both], ends[:both])


def evaluated(job: Job) -> dict[int, TaskMeans]:
    """Step -> task means of a run's evaluations."""
    traces = sorted((job.folder / "eval").glob("step_*.jsonl"))
    return {int(path.stem.removeprefix("step_")): task_means(iter_episodes(path)) for path in traces}


def trained_seconds(job: Job) -> float:
    return max((float(str(row.get("time/train_s") or 0.0)) for row in metric_rows(job.folder)), default=0.0)
