"""Which interval is reported, and by which formula; docs/research/intervals.md has what each covers.

- one evaluation, for new tasks of the kind: Gaffke's bounds of the tasks' means (`clustered`)
- the same where tasks share a scene, a world or a product: also t over the clusters' means (`clustered`, `clusters`)
- two runs on the same tasks: t over the tasks' differences and two more at -1 and 1 (`difference_bounds`)
- several training seeds: seeds and tasks crossed (`turngym.agents.evaluation.seeds`)
- many comparisons with one baseline: Holm's p-values (`holm`)
- a method at a cost: its curve interpolated at that cost (`cost_weights`)

Two quantiles are computed here and compared with scipy's in the tests: scipy is 100 MB, and the base install has none.

Others recompute these numbers on other machines (`result check`), so no sum depends on the processor: it is exact
before it is rounded (`fmean`, `math.fsum`), or adds arrays one after the other. A matrix product, a LAPACK routine and
NumPy's `mean`, `sum` and `std` round by kernel, threads and order. What remains, logarithms and the like of another C
library, is what `alike` tolerates.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist, fmean

import numpy as np
from numpy.typing import NDArray

from turngym.core.errors import TurngymError

TAIL_PROBABILITY = 0.025
"""Probability on either side of a 95 % interval."""
_HALVINGS = 26
"""Steps of bisection in an interval of at most 1: bounds are exact to 1e-8, the integral to about 1e-9."""


TOLERANCE = 1e-9
"""How much a number may differ from the same one of another machine: relative, and absolute where it is below 1."""


class ScoreError(TurngymError):
    """Results that cannot be scored or compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean over tasks with its 95 % interval."""

    mean: float
    low: float
    high: float
    tasks: int

    def __str__(self) -> str:
        return f"{100 * self.mean:z.1f} [{100 * self.low:z.1f}, {100 * self.high:z.1f}]"


# --- Sums that are equal on every machine


def alike(one: object, other: object) -> bool:
    """Whether two values, or two tables of values, are the same, wherever each was computed: numbers with a fraction
    within `TOLERANCE`, everything else (counts, names, hashes) exactly."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(alike(value, other[name]) for name, value in one.items())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return one == other


def variance(values: Sequence[float]) -> float:
    """Sample variance, with n - 1, of at least two values; equal in any order."""
    mean = fmean(values)
    return squares(value - mean for value in values) / (len(values) - 1)


def squares(values: Iterable[float]) -> float:
    """Sum of squares; equal in any order."""
    # not value**2: a C library's power may round otherwise than a product does
    return math.fsum(value * value for value in values)


# --- Means of one evaluation: Gaffke's bounds


def upper_bound(values: Sequence[float]) -> float:
    """Gaffke's upper bound of the mean: it lies below the mean with probability at most `TAIL_PROBABILITY`.

    `values` are independent and within [0, 1]; nothing else is assumed of their distribution. With one more value
    z_{n+1} = 1 and weights w ~ Dirichlet(1, ..., 1), the bound is the 1 - tail quantile of sum_i w_i z_i. It never
    falls when a value rises, and for zeros and ones it is the bound of Clopper and Pearson. Sources: Gaffke 2005,
    Learned-Miller and Thomas 2019; docs/research/intervals.md#references has both in full.
    """
    places, counts = with_the_end(values)
    if len(places) == 1:
        return 1.0
    low, high = float(places[0]), 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if chance_above(places, counts, middle) > TAIL_PROBABILITY:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def chance_above(places: NDArray[np.float64], counts: NDArray[np.float64], limit: float) -> float:
    """P(sum_i w_i z_i > limit), w ~ Dirichlet(1, ..., 1), where `counts` [v] of the z are at `places` [v].

    Such weights are standard exponentials E_i divided by their sum, so this is P(sum_i (z_i - limit) E_i > 0). By
    inversion of the characteristic function ([imhof] eq. 3.2) it is 1/2 + 1/pi int_0^inf sin(theta(u)) / (u rho(u)) du
    with theta = sum_v c_v atan(a_v u), rho = prod_v (1 + a_v^2 u^2)^(c_v / 2), a_v = z_v - limit. In log u the
    integrand is analytic and vanishes on both sides, so the trapezoidal rule converges exponentially.
    """
    # with more factors the strip in which the integrand stays small is narrower
    step = 0.1 * min(1.0, 10 / math.sqrt(counts.sum()))
    scaled_VU = np.multiply.outer(places - limit, np.exp(np.arange(-25.0, 25.0, step)))
    theta_U, log_rho_U = _weighted(counts, np.arctan(scaled_VU)), _weighted(counts, np.log1p(np.square(scaled_VU))) / 2
    return 0.5 + math.fsum((np.sin(theta_U) * np.exp(-log_rho_U)).tolist()) * step / math.pi


def _weighted(counts_V: NDArray[np.float64], values_VU: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sum over the rows of `values`, each `counts` times, one row after the other."""
    total_U = np.zeros(values_VU.shape[1])
    for count, row_U in zip(counts_V, values_VU, strict=True):
        total_U += count * row_U
    return total_U


def with_the_end(values: Sequence[float]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The distinct values, with one more value at 1, and how often each occurs."""
    # rounded, since equal means may differ in their last digits
    counts = Counter(round(float(value), 12) for value in values)
    counts[1.0] += 1
    points = sorted(counts)
    return np.array(points), np.array([counts[point] for point in points], np.float64)


def mean_bounds(values: Sequence[float]) -> tuple[float, float]:
    """Both ends of the 95 % interval of the mean of `values`, which lie within [0, 1]."""
    return 1.0 - upper_bound([1.0 - value for value in values]), upper_bound(values)


def clustered(means: Sequence[float], *, clusters: Sequence[Hashable] | None = None) -> Interval:
    """95 % interval of the mean of per-task means. Tasks are independent; samples of one task are not.

    The means lie within [0, 1], and nothing else is assumed of them: these are Gaffke bounds (`mean_bounds`) with
    2.5 % on either side, which never fall when a mean rises. If every mean is at an end of the scale, they are Clopper
    and Pearson's over tasks: for n tasks that all failed, [0, 1 - 0.025^(1/n)]. A single task gives [0, 1].

    With `clusters`, one for each task (its scene, its world, its product), the interval holds for new clusters: it also
    reaches as far as `cluster_error`; where all tasks are at one end of the scale, as far as Clopper and Pearson's over
    clusters. A single cluster gives [0, 1].

    Raises ScoreError without tasks.
    """
    count = len(means)
    if not count:
        raise ScoreError("there are no scored episodes to average")
    mean = fmean(means)
    below, above = (0.0, 1.0) if count == 1 else mean_bounds(means)
    if clusters is not None:
        sizes = Counter(clusters)
        if len(sizes) == 1:
            below, above = 0.0, 1.0
        elif len(sizes) < count:
            half = cluster_error(means, clusters)
            below, above = max(0.0, min(below, mean - half)), min(1.0, max(above, mean + half))
            if len(set(means)) == 1 and means[0] in (0.0, 1.0):
                number = count**2 / sum(size**2 for size in sizes.values())
                reach = 1 - TAIL_PROBABILITY ** (1 / number)
                below, above = (0.0, max(above, reach)) if means[0] == 0.0 else (min(below, 1.0 - reach), 1.0)
    return Interval(mean=mean, low=below, high=above, tasks=count)


def cluster_error(values: Sequence[float], clusters: Sequence[Hashable], tail: float = TAIL_PROBABILITY) -> float:
    """Half the width of the interval of the mean of `values` [n] for new clusters; at least two clusters.

    With C clusters whose means are m_c and shares of the values w_c, and m = sum_c w_c m_c: t(1 - tail, f) sqrt(V),
    V = k sum_c w_c^2 (m_c - m)^2. For clusters of one size k = C / (C - 1) and f = C - 1, which is Student's t over the
    clusters' means. Else both are what makes V unbiased, and f its degrees of freedom by Satterthwaite, where means of
    clusters vary alike: k = sum w^2 / tr Q, f = (tr Q)^2 / tr Q^2, Q = (I - 1 w')' diag(w^2) (I - 1 w').
    """
    groups = defaultdict[Hashable, list[float]](list)
    for cluster, value in zip(clusters, values, strict=True):
        groups[cluster].append(value)
    # with the number n_c of values of each cluster, shares are n_c / n, and both traces are fractions of whole numbers
    n, (s2, s3, s4, s5) = len(values), (sum(len(group) ** power for group in groups.values()) for power in (2, 3, 4, 5))
    # tr Q times n^4, and tr Q^2 times n^8
    trace = s2 * n**2 - 2 * s3 * n + s2**2
    of_square = s4 * n**4 - 4 * s5 * n**3 + (4 * s2 * s4 + 2 * s3**2) * n**2 - 4 * s2**2 * s3 * n + s2**4
    mean = fmean(values)
    apart = squares(len(group) / n * (fmean(group) - mean) for group in groups.values())
    return t_quantile(1 - tail, trace**2 / of_square) * math.sqrt(s2 * n**2 / trace * apart)


# --- Differences of two runs


def check_same_tasks(runs: Sequence[Mapping[str, float]]) -> None:
    """Raises ScoreError where there is no run or no task, or where one has other tasks than the first."""
    if not runs:
        raise ScoreError("there are no runs to average")
    if not runs[0]:
        raise ScoreError("there are no scored episodes to average")
    for number, run in enumerate(runs):
        if run.keys() != runs[0].keys():
            odd = sorted(run.keys() ^ runs[0].keys())
            raise ScoreError(
                f"run {number + 1} of {len(runs)} played other tasks than the first: {len(odd)} tasks were played in "
                f"one of them only, for example {', '.join(odd[:3])}"
            )


def difference_bounds(
    values: Sequence[float], clusters: Sequence[Hashable] | None = None, tail: float = TAIL_PROBABILITY
) -> tuple[float, float]:
    """Both ends of the 95 % interval of the mean of differences of tasks, which lie within [-1, 1].

    Student's t over the values and two more, -1 and 1: with m' and s' their mean and standard deviation,
    m' +- t(1 - tail, n + 1) s' / sqrt(n + 2). Plain t holds the truth in as few as 62 % where most tasks do not differ;
    the two stand for what n tasks need not have shown. Two runs without a difference get +- 2.8 points for 100 tasks.
    `clusters` as for `clustered`: the ends reach as far as `cluster_error`, too.
    """
    extended = [*values, -1.0, 1.0]
    half = t_quantile(1 - tail, len(extended) - 1) * math.sqrt(variance(extended) / len(extended))
    low, high = fmean(extended) - half, fmean(extended) + half
    if clusters is not None and len(set(clusters)) < len(values):
        if len(set(clusters)) == 1:
            return -1.0, 1.0
        wide, mean = cluster_error(values, clusters, tail), fmean(values)
        low, high = min(low, mean - wide), max(high, mean + wide)
    return max(-1.0, low), min(1.0, high)


def p_value(interval: Callable[[float], Interval]) -> float:
    """The smallest level at which the interval is clear of zero; `interval` takes the probability on either side."""

    def clear(log_level: float) -> bool:
        bounds = interval(math.exp(log_level) / 2)
        return bounds.low > 0 or bounds.high < 0

    low, high = math.log(1e-6), 0.0
    if clear(low):
        return 1e-6
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (low, middle) if clear(middle) else (middle, high)
    return math.exp(high)


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Adjusts p-values of one family by Holm 1979: the i-th smallest of m becomes max_{j <= i} (m - j + 1) p_j.

    Those up to 0.05 are clear of zero; the chance that any of them is so by mistake is at most 5 %.
    """
    adjusted, worst = dict[str, float](), 0.0
    for rank, name in enumerate(sorted(p_values, key=lambda name: p_values[name])):
        worst = max(worst, min(1.0, (len(p_values) - rank) * p_values[name]))
        adjusted[name] = worst
    return adjusted


# --- Quantiles


@lru_cache(1 << 14)
def t_quantile(p: float, degrees: float) -> float:
    """Quantile of Student's t, to 1e-9 at 95 %; degrees of freedom are at least 1 and need not be whole."""
    if p < 0.5:
        return -t_quantile(1 - p, degrees)
    z = NormalDist().inv_cdf(p)
    if degrees > 1e7:
        return z
    # with t = sqrt(f) tan(a) the density is proportional to cos(a)^(f - 1)
    factor = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(math.pi)
    angle = math.atan(z / math.sqrt(degrees))
    # Newton's method: the normal quantile is below t's, and from below a distribution that bends down is not overshot
    for _ in range(50):
        below = math.fsum(weight * math.cos(share * angle) ** (degrees - 1) for share, weight in _RULE)
        missing = p - 0.5 - factor * angle * below
        ahead = missing / (factor * math.cos(angle) ** (degrees - 1))
        angle += ahead
        if abs(ahead) <= 1e-15 * angle:
            break
    return math.sqrt(degrees) * math.tan(angle)


def _rule() -> list[tuple[float, float]]:
    """Points in (0, 1) and weights of an integral over [0, 1]: the trapezoidal rule in u, x = 1 / (1 + exp(-pi sinh u))
    (tanh-sinh), which converges exponentially, also where the integrand has no derivative at an end."""
    points, step = [], 0.1
    for number in range(-32, 33):
        point = 1 / (1 + math.exp(-math.pi * math.sinh(number * step)))
        points.append((point, step * math.pi * math.cosh(number * step) * point * (1 - point)))
    return points


_RULE = _rule()


def chi_squared(p: float, degrees: float) -> float:
    """Quantile of chi-squared divided by its degrees of freedom, which need not be whole."""
    half = degrees / 2

    def share(x: float) -> float:
        """P(half, x), the incomplete gamma function, by its series."""
        term = math.exp(half * math.log(x) - x - math.lgamma(half + 1))
        total, order = term, half
        while term > 1e-17 * total:
            order += 1
            term *= x / order
            total += term
        return total

    low, high = 1e-12, 2 * half + 40 * math.sqrt(half) + 40
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (low, middle) if share(middle) >= p else (middle, high)
    return (low + high) / degrees


def pass_at_k(samples: int, successes: int, k: int) -> float:
    """Probability that at least one of k samples drawn without replacement succeeds: 1 - C(n - c, k) / C(n, k).

    Unbiased. Source: [humaneval] eq. 1; docs/algorithms.md#pass-at-k.
    Raises ScoreError unless 1 <= k <= n and 0 <= c <= n.
    """
    _check_counts(samples, successes, k)
    return 1.0 - math.comb(samples - successes, k) / math.comb(samples, k)


def pass_all_k(samples: int, successes: int, k: int) -> float:
    """pass^k, the probability that all of k samples drawn without replacement succeed: C(c, k) / C(n, k). Unbiased.

    Source: docs/algorithms.md#pass-at-k. Raises ScoreError as `pass_at_k` does.
    """
    _check_counts(samples, successes, k)
    return math.comb(successes, k) / math.comb(samples, k)


def _check_counts(samples: int, successes: int, k: int) -> None:
    if not (1 <= k <= samples and 0 <= successes <= samples):
        raise ScoreError(f"pass@{k} needs 1 <= k <= samples and 0 <= successes <= samples; got {successes}/{samples}")


# --- Training curves


def cost_weights(costs: Sequence[float], start: float, end: float) -> NDArray[np.float64]:
    """How much each evaluation of a curve counts in the curve's mean between the costs `start` and `end`.

    Costs rise, and the curve is a straight line from one evaluation to the next.
    They add up to 1. With `start` = `end` that is the value at this cost. An average of the evaluations before a cost
    would lie further back for a method with longer steps, and so favor the other.
    """
    hats = np.eye(len(costs))
    if start == end:
        return np.array([np.interp(end, costs, hat) for hat in hats])
    knots = np.unique([start, end, *(cost for cost in costs if start < cost < end)])
    values = np.array([np.interp(knots, costs, hat) for hat in hats])
    areas = (values[:, 1:] + values[:, :-1]) / 2 * np.diff(knots)
    return np.array([math.fsum(row) / (end - start) for row in areas.tolist()])
