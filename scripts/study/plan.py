"""How many seeds, tasks and samples does a comparison of two methods need? Predicted from a pilot, before it is run.

A pilot is at least two runs of each method, evaluated on the same tasks, or a study.json, of which Same-Step is taken,
as in its tables. From it the spread between training seeds, tasks and samples is estimated, and from that the smallest
difference that another design tells from zero, and the cheapest design for a wanted difference.

Examples:
    turngym study plan --first a0.result.xz a1.result.xz --second b0.result.xz b1.result.xz
    turngym study plan --data docs/data/study-search-loops.json.gz --methods opd turnopd --difference 4
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

from msgspec import Meta

from turngym.agents.evaluation.compare import (
    decisive,
    describe,
    differences_of,
    no_seeds,
    read_evaluation,
    responses_of,
    same_run,
)
from turngym.agents.evaluation.scores import task_means
from turngym.agents.evaluation.seeds import (
    Design,
    Spread,
    TaskMeans,
    cheapest,
    detectable,
    half_width,
    power,
    rise,
    spread_of,
)
from turngym.core.errors import TurngymError, did_you_mean
from turngym.core.numbers import Group, Million, NotNegative
from turngym.core.spec import Spec, Unread, needing
from turngym.core.tables import Table, print_table
from turngym.scripts.options import read_options
from turngym.trainers.study.records import read_records
from turngym.trainers.study.results import averaged_evaluations, same_step_maps


class StudyPlanOptions(Spec):
    """The pilot, and which designs are asked about."""

    first: tuple[Path, ...] = ()
    """Evaluations of one method, one for each training seed: packed results, folders or traces."""
    second: tuple[Path, ...] = ()
    """Runs of the other method, in the same order of seeds."""
    data: Path | None = None
    """The folder of a study, or a study.json (.gz), in place of --first and --second; its Same-Step counts."""
    methods: tuple[str, str] = ("opd", "turnopd")
    """--data: the two methods."""
    difference: Annotated[float, Meta(gt=0, lt=100)] | None = None
    """Points of success that shall be told from zero: prints the cheapest designs for it."""
    power: Annotated[float, Meta(gt=0, lt=1)] = 0.8
    """Probability with which a difference shall be told from zero."""
    spread: Literal["cautious", "seen"] = "cautious"
    """How far training seeds are taken to lie apart: the one-sided 80 % limit of the pilot's, or as seen. Half of all
    pilots of three seeds see no spread at all, and a study planned by what they saw has half the power."""
    seeds: tuple[Group, ...] = (2, 3, 5, 10)
    """Training seeds of each method, one row each."""
    tasks: tuple[Group, ...] = ()
    """Tasks of the panel; by default half, all and twice as many as in the pilot."""
    samples: tuple[Million, ...] = (1, 4)
    """Episodes per task in an evaluation; as many evaluations as in the pilot are averaged."""
    train_hours: NotNegative | None = None
    """Hours of one training run; --data knows them."""
    episode_seconds: NotNegative | None = None
    """Seconds of one episode of an evaluation; by default as in the pilot (a study.json: 1)."""
    most_seeds: Million = 30
    """Most training seeds that --difference considers."""
    most_tasks: Million = 1000
    """Most tasks that --difference considers."""

    def unread(self) -> Unread:
        if self.data is None:
            yield from needing("--data", "methods")
        else:
            yield from needing("evaluations as the pilot (no --data)", "first", "second")
        if self.difference is None:
            yield from needing("--difference", "train_hours", "episode_seconds", "most_seeds", "most_tasks")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pilot:
    """Two methods, their runs paired by seed."""

    first: Sequence[TaskMeans]
    second: Sequence[TaskMeans]
    samples: int
    """Episodes per task in an evaluation."""
    evaluations: int = 1
    """Evaluations that a task's mean is over. Those of one run share their random streams: near the end they win and
    lose the same episodes, so that chance is taken as that of a single one."""
    train_hours: float | None
    episode_seconds: float

    @property
    def design(self) -> Design:
        return Design(seeds=len(self.first), tasks=len(self.first[0]), samples=self.samples)


def main(argv: Sequence[str]) -> int:
    """Run `turngym study plan` with `argv`; status 1 if no design tells the wanted difference."""
    options = read_options(StudyPlanOptions, argv, prog="turngym study plan", about=__doc__)
    pilot = read_pilot(options)
    spread = spread_of(pilot.first, pilot.second, pilot.samples)
    assumed = replace(spread, seed=spread.seed_high) if options.spread == "cautious" else spread
    print_table(spread_table(spread, pilot), "spread of the difference")
    print(said(pilot, spread))
    print_table(
        design_table(options, pilot, assumed),
        f"smallest difference in points that is told from zero with probability {options.power:g}",
    )
    print(
        f"training seeds taken to vary by {100 * math.sqrt(assumed.seed):.1f} points (--spread {options.spread}; "
        f"seen {100 * math.sqrt(spread.seed):.1f}, one-sided 80 % limit {100 * math.sqrt(spread.seed_high):.1f}); "
        f"seeds {'pair up' if spread.paired else 'do not pair up'} between the methods"
    )
    if options.difference is None:
        return 0
    table = cheapest_table(options, pilot, assumed)
    print_table(table, f"cheapest designs for {options.difference:g} points")
    return 0 if all(row[1] != "none" for row in table[1]) else 1


def read_pilot(options: StudyPlanOptions) -> Pilot:
    """The runs that the options name. Raises TurngymError where there are not two of each method that pair up."""
    pilot = _of_evaluations(options) if options.data is None else _of_study(options, options.data)
    costs: dict[str, Any] = {"train_hours": options.train_hours, "episode_seconds": options.episode_seconds}
    return replace(pilot, **{name: value for name, value in costs.items() if value is not None})


def _of_evaluations(options: StudyPlanOptions) -> Pilot:
    if not options.first or len(options.first) != len(options.second):
        raise TurngymError(
            f"name as many --first ({len(options.first)}) as --second ({len(options.second)}) evaluations, at least "
            "two of each, or a --data study.json"
        )
    paths = [*options.first, *options.second]
    if twice := next((path for path in paths if paths.count(path) > 1), None):
        raise TurngymError(f"--first and --second name {twice} {paths.count(twice)} times; valid: once")
    runs = {path: read_evaluation(path) for path in paths}
    for path, run in runs.items():
        if not run.episodes:
            raise TurngymError(f"{path} holds no episodes; valid: a packed result, a trace, or a folder with one")
    responses = {path: responses_of(run.episodes) for path, run in runs.items()}
    for option, side in (("--first", options.first), ("--second", options.second)):
        if why := no_seeds({str(path): (runs[path].spec, responses[path]) for path in side}):
            raise TurngymError(f"{option} needs evaluations of several training seeds: {why}")
    for first, second in product(options.first, options.second):
        if alike := same_run(responses[first], responses[second]):
            raise TurngymError(f"--first {first} and --second {second} are one run: {alike}")
        if differ := decisive(differences_of(runs[first].spec, runs[second].spec)):
            raise TurngymError(f"--first {first} and --second {second} were played otherwise: {describe(differ)}")
    return Pilot(
        first=[task_means(runs[path].outcomes) for path in options.first],
        second=[task_means(runs[path].outcomes) for path in options.second],
        samples=min(run.spec.play.samples for run in runs.values()),
        train_hours=None,
        episode_seconds=fmean(run.seconds / len(run.outcomes) for run in runs.values()),
    )


def _of_study(options: StudyPlanOptions, path: Path) -> Pilot:
    worlds = read_records(path).worlds
    if len(worlds) != 1:
        raise TurngymError(f"{path} holds {', '.join(sorted(worlds)) or 'no runs'}: a pilot is of one world")
    (methods,) = worlds.values()
    for name in options.methods:
        if name not in methods:
            raise TurngymError(f"--methods {name!r}: {path} has {', '.join(methods)}.{did_you_mean(name, [*methods])}")
    if len({*options.methods}) == 1:
        raise TurngymError(f"--methods names {options.methods[0]} twice; valid: two methods")
    base, against = (methods[name] for name in options.methods)
    # what the study's own tables compare, at the steps that all of its methods have
    maps = same_step_maps(methods)[1]
    first, second = (maps.get(name, {}) for name in options.methods)
    seeds = sorted(first.keys() & second.keys())
    runs = [[of[seed] for seed in seeds] for of in (first, second)]
    samples = min(of[seed].samples for of in (base, against) for seed in seeds) if seeds else 1
    hours = fmean(of[seed].total.seconds for of in (base, against) for seed in seeds) / 3600 if seeds else None
    return Pilot(
        first=runs[0],
        second=runs[1],
        samples=samples,
        evaluations=averaged_evaluations(methods),
        train_hours=hours,
        episode_seconds=1.0,
    )


def spread_table(spread: Spread, pilot: Pilot) -> Table:
    """Standard deviations in points, and the share of the variance of the pilot's difference."""
    size = pilot.design
    parts = {
        "training seeds": (spread.seed, size.seeds),
        "tasks": (spread.task, size.tasks),
        "a seed in a task": (spread.both, size.seeds * size.tasks),
        "samples": (spread.sample, size.seeds * size.tasks * size.samples),
    }
    total = sum(value / count for value, count in parts.values()) or 1.0
    rows = [
        [name, f"{100 * math.sqrt(value):.1f}", str(count), f"{100 * value / count / total:.0f}"]
        for name, (value, count) in parts.items()
    ]
    return ["between", "standard deviation, points", "in the pilot", "% of the variance of its mean"], rows


def said(pilot: Pilot, spread: Spread) -> str:
    difference, size = rise(pilot.first, pilot.second), pilot.design
    ends = f"{100 * difference.mean:+z.1f} points [{100 * difference.low:+z.1f}, {100 * difference.high:+z.1f}]"
    expected = f"expected to reach {100 * half_width(spread, size, spread.mean):.1f} to either side"
    drawn = f"{size.seeds} seeds x {size.tasks} tasks x {pilot.samples} samples"
    if pilot.evaluations > 1:
        drawn += f", Same-Step (mean of the last {pilot.evaluations} evaluations)"
    return f"pilot: {drawn}: {ends}; {expected}"


def design_table(options: StudyPlanOptions, pilot: Pilot, spread: Spread) -> Table:
    """One row per number of seeds, one column per tasks x samples."""
    pilot_tasks = pilot.design.tasks
    tasks = options.tasks or tuple(dict.fromkeys((max(2, pilot_tasks // 2), pilot_tasks, 2 * pilot_tasks)))
    sizes = list(product(tasks, options.samples))
    header = ["seeds", *(f"{m} tasks x {k}" for m, k in sizes)]
    rows = []
    for seeds in options.seeds:
        designs = [Design(seeds=seeds, tasks=m, samples=k) for m, k in sizes]
        rows.append([str(seeds), *(_points(detectable(spread, design, options.power)) for design in designs)])
    return header, rows


def _points(value: float) -> str:
    return "none" if math.isinf(value) else f"{100 * value:.1f}"


def cheapest_table(options: StudyPlanOptions, pilot: Pilot, spread: Spread) -> Table:
    """The design of fewest hours and of fewest episodes."""
    assert options.difference is not None
    wanted = options.difference / 100
    tasks = [count for count in (10, 20, 30, 50, 75, 100, 150, 200, 300, 500, 1000) if count <= options.most_tasks]
    designs = [
        Design(seeds=s, tasks=m, samples=k)
        for s, m, k in product(range(2, options.most_seeds + 1), tasks, (1, 2, 4, 8, 16))
    ]

    def hours(design: Design) -> float:
        episode = pilot.evaluations * pilot.episode_seconds / 3600
        return design.runs * (pilot.train_hours or 0.0) + design.episodes * episode

    # without hours of training only episodes count
    prices: dict[str, Callable[[Design], float]] = {} if pilot.train_hours is None else {"fewest hours": hours}
    prices["fewest episodes"] = lambda design: design.episodes
    rows = []
    for name, price in prices.items():
        best = cheapest(spread, wanted, price, designs, options.power)
        if best is None:
            rows.append([name, "none", "-", "-", "-", "-", "-"])
            continue
        cells = [str(best.seeds), str(best.tasks), str(best.samples), f"{pilot.evaluations * best.episodes:,}"]
        time = "-" if pilot.train_hours is None else f"{hours(best):.1f}"
        rows.append([name, *cells, time, f"{100 * power(spread, best, wanted):.0f}"])
    return ["", "seeds", "tasks", "samples", "episodes", "hours", "power %"], rows
