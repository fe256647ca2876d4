"""Tables of `turngym report`: paired differences, settings, training, and Tables 1 and 6 of the TurnOPD paper."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from turngym.agents.evaluation.compare import decisive, describe, differences_of, scripted
from turngym.agents.evaluation.scores import (
    check_hashes,
    score_means,
    task_means,
)
from turngym.agents.evaluation.seeds import Difference, TaskMeans, in_family, rise
from turngym.agents.evaluation.statistics import ScoreError
from turngym.core.tables import Table
from turngym.scripts.report_data import (
    Diagnosed,
    Method,
    Run,
    SameStep,
    same_step_of,
    unlike,
)
from turngym.scripts.report_training import depth_of


def panels_of(methods: Sequence[Method]) -> list[list[Method]]:
    """The methods that were evaluated, those that share tasks together."""
    found: list[list[Method]] = []
    for method in methods:
        tasks = _tasks(method)
        same = [group for group in found if tasks & _tasks(group[0])]
        if same:
            same[0].append(method)
        elif tasks:
            found.append([method])
    return found


def _tasks(method: Method) -> set[tuple[str, str]]:
    return {(one.task.env_id, one.task.task_id) for one in method.first.episodes}


def pairs(methods: Sequence[Method]) -> list[tuple[Method, Method]]:
    """(base, other) of all comparisons, panel by panel: first what was trained side by side, then everything against
    the panel's first method, what was trained before the rest."""
    found = []
    for played in panels_of(methods):
        trained = [one for one in played if one.first.training]
        rest = sorted(played[1:], key=lambda one: not one.first.training)
        found += [(trained[0], one) for one in trained[1:]] + [(played[0], one) for one in rest]
    return list({(base.name, one.name): (base, one) for base, one in found}.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """Differences by the names of their rows."""

    found: Mapping[str, Difference]
    """One family."""
    what: Mapping[str, str]
    """What each is the difference of: `success`, `success (mean of the last 4 evaluations)`, `score`."""
    levels: Mapping[str, float]
    """Mean success of the methods that are compared at Same-Step."""
    wider: Mapping[str, Difference]
    """The same with intervals for new scenes, worlds or products."""
    refused: Mapping[str, str]
    """Why methods are not compared."""
    order: Mapping[str, int]
    """Names of all comparisons, and how many of their two sides were trained."""

    def table(self) -> Table | None:
        """A row for each comparison; None without one."""
        wider = self.wider
        rows = [[name, "-", *(["-"] if wider else []), *["-"] * 3, said, "-"] for name, said in self.refused.items()]
        for name, one in self.found.items():
            cells = [str(one), *([str(wider.get(name, "-"))] if wider else []), str(one.tasks)]
            rows.append([name, *cells, "{} and {}".format(*reversed(one.seeds)), f"{100 * one.better:.0f}", one.told])
            rows[-1].append(self.what[name])
        rows.sort(key=lambda row: list(self.order).index(row[0].removesuffix(", score")))
        header = ["comparison", "points [95 %]", *(["for new scenes, worlds, products"] if wider else [])]
        return ([*header, "tasks", "seeds", "better %", "clear of zero", "of"], rows) if rows else None

    @property
    def clearest(self) -> tuple[str, Difference] | None:
        """Of what was trained side by side (else of what was trained, else of all) the comparison that owes least to
        chance; the first where none is off zero."""

        def doubt(item: tuple[str, Difference]) -> tuple[int, bool, float]:
            name, one = item
            off = one.low > 0 or one.high < 0
            return -self.order[name.removesuffix(", score")], not one.clear, one.p if off and one.p is not None else 1.0

        return min(self.found.items(), key=doubt, default=None)


def paired_of(methods: Sequence[Method], *, different_settings: bool = False) -> Paired:
    """Differences, paired by task (`pairs`): of training runs at Same-Step (`same_step_of`), of others and of scores at
    the last evaluation.

    Evaluations in other settings are not compared unless `different_settings`: the difference would be theirs.
    """
    found, wider, refused = dict[str, Difference](), dict[str, Difference](), dict[str, str]()
    means, said = same_step_of(methods)
    what: dict[str, str] = {}
    for base, method in pairs(methods):
        name = f"{method.name} minus {base.name}"
        other = _otherwise(base.first, method.first)
        if other and not different_settings:
            refused[name] = (
                f"not compared, played otherwise: {describe(other)}; --different-settings compares all the same"
            )
            continue
        try:
            differences = _differences(name, base, method, means)
            wider |= _differences(name, base, method, means, in_new_clusters=True)
        except ScoreError as error:
            refused[name] = str(error)
            continue
        found |= differences
        over = next((said[one.name] for one in (method, base) if one.name in said), None)
        what |= {name: "success" if over is None else f"success ({over})", f"{name}, score": "score"}
    order = {
        f"{method.name} minus {base.name}": sum(side.first.training is not None for side in (base, method))
        for base, method in pairs(methods)
    }
    levels = {name: fmean(fmean(tasks.values()) for tasks in seeds.values()) for name, seeds in means.items()}
    return Paired(found=in_family(found), wider=wider, refused=refused, order=order, what=what, levels=levels)


def _otherwise(first: Run, second: Run) -> Mapping[str, Any]:
    """The settings of the game in which two evaluations differ, as far as their traces say them."""
    if first.spec is None or second.spec is None:
        return {}
    return decisive(differences_of(first.spec, second.spec))


def _differences(
    name: str, base: Method, method: Method, means: SameStep, *, in_new_clusters: bool = False
) -> dict[str, Difference]:
    """Differences of success, at Same-Step where `means` has it, and of the graded score where it says more;
    `in_new_clusters` with their intervals for new scenes, worlds or products, and none where no two tasks share one.
    Raises ScoreError if tasks differ."""
    sides = [[[one for one in run.episodes if not one.status.is_error] for run in side.runs] for side in (base, method)]
    for played in sides[1]:
        check_hashes(sides[0][0], played)
    players = [side.first for side in (base, method) if len(side.runs) == 1 and not side.first.training]
    fixed = any(run.spec is not None and scripted(run.spec) for run in players)
    pair = [run.seed for run in base.runs] == [run.seed for run in method.runs]
    clusters = {one.task.task_id: one.task.cluster or one.task.task_id for one in sides[0][0]}
    if in_new_clusters and len(set(clusters.values())) == len(clusters):
        return {}

    def minus(ways: Sequence[Sequence[TaskMeans]], pair: bool) -> Difference:
        if in_new_clusters:
            groups = {task: clusters.get(task, task) for task in ways[0][0]}
            return rise(*ways, clusters=groups, fixed=fixed, pair=pair)
        return rise(*ways, fixed=fixed, pair=pair, p=True)

    ends = [[task_means(played) for played in side] for side in sides]
    found = {name: minus(*_at_same_step((base, method), ends, means, pair))}
    graded = [[score_means(played) for played in side] for side in sides]
    if any(means for side in graded for means in side):
        # a run whose every score is success is still on the same scale
        ways = [[m or task_means(p) for m, p in zip(*both, strict=True)] for both in zip(graded, sides, strict=True)]
        found[f"{name}, score"] = minus(ways, pair)
    return found


def _at_same_step(
    sides: tuple[Method, Method], ends: Sequence[Sequence[TaskMeans]], means: SameStep, pair: bool
) -> tuple[list[Sequence[TaskMeans]], bool]:
    """The runs of both sides and whether they pair up by seed: at Same-Step where it is known, else at their `ends`.

    Of two trainings the seeds that both have count, as in the tables of training. Of the other's tasks those are left
    out that not every evaluation of a training has an episode of.
    """
    known = [means.get(side.name) for side in sides]
    first, second = known
    if first is not None and second is not None and (both := [seed for seed in first if seed in second]):
        return [[side[seed] for seed in both] for side in (first, second)], True
    out = {task for side, runs in zip(known, ends, strict=True) if side for task in runs[0].keys() - _tasks_in(side)}
    found: list[Sequence[TaskMeans]] = [
        [{task: value for task, value in run.items() if task not in out} for run in runs]
        if side is None
        else [*side.values()]
        for side, runs in zip(known, ends, strict=True)
    ]
    return found, pair


def _tasks_in(seeds: Mapping[int, TaskMeans]) -> set[str]:
    return set(next(iter(seeds.values())))


def settings_table(methods: Sequence[Method]) -> Table | None:
    """A row for every setting in which methods differ, first those that matter; None if they all agree."""
    differ = unlike([method.first for method in methods])
    rows = [[name, *map(_shown, values)] for name, values in differ.items()]
    return (["setting", *(method.name for method in methods)], rows) if rows else None


def _shown(value: object) -> str:
    return "-" if value is None or value == "" else str(value)


def training_table(methods: Sequence[Method]) -> Table:
    """One row per method: what its runs took, first and last evaluation, depth where it was controlled, and the highest
    evaluation; means over seeds."""
    trained = [method for method in methods if method.records]
    depth = any(map(depth_of, trained))
    header = ["method", "seeds", "steps", "seconds", "start", "last", *(["depth"] if depth else [])]
    rows = []
    for method in trained:
        steps = "-".join(str(n) for n in sorted({max(_steps(method, n)) for n in range(len(method.records))}))
        values = mean_curve(method)
        cells = [
            method.name,
            str(len(method.records)),
            steps,
            f"{fmean(one.total.seconds for one in method.records):.0f}",
        ]
        cells += [percent(values[0]), percent(values[-1])] if values else ["-", "-"]
        if depth:
            found = depth_of(method)
            cells.append(f"{found:.1f}" if found else "full")
        # the highest of many evaluations is high by chance, too
        rows.append([*cells, f"{percent(max(values))} of {len(values)}" if values else "-"])
    return [*header, "highest, chosen on these tasks"], rows


def _steps(method: Method, number: int) -> list[int]:
    record = method.records[number]
    return [0, *(point.step for point in record.evaluations), *(int(step["step"]) for step in record.steps[-1:])]


def mean_curve(method: Method) -> list[float]:
    """Mean success at the steps that all seeds were evaluated after, in order."""
    curves = [{p.step: fmean(p.tasks.values()) for p in record.evaluations} for record in method.records]
    return [fmean(curve[step] for curve in curves) for step in sorted(set.intersection(*map(set, curves)))]


def regime_table(runs: Sequence[Diagnosed]) -> Table:
    """Table 1 by run and phase of training; percent."""
    header = ["run", "training", "steps", "KL deep / shallow", "deep third of KL mass", "deep third of KL (eq. 11)"]
    header += [
        "first 3 turns of KL mass",
        "deep support",
        "teacher entropy deep / shallow, failed",
        "G (nats)",
        "signs",
    ]
    rows = []
    for run in runs:
        for phase, item in run.diagnosis.regimes.items():
            shares = (item.kl_ratio, item.deep_mass, item.deep_share, item.first_mass, item.deep_support)
            cells = [percent(share) for share in (*shares, item.entropy_ratio)]
            gap = "-" if item.separation is None else f"{item.separation:+.3f}"
            steps = str(run.diagnosis.by_turn.curves[phase].steps)
            rows.append([run.name, phase, steps, *cells, gap, f"{3 - len(item.failures)} of 3"])
    return header, rows


def budget_table(runs: Sequence[Diagnosed]) -> Table:
    """Table 6: alpha and the deep budget that it realized, by run and phase of training; percent."""
    header = ["run", "training", "alpha", "weight on deep third", "turns per episode", "mean cap", "seconds per step"]
    rows = []
    for run in runs:
        for phase, means in run.diagnosis.over_steps.by_phase.items():
            cells = [percent(means["alpha"]), percent(means["deep_weight"])]
            plain = [means[name] for name in ("turns_mean", "depth/cap", "time/step_s")]
            rows.append([run.name, phase, *cells, *("-" if math.isnan(value) else f"{value:.1f}" for value in plain)])
    return header, rows


def variant_table(runs: Sequence[Diagnosed]) -> Table:
    """Replays the depth controller on the recorded probes with other settings."""
    header = ["run", "setting", "probes", "H_eff", "H_cov", "smoothed horizon", "turns played / full depth %"]
    rows = [
        [
            *(run.name, item.name, str(item.probes), str(item.state.h_eff), str(item.state.h_cov)),
            f"{item.state.hbar:.1f}",
            percent(item.turns_share),
        ]
        for run in runs
        for item in run.diagnosis.variants
    ]
    return header, rows


def percent(share: float | None) -> str:
    """Formats a share in percent; `-` if it is not known."""
    return "-" if share is None or math.isnan(share) else f"{100 * share:.1f}"
