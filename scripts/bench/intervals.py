"""How often the 95 % intervals of evaluations hold the true value, and how wide they are: simulated evaluations.

Examples:
    turngym bench intervals
    turngym bench intervals --tasks 300 --repetitions 4000
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

import numpy as np
import tyro
from numpy.typing import NDArray

from turngym.agents.evaluation.statistics import clustered, mean_covered, pass_at_k
from turngym.envs.core.tables import Table, markdown

RATES = (0.0, 0.01, 0.02, 0.05, 0.5, 0.95, 0.98, 0.99, 1.0)
Measure = Literal["avg", "pass", "difference"]
MEASURES: tuple[Measure, ...] = ("avg", "pass", "difference")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Which evaluations are simulated."""

    tasks: int = 100
    """Tasks of an evaluation."""
    samples: int = 4
    """Episodes per task."""
    rates: tuple[float, ...] = RATES
    """True success rates."""
    correlations: tuple[float, ...] = (0.0, 0.1, 0.3, 0.7)
    """How alike the samples of one task are: 0: all tasks are equally hard; 1: each is always or never solved."""
    repetitions: int = 2000
    """Evaluations for each rate and correlation."""
    widths: int = 40
    """Of them so many for the mean width."""
    seed: int = 0
    """Of the simulation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """What came of the evaluations with one rate and one correlation."""

    measure: Measure
    rate: float
    correlation: float
    covered: float
    """Share of evaluations whose interval holds the true value."""
    width: float
    """Mean width of the interval."""


def main(argv: Sequence[str]) -> int:
    """Run `turngym bench intervals` with `argv`."""
    description = (__doc__ or "").split("\n")[0]
    options = tyro.cli(Options, args=list(argv), prog="turngym bench intervals", description=description)
    print(markdown(coverage_table(list(coverages(options)))))
    return 0


def coverages(options: Options) -> Iterator[Coverage]:
    """Every measure at every rate and correlation."""
    for measure in MEASURES:
        for rate in options.rates:
            for correlation in options.correlations:
                # nothing varies at the ends
                if 0 < rate < 1 or correlation == options.correlations[0]:
                    yield simulated(measure, rate, correlation, options)


def simulated(measure: Measure, rate: float, correlation: float, options: Options) -> Coverage:
    """Draw tasks and their samples, and see whether the interval of `measure` holds what is true of all tasks.

    A task's own rate is drawn from a beta distribution with mean `rate` in which two samples of a task correlate by
    `correlation`. `difference`: a second agent plays every other task as well as the first, and the others as one does
    whose rate is a tenth closer to 1/2.
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


Draw = Callable[[np.random.Generator], list[float]]


def _draws(measure: Measure, rate: float, correlation: float, options: Options) -> tuple[Draw, float, float]:
    """What draws the per-task values of an evaluation, their true mean, and the low end of their scale."""
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
    """Success rates of `tasks` tasks [tasks]."""
    if rate in (0.0, 1.0) or not correlation:
        return np.full(tasks, rate)
    total = 1 / correlation - 1
    return rng.beta(rate * total, (1 - rate) * total, tasks)


def true_pass(rate: float, correlation: float, k: int) -> float:
    """pass@k over all tasks: 1 - E[(1 - r)^k] of r ~ Beta, by its moments."""
    if rate in (0.0, 1.0) or not correlation:
        return float(1 - (1 - rate) ** k)
    total = 1 / correlation - 1
    return float(1 - np.prod([((1 - rate) * total + i) / (total + i) for i in range(k)]))


def coverage_table(found: Sequence[Coverage]) -> Table:
    """Rows: measure and true rate. Columns: coverage and mean width by correlation, percent."""
    correlations = sorted({one.correlation for one in found})
    cells = {(one.measure, one.rate, one.correlation): one for one in found}
    header = ["measure", "true rate %", *(f"correlation {c:g}: covered % (width)" for c in correlations)]
    rows = []
    for measure, rate in dict.fromkeys((one.measure, one.rate) for one in found):
        line = [cells.get((measure, rate, c)) for c in correlations]
        shown = ["" if one is None else f"{100 * one.covered:.1f} ({100 * one.width:.1f})" for one in line]
        rows.append([measure, f"{100 * rate:g}", *shown])
    return header, rows
