"""Least-Time and Same-Step over tasks and seeds, and what it cost to get there: pure functions of records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal

from turngym.agents.evaluation.statistics import Interval
from turngym.scripts.study.learn_results import TaskMeans, over_seeds, rise
from turngym.scripts.study.methods import BASE
from turngym.scripts.study.records import Cost, Evaluation, Record

LAST = 4
"""Evaluation points that are averaged."""
Measure = Literal["seconds", "cpu", "turns", "tokens"]
MEASURES: tuple[Measure, ...] = ("turns", "tokens", "seconds", "cpu")
Rows = Mapping[str, Mapping[int, Record]]
"""Method -> seed -> record, of one world."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Accuracy over the last evaluations within a limit."""

    value: Interval
    """Mean with the 95 % interval over seeds and tasks."""
    spread: float
    """Standard deviation of the last evaluations, mean over seeds."""
    minus_base: Interval | None
    """Minus OPD, paired by seed and task; None where no seed pairs up, and for OPD itself."""


def by_world(records: Sequence[Record]) -> dict[str, dict[str, dict[int, Record]]]:
    """World -> method -> seed -> record."""
    found: dict[str, dict[str, dict[int, Record]]] = {}
    for record in records:
        found.setdefault(record.world, {}).setdefault(record.method, {})[record.seed] = record
    return found


def same_step(rows: Rows) -> tuple[int, dict[str, Estimate]]:
    """The greatest step that all records reached, and each method's accuracy there (its last four evaluations)."""
    step = min(record.evaluations[-1].step for seeds in rows.values() for record in seeds.values())
    picked = {
        name: {seed: [point for point in record.evaluations if point.step <= step] for seed, record in seeds.items()}
        for name, seeds in rows.items()
    }
    return step, _estimates(picked)


def budgets(rows: Rows, measure: Measure = "seconds") -> dict[int, float]:
    """Seed -> the least that any main method needed for all of its steps."""
    seeds = {seed for found in rows.values() for seed in found}
    main = {name: found for name, found in rows.items() if any(r.group == "main" for r in found.values())}
    costs = {seed: [getattr(found[seed].total, measure) for found in main.values() if seed in found] for seed in seeds}
    return {seed: min(values) for seed, values in costs.items() if values}


def least_time(rows: Rows, measure: Measure = "seconds") -> dict[str, Estimate]:
    """Accuracy within the least wall clock (or other measure) that any main method needed, seed by seed."""
    limit = budgets(rows, measure)
    return _estimates(picked_within(rows, limit, measure))


def picked_within(rows: Rows, limit: Mapping[int, float], measure: Measure) -> dict[str, dict[int, list[Evaluation]]]:
    """Method -> seed -> the evaluations that cost at most the seed's limit."""
    return {
        name: {
            # the slack only forgives the rounding of sums
            seed: [p for p in record.evaluations if getattr(p.cost, measure) <= limit[seed] * (1 + 1e-9)]
            for seed, record in seeds.items()
            if seed in limit and any(getattr(p.cost, measure) <= limit[seed] for p in record.evaluations)
        }
        for name, seeds in rows.items()
    }


def last_points(points: Sequence[Evaluation]) -> Sequence[Evaluation]:
    """The last four evaluations, without that of the untrained student as long as there is another."""
    return ([point for point in points if point.step > 0] or points)[-LAST:]


def task_map(points: Sequence[Evaluation]) -> dict[str, float]:
    """Task -> mean success over the last evaluations."""
    last = last_points(points)
    return {task: fmean(point.tasks[task] for point in last) for task in last[-1].tasks}


def at_category(picked: Mapping[int, Sequence[Evaluation]], seeds: Mapping[int, Record], name: str) -> Interval:
    """Accuracy over the tasks of one category, over seeds and tasks."""
    maps = [task_map(points) for points in picked.values()]
    wanted = next(iter(seeds.values())).categories
    return over_seeds([{task: value for task, value in means.items() if wanted[task] == name} for means in maps])


def reached(rows: Rows, target: float) -> dict[str, Cost | None]:
    """What each method had cost when its accuracy reached `target`, means over seeds; None where it did not.

    That is the first evaluation which is at least `target` and from which on the mean of the rest is, too: one lucky
    evaluation is no arrival.
    """
    found: dict[str, Cost | None] = {}
    for name, seeds in rows.items():
        steps = [point.step for point in next(iter(seeds.values())).evaluations if point.step > 0]
        curve = [at_step(seeds, step) for step in steps]
        values = [value for value, _ in curve]
        arrived = (n for n, value in enumerate(values) if value >= target and fmean(values[n:]) >= target)
        place = next(arrived, None)
        found[name] = None if place is None else curve[place][1]
    return found


def at_step(seeds: Mapping[int, Record], step: int) -> tuple[float, Cost]:
    """Accuracy and cost at one evaluation, means over seeds."""
    points = [point for record in seeds.values() for point in record.evaluations if point.step == step]
    value = fmean(fmean(point.tasks.values()) for point in points)
    return value, mean_cost([point.cost for point in points])


def mean_cost(costs: Sequence[Cost]) -> Cost:
    """Mean of costs."""
    values = {name: fmean(getattr(cost, name) for cost in costs) for name in MEASURES}
    return Cost(**values)


def total_cost(seeds: Mapping[int, Record]) -> Cost:
    """Cost of all steps, mean over seeds."""
    return mean_cost([record.total for record in seeds.values()])


def _estimates(picked: Mapping[str, Mapping[int, Sequence[Evaluation]]]) -> dict[str, Estimate]:
    maps = {name: {seed: task_map(points) for seed, points in seeds.items()} for name, seeds in picked.items() if seeds}
    return {
        name: Estimate(
            value=over_seeds(list(seeds.values())),
            spread=fmean(_spread(points) for points in picked[name].values()),
            minus_base=None if name == BASE or BASE not in maps else _difference(maps[BASE], seeds),
        )
        for name, seeds in maps.items()
    }


def _difference(base: Mapping[int, TaskMeans], other: Mapping[int, TaskMeans]) -> Interval | None:
    common = [seed for seed in base if seed in other]
    return rise([base[seed] for seed in common], [other[seed] for seed in common]) if common else None


def _spread(points: Sequence[Evaluation]) -> float:
    values = [fmean(point.tasks.values()) for point in last_points(points)]
    return stdev(values) if len(values) > 1 else 0.0
