"""Tables and figures of evaluations and training runs, side by side: success, costs, and what TurnOPD's paper plots.

Examples:
    turngym report runs/student/eval
    turngym report before=runs/a/eval after=runs/b/eval --out report
    turngym report 'opd=runs/opd-*' 'mine=runs/mine-*' --out report --latex    # runs that differ in their seed
"""

from __future__ import annotations

import base64
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

from turngym.agents.endpoint.usage import Usage, usage_table
from turngym.agents.evaluation.compare import decisive, describe, differences_of, scripted
from turngym.agents.evaluation.scores import (
    Scores,
    behavior_table,
    check_hashes,
    score_means,
    score_seeds,
    success_table,
    task_means,
)
from turngym.agents.evaluation.seeds import Difference, TaskMeans, in_family, rise
from turngym.agents.evaluation.statistics import ScoreError
from turngym.core.clean_keys import recorded_command
from turngym.core.errors import TurngymError
from turngym.core.spec import Positional, Unread, needing
from turngym.core.tables import Table, csv_text, filled, lines_of, markdown, markup
from turngym.scripts.options import pop_option, read_options
from turngym.scripts.report_data import (
    TRAINING,
    Diagnosed,
    Method,
    Run,
    SameStep,
    diagnosed,
    methods_of,
    records_of,
    same_step_of,
    short,
    trace_curves_of,
    unlike,
    worlds_of,
)
from turngym.scripts.report_figures import Figure, write_figure, write_page, write_table
from turngym.scripts.report_training import accuracy_figure, cost_figures, depth_figures, depth_of, draw_summary
from turngym.scripts.report_turns import episode_figures

# Tables: paired differences, settings, training, and Tables 1 and 6 of the TurnOPD paper.


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
            *(run.name, item.name, str(item.probes), str(item.h_eff), str(item.h_cov), f"{item.hbar:.1f}"),
            percent(item.turns_share),
        ]
        for run in runs
        for item in run.diagnosis.variants
    ]
    return header, rows


def percent(share: float | None) -> str:
    """Formats a share in percent; `-` if it is not known."""
    return "-" if share is None or math.isnan(share) else f"{100 * share:.1f}"


# Sections: headings with paragraphs, tables and figures, in the order in which the report shows them.

Part = str | tuple[str, Table] | Figure
"""A paragraph, a table with its stem for CSV, or a figure."""
PAIRED = """\
Of trainings at Same-Step, as in their tables below; of what was evaluated by itself, and of scores, at the last
evaluation. By task, 95 %, for new tasks and, where both sides have several, new training seeds, which are crossed. One
run each: it holds for these two runs; another seed may turn out otherwise, and one seed does not say how far seeds lie
apart. Clear of zero: among all rows (Holm). Better: how often a run of the one does better in a task than one of the
other, equal counting half."""
REGIME = """\
Full-depth steps; shallow and deep turns are the first and last third of full depth, KL is the raw reverse KL in nats
per token, G that of failed less that of successful episodes; the rest in percent. Signs that depth can pay: deep /
shallow KL below 60 %, at most 12 % of the KL mass in the deep third, teacher entropy falling with depth in failed
episodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A heading and the parts below it."""

    title: str
    parts: tuple[Part, ...]


def sections(
    methods: Sequence[Method], scores: dict[str, Scores], found: Sequence[Diagnosed], paired: Paired
) -> list[Section]:
    """Returns the sections of the report. Figures are only described here; they are drawn later, or not at all.

    Args:
        methods: the rows of the report; a method's runs differ in their seed alone.
        scores: by the method's name, the scores of its last evaluation; a method without episodes is left out.
        found: diagnostics of the training runs; empty: the report has none.
        paired: the paired differences.
    """
    made = []
    if (table := paired.table()) is not None:
        made.append(Section(title="Paired difference", parts=(("paired", table), PAIRED)))
    if scores:
        text = "The last evaluation. Intervals: 95 %, over tasks, and over seeds where a row has several. Episodes "
        text += "that ended in errors are not counted."
        text += "".join(f" ~ is approximate: {why}." for why in approximate(scores))
        told = [f"{method.name}: {method.first.departs}." for method in methods if method.first.departs]
        made.append(Section(title="Success (%)", parts=(*_success(methods, scores), text, *told)))
        made.append(Section(title="Behavior", parts=(("behavior", behavior_table(scores)),)))
    used = {method.name: sum(noted, start=Usage()) for method in methods if (noted := _used(method))}
    for table in usage_table(used):
        made.append(Section(title="Tokens and cost", parts=(("usage", table),)))
    differ = settings_table(methods)
    if differ is not None:
        made.append(Section(title="Settings that differ", parts=(("settings", differ),)))
    if any(method.records for method in methods):
        made.append(Section(title="Training", parts=tuple(_training(methods))))
    made += _diagnostics(found)
    traces = {method.name: item for method in methods if (item := trace_curves_of(method)) is not None and item.turns}
    if traces:
        places = {method.name: method.place for method in methods}
        made.append(Section(title="Episodes", parts=tuple(episode_figures(traces, places))))
    skipped = [line for method in methods for run in method.runs for line in run.skipped]
    if skipped:
        made.append(Section(title="Skipped", parts=("\n".join(f"- {line}" for line in skipped),)))
    return made


def _success(methods: Sequence[Method], scores: Mapping[str, Scores]) -> list[Part]:
    """A table for each panel, under its name where there are several."""
    groups = panels_of(methods)
    if len(groups) == 1:
        return [("success", success_table(scores))]
    parts: list[Part] = []
    for number, group in enumerate(groups, 1):
        first = group[0].first
        parts.append(f"{first.panel or first.episodes[0].task.env_id}:")
        parts.append((f"success-{number}", success_table({method.name: scores[method.name] for method in group})))
    return parts


def _used(method: Method) -> list[Usage]:
    return [run.used for run in method.runs if run.used is not None]


def _training(methods: Sequence[Method]) -> list[Part]:
    """What the runs took, and the tables of a study of them."""
    parts: list[Part] = [
        ("training", training_table(methods)),
        "Percent, means over seeds. The highest of k evaluations was chosen on the tasks that it is measured on, and "
        "is too high by chance: by 2 points of 5, by 3.5 of 20, where nothing but chance differs.",
    ]
    studies, notes = records_of(methods)
    # brings what only training needs
    from turngym.trainers.study.tables import caption, notes_of, tables_of

    worlds = worlds_of(studies)
    for title, table in [item for study in studies for item in tables_of(study).items()]:
        world, _, name = title.rpartition(": ")
        # as the files of a study are called
        parts += [(f"{world.split(':')[0].replace(' ', '-')}-{name}", table)]
        parts += [f"{title.removeprefix(f'{TRAINING}: ')}: {caption(name, worlds[world])}"]
    notes = [*notes, *(note for study in studies for note in notes_of(study))]
    parts += ["\n".join(f"- {note}" for note in notes)] if notes else []
    places = {method.name: method.place for method in methods}
    return [*parts, *(accuracy_figure(world, rows, places) for world, rows in worlds.items())]


def _diagnostics(found: Sequence[Diagnosed]) -> list[Section]:
    if not found:
        return []
    # brings torch, which a report of evaluations does without
    from turngym.scripts.report_turns import turn_figures

    notes = tuple(f"{run.name}: settings not known ({run.note})" for run in found if run.note)
    turns = turn_figures(found)
    if any(run.diagnosis.regimes for run in found):
        turns_parts: tuple[Part, ...] = (("regime", regime_table(found)), REGIME, *turns)
    else:
        turns_parts = tuple(turns)
    controller, *others = depth_figures(found)
    variants: tuple[Part, ...] = (
        (("variants", variant_table(found)),) if any(r.diagnosis.variants for r in found) else ()
    )
    controlled = (controller,) if controller.panels else ()
    depth = (*notes, ("budget", budget_table(found)), *others[1:2], *controlled, *others[:1], *variants, *others[2:])
    return [
        Section(title="Along an episode", parts=turns_parts),
        Section(title="Depth and weights", parts=depth),
        Section(title="Time and numerics", parts=tuple(cost_figures(found))),
    ]


# The head: what was compared, where, with which models, when, and what came out.


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Title, summary and origin of a report."""

    title: str
    summary: str
    """Summary of three sentences at most."""
    facts: tuple[str, ...]
    """Environment and panel, what each run was, dates, the command."""


def head(
    methods: Sequence[Method], scores: Mapping[str, Scores], paired: Paired, title: str | None, command: str
) -> Head:
    """The head of a report: title, summary and facts.

    Args:
        methods: the rows of the report; a method's runs differ in their seed alone.
        scores: by the method's name, the scores of its last evaluation; a method without episodes is left out.
        paired: the paired differences, of which the clearest comes first.
        title: overrides the one that the methods give.
        command: the command line that makes the report.
    """
    runs = [run for method in methods for run in method.runs]
    envs = dict.fromkeys(one.task.env_id for run in runs for one in run.episodes)
    envs |= dict.fromkeys(str(run.config["env"]) for run in runs if "env" in run.config)
    panels = dict.fromkeys(run.panel for run in runs if run.panel)
    names = [one.label for one in methods if one.records] or [one.label for one in methods]
    where = ", ".join(panels or envs) + (", scores approximate" if approximate(scores) else "")
    facts = [", ".join([*envs, *(f"panel {panel}" for panel in panels)])] + [_origin(one) for one in methods]
    return Head(
        title=title or " and ".join(names) + (f": {where}" if where else ""),
        summary=" ".join([*_outcome(paired), *_levels(scores, paired), *_costs(methods)]),
        facts=(*filter(None, facts), command),
    )


def _origin(method: Method) -> str:
    """`opd: opd, student A, teacher B, seeds 0, 1, 2026-11-25`; empty if nothing is known."""
    own = method.first.config
    parts = [str(own["algorithm"])] if "algorithm" in own else []
    for role in ("student", "teacher", "agent"):
        found = dict.fromkeys(short(run.config[role]) for run in method.runs if run.config.get(role))
        parts += [f"{role} {', '.join(found)}"] if found else []
    seeds = [str(run.seed) for run in method.runs if run.seed is not None]
    parts += [f"seeds {', '.join(seeds)}"] if len(seeds) > 1 else []
    started = [str(run.config["provenance"]["started"])[:10] for run in method.runs if "provenance" in run.config]
    parts += [" to ".join(dict.fromkeys((min(started), max(started))))] if started else []
    return f"{method.name}: {', '.join(parts)}" if parts else ""


def _outcome(paired: Paired) -> list[str]:
    """The clearest comparison in a sentence."""
    if paired.clearest is None:
        return [f"{name}: {why}." for name, why in list(paired.refused.items())[:1]]
    name, one = paired.clearest
    seeds, what = "{} and {} seeds".format(*reversed(one.seeds)), paired.what[name]
    said = {"yes": f"{seeds}, clear of zero", "no": f"{seeds}, not told from zero"}
    alone = "one run each, which says nothing about other seeds"
    name = name.removesuffix(", score")
    return [f"{name}: {one} points of {what} on {one.tasks} shared tasks, {said.get(one.told, alone)}."]


def approximate(scores: Mapping[str, Scores]) -> list[str]:
    """Why scores of these runs are approximate, each reason once."""
    return list(dict.fromkeys(item.approximate for item in scores.values() if item.approximate))


def _levels(scores: Mapping[str, Scores], paired: Paired) -> list[str]:
    """Success as it is compared."""
    found = ", ".join(
        f"{name} {item.mark}{percent(paired.levels.get(name, item.overall.avg.mean))} %"
        for name, item in scores.items()
    )
    return [f"Success: {found}."] if found else []


def _costs(methods: Sequence[Method]) -> list[str]:
    table = training_table(methods)[1]
    found = ", ".join(f"{name} {seconds} s for {steps} steps" for name, _, steps, seconds, *_ in table)
    return [f"Training took {found}."] if found else []


def as_markdown(top: Head, made: Sequence[Section], drawn: bool) -> str:
    """The report as Markdown; with `drawn` figures appear as images of `figures/`."""
    said = [top.summary, "\n".join(f"- {fact}" for fact in top.facts)]
    parts = [f"# {markup(top.title, 'markdown')}", *(lines_of(part) for part in said if part)]
    for section in made:
        texts = [text for part in section.parts if (text := _markdown(part, drawn))]
        parts += [f"## {markup(section.title, 'markdown')}", *texts] if texts else []
    return "\n\n".join(parts) + "\n"


def _markdown(part: Part, drawn: bool) -> str:
    if isinstance(part, str):
        return lines_of(part)
    if isinstance(part, tuple):
        return markdown(part[1])
    if not drawn:
        return ""
    title = markup(part.title, "markdown")
    image = f"![{title}](figures/{part.name}.png)\n\n" if part.panels else ""
    numbers = f" Numbers: [data/{part.name}.csv](data/{part.name}.csv)." if part.table[1] else ""
    missing = "".join(f"\n- {lines_of(line)}." for line in part.missing)
    return f"### {title}\n\n{image}{lines_of(part.caption)}{numbers}" + (f"\n{missing}" if missing else "")


# The HTML page: self-contained, figures as inline SVG, numbers as attached CSV, no script.

TEMPLATE = Path(__file__).with_name("report_page.html")
MOST_ATTACHED = 300_000
"""Largest CSV in bytes that is embedded in the page. Larger ones are only written to the data folder."""


def page(top: Head, made: Sequence[Section], drawn: Mapping[str, Sequence[str]]) -> str:
    """The page; `drawn` has the panels of each figure by its name, as SVG."""
    links = "".join(f'<li><a href="#s{n}">{escape(section.title)}</a></li>' for n, section in enumerate(made))
    body = "".join(
        f'<section id="s{n}"><h2>{escape(section.title)}</h2>'
        + "".join(_part(part, drawn) for part in section.parts)
        + "</section>"
        for n, section in enumerate(made)
    )
    text = TEMPLATE.read_text(encoding="utf-8")
    facts = "".join(f"<li>{escape(fact)}</li>" for fact in top.facts)
    about = f"<p class=summary>{escape(top.summary)}</p><ul class=facts>{facts}</ul>"
    marks = {"__TITLE__": escape(top.title), "__ABOUT__": about, "__LINKS__": links, "__BODY__": body}
    return filled(text, marks)


def _part(part: Part, drawn: Mapping[str, Sequence[str]]) -> str:
    if isinstance(part, str):
        lines = part.splitlines()
        if all(line.startswith("- ") for line in lines):
            return "<ul>" + "".join(f"<li>{_text(line[2:])}</li>" for line in lines) + "</ul>"
        return f"<p>{_text(part)}</p>"
    if isinstance(part, tuple):
        return f'<div class="wide">{_table(part[1])}</div>'
    return _figure(part, drawn.get(part.name, ()))


def _text(text: str) -> str:
    """Prose for the page, with what stands in backticks as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _figure(figure: Figure, panels: Sequence[str]) -> str:
    shown = "".join(f'<div class="panel">{svg}</div>' for svg in panels)
    missing = "".join(f"<li>{_text(line)}</li>" for line in figure.missing)
    return (
        f'<figure id="{figure.name}"><h3>{escape(figure.title)}</h3>'
        + (f'<div class="panels">{shown}</div>' if shown else "")
        + f"<figcaption>{_text(figure.caption)}{_numbers(figure)}</figcaption>"
        + (f'<ul class="missing">{missing}</ul>' if missing else "")
        + "</figure>"
    )


def _numbers(figure: Figure) -> str:
    """Links the CSV of a figure: the file beside the page, and an embedded copy if it is small."""
    if not figure.table[1]:
        return ""
    data, name = csv_text([figure.table[0], *figure.table[1]]).encode("utf-8"), f"{figure.name}.csv"
    if len(data) > MOST_ATTACHED:
        return f" Numbers: data/{name}."
    link = f"data:text/csv;base64,{base64.b64encode(data).decode('ascii')}"
    return f' Numbers: <a download="{name}" href="{link}">data/{name}</a>.'


def _table(table: Table) -> str:
    header, rows = table
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(text: str) -> str:
    return f"<td{' class=text' if len(text) > 40 else ''}>{escape(text)}</td>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Which runs are reported."""

    runs: Positional[tuple[str, ...]]
    """PATH or NAME=PATH of a trace, of an evaluation's folder or of a training run's; NAME=PATTERN ('opd=runs/opd-*')
    and a repeated NAME are runs of one method that differ in their seed alone. All are compared to the first."""
    out: Path | None = None
    """Folder for report.html, report.md, report.png, figures/ (PNG, SVG and PDF) and data/ (CSV); by default the report
    is only printed."""
    latex: bool = False
    """Also write each table as LaTeX (booktabs) into OUT/tables."""
    figure: bool = True
    """Draw figures (needs matplotlib)."""
    diagnostics: bool = True
    """Diagnose training runs by turn: KL, regime, controller, horizon, times (needs torch)."""
    different_settings: bool = False
    """Compare evaluations by task although they were played otherwise (turns, arguments of gym.make, temperature,
    preset); by default such pairs are refused."""
    title: str | None = None
    """Heading of the page; by default the runs and what they played."""

    def unread(self) -> Unread:
        # --no-figure is kept without --out, too: none is drawn then
        if self.out is None:
            yield from needing("--out", "latex")


def main(argv: Sequence[str]) -> int:
    """Run `turngym report` with `argv` (without the verb itself)."""
    options = read_options(Options, argv, prog="turngym report", about=__doc__)
    methods = methods_of(options.runs)
    scores = {
        one.name: score_seeds(
            [run.episodes for run in one.runs], None if one.first.spec is None else one.first.spec.play
        )
        for one in methods
        if one.first.episodes
    }
    found = diagnosed([run for one in methods for run in one.runs]) if options.diagnostics else []
    paired = paired_of(methods, different_settings=options.different_settings)
    made = sections(methods, scores, found, paired)
    # where the report is written to says nothing of it
    command = recorded_command(["turngym", "report", *pop_option(argv, "--out")[0]])
    top = head(methods, scores, paired, options.title, command)
    print(as_markdown(top, made, drawn=False))
    if options.out is None:
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    failed: list[str] = []
    summary = options.figure
    if options.figure:
        try:
            summary = draw_summary(methods, worlds_of(records_of(methods)[0]), scores, options.out / "report.png")
        except TurngymError as error:
            summary = False
            failed.append(str(error))
    failed += _write(options, top, made, summary=summary)
    for line in dict.fromkeys(failed):
        print(f"turngym report: {line}", file=sys.stderr)
    print(f"written to {options.out}; open {options.out / 'report.html'} in a browser")
    return 1 if failed else 0


def _write(options: Options, top: Head, made: Sequence[Section], *, summary: bool) -> list[str]:
    """Writes the report. Returns why figures are missing in it; everything else is there all the same."""
    folder = options.out or Path()
    (folder / "data").mkdir(exist_ok=True)
    drawn: dict[str, list[str]] = {}
    failed: list[str] = []

    def written(part: Part, caption: str) -> Part:
        if isinstance(part, tuple):
            write_table(part[1], folder / "data" / f"{part[0]}.csv")
            if options.latex:
                write_table(part[1], folder / "tables" / f"{part[0]}.tex", caption)
        elif isinstance(part, Figure):
            try:
                drawn[part.name] = write_figure(part, folder, draw=options.figure)
            except TurngymError as error:
                failed.append(str(error))
                return replace(part, panels=(), missing=(*part.missing, str(error)))
        return part

    def said(section: Section, number: int) -> str:
        """The paragraph below a part, else the section's title."""
        below = section.parts[number + 1 : number + 2]
        return below[0] if below and isinstance(below[0], str) else section.title

    made = [
        replace(section, parts=tuple(written(part, said(section, n)) for n, part in enumerate(section.parts)))
        for section in made
    ]
    text = as_markdown(top, made, drawn=options.figure)
    if summary:
        text += "\n![Accuracy, depth, categories](report.png)\n"
    write_page(folder / "report.md", text)
    write_page(folder / "report.html", page(top, made, drawn))
    return failed
