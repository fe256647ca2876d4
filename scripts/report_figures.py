"""How figures of `turngym report` are drawn and written: PNG and SVG files, CSV of their numbers, inline SVG."""

from __future__ import annotations

import io
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from turngym.core.errors import TurngymError
from turngym.core.redaction import excerpt
from turngym.core.tables import Table, csv_text, latex
from turngym.trainers.study.results import Rows, curve

# A figure of the report has panels, a caption and its numbers as CSV. It is written as PNG and SVG.

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C8C8C")
"""Okabe and Ito's palette, those first that stand out on white and on black; told apart by color-blind readers too."""
STYLES = ("-", "--", "-.", ":")
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
    # letters of a PDF stay letters
    "pdf.fonttype": 42,
    "font.family": "sans-serif",
    # a dollar sign in the name of a run is no formula
    "text.parse_math": False,
}
BACKEND = "MPLBACKEND"
"""Environment variable with which a notebook, or a user, chooses where pyplot draws; matplotlib reads it on import."""


@dataclass(frozen=True, slots=True)
class Plot:
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
    panels: tuple[Plot, ...] = ()
    missing: tuple[str, ...] = ()
    """Lines about runs that did not record what it needs."""


def of_runs(
    runs: Sequence[Any],
    known: Sequence[Any],
    lacks: str,
    panels: Sequence[Plot],
    *,
    name: str,
    title: str,
    caption: str,
    table: Table,
) -> Figure:
    """A figure of those `runs` that are `known`, without panels where none is; a line for each of the others says what
    it `lacks`."""
    missing = tuple(f"{run.name}: {lacks}" for run in runs if run not in known)
    drawn = tuple(panels) if known else ()
    return Figure(name=name, title=title, caption=caption, table=table, panels=drawn, missing=missing)


def color(place: int) -> dict[str, Any]:
    """Color and dash of the run with this number."""
    return {"color": COLORS[place % len(COLORS)], "linestyle": STYLES[place % len(STYLES)]}


def legend(axis: Any, *, thick: str = "", thin: str = "") -> None:
    """A legend of all that is drawn; with `thick` and `thin` also of what these lines mean, whatever their color."""
    for label, width in ((thick, 2.0), (thin, 0.7)):
        if label and axis.get_legend_handles_labels()[0]:
            axis.plot([], [], color=COLORS[6], linewidth=width, label=label)
    if axis.get_legend_handles_labels()[0]:
        axis.legend()


def number(value: Any) -> str:
    """A cell of a CSV file: empty for what is not known."""
    if isinstance(value, str):
        return value
    value = float(value)
    return "" if not math.isfinite(value) else str(int(value)) if value == int(value) else f"{value:.6g}"


def write_page(path: Path, text: str) -> None:
    """Writes a page for people. Bytes of names and paths that are not UTF-8 are shown as `\\udcff`."""
    path.write_text(text, encoding="utf-8", errors="backslashreplace")


def write_table(table: Table, path: Path, caption: str = "") -> None:
    """Writes a table as CSV, or as LaTeX with its `caption` where `path` ends in .tex: the same cells."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [table[0], *table[1]]
    write_page(path, latex(table, caption, path.stem) if path.suffix == ".tex" else csv_text(rows))


@contextmanager
def plotting(what: str) -> Iterator[None]:
    """Lets `what` be drawn in the report's style, whatever the user's settings of matplotlib say.

    Nothing here asks for pyplot or its backend. Raises TurngymError without matplotlib, and where drawing fails.
    """
    with _plain_import():
        try:
            import matplotlib
        except ImportError as error:
            raise TurngymError(
                "figures need matplotlib: pip install 'turngym[train]'; reports go without by --no-figure"
            ) from error
        # a matplotlibrc that cannot be read
        except Exception as error:
            raise TurngymError(f"matplotlib cannot be imported: {_first_line(error)}") from error
    with matplotlib.rc_context(), warnings.catch_warnings():
        # letters that no font here has are drawn as boxes
        warnings.simplefilter("ignore")
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(RC)
        try:
            yield
        except Exception as error:
            raise TurngymError(f"{what} could not be drawn: {_first_line(error)}") from error


@contextmanager
def _plain_import() -> Iterator[None]:
    """Imports without the user's backend: matplotlib refuses to be imported where it does not know its name."""
    backend = os.environ.pop(BACKEND, None)
    before = "matplotlib" in sys.modules
    try:
        yield
    finally:
        if backend is not None:
            os.environ[BACKEND] = backend
            # what the user draws later in this process goes where the user wants it
            if not before and (matplotlib := sys.modules.get("matplotlib")) is not None:
                with suppress(ValueError):
                    matplotlib.rcParams["backend"] = backend


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {excerpt((str(error).strip() or '-').splitlines()[0], 200)}"


def write_figure(figure: Figure, folder: Path, *, draw: bool = True) -> list[str]:
    """Write `data/NAME.csv`, and with `draw` `figures/NAME.png`, `.svg` and `.pdf`; returns each panel as inline SVG.

    Raises TurngymError where a panel cannot be drawn; the numbers are written then.
    """
    write_table(figure.table, folder / "data" / f"{figure.name}.csv")
    if not figure.panels or not draw:
        return []
    (folder / "figures").mkdir(exist_ok=True)
    ends = save_panels(figure.panels, *(folder / "figures" / f"{figure.name}.{kind}" for kind in ("png", "svg", "pdf")))
    with plotting(figure.title):
        parts = zip(figure.panels, ends, strict=True)
        return [_inline(panel, end, f"{figure.name}-{number}") for number, (panel, end) in enumerate(parts)]


def save_panels(panels: Sequence[Plot], *paths: Path, columns: int = 2) -> list[Ends]:
    """Draws panels in `columns` and writes them to PNG, SVG and PDF files; returns the ends of their axes. Raises
    TurngymError as `plotting` does.

    A single panel leaves half of the width empty: so letters are of one size in all figures of a page. Panels whose
    axes have one label share them, so that they can be compared.
    """
    with plotting(paths[0].name):
        drawn, ends = _draw(panels, columns)
        for path in paths:
            drawn.savefig(path, dpi=140, metadata=_metadata(path.suffix))
    return ends


WHOLE = {"turn", "turns", "step", "steps"}
"""Words in the label of an axis of whole numbers."""
Ends = Mapping[str, tuple[float, float]]
"""`x` and `y`, each from where to where."""


def _share(axes: Any) -> list[Ends]:
    """Gives axes of one label one range."""
    all_ends: list[dict[str, tuple[float, float]]] = [{} for _ in axes]
    for name in "xy":
        labels = [getattr(axis, f"get_{name}label")() for axis in axes]
        limits = [getattr(axis, f"get_{name}lim")() for axis in axes]
        for index, (start, end) in enumerate(limits):
            shared = [limits[n] for n in range(len(axes)) if n == index or (labels[n] and labels[n] == labels[index])]
            low, high = min(map(min, shared)), max(map(max, shared))
            # an axis that points down stays so
            all_ends[index][name] = (low, high) if start <= end else (high, low)
    for axis, ends in zip(axes, all_ends, strict=True):
        axis.set(xlim=ends["x"], ylim=ends["y"])
    return [*all_ends]


def _draw(panels: Sequence[Plot], columns: int, ends: Ends | None = None) -> tuple[Any, list[Ends]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    rows = -(-len(panels) // columns)
    width, height = PANEL
    figure = Canvas(figsize=(width * columns, height * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False)
    for panel, axis in zip(panels, axes.flat, strict=False):
        panel.draw(axis)
        axis.set_title(panel.title, loc="left")
        for name in "xy":
            # there is no turn 2.5
            if WHOLE & {*re.findall(r"\w+", getattr(axis, f"get_{name}label")())}:
                getattr(axis, f"{name}axis").get_major_locator().set_params(integer=True)
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    _one_legend(figure, axes.flat[: len(panels)])
    shared = _share(axes.flat[: len(panels)])
    if ends is not None:
        axes.flat[0].set(xlim=ends["x"], ylim=ends["y"])
    # once: every saving would find the same places again, which takes longer than to draw
    engine: Any = figure.get_layout_engine()
    engine.execute(figure)
    figure.set_layout_engine(None)
    return figure, shared


def _one_legend(figure: Any, axes: Any) -> None:
    """A legend that is the same in several panels stands once, beside them."""
    legends = [legend for axis in axes if (legend := axis.get_legend()) is not None]
    labels = {tuple(text.get_text() for text in legend.get_texts()) for legend in legends}
    if len(legends) < 2 or len(labels) > 1:
        return
    handles, names = next(axis for axis in axes if axis.get_legend() is not None).get_legend_handles_labels()
    for legend in legends:
        legend.remove()
    figure.legend(handles, names, loc="outside right upper")


def _inline(panel: Plot, ends: Ends, prefix: str) -> str:
    """One panel as an SVG element for a page: ids of its own, colors of the page's theme."""
    (drawn, _), page = _draw([panel], columns=1, ends=ends), io.StringIO()
    drawn.savefig(page, format="svg", metadata=_metadata(".svg"))
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
    if suffix == ".pdf":
        return {"CreationDate": None}
    return {"Software": None} if suffix == ".png" else {"Date": None, "Creator": None}


# Curves of training, as studies and reports draw them.

AXES = {"step": "training step", "seconds": "training time (s)", "cpu": "CPU time of training (s)"}
MOST_INSIDE = 5
"""Most methods whose legend stands among the curves."""


def curve_panels(
    rows: Rows, across: Sequence[Literal["step", "seconds", "cpu"]], places: Mapping[str, int] | None = None
) -> tuple[Plot, ...]:
    """A panel for each of `across`: success of every method against it; `places` fix their colors."""
    where = places or {name: index for index, name in enumerate(rows)}
    return tuple(Plot(f"success by {AXES[by]}", partial(_curves, rows=rows, by=by, places=where)) for by in across)


def _curves(axis: Any, rows: Rows, by: str, places: Mapping[str, int]) -> None:
    for name, seeds in rows.items():
        points, look = curve(seeds), color(places[name])
        where, values = [getattr(point, by) for point in points], [point.value for point in points]
        label = name if len(seeds) == 1 else f"{name}, {len(seeds)} seeds"
        axis.plot(where, [100 * value.mean for value in values], marker="o", markersize=3, label=label, **look)
        # of a single task nothing is known
        if points and values[0].tasks > 1:
            low, high = [100 * value.low for value in values], [100 * value.high for value in values]
            axis.fill_between(where, low, high, color=look["color"], alpha=0.12, linewidth=0)
    axis.set(xlabel=AXES[by], ylabel="success (%)", ylim=(0, None))
    # a legend of many methods would hide their lines
    beside: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)} if len(rows) > MOST_INSIDE else {}
    axis.legend(**beside)
