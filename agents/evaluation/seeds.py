"""What several training seeds tell: intervals over seeds and tasks, and how many of each a study needs.

`rise` compares two methods whose runs are paired by seed and task. `spread_of` splits the variance of such a pilot into
seeds, tasks, both together and sampling. `power` and `detectable` predict from it what another design would find out,
and `cheapest` searches the least expensive one. docs/study.md has an example and how well the predictions hold.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, variance

import numpy as np

from turngym.agents.evaluation.statistics import Interval, ScoreError, clustered, t_quantile

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


# --- What a pilot says of another design


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Variances of the difference of two methods on the scale of success; all in squared shares."""

    seed: float
    """Of the mean over all tasks, between training seeds."""
    seed_high: float
    """The same, where the pilot's few seeds happened to lie close together: its one-sided 80 % limit."""
    task: float
    """Of the mean over all seeds, between tasks."""
    both: float
    """Of what a seed does in a task beyond that."""
    sample: float
    """Of a single pair of episodes, by chance alone."""
    mean: float
    """The difference in the pilot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """Both methods are trained with `seeds` seeds; every run plays `tasks` tasks `samples` times."""

    seeds: int
    tasks: int
    samples: int

    @property
    def runs(self) -> int:
        return 2 * self.seeds

    @property
    def episodes(self) -> int:
        """Of the evaluations."""
        return self.runs * self.tasks * self.samples


def spread_of(first: Sequence[TaskMeans], second: Sequence[TaskMeans], samples: int) -> Spread:
    """The spread of `second` minus `first`, runs paired by seed, each task played `samples` times.

    Two-way analysis of variance, components below zero taken as zero. A task's y successes of K samples vary by chance
    by an estimated y (1 - y) / (K - 1); with one sample chance cannot be told from `both` and counts there.

    Raises ScoreError with fewer than two seeds or two tasks, or where runs do not pair up.
    """
    rows = differences(first, second)
    if len(rows) < 2 or len(rows[0]) < 2:
        raise ScoreError(f"{len(rows)} seeds of {len(rows[0]) if rows else 0} tasks: a pilot needs two of each")
    values = np.array([[row[task] for task in sorted(row)] for row in rows])
    seeds, tasks = values.shape
    of_seeds, of_tasks = values.mean(1), values.mean(0)
    rest = values - of_seeds[:, None] - of_tasks[None] + values.mean()
    error = float((rest**2).sum() / ((seeds - 1) * (tasks - 1)))
    chance = 0.0
    if samples > 1:
        each = [value * (1 - value) for run in (*first, *second) for value in run.values()]
        chance = 2 * fmean(each) / (samples - 1)
    observed = float(of_seeds.var(ddof=1))
    return Spread(
        seed=max(0.0, observed - error / tasks),
        seed_high=max(0.0, observed / _chi_squared(0.2, seeds - 1) - error / tasks),
        task=max(0.0, float(of_tasks.var(ddof=1)) - error / seeds),
        both=max(0.0, error - chance),
        sample=samples * chance,
        mean=float(values.mean()),
    )


def _chi_squared(p: float, degrees: float) -> float:
    """Quantile of chi-squared divided by its degrees of freedom, by Wilson and Hilferty."""
    return max(1 - 2 / (9 * degrees) + NormalDist().inv_cdf(p) * math.sqrt(2 / (9 * degrees)), 0.0) ** 3


def half_width(spread: Spread, design: Design, difference: float = 0.0, luck: float = 1.0) -> float:
    """How far the 95 % interval of `rise` reaches below the observed `difference`: the larger of

    - t(0.975, f) sqrt(A + B) as in `crossed_error`, with E[A] = seed / S + R, E[B] = task / M + R,
      R = (both + sample / K) / (S M); A + B is `luck` times its expectation
    - what Gaffke's bound of the tasks' means needs (`clustered`), by the mean and variance of its Dirichlet weights
    """
    s, m = design.seeds, design.tasks
    rest = (spread.both + spread.sample / design.samples) / (s * m)
    of_seeds, of_tasks = spread.seed / s + rest, spread.task / m + rest
    if not (total := of_seeds + of_tasks):
        return 0.0
    t = t_quantile(0.975, max(1, int(_degrees(of_seeds, of_tasks, design) + 1e-6)))
    # with the value -1 added, m + 1 values are weighted by Dirichlet(1, ..., 1)
    end = 1 + difference
    bound = math.sqrt((of_tasks * m * m + end**2 * m / (m + 1)) / (m + 1) / (m + 2))
    return max(t * math.sqrt(total * luck), end / (m + 1) + 1.96 * bound)


def _degrees(of_seeds: float, of_tasks: float, design: Design) -> float:
    total = of_seeds + of_tasks
    return 1 / ((of_seeds / total) ** 2 / (design.seeds - 1) + (of_tasks / total) ** 2 / (design.tasks - 1))


def power(spread: Spread, design: Design, difference: float) -> float:
    """Probability that the 95 % interval of `rise` lies above zero, where the true difference is `difference` > 0.

    The observed difference is taken as normal with variance seed / S + task / M + R, and the square of the interval's
    width (`half_width`) as chi-squared, whose degrees are few where seeds are.
    """
    s, m = design.seeds, design.tasks
    rest = (spread.both + spread.sample / design.samples) / (s * m)
    deviation = math.sqrt(spread.seed / s + spread.task / m + rest)
    if not deviation:
        return 1.0
    degrees = _degrees(spread.seed / s + rest, spread.task / m + rest, design)
    lucks = [_chi_squared((part + 0.5) / 64, degrees) for part in range(64)]
    halves = [half_width(spread, design, difference, luck) for luck in lucks]
    return fmean(NormalDist().cdf((difference - half) / deviation) for half in halves)


def detectable(spread: Spread, design: Design, wanted: float = 0.8) -> float:
    """The smallest true difference that is told from zero with probability `wanted`; above 1 there is none: inf."""
    low, high = 0.0, 1.0
    if power(spread, design, high) < wanted:
        return math.inf
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (low, middle) if power(spread, design, middle) >= wanted else (middle, high)
    return high


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What a design costs, in hours of one machine."""

    training: float
    """Hours of one training run."""
    episode: float
    """Hours of one episode of an evaluation."""

    def hours(self, design: Design) -> float:
        return design.runs * self.training + design.episodes * self.episode


def cheapest(
    spread: Spread, difference: float, price: Price, designs: Iterable[Design], wanted: float = 0.8
) -> Design | None:
    """The design of fewest hours that tells `difference` from zero with probability `wanted`; None if none does."""
    for design in sorted(designs, key=lambda one: (price.hours(one), one.episodes)):
        if power(spread, design, difference) >= wanted:
            return design
    return None
