"""Means and rises over seeds and tasks with their intervals, and the figure of `study learn` and `study scenarios`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median, variance
from typing import Any

from turngym.agents.evaluation.scores import task_means
from turngym.agents.evaluation.statistics import Interval, ScoreError, clustered, t_quantile
from turngym.envs.core.errors import TurngymError
from turngym.envs.core.trace import iter_episodes
from turngym.scripts.study.grid import Job, metric_rows
from turngym.scripts.study.recipes import Recipe

# --- Intervals that hold for new seeds and new tasks

TaskMeans = Mapping[str, float]
"""Task id -> mean success of its samples in one run."""


def over_seeds(runs: Sequence[TaskMeans], *, low: float = 0.0, high: float = 1.0) -> Interval:
    """95 % interval of the mean over S seeds and n tasks, both of which could have been others.

    Every seed plays all tasks, so both are crossed: m +- `crossed_error`, cut to [low, high], and at least the interval
    over tasks that a single evaluation has (`clustered`, of the means over seeds), which alone holds near the ends of
    the scale. With one seed nothing is known of seeds: the interval is that over tasks, and holds for this seed only.

    Raises ScoreError without runs, or where they played different tasks.
    """
    if not runs:
        raise ScoreError("there are no runs to average")
    tasks = sorted(runs[0])
    odd = [number for number, run in enumerate(runs) if run.keys() != runs[0].keys()]
    if odd:
        raise ScoreError(f"run {odd[0] + 1} of {len(runs)} played other tasks than the first")
    over = clustered([fmean(run[task] for run in runs) for task in tasks], low=low, high=high)
    if len(runs) == 1 or len(tasks) == 1:
        return over
    half = crossed_error([[run[task] for task in tasks] for run in runs])
    ends = max(low, min(over.low, over.mean - half)), min(high, max(over.high, over.mean + half))
    return Interval(mean=over.mean, low=ends[0], high=ends[1], tasks=over.tasks)


def crossed_error(values: Sequence[Sequence[float]]) -> float:
    """Half the width of the 95 % interval of the mean of y_si, `values` [S, n], over S >= 2 seeds and n >= 2 tasks.

    With y_s. the mean over tasks and y_.i over seeds, t(0.975, f) sqrt(A + B), A = var_s(y_s.) / S,
    B = var_i(y_.i) / n, f = (A + B)^2 / (A^2 / (S - 1) + B^2 / (n - 1)) (Satterthwaite), rounded down. A + B holds the
    variance of chance within a task twice, so that the interval errs to the wide side.
    """
    seeds, tasks = len(values), len(values[0])
    of_seeds = variance([fmean(row) for row in values]) / seeds
    of_tasks = variance([fmean(column) for column in zip(*values, strict=True)]) / tasks
    total = of_seeds + of_tasks
    if not total:
        return 0.0
    degrees = 1 / ((of_seeds / total) ** 2 / (seeds - 1) + (of_tasks / total) ** 2 / (tasks - 1))
    # 1e-6: whole degrees of freedom stay whole, whatever rounding did to the variances
    return t_quantile(0.975, max(1, int(degrees + 1e-6))) * math.sqrt(total)


def differences(before: Sequence[TaskMeans], after: Sequence[TaskMeans]) -> list[dict[str, float]]:
    """After minus before, seed by seed and task by task. Raises ScoreError where seeds or tasks do not pair up."""
    if len(before) != len(after) or any(a.keys() != b.keys() for a, b in zip(before, after, strict=True)):
        raise ScoreError(f"{len(before)} and {len(after)} runs do not pair up by seed and task")
    return [{task: b[task] - a[task] for task in a} for a, b in zip(before, after, strict=True)]


def rise(before: Sequence[TaskMeans], after: Sequence[TaskMeans]) -> Interval:
    """Mean of after minus before with the interval of `over_seeds`, within [-1, 1]."""
    return over_seeds(differences(before, after), low=-1.0, high=1.0)


# --- One row: an algorithm over its seeds


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
    evaluations = [task_means_by_step(job) for job in jobs]
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


def task_means_by_step(job: Job) -> dict[int, TaskMeans]:
    """Step -> task means of a run's evaluations."""
    traces = sorted((job.folder / "eval").glob("step_*.jsonl"))
    return {int(path.stem.removeprefix("step_")): task_means(iter_episodes(path)) for path in traces}


def trained_seconds(job: Job) -> float:
    return max((float(str(row.get("time/train_s") or 0.0)) for row in metric_rows(job.folder)), default=0.0)


# --- The figure

COLUMNS = 4
CLEAR, UNCLEAR, CONTROL = "tab:blue", "tab:orange", "0.6"


def draw_figure(results: Sequence[Result], path: Path, samples: int) -> Path:
    """Write the figure to `path`; the suffix chooses the format."""
    try:
        import matplotlib
    except ImportError as error:
        raise TurngymError("the figure needs matplotlib: pip install 'turngym[train]', or --no-report") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = -(-len(results) // COLUMNS)
    figure = pyplot.figure(figsize=(3.0 * COLUMNS, 2.3 * lines + 0.5 + 0.3 * len(results)))
    grid = figure.add_gridspec(lines + 1, COLUMNS, height_ratios=[2.3] * lines + [0.5 + 0.3 * len(results)])
    by_name = {result.name: result for result in results}
    top = 100 * max(point.high for result in results for point in result.curve.values())
    for place, result in enumerate(results):
        axis = figure.add_subplot(grid[place // COLUMNS, place % COLUMNS])
        _curve(axis, result, by_name.get(result.control or ""))
        axis.set(ylim=(0, min(100.0, top + 5)), xlabel="step" if place + COLUMNS >= len(results) else "")
        axis.set_ylabel(f"Avg@{samples} (%)" if place % COLUMNS == 0 else "")
    _rises(figure.add_subplot(grid[lines, :]), results)
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None} if path.suffix == ".png" else None)
    pyplot.close(figure)
    return path


def _curve(axis: Any, result: Result, control: Result | None) -> None:
    """Seeds thin, their mean with its interval bold, the control's mean dashed."""
    steps = list(result.curve)
    if control is not None:
        means = [100 * point.mean for point in control.curve.values()]
        axis.plot(list(control.curve), means, "--", color=CONTROL, label=control.name)
    for seed in zip(*result.by_seed.values(), strict=True):
        axis.plot(steps, [100 * value for value in seed], color=CLEAR, linewidth=0.7, alpha=0.6)
    points = list(result.curve.values())
    axis.plot(steps, [100 * point.mean for point in points], "o-", color=CLEAR, markersize=3, linewidth=2)
    low, high = ([100 * getattr(point, end) for point in points] for end in ("low", "high"))
    axis.fill_between(steps, low, high, color=CLEAR, alpha=0.15)
    axis.axhline(100 * result.start.mean, color=CONTROL, linewidth=0.8)
    axis.set_title(result.name, fontsize=10)
    axis.grid(alpha=0.3)
    if control is not None:
        axis.legend(fontsize=7, loc="lower right")


def _rises(axis: Any, results: Sequence[Result]) -> None:
    for place, result in enumerate(results):
        mean, low, high = (100 * getattr(result.rise, name) for name in ("mean", "low", "high"))
        color = CLEAR if result.rises else UNCLEAR
        axis.errorbar(mean, place, xerr=[[mean - low], [high - mean]], fmt="o", color=color, capsize=3)
    axis.axvline(0, color="black", linewidth=0.8)
    axis.set_yticks(range(len(results)), [result.name for result in results])
    axis.invert_yaxis()
    axis.set_xlabel("rise of the success over the start, points, 95 % interval over seeds and tasks")
    axis.grid(axis="x", alpha=0.3)
