"""Tables of `turngym report`: paired differences, settings, training, and Table 6 of the TurnOPD paper."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from turngym.agents.evaluation.compare import decisive, describe, differences_of, scripted
from turngym.agents.evaluation.scores import check_hashes, score_means, task_means
from turngym.agents.evaluation.seeds import NEW_CLUSTERS, Difference, TaskMeans, in_family, rise
from turngym.agents.evaluation.statistics import ScoreError
from turngym.core.tables import Table, table_of
from turngym.scripts.report_data import Diagnosed, Method, Run, SameStep, same_step_of, unlike
from turngym.trainers.study.records import Record


def panels_of(methods: Sequence[Method]) -> list[list[Method]]:
    """The methods that were evaluated, those that share tasks together."""
    panels: list[list[Method]] = []
    for method in methods:
        tasks = _tasks(method)
        same = [group for group in panels if tasks & _tasks(group[0])]
        if same:
            same[0].append(method)
        elif tasks:
            panels.append([method])
    return panels


def _tasks(method: Method) -> set[tuple[str, str]]:
    return {(episode.task.env_id, episode.task.task_id) for episode in method.first.episodes}


def pairs(methods: Sequence[Method]) -> list[tuple[Method, Method]]:
    """(base, other) of all comparisons, panel by panel: first what was trained side by side, then everything against
    the panel's first method, what was trained before the rest."""
    compared = []
    for panel in panels_of(methods):
        trained = [method for method in panel if method.first.training]
        others = sorted(panel[1:], key=lambda method: not method.first.training)
        compared += [(trained[0], method) for method in trained[1:]] + [(panel[0], method) for method in others]
    return list({(base.name, method.name): (base, method) for base, method in compared}.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One method minus another, or why the two are not compared."""

    name: str
    trained: int = 0
    """How many of the two sides were trained."""
    what: str = "-"
    """What it is the difference of: `success`, `success (mean of the last 4 evaluations)`, `score`."""
    difference: Difference | None = None
    wider: Difference | None = None
    """The same with its interval for new scenes, worlds or products; None where no two tasks share one."""
    refused: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """Comparisons of methods, of which those that have a difference are one family."""

    rows: Sequence[Compared]
    levels: Mapping[str, float]
    """Mean success of the methods that are compared at Same-Step."""

    def table(self) -> Table | None:
        """A row for each comparison; None without one."""
        wider = any(row.wider for row in self.rows)
        cells = [
            {
                "comparison": row.name,
                "points [95 %]": str(difference or "-"),
                **({NEW_CLUSTERS: str(row.wider or "-")} if wider else {}),
                "tasks": str(difference.tasks) if difference else "-",
                "seeds": "{} and {}".format(*reversed(difference.seeds)) if difference else "-",
                "better %": f"{100 * difference.better:.0f}" if difference else "-",
                "clear of zero": difference.told if difference else row.refused,
                "of": row.what,
            }
            for row in self.rows
            for difference in [row.difference]
        ]
        return table_of(cells) if cells else None

    @property
    def clearest(self) -> tuple[Compared, Difference] | None:
        """The comparison that owes least to chance, among methods trained side by side if there are any, else among
        trained ones, else among all. If none is off zero, the first."""

        def doubt(item: tuple[Compared, Difference]) -> tuple[int, bool, float]:
            row, difference = item
            off = difference.low > 0 or difference.high < 0
            return -row.trained, not difference.clear, difference.p if off and difference.p is not None else 1.0

        compared = [(row, row.difference) for row in self.rows if row.difference is not None]
        return min(compared, key=doubt, default=None)


def paired_of(methods: Sequence[Method], *, different_settings: bool = False) -> Paired:
    """Differences, paired by task (`pairs`): of training runs at Same-Step (`same_step_of`), of others and of scores at
    the last evaluation.

    Evaluations in other settings are not compared unless `different_settings`: the difference would be theirs.
    """
    means, labels = same_step_of(methods)
    rows = list[Compared]()
    for base, method in pairs(methods):
        trained = sum(side.first.training is not None for side in (base, method))
        about = Compared(name=f"{method.name} minus {base.name}", trained=trained)
        differing = _otherwise(base.first, method.first)
        if differing and not different_settings:
            why = f"not compared, played otherwise: {describe(differing)}; --different-settings compares all the same"
            rows.append(replace(about, refused=why))
            continue
        over = labels.get(method.name, labels.get(base.name))
        about = replace(about, what="success" if over is None else f"success ({over})")
        try:
            rows += _compared(about, base, method, means)
        except ScoreError as error:
            rows.append(replace(about, refused=str(error), what="-"))
    family = in_family({row.name: row.difference for row in rows if row.difference is not None})
    levels = {name: fmean(fmean(tasks.values()) for tasks in seeds.values()) for name, seeds in means.items()}
    return Paired(rows=[replace(row, difference=family.get(row.name)) for row in rows], levels=levels)


def _otherwise(first: Run, second: Run) -> Mapping[str, Any]:
    """The settings of the game in which two evaluations differ, as far as their traces say them."""
    if first.spec is None or second.spec is None:
        return {}
    return decisive(differences_of(first.spec, second.spec))


def _compared(about: Compared, base: Method, method: Method, means: SameStep) -> list[Compared]:
    """The difference of success, at Same-Step where `means` has it, and of the graded score where it says more. Raises
    ScoreError if tasks differ."""
    # side -> run -> episodes
    played = [
        [[episode for episode in run.episodes if not episode.status.is_error] for run in side.runs]
        for side in (base, method)
    ]
    for episodes in played[1]:
        check_hashes(played[0][0], episodes)
    players = [side.first for side in (base, method) if len(side.runs) == 1 and not side.first.training]
    fixed = any(run.spec is not None and scripted(run.spec) for run in players)
    same_seeds = [run.seed for run in base.runs] == [run.seed for run in method.runs]
    ends = [[task_means(episodes) for episodes in runs] for runs in played]
    wanted: list[tuple[Compared, Sequence[Sequence[TaskMeans]], bool]]
    wanted = [(about, *_at_same_step((base, method), ends, means, same_seeds))]
    scores = [[score_means(episodes) for episodes in runs] for runs in played]
    if any(map(any, scores)):
        # a run whose every score is success is still on the same scale
        graded = [[score or end for score, end in zip(*runs, strict=True)] for runs in zip(scores, ends, strict=True)]
        wanted.append((replace(about, name=f"{about.name}, score", what="score"), graded, same_seeds))
    clusters = {episode.task.task_id: episode.task.cluster or episode.task.task_id for episode in played[0][0]}
    rows = []
    for row, (first, second), pair in wanted:
        wider = None
        if len(set(clusters.values())) < len(clusters):
            groups = {task: clusters.get(task, task) for task in first[0]}
            wider = rise(first, second, clusters=groups, fixed=fixed, pair=pair)
        rows.append(replace(row, difference=rise(first, second, fixed=fixed, pair=pair, p=True), wider=wider))
    return rows


def _at_same_step(
    sides: tuple[Method, Method], ends: Sequence[Sequence[TaskMeans]], means: SameStep, pair: bool
) -> tuple[Sequence[Sequence[TaskMeans]], bool]:
    """The runs of both sides and whether they pair up by seed: at Same-Step where it is known, else at their `ends`.

    Of two trainings the seeds that both have count, as in the tables of training. Of the other's tasks those are left
    out that not every evaluation of a training has an episode of.
    """
    same_steps = [means.get(side.name) for side in sides]
    first, second = same_steps
    if first is not None and second is not None and (shared := [seed for seed in first if seed in second]):
        return [[side[seed] for seed in shared] for side in (first, second)], True
    out = set[str]()
    for side, runs in zip(same_steps, ends, strict=True):
        out |= runs[0].keys() - next(iter(side.values())).keys() if side else set()
    means_of: list[Sequence[TaskMeans]] = []
    for side, runs in zip(same_steps, ends, strict=True):
        cut = [{task: mean for task, mean in run.items() if task not in out} for run in runs]
        means_of.append(cut if side is None else [*side.values()])
    return means_of, pair


def settings_table(methods: Sequence[Method]) -> Table | None:
    """A row for every setting in which methods differ, first those that matter; None if they all agree."""
    differ = unlike([method.first for method in methods])
    rows = [
        [name, *("-" if value in (None, "") else str(value) for value in values)] for name, values in differ.items()
    ]
    return (["setting", *(method.name for method in methods)], rows) if rows else None


def training_table(methods: Sequence[Method]) -> Table:
    """One row per method: what its runs took, first and last evaluation, depth where it was controlled, and the highest
    evaluation; means over seeds."""
    trained = [method for method in methods if method.records]
    depths = {method.name: method.depth for method in trained}
    rows = []
    for method in trained:
        last = set(map(_last_step, method.records))
        values, depth = mean_curve(method), depths[method.name]
        rows.append(
            {
                "method": method.name,
                "seeds": str(len(method.records)),
                "steps": "-".join(map(str, sorted(last))),
                "seconds": f"{fmean(record.total.seconds for record in method.records):.0f}",
                "start": percent(values[0]) if values else "-",
                "last": percent(values[-1]) if values else "-",
                **({"depth": f"{depth:.1f}" if depth else "full"} if any(depths.values()) else {}),
                # the highest of many evaluations is high by chance, too
                "highest, chosen on these tasks": f"{percent(max(values))} of {len(values)}" if values else "-",
            }
        )
    return table_of(rows)


def _last_step(record: Record) -> int:
    """The last step that a run trained or was evaluated after."""
    trained = [int(step["step"] or 0) for step in record.steps[-1:]]
    return max([0, *trained, *(point.step for point in record.evaluations)])


def mean_curve(method: Method) -> list[float]:
    """Mean success at the steps that all seeds were evaluated after, in order."""
    curves = [{point.step: fmean(point.tasks.values()) for point in record.evaluations} for record in method.records]
    return [fmean(curve[step] for curve in curves) for step in sorted(set.intersection(*map(set, curves)))]


def budget_table(runs: Sequence[Diagnosed]) -> Table:
    """Table 6: alpha and the deep budget that it realized, by run and phase of training; percent."""
    plain = {"turns per episode": "turns_mean", "mean cap": "depth/cap", "seconds per step": "time/step_s"}
    return table_of(
        {
            "run": run.name,
            "training": phase,
            "alpha": percent(means["alpha"]),
            "weight on deep third": percent(means["deep_weight"]),
            **{title: "-" if math.isnan(means[key]) else f"{means[key]:.1f}" for title, key in plain.items()},
        }
        for run in runs
        for phase, means in run.diagnosis.over_steps.by_phase.items()
    )


def variant_table(runs: Sequence[Diagnosed]) -> Table:
    """Replays the depth controller on the recorded probes with other settings."""
    return table_of(
        {
            "run": run.name,
            "setting": variant.name,
            "probes": str(variant.probes),
            "H_eff": str(variant.state.h_eff),
            "H_cov": str(variant.state.h_cov),
            "smoothed horizon": f"{variant.state.hbar:.1f}",
            "turns played / full depth %": percent(variant.turns_share),
        }
        for run in runs
        for variant in run.diagnosis.variants
    )


def percent(share: float | None) -> str:
    """Formats a share in percent; `-` if it is not known."""
    return "-" if share is None or math.isnan(share) else f"{100 * share:.1f}"
