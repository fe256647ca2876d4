"""Tables and figures of evaluations and training runs, side by side: success, costs, and what TurnOPD's paper plots.

Runs of a study have tables of their own (`turngym study show`).

Examples:
    turngym report runs/student/eval
    turngym report before=runs/a/eval after=runs/b/eval --out report
    turngym report 'opd=runs/opd-*' 'mine=runs/mine-*' --out report --latex    # runs that differ in their seed
"""

from __future__ import annotations

import base64
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path

from turngym.agents.endpoint.usage import Usage, usage_table
from turngym.agents.evaluation.scores import Scores, behavior_table, score_seeds, success_table
from turngym.core.clean_keys import recorded_command
from turngym.core.errors import TurngymError
from turngym.core.setting import Positional
from turngym.core.spec import Spec, Unread, needing
from turngym.core.tables import Table, csv_text, filled, lines_of, markdown, markup
from turngym.scripts.options import pop_option, read_options
from turngym.scripts.report_data import (
    TRAINING,
    Diagnosed,
    Method,
    diagnosed,
    methods_of,
    records_of,
    short,
    trace_curves_of,
    worlds_of,
)
from turngym.scripts.report_figures import Figure, write_figure, write_page, write_table
from turngym.scripts.report_tables import (
    Paired,
    budget_table,
    paired_of,
    panels_of,
    percent,
    settings_table,
    training_table,
    variant_table,
)
from turngym.scripts.report_training import accuracy_figure, cost_figures, depth_figures, draw_summary
from turngym.scripts.report_turns import episode_figures, turn_figures
from turngym.trainers.study.tables import notes_of, tables_of

# Sections: headings with paragraphs, tables and figures, in the order in which the report shows them.

Part = str | tuple[str, Table] | Figure
"""A paragraph, a table with its stem for CSV, or a figure."""
PAIRED = """\
One method minus the other in points, with 95 % intervals for new tasks and, where both have several, new training
seeds. Trainings: at Same-Step; scores, and what was evaluated by itself: at the last evaluation. One run each: it holds
for these two runs; another seed may turn out otherwise. Clear of zero: among all rows (Holm). Better: how often a run
of the one does better in a task than one of the other, equal counting half."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A heading and the parts below it."""

    title: str
    parts: tuple[Part, ...]


def sections(
    methods: Sequence[Method], scores: dict[str, Scores], runs: Sequence[Diagnosed], paired: Paired
) -> list[Section]:
    """Returns the sections of the report. Figures are only described here; they are drawn later, or not at all. Methods
    without episodes are not in `scores`; without diagnosed `runs` the report has no diagnostics."""
    built = []
    if (table := paired.table()) is not None:
        built.append(Section(title="Paired difference", parts=(("paired", table), PAIRED)))
    if scores:
        counted = [method for method in methods if method.name in scores]

        def success_of(group: Sequence[Method]) -> Table:
            return success_table({method.name: scores[method.name] for method in group})

        success = _by_panel(counted, "success", success_of)
        text = "The last evaluation. Intervals: 95 %, over tasks, and over seeds where a row has several. Episodes "
        text += "that ended in errors are not counted."
        text += "".join(f" ~ is approximate: {why}." for why in approximate(scores))
        departing = [f"{method.name}: {method.first.departs}." for method in methods if method.first.departs]
        built.append(Section(title="Success (%)", parts=(*success, text, *departing)))
        built.append(Section(title="Behavior", parts=(("behavior", behavior_table(scores)),)))
    usages = {method.name: [run.used for run in method.runs if run.used is not None] for method in methods}
    for table in usage_table({name: sum(used, start=Usage()) for name, used in usages.items() if used}):
        built.append(Section(title="Tokens and cost", parts=(("usage", table),)))
    if differ := _by_panel(methods, "settings", settings_table):
        built.append(Section(title="Settings that differ", parts=tuple(differ)))
    if any(method.records for method in methods):
        built.append(Section(title="Training", parts=tuple(_training(methods))))
    built += _diagnostics(runs)
    curves = {method.name: trace_curves_of(method) for method in methods}
    if traces := {name: trace for name, trace in curves.items() if trace is not None and trace.turns}:
        places = {method.name: method.place for method in methods}
        built.append(Section(title="Episodes", parts=tuple(episode_figures(traces, places))))
    skipped = [line for method in methods for run in method.runs for line in run.skipped]
    if skipped:
        built.append(Section(title="Skipped", parts=("\n".join(f"- {line}" for line in skipped),)))
    return built


def _by_panel(methods: Sequence[Method], name: str, make: Callable[[Sequence[Method]], Table | None]) -> list[Part]:
    """A table per panel, under the panel's name if there are several. Methods that were not evaluated have one of their
    own."""
    groups = panels_of(methods)
    apart = [method for method in methods if not any(method in group for group in groups)]
    if len(groups) < 2:
        groups, apart = [list(methods)], []
    parts: list[Part] = []
    for number, group in enumerate([*groups, *([apart] if apart else [])], 1):
        if (table := make(group)) is None:
            continue
        run = group[0].first
        if len(groups) > 1:
            parts.append(f"{run.panel or run.episodes[0].task.env_id}:" if run.episodes else "Not evaluated:")
        parts.append((name if len(groups) == 1 else f"{name}-{number}", table))
    return parts


def _training(methods: Sequence[Method]) -> list[Part]:
    """What the runs took, and the tables of a study of them."""
    parts: list[Part] = [
        ("training", training_table(methods)),
        "Percent, means over seeds. The highest of k evaluations was chosen on the tasks that it is measured on, and "
        "is too high by chance: by 2 points of 5, by 3.5 of 20, where nothing but chance differs.",
    ]
    studies, notes = records_of(methods)
    for shown in (shown for study in studies for shown in tables_of(study)):
        world = shown.world
        # as the files of a study are called
        parts += [(f"{world.split(':')[0].replace(' ', '-')}-{shown.name}", shown.table)]
        parts += [shown.caption if world == TRAINING else f"{world}: {shown.caption}"]
    notes = [*notes, *(note for study in studies for note in notes_of(study))]
    parts += ["\n".join(f"- {note}" for note in notes)] if notes else []
    places = {method.name: method.place for method in methods}
    return [*parts, *(accuracy_figure(world, rows, places) for world, rows in worlds_of(studies).items())]


def _diagnostics(runs: Sequence[Diagnosed]) -> list[Section]:
    if not runs:
        return []
    # brings torch, which a report of evaluations does without
    from turngym.trainers.study.regime_table import ABOUT, MeasuredRegime, regime_table

    notes = tuple(f"{run.name}: settings not known ({run.note})" for run in runs if run.note)
    regimes = {
        run.name: {
            f"{phase} ({run.diagnosis.by_turn.curves[phase].steps})": MeasuredRegime(regime=signs)
            for phase, signs in run.diagnosis.regimes.items()
        }
        for run in runs
    }
    measured: tuple[Part, ...] = (("regime", regime_table(regimes)), ABOUT) if any(regimes.values()) else ()
    controller, counterfactual, budget, horizon = depth_figures(runs)
    depth: list[Part] = [*notes, ("budget", budget_table(runs)), budget]
    depth += [*([controller] if controller.panels else []), counterfactual]
    depth += [("variants", variant_table(runs))] if any(run.diagnosis.variants for run in runs) else []
    return [
        Section(title="Along an episode", parts=(*measured, *turn_figures(runs))),
        Section(title="Depth and weights", parts=(*depth, horizon)),
        Section(title="Time and numerics", parts=tuple(cost_figures(runs))),
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
    """The head of a report: title, summary and facts."""
    runs = [run for method in methods for run in method.runs]
    envs = dict.fromkeys(episode.task.env_id for run in runs for episode in run.episodes)
    envs |= dict.fromkeys(str(run.config["env"]) for run in runs if "env" in run.config)
    panels = dict.fromkeys(run.panel for run in runs if run.panel)
    names = [method.label for method in methods if method.records] or [method.label for method in methods]
    where = ", ".join(panels or envs) + (", scores approximate" if approximate(scores) else "")
    facts = [", ".join([*envs, *(f"panel {panel}" for panel in panels)]), *map(_origin, methods)]
    return Head(
        title=title or ", ".join(names) + (f": {where}" if where else ""),
        summary=" ".join([*_outcome(paired), *_levels(scores, paired), *_costs(methods)]),
        facts=(*filter(None, facts), command),
    )


def _origin(method: Method) -> str:
    """`opd: opd, student A, teacher B, seeds 0, 1, 2026-11-25`; empty if nothing is known."""
    config = method.first.config
    parts = [str(config["algorithm"])] if "algorithm" in config else []
    for role in ("student", "teacher", "agent"):
        names = dict.fromkeys(short(run.config[role]) for run in method.runs if run.config.get(role))
        parts += [f"{role} {', '.join(names)}"] if names else []
    seeds = [str(run.seed) for run in method.runs if run.seed is not None]
    parts += [f"seeds {', '.join(seeds)}"] if len(seeds) > 1 else []
    started = [str(run.config["provenance"]["started"])[:10] for run in method.runs if "provenance" in run.config]
    parts += [" to ".join(dict.fromkeys((min(started), max(started))))] if started else []
    return f"{method.name}: {', '.join(parts)}" if parts else ""


def _outcome(paired: Paired) -> list[str]:
    """The clearest comparison in a sentence."""
    if paired.clearest is None:
        return [f"{row.name}: {row.refused}." for row in paired.rows[:1]]
    row, difference = paired.clearest
    seeds = "{} and {} seeds".format(*reversed(difference.seeds))
    verdicts = {"yes": f"{seeds}, clear of zero", "no": f"{seeds}, not told from zero"}
    alone = "one run each, which says nothing about other seeds"
    name = row.name.removesuffix(", score")
    verdict = verdicts.get(difference.told, alone)
    return [f"{name}: {difference} points of {row.what} on {difference.tasks} shared tasks, {verdict}."]


def approximate(scores: Mapping[str, Scores]) -> list[str]:
    """Why scores of these runs are approximate, each reason once."""
    return list(dict.fromkeys(item.approximate for item in scores.values() if item.approximate))


def _levels(scores: Mapping[str, Scores], paired: Paired) -> list[str]:
    """Success as it is compared."""
    levels = {name: percent(paired.levels.get(name, item.overall.avg.mean)) for name, item in scores.items()}
    listed = ", ".join(f"{name} {scores[name].mark}{level} %" for name, level in levels.items())
    return [f"Success: {listed}."] if listed else []


def _costs(methods: Sequence[Method]) -> list[str]:
    table = training_table(methods)[1]
    listed = ", ".join(f"{name} {seconds} s for {steps} steps" for name, _, steps, seconds, *_ in table)
    return [f"Training took {listed}."] if listed else []


def as_markdown(top: Head, made: Sequence[Section], drawn: bool) -> str:
    """The report as Markdown; with `drawn` figures appear as images of `figures/`."""
    head_parts = [top.summary, "\n".join(f"- {fact}" for fact in top.facts)]
    parts = [f"# {markup(top.title, 'markdown')}", *(lines_of(part) for part in head_parts if part)]
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
    drawn = "".join(f'<div class="panel">{svg}</div>' for svg in panels)
    missing = "".join(f"<li>{_text(line)}</li>" for line in figure.missing)
    return (
        f'<figure id="{figure.name}"><h3>{escape(figure.title)}</h3>'
        + (f'<div class="panels">{drawn}</div>' if drawn else "")
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
    cells = [[f"<td{' class=text' if len(cell) > 40 else ''}>{escape(cell)}</td>" for cell in row] for row in rows]
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in cells)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


class Options(Spec):
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
        method.name: score_seeds(
            [run.episodes for run in method.runs], None if method.first.spec is None else method.first.spec.play
        )
        for method in methods
        if method.first.episodes
    }
    runs = diagnosed([run for method in methods for run in method.runs]) if options.diagnostics else []
    paired = paired_of(methods, different_settings=options.different_settings)
    built = sections(methods, scores, runs, paired)
    # where the report is written to says nothing of it
    command = recorded_command(["turngym", "report", *pop_option(argv, "--out")[0]])
    top = head(methods, scores, paired, options.title, command)
    print(as_markdown(top, built, drawn=False))
    if options.out is None:
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    failed: list[str] = []
    summary = False
    if options.figure:
        try:
            summary = draw_summary(methods, worlds_of(records_of(methods)[0]), scores, options.out / "report.png")
        except TurngymError as error:
            failed.append(str(error))
    failed += _write(options, top, built, summary=summary)
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
