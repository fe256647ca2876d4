"""Intervals over training seeds and tasks, and how many of each a study needs.

`over_seeds` is for one method, `rise` compares two. `spread_of` splits the variance of such a pilot into seeds, tasks,
both together and sampling. `power` and `detectable` predict from it what another design would find out, and `cheapest`
searches the least expensive one. docs/research/intervals.md has the formulas and what they cover, docs/study.md an
example.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import NormalDist, fmean

import numpy as np
from numpy.typing import NDArray

from turngym.agents.evaluation.statistics import (
    TAIL_PROBABILITY,
    Interval,
    ScoreError,
    check_same_tasks,
    chi_squared,
    cluster_error,
    clustered,
    difference_bounds,
    holm,
    p_value,
    squares,
    t_quantile,
    variance,
)

# --- Intervals that hold for new seeds and new tasks

TaskMeans = Mapping[str, float]
"""Task id -> mean success of its samples in one run."""
Clusters = Mapping[str, Hashable]
"""Task id -> what it shares with others: a scene, a world, a product."""


def paired_below(seeds: int) -> float:
    """Returns the largest width, relative to the unpaired interval, at which the paired one is reported.

    Recorded seeds of two methods correlate by 0.7 to 1.0 in search and the shop, by 0 in the household. Always taking
    the shorter interval would cover too little, and two or three unrelated seeds often seem to pair up.
    """
    return 0.5 if seeds > 3 else 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class VarianceParts:
    """The variance of a mean over S seeds and n tasks, crossed, from an analysis of variance without repetition."""

    seeds: int
    between_seeds: float
    """A: variance of the seeds' means over S. Holds the chance of a cell once."""
    between_tasks: float
    """B: variance of the tasks' means over n, for new clusters where there are any. Holds that chance once more."""
    chance: float
    """C: what is left, the residual mean square over S n."""

    @classmethod
    def of(cls, values_SN: NDArray[np.float64]) -> VarianceParts:
        """The parts of `values`, of at least two seeds and two tasks."""
        count, tasks = values_SN.shape
        mean_S, mean_N = _means(values_SN.T), _means(values_SN)
        rest_SN = values_SN - np.array(mean_S)[:, None] - np.array(mean_N) + fmean(values_SN.ravel().tolist())
        residual = squares(rest_SN.ravel().tolist()) / ((count - 1) * (tasks - 1))
        return cls(
            seeds=count,
            between_seeds=variance(mean_S) / count,
            between_tasks=variance(mean_N) / tasks,
            chance=residual / (count * tasks),
        )


def _means(values_SN: NDArray[np.float64]) -> list[float]:
    """Mean over seeds of every task, equal on every machine."""
    return [fmean(values_S) for values_S in values_SN.T.tolist()]


def crossed_half(
    between_seeds: float, degrees: float, chance: float, between_tasks: float, t_tasks: float, seeds: int, tail: float
) -> float:
    """Half the width: sqrt(t(f)^2 max(A - c C, 0) + t(n - 1)^2 max(B - (1 - c) C, c C)), c = (S - 2) / (4 (S - 1)).

    A + B counts the chance of a cell twice, so C is taken off once. A has few degrees of freedom, C has many: the more
    seeds there are, the larger the part of C within A that may be counted with the tasks' quantile.

    Args:
        between_seeds: A, variance of the mean between seeds.
        degrees: f, degrees of freedom of A.
        chance: C, variance of the mean by the chance of a cell.
        between_tasks: B, variance of the mean between tasks.
        t_tasks: t(n - 1), the quantile for tasks.
        seeds: S, the number of seeds.
    """
    known = chance * (seeds - 2) / (4 * (seeds - 1))
    apart = t_quantile(1 - tail, degrees) ** 2 * max(between_seeds - known, 0.0)
    return math.sqrt(apart + t_tasks**2 * max(between_tasks - (chance - known), known))


def over_seeds(runs: Sequence[TaskMeans], *, clusters: Clusters | None = None) -> Interval:
    """95 % interval of the mean over S seeds and n tasks, both of which could have been others.

    Every seed plays all tasks, so both are crossed: m +- `crossed_half` with f = S - 1, cut to [0, 1], and at
    least the interval over tasks that a single evaluation has (`clustered`, of the means over seeds), which alone holds
    near the ends of the scale. With one seed nothing is known of seeds: the interval is that over tasks, and holds for
    this run only.

    Raises ScoreError without runs, or where they played different tasks.

    Args:
        runs: one for each seed, task -> mean over its samples.
        clusters: task -> cluster; None: tasks are independent.
    """
    check_same_tasks(runs)
    tasks = sorted(runs[0])
    groups = None if clusters is None else [clusters[task] for task in tasks]
    values = _matrix(runs, tasks)
    over = clustered(_means(values), clusters=groups)
    if len(runs) == 1 or len(tasks) == 1:
        return over
    half = _half_of(values, groups)
    ends = max(0.0, min(over.low, over.mean - half)), min(1.0, max(over.high, over.mean + half))
    return Interval(mean=over.mean, low=ends[0], high=ends[1], tasks=over.tasks)


def _matrix(runs: Sequence[TaskMeans], tasks: Sequence[str]) -> NDArray[np.float64]:
    return np.array([[run[task] for task in tasks] for run in runs], np.float64)


def crossed_error(values: Sequence[Sequence[float]]) -> float:
    """Half the width of the 95 % interval of the mean of `values` [S, n] over S >= 2 seeds and n >= 2 tasks."""
    return _half_of(np.asarray(values, np.float64), None)


def crossed_difference(before: Sequence[TaskMeans], after: Sequence[TaskMeans]) -> float:
    """Half the width of the 95 % interval of after minus before on any scale, as `rise` has it but for its bounds.

    Both are of at least two seeds and the same tasks, at least two.
    """
    check_same_tasks([*before, *after])
    tasks = sorted(before[0])
    first, second = _matrix(before, tasks), _matrix(after, tasks)
    mean_N = [b - a for a, b in zip(_means(first), _means(second), strict=True)]
    return _half_of_two(first, second, *_over_tasks(mean_N, None, TAIL_PROBABILITY), TAIL_PROBABILITY, True)[0]


def _half_of(values: NDArray[np.float64], groups: Sequence[Hashable] | None) -> float:
    parts, tail = VarianceParts.of(values), TAIL_PROBABILITY
    over, quantile = _over_tasks(_means(values), groups, tail)
    return crossed_half(parts.between_seeds, len(values) - 1, parts.chance, over, quantile, len(values), tail)


def _over_tasks(mean_N: Sequence[float], groups: Sequence[Hashable] | None, tail: float) -> tuple[float, float]:
    """B, the variance of the mean over tasks, and the quantile that goes with it; over clusters where that is wider."""
    count = len(mean_N)
    over, quantile = variance(mean_N) / count, t_quantile(1 - tail, count - 1)
    if groups is not None and 1 < len(set(groups)) < count:
        half = cluster_error(mean_N, groups, tail)
        if half > quantile * math.sqrt(over):
            return (half / quantile) ** 2, quantile
    return over, quantile


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference(Interval):
    """One method minus another, with what a reader needs to judge it."""

    seeds: tuple[int, int]
    """Training seeds of the other and of this method."""
    fixed: bool = False
    """Whether the side with one run has no training seeds: a scripted player."""
    seed_error: float | None = None
    """Standard error by training seeds alone, chance taken out; None where a side has one run."""
    task_error: float | None = None
    """Standard error by tasks, with the chance of their samples; None for a single task."""
    better: float = 0.5
    """Probability of improvement: that a run of this method does better than one of the other in the same task, where
    equal counts half (rliable's, Agarwal et al. 2021); mean over tasks and pairs of seeds."""
    p: float | None = None
    """The least level at which the interval is clear of zero; None where it was not asked for."""
    family: int = 1
    """Comparisons that were made beside this one, itself included (`in_family`)."""
    adjusted: float | None = None
    """`p` among all of the family, by Holm; None outside of one."""

    @property
    def one_run_each(self) -> bool:
        """Whether it holds for these runs and new tasks only, since nothing is known of other seeds."""
        return min(self.seeds) == 1 and not self.fixed

    @property
    def clear(self) -> bool:
        """Whether the interval lies on one side of zero and holds for new seeds; in a family, by Holm."""
        if self.one_run_each:
            return False
        return self.low > 0 or self.high < 0 if self.adjusted is None else self.adjusted <= 2 * TAIL_PROBABILITY

    def reversed(self) -> Difference:
        """The other method minus this one."""
        return replace(
            self, mean=-self.mean, low=-self.high, high=-self.low, better=1 - self.better, seeds=self.seeds[::-1]
        )

    @property
    def told(self) -> str:
        """`yes`, `no`, or `one run each`."""
        return "one run each" if self.one_run_each else "yes" if self.clear else "no"


NEW_CLUSTERS = "for new scenes, worlds, products"
"""Column of a difference whose interval is for new clusters."""


def signed(value: Difference | None) -> str:
    """A difference in points with its interval, and whether it is clear of zero (`*`) or of one run each."""
    if value is None:
        return "-"
    text = f"{100 * value.mean:+z.1f} [{100 * value.low:+z.1f}, {100 * value.high:+z.1f}]"
    return text + (" *" if value.clear else ", one run each" if value.one_run_each else "")


def points(error: float | None) -> str:
    """A standard error in points; `-` where it is not known."""
    return "-" if error is None else f"{100 * error:.1f}"


def rise(
    before: Sequence[TaskMeans],
    after: Sequence[TaskMeans],
    *,
    clusters: Clusters | None = None,
    fixed: bool = False,
    pair: bool = True,
    p: bool = False,
    tail: float = TAIL_PROBABILITY,
) -> Difference:
    """Mean of after minus before, paired by task, with its 95 % interval for new seeds and new tasks, within [-1, 1].

    m +- `half_of_arms`, and at least `difference_bounds` of the tasks' means. Where there are as many runs and pairing
    them by seed makes the interval much shorter (`paired_below`), it is `crossed_half` of the differences. A single
    run says nothing of other seeds (`Difference.one_run_each`), unless that side is `fixed`, a player without training
    seeds.

    Raises ScoreError without runs, or where they played different tasks.

    Args:
        before: the first method's runs, one for each seed: task -> mean over its samples, from 0 to 1.
        after: the second method's, for the same tasks.
        clusters: task -> cluster; the interval then holds for new clusters. None: tasks are independent.
        fixed: whether a side of one run is a player without training seeds; runs are then not paired.
        pair: whether run i of both sides has the same seed, and may be paired. False: the order means nothing.
        p: whether the p-value is computed, too, which takes 50 times as long.
        tail: probability on either side of the interval.
    """
    check_same_tasks([*before, *after] if before and after else [])
    tasks = sorted(before[0])
    groups = None if clusters is None else [clusters[task] for task in tasks]
    first, second = _matrix(before, tasks), _matrix(after, tasks)
    mean_N = [b - a for a, b in zip(_means(first), _means(second), strict=True)]
    mean = fmean(mean_N)
    low, high = difference_bounds(mean_N, groups, tail)
    over, quantile = _over_tasks(mean_N, groups, tail) if len(tasks) > 1 else (None, 0.0)
    seed_error: float | None = None
    if over is not None and (fixed or min(len(first), len(second)) > 1):
        half, seed_error = _half_of_two(first, second, over, quantile, tail, pair and not fixed)
        low, high = max(-1.0, min(low, mean - half)), min(1.0, max(high, mean + half))
    sides = np.sign(second[:, None] - first[None]).astype(np.int64)

    def at(tail: float) -> Interval:
        return rise(before, after, clusters=clusters, fixed=fixed, pair=pair, tail=tail)

    return Difference(
        mean=mean,
        low=low,
        high=high,
        tasks=len(tasks),
        seeds=(len(first), len(second)),
        fixed=fixed and 1 in (len(first), len(second)),
        seed_error=seed_error,
        task_error=None if over is None else math.sqrt(over),
        better=int(sides.sum()) / sides.size / 2 + 0.5,
        p=p_value(at) if p else None,
    )


def in_family(found: Mapping[str, Difference]) -> dict[str, Difference]:
    """Adjusts the p-values of comparisons, which `rise` must have computed, as one family by Holm. Comparisons of one
    run each are never clear of zero, and do not count."""
    counted = {name: delta.p for name, delta in found.items() if not delta.one_run_each and delta.p is not None}
    adjusted = holm(counted)
    return {name: replace(delta, family=len(counted), adjusted=adjusted.get(name)) for name, delta in found.items()}


def _half_of_two(
    first: NDArray[np.float64],
    second: NDArray[np.float64],
    over: float,
    quantile: float,
    tail: float,
    pair: bool,
) -> tuple[float, float]:
    """Half the width of the interval, and the standard error by seeds alone."""
    arms = [VarianceParts.of(values) for values in (first, second) if len(values) > 1]
    if not arms:
        return 0.0, 0.0
    apart, chance = math.fsum(arm.between_seeds for arm in arms), math.fsum(arm.chance for arm in arms)
    half = half_of_arms(arms, over, quantile, tail)
    if pair and len(first) == len(second):
        parts = VarianceParts.of(second - first)
        paired = crossed_half(parts.between_seeds, parts.seeds - 1, parts.chance, over, quantile, parts.seeds, tail)
        if paired <= paired_below(parts.seeds) * half:
            return paired, math.sqrt(max(parts.between_seeds - parts.chance, 0.0))
    return half, math.sqrt(max(apart - chance, 0.0))


def half_of_arms(arms: Sequence[VarianceParts], between_tasks: float, t_tasks: float, tail: float) -> float:
    """Half the width for two methods with unrelated seeds: sqrt(V + t(n - 1)^2 max(B - (C - K), K)).

    K = c_1 C_1 + c_2 C_2 is chance that is known well (`known_chance`), and counts with the tasks' quantile. If both
    have as many seeds, V = t(f)^2 max(A_1 + A_2 - K, 0), f by Welch (`degrees_of_two`). Else V = sum_i t(S_i - 1)^2
    max(A_i - c_i C_i, 0), each with its own quantile: Welch's f covers too little if the method with fewer seeds varies
    more. A single arm, against a player without seeds, has `crossed_half`.
    """
    chance = math.fsum(arm.chance for arm in arms)
    if len(arms) == 1:
        (arm,) = arms
        return crossed_half(arm.between_seeds, arm.seeds - 1, chance, between_tasks, t_tasks, arm.seeds, tail)
    shares = [known_chance(arm.seeds, tail) * arm.chance for arm in arms]
    known = math.fsum(shares)
    if arms[0].seeds == arms[1].seeds:
        degrees = degrees_of_two([arm.between_seeds for arm in arms], arms[0].seeds - 1)
        apart = max(math.fsum(arm.between_seeds for arm in arms) - known, 0.0)
        squared = t_quantile(1 - tail, degrees) ** 2 * apart
    else:
        squared = math.fsum(
            t_quantile(1 - tail, arm.seeds - 1) ** 2 * max(arm.between_seeds - share, 0.0)
            for arm, share in zip(arms, shares, strict=True)
        )
    return math.sqrt(squared + t_tasks**2 * max(between_tasks - (chance - known), known))


def known_chance(seeds: float, tail: float = TAIL_PROBABILITY) -> float:
    """c, the share of the chance within A that counts with the tasks' quantile, of two methods (`half_of_arms`).

    It is 1 - 4 / S^2 at 95 %. For a smaller `tail`, as in many comparisons, it shrinks in proportion: else a level of
    0.56 % would really be 1.1 %.
    """
    return (1 - 4 / (seeds * seeds)) * min(1.0, tail / TAIL_PROBABILITY)


def degrees_of_two(apart: Sequence[float], own: float) -> float:
    """Degrees of freedom of the sum of two variances that have `own` each (Welch, Satterthwaite): from `own`, if one of
    them is all of the sum, to twice as many."""
    total = math.fsum(apart)
    return own / math.fsum((value / total) ** 2 for value in apart) if total else 2 * own


SURE = 0.05
"""Chance that a seed among seeds of one normal distribution is said to lie apart."""


def seed_apart(runs: Sequence[TaskMeans]) -> int | None:
    """Index of the run that lies apart from the others of its method, as a collapsed one does; None if there is none.

    The intervals take seeds for draws of a normal distribution, and cover as little as 60 % if one in six collapses.
    The run farthest from the mean of the others lies apart if that is more than t(1 - `SURE` / 2S, S - 2) d sqrt(1 +
    1 / (S - 1)), where d is the others' deviation, at least that of chance. Of two runs, neither can be the odd one.
    """
    count = len(runs)
    if count < 3 or len(runs[0]) < 2:
        return None
    values = _matrix(runs, sorted(runs[0]))
    means = _means(values.T)
    far = max(range(count), key=lambda index: abs(means[index] - fmean(means)))
    rest = [*means[:far], *means[far + 1 :]]
    chance = count * VarianceParts.of(values).chance
    deviation = math.sqrt(max(variance(rest), chance) * (1 + 1 / len(rest)))
    return far if abs(means[far] - fmean(rest)) > t_quantile(1 - SURE / 2 / count, count - 2) * deviation else None


def seed_spread(runs: Sequence[TaskMeans]) -> float | None:
    """Standard deviation of training seeds, less what chance alone gives; None for one run or one task."""
    if len(runs) < 2 or len(runs[0]) < 2:
        return None
    parts = VarianceParts.of(_matrix(runs, sorted(runs[0])))
    return math.sqrt(len(runs) * max(parts.between_seeds - parts.chance, 0.0))


def differences(before: Sequence[TaskMeans], after: Sequence[TaskMeans]) -> list[dict[str, float]]:
    """Differences, after minus before, seed by seed and task by task. Raises ScoreError where seeds or tasks do not
    pair up."""
    if len(before) != len(after) or any(a.keys() != b.keys() for a, b in zip(before, after, strict=True)):
        raise ScoreError(f"{len(before)} and {len(after)} runs do not pair up by seed and task")
    return [{task: b[task] - a[task] for task in a} for a, b in zip(before, after, strict=True)]


# --- What a pilot says of another design


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Variances of the difference of two methods on the scale of success; all in squared shares."""

    seed: float
    """Variance of the mean over all tasks between training seeds."""
    seed_high: float
    """One-sided 80 % upper limit of `seed`, since a pilot's few seeds may happen to lie close together."""
    task: float
    """Variance of the mean over all seeds between tasks."""
    both: float
    """Variance of the interaction of seed and task."""
    sample: float
    """Variance of a single pair of episodes by chance alone."""
    mean: float
    """The difference in the pilot."""
    paired: bool = False
    """Whether the pilot's seeds pair up (`paired_below`): a study's differences then have S - 1 degrees of freedom."""


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
        """Number of episodes of the evaluations."""
        return self.runs * self.tasks * self.samples


def spread_of(first: Sequence[TaskMeans], second: Sequence[TaskMeans], samples: int) -> Spread:
    """The spread of `second` minus `first`, runs paired by seed, each task played `samples` times.

    Two-way analysis of variance, components below zero taken as zero; between seeds that of the differences where seeds
    pair up (`paired_below`), else the sum of both methods' own. A task's y successes of K samples vary by chance by an
    estimated y (1 - y) / (K - 1); with one sample chance cannot be told from `both` and counts there.

    Raises ScoreError with fewer than two seeds or two tasks, or where runs do not pair up.
    """
    rows = differences(first, second)
    if len(rows) < 2 or len(rows[0]) < 2:
        raise ScoreError(f"{len(rows)} seeds of {len(rows[0]) if rows else 0} tasks: a pilot needs two of each")
    tasks = sorted(rows[0])
    values = _matrix(rows, tasks)
    parts, arms = VarianceParts.of(values), [VarianceParts.of(_matrix(runs, tasks)) for runs in (first, second)]
    seeds, error = parts.seeds, parts.chance * values.size
    chance = 0.0
    if samples > 1:
        noise = [value * (1 - value) for run in (*first, *second) for value in run.values()]
        # runs of one seed share random streams, so that their chance may be less than that of strangers
        chance = min(2 * fmean(noise) / (samples - 1), error)
    ways = {
        True: (parts.between_seeds, parts.chance, seeds - 1.0),
        False: (
            math.fsum(arm.between_seeds for arm in arms),
            math.fsum(arm.chance for arm in arms),
            degrees_of_two([arm.between_seeds for arm in arms], seeds - 1),
        ),
    }
    reach = {
        way: t_quantile(1 - TAIL_PROBABILITY, degrees) * math.sqrt(apart) for way, (apart, _, degrees) in ways.items()
    }
    paired = reach[True] < paired_below(seeds) * reach[False]
    apart, within, degrees = ways[paired]
    return Spread(
        seed=seeds * max(0.0, apart - within),
        seed_high=seeds * max(0.0, apart / chi_squared(0.2, degrees) - within),
        task=len(tasks) * max(0.0, parts.between_tasks - parts.chance),
        both=max(0.0, error - chance),
        sample=samples * chance,
        mean=fmean(values.ravel().tolist()),
        paired=paired,
    )


_LUCKS = 24
"""Equally likely sizes of a variance that a prediction averages over, for each method."""


@lru_cache(1 << 8)
def _lucks(degrees: float) -> NDArray[np.float64]:
    """Sizes of an estimated variance, as shares of the true one."""
    return np.array([chi_squared((index + 0.5) / _LUCKS, degrees) for index in range(_LUCKS)])


@lru_cache(1 << 12)
def _halves(spread: Spread, design: Design) -> NDArray[np.float64]:
    """Half widths of the interval of `rise` as they may come out, equally likely: `crossed_half`, or `half_of_arms`, of
    expected variances, those between seeds times their luck."""
    s, m = design.seeds, design.tasks
    residual = (spread.both + spread.sample / design.samples) / (s * m)
    known = residual * ((s - 2) / (4 * (s - 1)) if spread.paired else known_chance(s))
    apart, over = spread.seed / s + residual, spread.task / m + residual
    luck = _lucks(s - 1)
    if spread.paired:
        estimates, quantile = apart * luck, np.full(_LUCKS, t_quantile(1 - TAIL_PROBABILITY, s - 1))
    else:
        first, second = (part.ravel() for part in np.meshgrid(luck, luck))
        estimates = apart / 2 * (first + second)
        # `degrees_of_two` of two methods that vary alike
        share = first / (first + second)
        quantile = _t_of((s - 1) / (share**2 + (1 - share) ** 2))
    with_tasks = t_quantile(1 - TAIL_PROBABILITY, m - 1) ** 2 * max(over - (residual - known), known)
    halves: NDArray[np.float64] = np.sqrt(quantile**2 * np.maximum(estimates - known, 0.0) + with_tasks)
    return halves


def _t_of(degrees: NDArray[np.float64]) -> NDArray[np.float64]:
    """t(1 - TAIL) at many degrees of freedom, on straight lines between a few hundred."""
    knots = np.linspace(float(degrees.min()), float(degrees.max()), 33)
    return np.interp(degrees, knots, [t_quantile(1 - TAIL_PROBABILITY, round(float(knot), 9)) for knot in knots])


def _floor(spread: Spread, design: Design, difference: float) -> float:
    """How far `difference_bounds` reaches below the observed `difference`: m values and two more, -1 and 1."""
    m, count = design.tasks, design.tasks + 2
    residual = (spread.both + spread.sample / design.samples) / (design.seeds * m)
    middle = difference * m / count
    square = (m - 1) * m * (spread.task / m + residual) + m * difference**2 + 2 - count * middle**2
    return difference - middle + t_quantile(1 - TAIL_PROBABILITY, count - 1) * math.sqrt(square / (count - 1) / count)


def half_width(spread: Spread, design: Design, difference: float = 0.0) -> float:
    """How far the 95 % interval of `rise` is expected to reach below the observed `difference`."""
    return fmean(np.maximum(_halves(spread, design), _floor(spread, design, difference)).tolist())


def power(spread: Spread, design: Design, difference: float) -> float:
    """Probability that the 95 % interval of `rise` lies above zero, where the true difference is `difference` > 0.

    The observed difference is taken as normal with variance seed / S + task / M + (both + sample / K) / (S M), and the
    variance between seeds that the study finds as chi-squared.
    """
    s, m = design.seeds, design.tasks
    deviation = math.sqrt(spread.seed / s + spread.task / m + (spread.both + spread.sample / design.samples) / (s * m))
    reach = np.maximum(_halves(spread, design), _floor(spread, design, difference))
    if not deviation:
        return fmean((reach < difference).tolist())
    return fmean(NormalDist().cdf(value) for value in ((difference - reach) / deviation).tolist())


def detectable(spread: Spread, design: Design, wanted: float = 0.8) -> float:
    """The smallest true difference that is told from zero with probability `wanted`; inf if that is above 1."""
    low, high = 0.0, 1.0
    if power(spread, design, high) < wanted:
        return math.inf
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (low, middle) if power(spread, design, middle) >= wanted else (middle, high)
    return high


def cheapest(
    spread: Spread,
    difference: float,
    hours: Callable[[Design], float],
    designs: Iterable[Design],
    wanted: float = 0.8,
) -> Design | None:
    """The design of fewest hours that tells `difference` from zero with probability `wanted`; None if none does.

    Of two designs with equal hours, the one with fewer episodes is taken.
    """
    by_size: dict[tuple[int, int], list[Design]] = {}
    for design in sorted(designs, key=lambda candidate: candidate.seeds):
        by_size.setdefault((design.tasks, design.samples), []).append(design)
    enough = list[Design]()
    for sized in by_size.values():
        # more seeds never tell less, so that few of a size have to be looked at
        index = bisect_left(sized, True, key=lambda candidate: power(spread, candidate, difference) >= wanted)
        enough += sized[index : index + 1]
    return min(enough, key=lambda candidate: (hours(candidate), candidate.episodes), default=None)
