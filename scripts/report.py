"""Tables and a figure of evaluations and training runs, with paired comparisons.

Examples:
    turngym report runs/student/eval
    turngym report before=runs/a/eval after=runs/b/eval --out report
    turngym report opd=runs/opd turnopd=runs/turnopd --out report
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from turngym.agents.evaluation.scores import Scores, compare, score
from turngym.agents.evaluation.statistics import ScoreError, least_time, same_step
from turngym.agents.evaluation.tables import Table, behavior_table, markdown, success_table
from turngym.scripts.reports.data import Run, curves, load_run, unique_names


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Which runs are reported."""

    runs: Annotated[tuple[str, ...], tyro.conf.Positional]
    """PATH or NAME=PATH of a trace, of an evaluation's folder or of a training run's; all are compared to the first."""
    out: Path | None = None
    """Folder for report.md and report.png; by default the report is only printed."""
    figure: bool = True
    """Draw the figure (needs matplotlib)."""


def main(argv: Sequence[str]) -> int:
    """Run `turngym report` with `argv` (without the verb itself)."""
    options = tyro.cli(Options, args=list(argv), prog="turngym report", description=(__doc__ or "").split("\n")[0])
    if not options.runs:
        raise ScoreError("name at least one run to report: turngym report PATH [NAME=PATH ...]")
    runs = [load_run(spec) for spec in options.runs]
    unique_names(runs)
    scores = {run.name: score(run.episodes) for run in runs if run.episodes}
    text = render(runs, scores)
    print(text)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        if options.figure:
            from turngym.scripts.reports.figure import draw_figure

            draw_figure(runs, scores, options.out / "report.png")
            text += "\n![Accuracy, depth, categories](report.png)\n"
        (options.out / "report.md").write_text(text, encoding="utf-8")
        print(f"written to {options.out}")
    return 0


def render(runs: Sequence[Run], scores: dict[str, Scores]) -> str:
    """The whole report in Markdown."""
    parts = ["# Report"]
    if scores:
        parts += ["## Success (%)", markdown(success_table(scores))]
        parts += ["Intervals: 95 %, clustered by task. Episodes that ended in errors are not counted."]
        parts += ["## Behavior", markdown(behavior_table(scores))]
        parts += _paired(runs)
    if curves(runs):
        parts += ["## Training", markdown(training_table(runs))]
        parts += ["Same-Step and Least-Time: mean ± standard deviation of the last four evaluations, in percent."]
    skipped = [line for run in runs for line in run.skipped]
    if skipped:
        parts += ["## Skipped", "\n".join(f"- {line}" for line in skipped)]
    return "\n\n".join(parts) + "\n"


def training_table(runs: Sequence[Run]) -> Table:
    """One row per training run: start, end, Same-Step, Least-Time, depth."""
    lines = curves(runs)
    steps, times = same_step(lines), least_time(lines)
    budget = min(max(point.seconds for point in points) for points in lines.values())
    step = min(max(point.step for point in points) for points in lines.values())
    header = [
        "run",
        "steps",
        "seconds",
        "start",
        "best",
        f"Same-Step ({step})",
        f"Least-Time ({budget:.0f} s)",
        "depth",
    ]
    rows = []
    for run in runs:
        if run.points:
            last, values = max(run.points, key=lambda point: point.step), [point.value for point in run.points]
            depth = "full" if not run.depth else f"{run.depth[-1][2]:.1f}"
            cells = [str(last.step), f"{last.seconds:.0f}", _percent(values[0]), _percent(max(values))]
            rows.append([run.name, *cells, _spread(steps[run.name]), _spread(times[run.name]), depth])
    return header, rows


def _paired(runs: Sequence[Run]) -> list[str]:
    played = [run for run in runs if run.episodes]
    if len(played) < 2:
        return []
    base, rows = played[0], []
    for run in played[1:]:
        try:
            difference = compare(base.episodes, run.episodes)
        except ScoreError as error:
            rows.append([run.name, "-", "-", str(error)])
            continue
        clear = "yes" if difference.low > 0 or difference.high < 0 else "no"
        rows.append([run.name, str(difference), str(difference.tasks), clear])
    header = ["run", f"minus {base.name} [95 %]", "tasks", "clear of zero"]
    return ["## Paired difference (points of success)", markdown((header, rows))]


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _spread(value: tuple[float, float]) -> str:
    return f"{_percent(value[0])} ± {_percent(value[1])}"
