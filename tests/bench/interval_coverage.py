"""Simulates evaluations and counts how often their 95 % intervals hold the true value, and how wide they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from turngym.agents.evaluation.statistics import TAIL_PROBABILITY, chance_above, clustered, pass_at_k, with_the_end

RATES = (0.0, 0.01, 0.02, 0.05, 0.5, 0.95, 0.98, 0.99, 1.0)
Measure = Literal["avg", "pass", "difference"]
MEASURES: tuple[Measure, ...] = ("avg", "pass", "difference")


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """The evaluations to simulate."""

    tasks: int = 100
    """Tasks of an evaluation."""
    samples: int = 4
    """Episodes per task."""
    rates: tuple[float, ...] = RATES
    """True success rates."""
    correlations: tuple[float, ...] = (0.0, 0.1, 0.3, 0.7)
    """Correlation of two samples of one task. 0: all tasks are equally hard; 1: each is always or never solved."""
    repetitions: int = 2000
    """Evaluations for each rate and correlation."""
    widths: int = 40
    """How many of the repetitions give the mean width, which takes longer than coverage."""
    seed: int = 0
    """Seed of the simulation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """Coverage and width at one rate and one correlation."""

    measure: Measure
    rate: float
    correlation: float
    covered: float
    """Share of evaluations whose interval holds the true value."""
    width: float
    """Mean width of the interval."""


def coverages(options: Simulation) -> Iterator[Coverage]:
    """Simulates every measure at every rate and correlation."""
    for measure in MEASURES:
        for rate in options.rates:
            for correlation in options.correlations:
                # at rates 0 and 1 nothing varies, so one correlation is enough
                if 0 < rate < 1 or correlation == options.correlations[0]:
                    yield simulate(measure, rate, correlation, options)


def simulate(measure: Measure, rate: float, correlation: float, options: Simulation) -> Coverage:
    """Draws tasks and their samples, and counts how often the interval of `measure` holds the true value.

    A task's own rate is drawn from a beta distribution with mean `rate` in which two samples of a task correlate by
    `correlation`. For `difference`, a second agent plays half of the tasks as well as the first does, and the others
    like an agent whose rate is a tenth closer to 1/2.
    """
    place = (RATES.index(rate) if rate in RATES else len(RATES), MEASURES.index(measure), int(1000 * correlation))
    rng = np.random.default_rng([options.seed, *place])
    draw, truth, low = _draws(measure, rate, correlation, options)
    covered, widths = 0, []
    for number in range(options.repetitions):
        values = draw(rng)
        covered += mean_covered(values, truth, low, 1.0)
        if number < options.widths:
            found = clustered(values, low=low)
            widths.append(found.high - found.low)
    share = covered / options.repetitions
    return Coverage(measure=measure, rate=rate, correlation=correlation, covered=share, width=fmean(widths))


def mean_covered(values: Sequence[float], mean: float, low: float, high: float) -> bool:
    """Tells whether `mean` lies within `mean_bounds(values, low, high)`, without the search for its ends."""
    width = high - low
    return not any(
        rejected([abs(value - end) / width for value in values], abs(mean - end) / width) for end in (low, high)
    )


def rejected(values: Sequence[float], mean: float) -> bool:
    """Tells whether `mean` lies above the upper bound of the mean of `values`, which lie within [0, 1]."""
    places, counts = with_the_end(values)
    return mean > 1.0 if len(places) == 1 else chance_above(places, counts, mean) < TAIL_PROBABILITY


Draw = Callable[[np.random.Generator], list[float]]


def _draws(measure: Measure, rate: float, correlation: float, options: Simulation) -> tuple[Draw, float, float]:
    """Returns a function that draws per-task values, their true mean, and the low end of their scale."""
    tasks, n = options.tasks, options.samples

    def counts(rng: np.random.Generator, rates: NDArray[np.float64]) -> NDArray[np.int64]:
        return rng.binomial(n, rates)

    def average(rng: np.random.Generator) -> list[float]:
        return [float(count) / n for count in counts(rng, task_rates(rng, rate, correlation, tasks))]

    k = max(n // 2, 1)

    def best(rng: np.random.Generator) -> list[float]:
        return [pass_at_k(n, int(count), k) for count in counts(rng, task_rates(rng, rate, correlation, tasks))]

    other = rate + (0.5 - rate) / 10

    def difference(rng: np.random.Generator) -> list[float]:
        first = task_rates(rng, rate, correlation, tasks)
        second = np.where(rng.random(tasks) < 0.5, first, task_rates(rng, other, correlation, tasks))
        return [float(b - a) / n for a, b in zip(counts(rng, first), counts(rng, second), strict=True)]

    if measure == "avg":
        return average, rate, 0.0
    if measure == "pass":
        return best, true_pass(rate, correlation, k), 0.0
    return difference, (other - rate) / 2, -1.0


def task_rates(rng: np.random.Generator, rate: float, correlation: float, tasks: int) -> NDArray[np.float64]:
    """Draws success rates, float64 [tasks]."""
    if rate in (0.0, 1.0) or not correlation:
        return np.full(tasks, rate)
    total = 1 / correlation - 1
    return rng.beta(rate * total, (1 - rate) * total, tasks)


def true_pass(rate: float, correlation: float, k: int) -> float:
    """pass@k over all tasks: 1 - E[(1 - r)^k] for r ~ Beta, from its moments."""
    if rate in (0.0, 1.0) or not correlation:
        return float(1 - (1 - rate) ** k)
    total = 1 / correlation - 1
    return float(1 - np.prod([((1 - rate) * total + i) / (total + i) for i in range(k)]))
