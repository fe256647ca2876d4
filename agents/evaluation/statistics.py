"""Which statistics are reported: intervals clustered by task, pass@k, paired differences, ends of training curves."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev

import numpy as np
from numpy.typing import NDArray

from turngym.envs.core.errors import TurngymError

TAIL = 0.025
"""Probability on either side of a 95 % interval."""
_HALVINGS = 26
"""Steps of bisection in an interval of at most 1: bounds are exact to 1e-8, the integral to about 1e-9."""


def upper_bound(values: Sequence[float]) -> float:
    """Gaffke's upper bound of the mean: it lies below the mean with probability at most TAIL.

    `values` are independent and within [0, 1]; nothing else is assumed of their distribution. With one more value
    z_{n+1} = 1 and weights w ~ Dirichlet(1, ..., 1), the bound is the 1 - TAIL quantile of sum_i w_i z_i. It never
    falls when a value rises, and for zeros and ones it is the bound of Clopper and Pearson. Sources: Gaffke 2005,
    Learned-Miller and Thomas 2019; docs/evaluation.md#intervals has both in full.
    """
    places, counts = with_the_end(values)
    if len(places) == 1:
        return 1.0
    low, high = float(places[0]), 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if chance_above(places, counts, middle) > TAIL:
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
    scaled = np.multiply.outer(np.exp(np.arange(-25.0, 25.0, step)), places - limit)
    theta = np.arctan(scaled) @ counts
    log_rho = np.log1p(np.square(scaled)) @ counts / 2
    return float(0.5 + np.sum(np.sin(theta) * np.exp(-log_rho)) * step / np.pi)


def with_the_end(values: Sequence[float]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The distinct values, with one more value at 1, and how often each occurs."""
    # rounded, since equal means may differ in their last digits
    found = Counter(round(float(value), 12) for value in values)
    found[1.0] += 1
    places = sorted(found)
    return np.array(places), np.array([found[place] for place in places], np.float64)


def mean_bounds(values: Sequence[float], low: float, high: float) -> tuple[float, float]:
    """Both ends of the 95 % interval of the mean of `values`, which lie within [low, high]: TAIL on either side."""
    width = high - low
    above = upper_bound([(value - low) / width for value in values])
    below = upper_bound([(high - value) / width for value in values])
    return high - width * below, low + width * above


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
        return f"{100 * self.mean:.1f} [{100 * self.low:.1f}, {100 * self.high:.1f}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """One evaluation during training."""

    step: int
    seconds: float
    """Wall clock of training up to this point, evaluations excluded."""
    value: float


def clustered(means: Sequence[float], *, low: float = 0.0, high: float = 1.0) -> Interval:
    """95 % interval of the mean of per-task means. Tasks are independent; samples of one task are not.

    The means lie within [low, high], and nothing else is assumed of them: these are Gaffke bounds (`mean_bounds`) with
    2.5 % on either side, which never fall when a mean rises. If every mean is at an end of the scale, they are Clopper
    and Pearson's over tasks: for n tasks that all failed, [0, 1 - 0.025^(1/n)]. A single task gives [low, high].

    Raises ScoreError without tasks.
    """
    count = len(means)
    if not count:
        raise ScoreError("there are no scored episodes to average")
    ends = (low, high) if count == 1 else mean_bounds(means, low, high)
    return Interval(mean=fmean(means), low=ends[0], high=ends[1], tasks=count)


def t_quantile(p: float, degrees: int) -> float:
    """Quantile of Student's t. Exact for 1 and 2 degrees of freedom, else the Cornish-Fisher series (within 0.3 %)."""
    if degrees == 1:
        return math.tan(math.pi * (p - 0.5))
    if degrees == 2:
        return (2 * p - 1) * math.sqrt(2 / (4 * p * (1 - p)))
    z = NormalDist().inv_cdf(p)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / degrees**power for power, term in enumerate(terms))


def pass_at_k(samples: int, successes: int, k: int) -> float:
    """Probability that at least one of k samples drawn without replacement succeeds: 1 - C(n - c, k) / C(n, k).

    Unbiased. Source: [humaneval] eq. 1; docs/algorithms.md#pass-at-k.
    Raises ScoreError unless 1 <= k <= n and 0 <= c <= n.
    """
    if not (1 <= k <= samples and 0 <= successes <= samples):
        raise ScoreError(f"pass@{k} needs 1 <= k <= samples and 0 <= successes <= samples; got {successes}/{samples}")
    return 1.0 - math.comb(samples - successes, k) / math.comb(samples, k)


def paired_difference(first: Mapping[str, float], second: Mapping[str, float]) -> Interval:
    """Mean over tasks of second minus first, with the `clustered` interval of the differences (within [-1, 1]).

    Raises ScoreError if the tasks differ; the difference of two panels is not a paired one.
    """
    if first.keys() != second.keys():
        odd = sorted(first.keys() ^ second.keys())
        raise ScoreError(f"{len(odd)} tasks were played in one run only, for example {', '.join(odd[:3])}")
    return clustered([second[task] - first[task] for task in sorted(first)], low=-1.0, high=1.0)


def last_points(points: Sequence[CurvePoint], count: int = 4) -> tuple[float, float]:
    """Mean and sample standard deviation (0 for one point) of the last `count` evaluations."""
    if not points:
        raise ScoreError("there is no evaluation to average")
    values = [point.value for point in sorted(points, key=lambda point: point.step)[-count:]]
    return fmean(values), stdev(values) if len(values) > 1 else 0.0


def same_step(curves: Mapping[str, Sequence[CurvePoint]]) -> dict[str, tuple[float, float]]:
    """Each method's `last_points` up to the largest step that every method reached."""
    step = min(max(point.step for point in points) for points in curves.values())
    return {name: last_points([p for p in points if p.step <= step]) for name, points in curves.items()}


def least_time(curves: Mapping[str, Sequence[CurvePoint]]) -> dict[str, tuple[float, float]]:
    """Each method's `last_points` within the smallest wall clock that any of them needed for all its steps."""
    budget = min(max(point.seconds for point in points) for points in curves.values())
    return {name: last_points([p for p in points if p.seconds <= budget]) for name, points in curves.items()}
