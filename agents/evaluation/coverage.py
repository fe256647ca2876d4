"""How often do the reported intervals hold the truth? Simulates studies of any design with the same formulas.

`measure` draws studies whose truth is known and calls the functions that make every table: one evaluation, two runs,
one method over its seeds, two methods over theirs. docs/research/intervals.md has the results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, stdev
from typing import Annotated

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from turngym.agents.evaluation.scores import of_draws
from turngym.agents.evaluation.seeds import TaskMeans, over_seeds, rise, seed_apart
from turngym.agents.evaluation.statistics import TAIL_PROBABILITY, Interval, clustered, t_quantile
from turngym.core.errors import TurngymError
from turngym.core.numbers import Group, Million, NotNegative, Number, Share
from turngym.core.spec import Spec, Unread, changed, needing


class SimulatedStudy(Spec):
    """Two methods and what they vary by. All deviations are standard deviations in shares of success, of one method."""

    seeds: Million = 3
    """Training seeds of each method."""
    second_seeds: Group | None = None
    """Training seeds of the second method; None: as many as of the first."""
    tasks: Group = 100
    """Tasks of the panel."""
    samples: Million = 4
    """Episodes per task."""
    rate: Share = 0.5
    """Success of the first method."""
    difference: Annotated[float, Meta(ge=-1, le=1)] = 0.0
    """Success of the second method minus that of the first."""
    seed_spread: NotNegative = 0.02
    """Standard deviation between training seeds."""
    second_spread: NotNegative | None = None
    """Standard deviation between training seeds of the second method; None: as of the first."""
    collapse: Share = 0.0
    """Probability that a training run of the second method collapses and loses 40 points."""
    correlation: Share = 0.0
    """Correlation of the two methods' seeds: 1 where a seed that is good for one is as good for the other."""
    hard: NotNegative = 0.15
    """Standard deviation between tasks that both methods share."""
    task_spread: NotNegative = 0.1
    """Standard deviation between tasks of each method by itself."""
    both: NotNegative = 0.0
    """Standard deviation of the interaction of seed and task."""
    clusters: Number = 0
    """Scenes, worlds or products that the tasks belong to, evenly; 0: every task is on its own."""
    shared: Share = 0.2
    """Share of the variance between tasks that is between clusters, where there are any."""
    draws: Number = 0
    """Episodes of a validation that draws a task for each (`--sampling published`); 0: none is simulated."""
    family: Million = 1
    """Methods that are compared with the first one, by Holm; where more than one, how often any is clear of zero."""

    def unread(self) -> Unread:
        if not self.clusters:
            yield from needing("--clusters", "shared")
        if self.seeds == 1:
            yield from needing("--seeds above 1", "second_seeds", "family", "collapse")
        if self.second_seeds not in (None, self.seeds):
            yield from needing("as many seeds of both methods", "correlation")

    def __post_init__(self) -> None:
        if not self.clusters <= self.tasks:
            raise TurngymError(f"--clusters {self.clusters}: at most as many as --tasks, {self.tasks}")

    @property
    def groups(self) -> list[int] | None:
        """The cluster of every task."""
        return [task * self.clusters // self.tasks for task in range(self.tasks)] if self.clusters else None

    def rates(self, rng: np.random.Generator) -> list[NDArray[np.float64]]:
        """Success rates [seeds, tasks] of the first method, and of those that are compared with it."""
        hard = self._tasks(rng, self.hard)
        common = rng.normal(0, 1, self.seeds)
        rates = []
        for number in range(1 + self.family):
            first, seeds = not number, self.seeds if not number or self.second_seeds is None else self.second_seeds
            spread = self.seed_spread if first or self.second_spread is None else self.second_spread
            seed_S = spread * math.sqrt(1 - self.correlation) * rng.normal(0, 1, seeds)
            if self.correlation:
                seed_S += spread * math.sqrt(self.correlation) * common
            if self.collapse and not first:
                seed_S -= COLLAPSE * (rng.random(seeds) < self.collapse)
            rate_N = self.rate + (not first) * self.difference + hard + self._tasks(rng, self.task_spread)
            rest_SN = rng.normal(0, self.both, (seeds, self.tasks))
            rates.append((rate_N + seed_S[:, None] + rest_SN).clip(0, 1))
        return rates

    def _tasks(self, rng: np.random.Generator, spread: float) -> NDArray[np.float64]:
        own_N = rng.normal(0, spread, self.tasks)
        if (groups := self.groups) is None:
            return own_N
        theirs_C = rng.normal(0, spread, self.clusters)
        return math.sqrt(self.shared) * theirs_C[groups] + math.sqrt(1 - self.shared) * own_N

    def draw(self, rng: np.random.Generator) -> list[list[TaskMeans]]:
        """The task means of every run of both methods."""
        names = [f"{task}" for task in range(self.tasks)]
        means = [rng.binomial(self.samples, rates) / self.samples for rates in self.rates(rng)]
        return [[dict(zip(names, row, strict=True)) for row in runs.tolist()] for runs in means]

    def validation(self, rng: np.random.Generator) -> tuple[list[float], list[str]]:
        """Returns outcomes of the first method in a validation that draws its tasks, and the tasks that were drawn."""
        tasks = rng.integers(self.tasks, size=self.draws)
        won = rng.random(self.draws) < self.rates(rng)[0][0][tasks]
        return won.astype(float).tolist(), [f"{task}" for task in tasks]

    def truth(self) -> tuple[float, float]:
        """Returns the success of the first method, and the second's minus the first's, with rates clipped to [0, 1]."""
        if not self.clipped():
            return self.rate, self.difference - COLLAPSE * self.collapse
        rng = np.random.default_rng(0)
        # one task by itself has the same distribution, and seeds enough make the mean exact to 0.1 points
        many = changed(self, seeds=200, second_seeds=None, tasks=2000, clusters=0, family=1)
        means = np.mean([[rates.mean() for rates in many.rates(rng)] for _ in range(10)], 0)
        alike = not (self.difference or self.collapse) and self.second_spread in (None, self.seed_spread)
        return float(means[0]), 0.0 if alike else float(means[1] - means[0])

    def clipped(self) -> bool:
        """Whether rates of a method come within three deviations of an end of the scale."""
        spread = max(self.seed_spread, self.second_spread or 0.0)
        reach = 3 * math.sqrt(spread**2 + self.hard**2 + self.task_spread**2 + self.both**2)
        fall = COLLAPSE if self.collapse else 0.0
        rates = self.rate, self.rate + self.difference, self.rate + self.difference - fall
        return not all(reach < rate < 1 - reach for rate in rates)


COLLAPSE = 0.4
"""What a run that collapses loses."""
REFERENCE = "t over seeds, for comparison"
"""What others print: it takes the tasks as given, and covers too little for new ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalCoverage:
    """How an interval did in many studies."""

    name: str
    covered: float
    """Share that held the truth."""
    width: float
    """Mean width of the intervals."""
    ratio: float
    """Mean width over that of an interval which knows the standard error: 3.92 deviations of the estimate."""
    clear: float
    """Share that was clear of zero: power where there is a difference, false alarms where there is none."""


def measure(study: SimulatedStudy, repetitions: int, seed: int = 0) -> Iterator[IntervalCoverage]:
    """Yields what each kind of interval covers in `repetitions` drawn studies; kinds over seeds need two seeds."""
    rate, difference = study.truth()
    clusters = study.groups
    named = None if clusters is None else {str(task): cluster for task, cluster in enumerate(clusters)}
    kinds: dict[str, tuple[Callable[[list[list[TaskMeans]]], Interval], float, SimulatedStudy]] = {}
    # intervals of one run or two are about these runs alone, so that other seeds do not matter
    alone = changed(
        study, seeds=1, second_seeds=None, seed_spread=0.0, second_spread=None, both=0.0, collapse=0.0, family=1
    )
    family, (rate_alone, difference_alone) = study.family, alone.truth()
    kinds["one evaluation, these tasks' kind"] = (lambda runs: clustered([*runs[0][0].values()]), rate_alone, alone)
    kinds["two runs, by task"] = (lambda runs: rise(*runs[:2]), difference_alone, alone)
    if clusters is not None:
        single = partial(clustered, clusters=clusters)
        kinds["one evaluation, new clusters"] = (lambda runs: single([*runs[0][0].values()]), rate_alone, alone)
        kinds["two runs, new clusters"] = (lambda runs: rise(*runs[:2], clusters=named), difference_alone, alone)
    if study.seeds > 1:
        kinds["a method over its seeds"] = (lambda runs: over_seeds(runs[0], clusters=named), rate, study)
        kinds["two methods over their seeds"] = (lambda runs: rise(*runs[:2], clusters=named), difference, study)
        if study.second_seeds in (None, study.seeds):
            kinds[REFERENCE] = (_t_over_seeds, difference, study)
        if family > 1:
            kinds[f"the clearest of {family}, by Holm"] = _clearest, difference, study
    for number, (name, (interval, truth, drawn)) in enumerate(kinds.items()):
        rng = np.random.default_rng([seed, number])
        yield counted(name, [interval(drawn.draw(rng)) for _ in range(repetitions)], truth)
    if study.draws:
        rng = np.random.default_rng([seed, len(kinds)])
        intervals = [of_draws(*alone.validation(rng)) for _ in range(repetitions)]
        yield counted(f"one validation of {study.draws} draws", intervals, rate_alone)


def counted(name: str, found: Sequence[Interval], truth: float) -> IntervalCoverage:
    """Coverage and width of intervals of one truth."""
    width, oracle = fmean(span.high - span.low for span in found), 3.92 * stdev(span.mean for span in found)
    return IntervalCoverage(
        name=name,
        covered=fmean(span.low - 1e-9 <= truth <= span.high + 1e-9 for span in found),
        width=width,
        ratio=width / oracle if oracle else math.inf,
        clear=fmean(span.low > 0 or span.high < 0 for span in found),
    )


def _clearest(runs: list[list[TaskMeans]]) -> Interval:
    """Of all methods minus the first, the interval that is farthest from zero."""
    # Holm compares the smallest of m p-values with 0.05 / m
    intervals = [rise(runs[0], run, tail=TAIL_PROBABILITY / (len(runs) - 1)) for run in runs[1:]]
    return max(intervals, key=lambda interval: max(interval.low, -interval.high))


def shown_apart(study: SimulatedStudy, repetitions: int, seed: int = 0) -> float:
    """Returns the share of studies in which a seed of one of two methods lies apart (`seed_apart`)."""
    rng = np.random.default_rng([seed, 99])
    drawn = (changed(study, family=1).draw(rng) for _ in range(repetitions))
    return fmean(any(seed_apart(runs) is not None for runs in methods) for methods in drawn)


def _t_over_seeds(runs: list[list[TaskMeans]]) -> Interval:
    """Student's t over the seeds' differences: tasks are taken as given."""
    values = [fmean(after.values()) - fmean(before.values()) for before, after in zip(*runs[:2], strict=True)]
    half = t_quantile(0.975, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return Interval(mean=fmean(values), low=fmean(values) - half, high=fmean(values) + half, tasks=len(runs[0][0]))
