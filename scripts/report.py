"""Tables and figures of evaluations and training runs, side by side: success, costs, and what TurnOPD's paper plots.

Examples:
    turngym report runs/student/eval
    turngym report before=runs/a/eval after=runs/b/eval --out report
    turngym report opd=runs/opd turnopd=runs/turnopd --out report
"""

from __future__ import annotations

import base64
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Annotated

import tyro

from turngym.agents.evaluation.compare import decisive, describe, differing
from turngym.agents.evaluation.scores import (
    Scores,
    behavior_table,
    compare,
    compare_scores,
    score,
    success_table,
    task_means,
)
from turngym.agents.evaluation.seeds import seed_spread
from turngym.agents.evaluation.statistics import ScoreError, last_points, least_time, same_step
from turngym.envs.core.errors import TurngymError
from turngym.envs.core.secrets import recorded_command
from turngym.envs.core.tables import Table, markdown
from turngym.scripts.options import pop_option, read
from turngym.scripts.report_data import Diagnosed, Run, curves, diagnosed, load_run, trace_curves_of, unique_names
from turngym.scripts.report_figures import Figure, csv_text, write_figure, write_page
from turngym.scripts.report_training import accuracy_figures, cost_figures, depth_figures, draw_summary
from turngym.scripts.report_turns import episode_figures

# Tables: success, behavior, paired differences, training, and Tables 1 and 6 of the TurnOPD paper.


def training_table(runs: Sequence[Run]) -> Table:
    """One row per training run: first and last evaluation, Same-Step, Least-Time, depth, and the highest evaluation."""
    lines = curves(runs)
    steps, times = same_step(lines), least_time(lines)
    budget = min(max(point.seconds for point in points) for points in lines.values())
    step = min(max(point.step for point in points) for points in lines.values())
    header = ["run", "steps", "seconds", "start", "last", f"Same-Step ({step})", f"Least-Time ({budget:.0f} s)"]
    averaged = any(run.averaged is not None for run in runs)
    header += [*(["averaged weights"] if averaged else []), "depth", "highest, chosen on these tasks"]
    rows = []
    for run in runs:
        if run.points:
            last, values = max(run.points, key=lambda point: point.step), [point.value for point in run.points]
            depth = "full" if not run.depth else f"{run.depth[-1][2]:.1f}"
            cells = [str(last.step), f"{last.seconds:.0f}", percent(values[0]), percent(last.value)]
            cells += [percent(steps[run.name]), percent(times[run.name])]
            # the highest of many evaluations is high by chance, too
            best = f"{percent(max(values))} of {len(values)}"
            rows.append([run.name, *cells, *([percent(run.averaged)] if averaged else []), depth, best])
    return header, rows


def seeds_table(runs: Sequence[Run]) -> Table | None:
    """One row per method that was trained with several seeds: its mean at the last evaluation, over the last four, and
    with averaged weights, and how far the seeds lie apart at the last, chance taken out. None if no two runs differ in
    their seed alone."""
    same: dict[str, list[Run]] = {}
    for run in runs:
        if run.points and "seed" in run.config:
            settings = {name: value for name, value in run.config.items() if name not in ("seed", "out", "provenance")}
            same.setdefault(repr(sorted(settings.items())), []).append(run)
    rows = []
    for found in same.values():
        if len(found) > 1:
            cells = [[last_points(run.points, count) for run in found] for count in (1, 4)]
            cells.append([run.averaged for run in found if run.averaged is not None])
            means = [percent(fmean(values)) if len(values) == len(found) else "-" for values in cells]
            ends = [task_means(run.episodes) for run in found]
            spread = seed_spread(ends) if ends[0] and all(end.keys() == ends[0].keys() for end in ends) else None
            rows.append([f"{found[0].name} ... {found[-1].name}", str(len(found)), *means, percent(spread)])
    header = ["runs", "seeds", "last evaluation", "mean of the last four", "averaged weights", "std of seeds"]
    return (header, rows) if rows else None


def settings_table(runs: Sequence[Run]) -> Table | None:
    """Returns a row for every setting in which the evaluations differ, or None if they all agree."""
    played = [run for run in runs if run.episodes]
    names = dict.fromkeys(name for run in played[1:] for name in differing(played[0].settings, run.settings))
    if not names:
        return None
    rows = [[name, *(_shown(run.settings.get(name)) for run in played)] for name in names]
    return ["setting", *(run.name for run in played)], rows


def _shown(value: object) -> str:
    return "-" if value is None else str(value)


def pairs(runs: Sequence[Run]) -> list[tuple[Run, Run]]:
    """(base, other) of all comparisons: first what was trained side by side, then everything against the first run,
    what was trained before the rest."""
    played = [run for run in runs if run.episodes]
    trained = [run for run in played if run.training]
    rest = sorted(played[1:], key=lambda run: not run.training)
    found = [(trained[0], run) for run in trained[1:]] + [(played[0], run) for run in rest]
    return list({(base.name, run.name): (base, run) for base, run in found}.values())


def paired_table(runs: Sequence[Run], *, different_settings: bool = False) -> Table | None:
    """Differences of evaluations, paired by task (`pairs`); None with fewer than two.

    Evaluations in other settings are not compared unless `different_settings`: the difference would be theirs.
    """
    rows = []
    for base, run in pairs(runs):
        name, other = f"{run.name} minus {base.name}", decisive(differing(base.settings, run.settings))
        if other and not different_settings:
            said = f"not compared, played otherwise: {describe(other)}; --different-settings compares all the same"
            rows.append([name, "-", "-", "-", said])
            continue
        try:
            found = compare(base.episodes, run.episodes)
        except ScoreError as error:
            rows.append([name, "-", "-", "-", str(error)])
            continue
        rows.append([name, str(found), str(found.tasks), f"{100 * found.better:.0f}", "one run each"])
        if (graded := compare_scores(base.episodes, run.episodes)) is not None:
            rows.append(
                [f"{name}, score", str(graded), str(graded.tasks), f"{100 * graded.better:.0f}", "one run each"]
            )
    return (["comparison", "points [95 %]", "tasks", "better %", "holds for"], rows) if rows else None


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
Of success, by task, 95 %: for these two runs and new tasks; other training seeds may differ (`turngym result table`
compares several). Better: how often the one does better in a task than the other, equal counting half."""
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
    runs: Sequence[Run], scores: dict[str, Scores], found: Sequence[Diagnosed], paired: Table | None
) -> list[Section]:
    """Returns the sections of the report. Figures are only described here; they are drawn later, or not at all."""
    made = []
    if paired is not None:
        made.append(Section(title="Paired difference", parts=(("paired", paired), PAIRED)))
    if scores:
        text = "Intervals: 95 %, clustered by task. Episodes that ended in errors are not counted."
        text += "".join(f" ~ is approximate: {why}." for why in approximate(scores))
        told = [f"{run.name}: {run.departs}." for run in runs if run.departs]
        made.append(Section(title="Success (%)", parts=(("success", success_table(scores)), text, *told)))
        made.append(Section(title="Behavior", parts=(("behavior", behavior_table(scores)),)))
    unlike = settings_table(runs)
    if unlike is not None:
        made.append(Section(title="Settings that differ", parts=(("settings", unlike),)))
    if curves(runs):
        text = (
            "Percent. Same-Step: mean of the last four evaluations up to this step. Least-Time: at this wall clock, on "
            "straight lines between evaluations. The highest of k evaluations was chosen on the tasks that it is "
            "measured on, and is too high by chance: by 2 points of 5, by 3.5 of 20, where nothing but chance differs."
        )
        parts: tuple[Part, ...] = (("training", training_table(runs)), text)
        if (seeds := seeds_table(runs)) is not None:
            parts += (
                ("seeds", seeds),
                (
                    "Runs that differ in their seed alone, percent; the standard deviation of seeds is that at the "
                    "last evaluation, less what chance alone gives."
                ),
            )
        parts += (*accuracy_figures(runs),)
        made.append(Section(title="Training", parts=parts))
    made += _diagnostics(found)
    traces = {run.name: item for run in runs if (item := trace_curves_of(run)) is not None and item.turns}
    if traces:
        made.append(
            Section(title="Episodes", parts=tuple(episode_figures(traces, {run.name: run.place for run in runs})))
        )
    skipped = [line for run in runs for line in run.skipped]
    if skipped:
        made.append(Section(title="Skipped", parts=("\n".join(f"- {line}" for line in skipped),)))
    return made


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
    depth = (*notes, ("budget", budget_table(found)), *others[1:2], controller, *others[:1], *variants, *others[2:])
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
    """At most three sentences."""
    facts: tuple[str, ...]
    """Environment and panel, what each run was, dates, the command."""


def head(
    runs: Sequence[Run], scores: Mapping[str, Scores], paired: Table | None, title: str | None, command: str
) -> Head:
    """The head of a report that `command` makes; `title` overrides the one that the runs give."""
    envs = dict.fromkeys(one.task.env_id for run in runs for one in run.episodes)
    envs |= dict.fromkeys(str(run.config["env"]) for run in runs if "env" in run.config)
    panels = dict.fromkeys(run.panel for run in runs if run.panel)
    names = [run.name for run in runs if run.training] or [run.name for run in runs]
    where = ", ".join(panels or envs) + (", scores approximate" if approximate(scores) else "")
    facts = [", ".join([*envs, *(f"panel {panel}" for panel in panels)])] + [_origin(run) for run in runs]
    return Head(
        title=title or " and ".join(names) + (f": {where}" if where else ""),
        summary=" ".join([*_outcome(paired), *_levels(scores), *_costs(runs)]),
        facts=(*filter(None, facts), command),
    )


def _origin(run: Run) -> str:
    """`opd: opd, student A, teacher B, 2026-11-25`; empty if nothing is known."""
    own, about = run.config, run.config.get("provenance", {})
    parts = [str(own["algorithm"])] if "algorithm" in own else []
    parts += [f"{role} {_short(own[role])}" for role in ("student", "teacher", "agent") if own.get(role)]
    parts += [str(about["started"])[:10]] if "started" in about else []
    return f"{run.name}: {', '.join(parts)}" if parts else ""


def _short(path: object) -> str:
    """The last two names of a path: where a machine keeps its models says nothing to others."""
    kind, colon, rest = str(path).partition(":")
    return f"{kind}:{_short(rest)}" if colon else "/".join(Path(kind).parts[-2:])


def _outcome(paired: Table | None) -> list[str]:
    """The first comparison in a sentence."""
    if paired is None:
        return []
    name, difference, tasks, _, holds = paired[1][0]
    if difference == "-":
        return [f"{name}: {holds}."]
    return [f"{name}: {difference} points of success on {tasks} shared tasks, {holds}."]


def approximate(scores: Mapping[str, Scores]) -> list[str]:
    """Why scores of these runs are approximate, each reason once."""
    return list(dict.fromkeys(item.approximate for item in scores.values() if item.approximate))


def _levels(scores: Mapping[str, Scores]) -> list[str]:
    found = ", ".join(f"{name} {item.mark}{percent(item.overall.avg.mean)} %" for name, item in scores.items())
    return [f"Success: {found}."] if found else []


def _costs(runs: Sequence[Run]) -> list[str]:
    last = {run.name: max(run.points, key=lambda point: point.step) for run in runs if run.points}
    found = ", ".join(f"{name} {point.seconds:.0f} s for {point.step} steps" for name, point in last.items())
    return [f"Training took {found}."] if found else []


def as_markdown(top: Head, made: Sequence[Section], drawn: bool) -> str:
    """The report as Markdown; with `drawn` figures appear as images of `figures/`."""
    parts = [f"# {top.title}", top.summary, "\n".join(f"- {fact}" for fact in top.facts)]
    parts = [part for part in parts if part]
    for section in made:
        texts = [text for part in section.parts if (text := _markdown(part, drawn))]
        parts += [f"## {section.title}", *texts] if texts else []
    return "\n\n".join(parts) + "\n"


def _markdown(part: Part, drawn: bool) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, tuple):
        return markdown(part[1])
    if not drawn:
        return ""
    image = f"![{part.title}](figures/{part.name}.png)\n\n" if part.panels else ""
    numbers = f" Numbers: [data/{part.name}.csv](data/{part.name}.csv)." if part.table[1] else ""
    missing = "".join(f"\n- {line}." for line in part.missing)
    return f"### {part.title}\n\n{image}{part.caption}{numbers}" + (f"\n{missing}" if missing else "")


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
    for name, value in marks.items():
        text = text.replace(name, value)
    return text


def _part(part: Part, drawn: Mapping[str, Sequence[str]]) -> str:
    if isinstance(part, str):
        lines = part.splitlines()
        if all(line.startswith("- ") for line in lines):
            return "<ul>" + "".join(f"<li>{escape(line[2:])}</li>" for line in lines) + "</ul>"
        return f"<p>{escape(part)}</p>"
    if isinstance(part, tuple):
        return f'<div class="wide">{_table(part[1])}</div>'
    return _figure(part, drawn.get(part.name, ()))


def _figure(figure: Figure, panels: Sequence[str]) -> str:
    shown = "".join(f'<div class="panel">{svg}</div>' for svg in panels)
    missing = "".join(f"<li>{escape(line)}</li>" for line in figure.missing)
    return (
        f'<figure id="{figure.name}"><h3>{escape(figure.title)}</h3>'
        + (f'<div class="panels">{shown}</div>' if shown else "")
        + f"<figcaption>{escape(figure.caption)}{_numbers(figure)}</figcaption>"
        + (f'<ul class="missing">{missing}</ul>' if missing else "")
        + "</figure>"
    )


def _numbers(figure: Figure) -> str:
    """Links the CSV of a figure: the file beside the page, and an embedded copy if it is small."""
    if not figure.table[1]:
        return ""
    data, name = csv_text(figure.table).encode("utf-8"), f"{figure.name}.csv"
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

    runs: Annotated[tuple[str, ...], tyro.conf.Positional]
    """PATH or NAME=PATH of a trace, of an evaluation's folder or of a training run's; all are compared to the first."""
    out: Path | None = None
    """Folder for report.html, report.md, report.png, figures/ (PNG and SVG) and data/ (CSV); by default the report is
    only printed."""
    figure: bool = True
    """Draw figures (needs matplotlib)."""
    diagnostics: bool = True
    """Diagnose training runs by turn: KL, regime, controller, horizon, times (needs torch)."""
    different_settings: bool = False
    """Compare evaluations by task although they were played otherwise (turns, arguments of gym.make, temperature,
    preset); by default such pairs are refused."""
    title: str | None = None
    """Heading of the page; by default the runs and what they played."""


def main(argv: Sequence[str]) -> int:
    """Run `turngym report` with `argv` (without the verb itself)."""
    options = read(Options, argv, prog="turngym report", description=(__doc__ or "").split("\n")[0])
    if not options.runs:
        raise ScoreError("name at least one run to report: turngym report PATH [NAME=PATH ...]")
    runs = [load_run(spec, place) for place, spec in enumerate(options.runs)]
    unique_names(runs)
    scores = {run.name: score(run.episodes) for run in runs if run.episodes}
    found = diagnosed(runs) if options.diagnostics else []
    paired = paired_table(runs, different_settings=options.different_settings)
    made = sections(runs, scores, found, paired)
    # where the report is written to says nothing of it
    command = recorded_command(["turngym", "report", *pop_option(argv, "--out")[0]])
    top = head(runs, scores, paired, options.title, command)
    print(as_markdown(top, made, drawn=False))
    if options.out is None:
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    failed: list[str] = []
    summary = options.figure
    if options.figure:
        try:
            draw_summary(runs, scores, options.out / "report.png")
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

    def written(part: Part) -> Part:
        if isinstance(part, tuple):
            write_page(folder / "data" / f"{part[0]}.csv", csv_text(part[1]))
        elif isinstance(part, Figure):
            try:
                drawn[part.name] = write_figure(part, folder, draw=options.figure)
            except TurngymError as error:
                failed.append(str(error))
                return replace(part, panels=(), missing=(*part.missing, str(error)))
        return part

    made = [replace(section, parts=tuple(map(written, section.parts))) for section in made]
    text = as_markdown(top, made, drawn=options.figure)
    if summary:
        text += "\n![Accuracy, depth, categories](report.png)\n"
    write_page(folder / "report.md", text)
    write_page(folder / "report.html", page(top, made, drawn))
    return failed
