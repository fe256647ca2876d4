"""Least-Time and Same-Step over tasks and seeds, and what it cost to get there: pure functions of records."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal

from turngym.agents.evaluation.seeds import Difference, TaskMeans, in_family, over_seeds, rise
from turngym.agents.evaluation.statistics import Interval, cost_weights
from turngym.trainers.study.records import Cost, Evaluation, Record

LAST = 4
"""Evaluation points that are averaged."""
Measure = Literal["seconds", "cpu", "turns", "tokens"]
MEASURES = ("turns", "sampled", "tokens", "seconds", "cpu")
Rows = Mapping[str, Mapping[int, Record]]
"""Method -> seed -> record, of one world."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyEstimate:
    """Accuracy over the last evaluations, or at a cost."""

    value: Interval
    """Mean with the 95 % interval over seeds and tasks."""
    minus_base: Difference | None
    """Minus the baseline, paired by seed and task; None where no seed pairs up, and for the baseline itself."""
    in_new_clusters: Difference | None = None
    """The same difference, with an interval for new scenes, worlds or products, where tasks share some."""


def same_step(rows: Rows, baseline: str) -> tuple[int, dict[str, AccuracyEstimate]]:
    """The greatest step at which all runs were evaluated, and each method's accuracy there: the mean of the last four
    evaluations that all have. An agent that was only evaluated counts as it is, at every step.

    Where runs have no evaluation in common there is no such step, and nothing to say of them. The one before training
    does not count, unless there is no other.
    """
    step, maps = same_step_maps(rows)
    cluster_of = {
        task: name for seeds in rows.values() for record in seeds.values() for task, name in record.clusters.items()
    }
    return step, _estimates(maps, rows, baseline, cluster_of)


def common_steps(rows: Rows) -> set[int]:
    """The steps after which all runs were evaluated. Step 0 is among them only if there is no other."""
    records = [record for seeds in rows.values() for record in seeds.values()]
    grids = [{point.step for point in record.evaluations} for record in records if record.trained]
    common = set.intersection(*grids) if grids else {0}
    return common - {0} if any(max(grid, default=0) > 0 for grid in grids) else common


def same_step_maps(rows: Rows) -> tuple[int, dict[str, dict[int, dict[str, float]]]]:
    """The step of `same_step`, and method -> seed -> task -> mean success there."""
    common = common_steps(rows)
    maps: dict[str, dict[int, dict[str, float]]] = {}
    for name, seeds in rows.items():
        for seed, record in seeds.items():
            points = [point for point in record.evaluations if not record.trained or point.step in common]
            if points:
                maps.setdefault(name, {})[seed] = task_map(points)
    return max(common, default=0), maps


def budgets(rows: Rows, measure: Measure = "seconds") -> dict[int, float]:
    """Seed -> the least that any main method needed for all of its steps. An agent that was not trained needed nothing,
    and sets no budget beside those that were."""
    trained = {name: runs for name, runs in rows.items() if any(record.trained for record in runs.values())} or rows
    seeds = {seed for runs in trained.values() for seed in runs}
    main = {name: runs for name, runs in trained.items() if any(r.group == "main" for r in runs.values())} or trained
    costs = {seed: [getattr(runs[seed].total, measure) for runs in main.values() if seed in runs] for seed in seeds}
    return {seed: min(values) for seed, values in costs.items() if values}


EVALUATED = 3
"""Least evaluations of a training for its success at a cost, that of the start included. A single one behind the start
makes a straight line of the whole run, which lies 6 to 14 points below a curve that bends."""
WINDOW = 0.3
"""The last part of the budget over which Least-Time is averaged, too."""


def least_time(
    rows: Rows, baseline: str, measure: Measure = "seconds", window: float = 0.0
) -> dict[str, AccuracyEstimate]:
    """Accuracy at the least wall clock (or other measure) that any main method needed, seed by seed; with `window`, its
    mean over this last part of it. As for `maps_at`."""
    return _estimates(maps_at(rows, budgets(rows, measure), measure, window), rows, baseline)


def maps_at(
    rows: Rows, limit: Mapping[int, float], measure: Measure, window: float = 0.0
) -> dict[str, dict[int, dict[str, float]]]:
    """Method -> seed -> task -> mean success at the seed's limit, on straight lines between evaluations: the same cost
    for every method, however long its steps are. A run that needed less counts as it ended; one that has no evaluation
    before the limit is left out, and so is one that was evaluated once alone behind its start and has not ended by then
    (`EVALUATED`).

    Args:
        limit: the budget by seed, in the unit of `measure`.
        measure: in what costs are counted: wall clock, CPU time (both in seconds), turns or tokens.
        window: last part of the budget over which the mean is taken, 0 to 1; 0: the end alone.
    """
    maps: dict[str, dict[int, dict[str, float]]] = {}
    for name, seeds in rows.items():
        for seed, record in seeds.items():
            if seed not in limit:
                continue
            costs = [getattr(point.cost, measure) for point in record.evaluations]
            start = limit[seed] * (1 - window)
            if costs[0] > limit[seed] or (len(costs) < EVALUATED and start < costs[-1]):
                continue
            weights = cost_weights(costs, start, limit[seed]).tolist()
            pairs = [(point, w) for point, w in zip(record.evaluations, weights, strict=True) if w]
            tasks = {
                task: math.fsum(w * point.tasks[task] for point, w in pairs) for task in record.evaluations[-1].tasks
            }
            maps.setdefault(name, {})[seed] = tasks
    return maps


def averaged_evaluations(rows: Rows) -> int:
    """How many evaluations Same-Step averages: those that all runs have, at most four."""
    return min(LAST, len(common_steps(rows)))


def task_map(points: Sequence[Evaluation]) -> dict[str, float]:
    """Task -> mean success over the last four evaluations, without that of the untrained student as long as there is
    another."""
    last = ([point for point in points if point.step > 0] or points)[-LAST:]
    return {task: fmean(point.tasks[task] for point in last) for task in last[-1].tasks}


def at_category(maps: Mapping[int, TaskMeans], seeds: Mapping[int, Record], name: str) -> Interval:
    """Accuracy over the tasks of one category, over seeds and tasks."""
    wanted = next(iter(seeds.values())).categories
    return over_seeds([{t: value for t, value in means.items() if wanted[t] == name} for means in maps.values()])


def reached(rows: Rows, target: float) -> dict[str, Cost | None]:
    """The cost of each method when its accuracy reached `target`, mean over seeds; None where it never did.

    This is the first evaluation of at least `target` from which on the mean of all later ones is at least `target` too,
    so that a single lucky evaluation does not count.
    """
    costs: dict[str, Cost | None] = {}
    for name, seeds in rows.items():
        steps = [point.step for point in next(iter(seeds.values())).evaluations if point.step > 0]
        curve = [at_step(seeds, step) for step in steps]
        values = [value for value, _ in curve]
        arrived = (n for n, value in enumerate(values) if value >= target and fmean(values[n:]) >= target)
        index = next(arrived, None)
        costs[name] = None if index is None else curve[index][1]
    return costs


def at_step(seeds: Mapping[int, Record], step: int) -> tuple[float, Cost]:
    """Accuracy and cost at one evaluation, means over seeds."""
    points = [point for record in seeds.values() for point in record.evaluations if point.step == step]
    value = fmean(fmean(point.tasks.values()) for point in points)
    return value, mean_cost([point.cost for point in points])


def mean_cost(costs: Sequence[Cost]) -> Cost:
    means: dict[str, float] = {}
    for name in MEASURES:
        column = [getattr(cost, name) for cost in costs]
        if None not in column:
            means[name] = fmean(column)
    return Cost(**means)


def total_cost(seeds: Mapping[int, Record]) -> Cost:
    """Cost of all steps, mean over seeds."""
    return mean_cost([record.total for record in seeds.values()])


def times_less(base: Mapping[int, Record], seeds: Mapping[int, Record], measure: str) -> tuple[float, ...]:
    """How many times less a method cost than the baseline: by mean totals, then the least and the greatest ratio of the
    seeds that both have, if there are several. Empty if a cost is unknown or 0."""
    if not base:
        return ()
    pairs = [(base[seed].total, seeds[seed].total) for seed in base if seed in seeds]
    every = [(total_cost(base), total_cost(seeds)), *(pairs if len(pairs) > 1 else [])]
    costs = [(getattr(first, measure), getattr(second, measure)) for first, second in every]
    if not all(first is not None and second for first, second in costs):
        return ()
    mean, *single = [first / second for first, second in costs]
    return (mean, min(single), max(single)) if single else (mean,)


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodPoint:
    """A method's success at a step, and what it had cost, means over its seeds."""

    step: int
    seconds: float
    cpu: float
    value: Interval


def curve(seeds: Mapping[int, Record]) -> list[MethodPoint]:
    """The evaluations that all seeds have."""
    columns = [{point.step: point for point in record.evaluations} for record in seeds.values()]
    curve_points = []
    for step in sorted(set.intersection(*map(set, columns))):
        points = [column[step] for column in columns]
        cost = mean_cost([point.cost for point in points])
        value = over_seeds([point.tasks for point in points])
        curve_points.append(MethodPoint(step=step, seconds=cost.seconds, cpu=cost.cpu, value=value))
    return curve_points


def _estimates(
    maps: Mapping[str, Mapping[int, TaskMeans]],
    rows: Rows,
    baseline: str,
    clusters: Mapping[str, str] | None = None,
) -> dict[str, AccuracyEstimate]:
    """The differences from the baseline are one family."""
    base = maps.get(baseline, {})
    shared = clusters is not None and len(set(clusters.values())) < len(clusters)

    def minus(name: str, clusters: Mapping[str, str] | None = None) -> Difference | None:
        if name == baseline or not base:
            return None
        return difference(base, maps[name], fixed=(fixed(rows[baseline]), fixed(rows[name])), clusters=clusters)

    differences = {name: gap for name in maps if (gap := minus(name)) is not None}
    family = in_family(differences)
    return {
        name: AccuracyEstimate(
            value=over_seeds(list(seeds.values())),
            minus_base=family.get(name),
            in_new_clusters=minus(name, clusters) if shared and name in differences else None,
        )
        for name, seeds in maps.items()
    }


def fixed(seeds: Mapping[int, Record]) -> bool:
    """Whether a method has no training seeds: a scripted player, whose seeds are those of its evaluations."""
    return all(record.scripted for record in seeds.values())


def difference(
    base: Mapping[int, TaskMeans],
    other: Mapping[int, TaskMeans],
    *,
    fixed: tuple[bool, bool] = (False, False),
    clusters: Mapping[str, str] | None = None,
) -> Difference | None:
    """How much better `other` is than `base`, over the seeds that both have; None where they share none.

    Args:
        base: seed -> task -> mean success of the one.
        fixed: whether each has no training seeds; such a player is set against all runs of the other.
        clusters: task -> cluster, for an interval for new ones; None: tasks are independent.
    """
    shared = [seed for seed in base if seed in other]
    ways = [list(side.values()) if any(fixed) else [side[seed] for seed in shared] for side in (base, other)]
    if not all(ways):
        return None
    # a single training run says nothing of other seeds, whomever it is compared with
    varies = all(player or len(way) > 1 for player, way in zip(fixed, ways, strict=True))
    pair = not any(fixed)
    if clusters is None:
        return rise(*ways, fixed=not pair and varies, pair=pair, p=True)
    # the same comparison once more: no further claim that it is clear of zero
    groups = {task: clusters.get(task, task) for task in ways[0][0]}
    return replace(rise(*ways, fixed=not pair and varies, pair=pair, clusters=groups), adjusted=1.0)


def ends_of(records: Sequence[Record]) -> dict[str, list[TaskMeans]]:
    """Every run's task means at its end, three ways: at the last evaluation, in the mean of the last ones, and with the
    averaged weights of its last checkpoints. A way that not all runs have is left out."""
    ways: dict[str, list[TaskMeans | None]] = {
        "last evaluation": [record.evaluations[-1].tasks for record in records],
        "mean of the last ones": [task_map(record.evaluations) for record in records],
        "averaged weights": [record.averaged for record in records],
    }
    return {name: [tasks for tasks in maps if tasks is not None] for name, maps in ways.items() if None not in maps}
