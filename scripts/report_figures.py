"""How figures of `turngym report` are drawn and written: PNG and SVG files, CSV of their numbers, inline SVG."""

from __future__ import annotations

import csv
import io
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turngym.envs.core.errors import TurngymError
from turngym.envs.core.tables import Table

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
    # a dollar sign in the name of a run is no formula
    "text.parse_math": False,
}
BACKEND = "MPLBACKEND"
"""Environment variable with which a notebook, or a user, chooses where pyplot draws; matplotlib reads it on import."""


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


def write_page(path: Path, text: str) -> None:
    """Writes what people read. Names and paths may have bytes that are no UTF-8; they are shown as `\\udcff`."""
    path.write_text(text, encoding="utf-8", errors="backslashreplace")


def csv_text(table: Table) -> str:
    """The table as CSV, header first."""
    page = io.StringIO()
    writer = csv.writer(page, lineterminator="\n")
    writer.writerow(table[0])
    writer.writerows(table[1])
    return page.getvalue()


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
    """Without the user's backend: matplotlib refuses to be imported where it does not know its name."""
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
    return f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0][:200]}"


def write_figure(figure: Figure, folder: Path, *, draw: bool = True) -> list[str]:
    """Write `data/NAME.csv`, and with `draw` `figures/NAME.png` and `.svg`; returns each panel as inline SVG.

    Raises TurngymError where a panel cannot be drawn; the numbers are written then.
    """
    for name in ("figures", "data") if draw else ("data",):
        (folder / name).mkdir(parents=True, exist_ok=True)
    write_page(folder / "data" / f"{figure.name}.csv", csv_text(figure.table))
    if not figure.panels or not draw:
        return []
    save_panels(figure.panels, *(folder / "figures" / f"{figure.name}{suffix}" for suffix in (".png", ".svg")))
    with plotting(figure.title):
        return [_inline(panel, f"{figure.name}-{place}") for place, panel in enumerate(figure.panels)]


def save_panels(panels: Sequence[Panel], *paths: Path, columns: int = 2) -> None:
    """Draws panels in `columns` and writes them to PNG and SVG files. Raises TurngymError as `plotting` does.

    A single panel leaves half of the width empty: so letters are of one size in all figures of a page.
    """
    with plotting(paths[0].name):
        drawn = _draw(panels, columns)
        for path in paths:
            drawn.savefig(path, dpi=140, metadata=_metadata(path.suffix))


def _draw(panels: Sequence[Panel], columns: int) -> Any:
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
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    # once: every saving would find the same places again, which takes longer than to draw
    engine: Any = figure.get_layout_engine()
    engine.execute(figure)
    figure.set_layout_engine(None)
    return figure


def _inline(panel: Panel, prefix: str) -> str:
    """One panel as an SVG element for a page: ids of its own, colors of the page's theme."""
    drawn, page = _draw([panel], columns=1), io.StringIO()
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
