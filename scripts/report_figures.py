"""How figures of `turngym report` are drawn and written: PNG and SVG files, CSV of their numbers, inline SVG."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turngym.agents.evaluation.scores import Scores
from turngym.envs.core.errors import TurngymError
from turngym.envs.core.tables import Table
from turngym.scripts.report_data import Run


def draw_figure(runs: Sequence[Run], scores: dict[str, Scores], path: Path) -> Path:
    """Writes one image of all panels that have data: accuracy over steps and time, depth, categories."""
    try:
        import matplotlib
    except ImportError as error:
        raise TurngymError("figures need matplotlib: pip install 'turngym[train]', or use --no-figure") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = []
    if any(run.points for run in runs):
        panels += [_over_steps, _over_time]
    if any(run.depth for run in runs):
        panels.append(_depth)
    if scores:
        panels.append(_bars)
    figure, axes = pyplot.subplots(1, len(panels), figsize=(4.6 * len(panels), 3.6), squeeze=False)
    for panel, axis in zip(panels, axes[0], strict=True):
        panel(axis, runs, scores)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8, loc="upper left" if panel is _bars else "best", ncols=2 if panel is _bars else 1)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140, metadata={"Software": None} if path.suffix == ".png" else None)
    pyplot.close(figure)
    return path


def _over_steps(axis: Any, runs: Sequence[Run], scores: dict[str, Scores]) -> None:
    for run in runs:
        _curve(axis, run, [float(point.step) for point in run.points])
    axis.set(xlabel="training step", ylabel="success (%)", title="Same steps")


def _over_time(axis: Any, runs: Sequence[Run], scores: dict[str, Scores]) -> None:
    for run in runs:
        _curve(axis, run, [point.seconds for point in run.points])
    axis.set(xlabel="training time (s)", ylabel="success (%)", title="Same time")


def _curve(axis: Any, run: Run, where: list[float]) -> None:
    if not run.points:
        return
    (line,) = axis.plot(where, [100 * point.value for point in run.points], marker="o", markersize=3, label=run.name)
    low, high = zip(*run.bands, strict=True)
    if any(high):
        axis.fill_between(where, [100 * x for x in low], [100 * x for x in high], alpha=0.15, color=line.get_color())


def _depth(axis: Any, runs: Sequence[Run], scores: dict[str, Scores]) -> None:
    for run in runs:
        if run.depth:
            steps, caps, horizon = zip(*run.depth, strict=True)
            (line,) = axis.plot(steps, horizon, label=f"{run.name}: smoothed horizon")
            axis.step(steps, caps, where="mid", linewidth=0.8, alpha=0.6, color=line.get_color())
    axis.set(xlabel="training step", ylabel="turns", title="Rollout depth (thin: cap)")


def _bars(axis: Any, runs: Sequence[Run], scores: dict[str, Scores]) -> None:
    names = [*dict.fromkeys(row.name for item in scores.values() for row in item.categories), "all"]
    width = 0.8 / len(scores)
    for place, (run, item) in enumerate(scores.items()):
        rows = {row.name: row for row in (*item.categories, item.overall)}
        shown = [(names.index(name) + width * (place + 0.5) - 0.4, rows[name].avg) for name in names if name in rows]
        heights = [100 * avg.mean for _, avg in shown]
        below = [100 * (avg.mean - avg.low) for _, avg in shown]
        above = [100 * (avg.high - avg.mean) for _, avg in shown]
        axis.bar([x for x, _ in shown], heights, width, yerr=[below, above], capsize=2, label=run)
    axis.set(ylabel="success (%)", title="By category (95 % interval over tasks)", ylim=(0, 120))
    axis.set_xticks(range(len(names)), names, rotation=30, ha="right", fontsize=8)


# A figure of the report has panels, a caption and its numbers as CSV. It is written as PNG and SVG.

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C8C8C")
"""Okabe and Ito's palette, those first that stand out on white and on black; told apart by color-blind readers too."""
STYLES = ("-", "--", "-.", ":")
MARKERS = "osD^vPX"
INK, RULE, PAPER = "#1a1b1c", "#c8c9ca", "#fefefd"
"""Text, grid and background: the page puts its own colors of the light or dark theme in their place."""
PANEL = (4.4, 3.1)
"""Width and height of a panel in inches."""
RC: Any = {
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor", "legend.facecolor"), PAPER),
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "axes.grid": True,
    "axes.axisbelow": True,
    "font.size": 9.5,
    "axes.titlesize": 10,
    "axes.labelsize": 9.5,
    "legend.fontsize": 8.5,
    "legend.framealpha": 0.8,
    "legend.edgecolor": RULE,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 1.6,
    "svg.fonttype": "none",
    "svg.hashsalt": "turngym",
    "font.family": "sans-serif",
}


@dataclass(frozen=True, slots=True)
class Panel:
    """One set of axes."""

    title: str
    draw: Callable[[Any], None]
    """Draws into the axes that it is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure of the report."""

    name: str
    """Stem of its files."""
    title: str
    caption: str
    """What is plotted, and n."""
    table: Table
    """The numbers, one row per point."""
    panels: tuple[Panel, ...] = ()
    missing: tuple[str, ...] = ()
    """Lines about runs that did not record what it needs."""


def color(place: int) -> dict[str, Any]:
    """How the run at this place is drawn: color and dash."""
    return {"color": COLORS[place % len(COLORS)], "linestyle": STYLES[place % len(STYLES)]}


def number(value: Any) -> str:
    """A cell of a CSV file: empty for what is not known."""
    if isinstance(value, str):
        return value
    value = float(value)
    return "" if not math.isfinite(value) else str(int(value)) if value == int(value) else f"{value:.6g}"


def csv_text(table: Table) -> str:
    """The table as CSV, header first."""
    page = io.StringIO()
    writer = csv.writer(page, lineterminator="\n")
    writer.writerow(table[0])
    writer.writerows(table[1])
    return page.getvalue()


@contextmanager
def plotting() -> Iterator[Any]:
    """pyplot in the report's style. Raises TurngymError without matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise TurngymError("figures need matplotlib: pip install 'turngym[train]', or use --no-figure") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    with matplotlib.rc_context(RC):
        yield pyplot


def write_figure(figure: Figure, folder: Path, *, draw: bool = True) -> list[str]:
    """Write `data/NAME.csv`, and with `draw` `figures/NAME.png` and `.svg`; returns each panel as inline SVG."""
    for name in ("figures", "data") if draw else ("data",):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "data" / f"{figure.name}.csv").write_text(csv_text(figure.table), encoding="utf-8")
    if not figure.panels or not draw:
        return []
    with plotting() as pyplot:
        drawn = _draw(pyplot, figure.panels)
        for suffix in ("png", "svg"):
            drawn.savefig(folder / "figures" / f"{figure.name}.{suffix}", dpi=140, metadata=_metadata(suffix))
        pyplot.close(drawn)
        return [_inline(pyplot, panel, f"{figure.name}-{place}") for place, panel in enumerate(figure.panels)]


def _draw(pyplot: Any, panels: Sequence[Panel]) -> Any:
    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    width, height = PANEL
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(width * columns, height * rows), squeeze=False, layout="constrained"
    )
    for panel, axis in zip(panels, axes.flat, strict=False):
        panel.draw(axis)
        axis.set_title(panel.title, loc="left")
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    # once: every saving would find the same places again, which takes longer than to draw
    figure.get_layout_engine().execute(figure)
    figure.set_layout_engine(None)
    return figure


def _inline(pyplot: Any, panel: Panel, prefix: str) -> str:
    """One panel as an SVG element for a page: ids of its own, colors of the page's theme."""
    drawn, page = _draw(pyplot, [panel]), io.StringIO()
    drawn.savefig(page, format="svg", metadata=_metadata("svg"))
    pyplot.close(drawn)
    text = page.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', text)
    text = re.sub(r'href="#([^"]+)"', rf'href="#{prefix}-\1"', text)
    text = re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}-\1)", text)
    for plain, themed in ((INK, "var(--ink)"), (RULE, "var(--rule)"), (PAPER, "var(--paper)")):
        text = text.replace(plain, themed)
    # the page sets the width; the viewBox keeps the proportions
    text = re.sub(r'(<svg[^>]*?) width="[^"]+"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]+"', r"\1", text, count=1)
    label = panel.title.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    return text.replace("<svg", f'<svg role="img" aria-label="{label}"', 1).strip()


def _metadata(suffix: str) -> dict[str, Any]:
    # no date and no version: the same numbers give the same file
    return {"Software": None} if suffix == "png" else {"Date": None, "Creator": None}
