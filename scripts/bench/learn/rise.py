"""Means and differences over seeds and tasks, with intervals that hold for new seeds and new tasks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, variance

from turngym.agents.evaluation.statistics import Interval, ScoreError, clustered, t_quantile

TaskMeans = Mapping[str, float]
"""Task id -> mean success of its samples in one run."""


def over_seeds(runs: Sequence[TaskMeans], *, low: float = 0.0, high: float = 1.0) -> Interval:
    """95 % interval of the mean over S seeds and n tasks, both of which could have been others.

    y_si is the value of task i in the run with seed s, y_s. its mean over tasks, y_.i over seeds. Every seed plays all
    tasks, so both are crossed: m +- t(0.975, f) sqrt(A + B), A = var_s(y_s.) / S, B = var_i(y_.i) / n,
    f = (A + B)^2 / (A^2 / (S - 1) + B^2 / (n - 1)) (Satterthwaite), rounded down; cut to [low, high].
    A + B holds the variance of chance within a task twice, so that the interval errs to the wide side.
    With one seed A is unknown: the interval is that over tasks, and holds for this seed only.

    Raises ScoreError without runs, or where they played different tasks.
    """
    if not runs:
        raise ScoreError("there are no runs to average")
    tasks = sorted(runs[0])
    odd = [number for number, run in enumerate(runs) if run.keys() != runs[0].keys()]
    if odd:
        raise ScoreError(f"run {odd[0] + 1} of {len(runs)} played other tasks than the first")
    by_task = [fmean(run[task] for run in runs) for task in tasks]
    if len(runs) == 1 or len(tasks) == 1:
        return clustered(by_task, low=low, high=high)
    of_seeds = variance([fmean(run[task] for task in tasks) for run in runs]) / len(runs)
    of_tasks = variance(by_task) / len(tasks)
    total = of_seeds + of_tasks
    if not total:
        return clustered(by_task, low=low, high=high)
    degrees = 1 / ((of_seeds / total) ** 2 / (len(runs) - 1) + (of_tasks / total) ** 2 / (len(tasks) - 1))
    # 1e-6: whole degrees of freedom stay whole, whatever rounding did to the variances
    mean, half = fmean(by_task), t_quantile(0.975, max(1, int(degrees + 1e-6))) * math.sqrt(total)
    return Interval(mean=mean, low=max(low, mean - half), high=min(high, mean + half), tasks=len(tasks))


def differences(before: Sequence[TaskMeans], after: Sequence[TaskMeans]) -> list[dict[str, float]]:
    """After minus before, seed by seed and task by task. Raises ScoreError where seeds or tasks do not pair up."""
    if len(before) != len(after) or any(a.keys() != b.keys() for a, b in zip(before, after, strict=True)):
        raise ScoreError(f"{len(before)} and {len(after)} runs do not pair up by seed and task")
    return [{task: b[task] - a[task] for task in a} for a, b in zip(before, after, strict=True)]


def rise(before: Sequence[TaskMeans], after: Sequence[TaskMeans]) -> Interval:
    """Mean of after minus before with the interval of `over_seeds`, within [-1, 1]."""
    return over_seeds(differences(before, after), low=-1.0, high=1.0)
