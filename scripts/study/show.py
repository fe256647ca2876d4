"""Shows studies: their tables in the terminal, and as Markdown, CSV, LaTeX and figures in a folder.

Examples:
    turngym study show runs/mine
    turngym study show runs/mine --tables accuracy cost
    turngym study show runs/mine/tables/study.json more.json.gz --out runs/both    # cells of several machines
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import tyro

from turngym.agents.evaluation.seeds import over_seeds
from turngym.envs.core.errors import TurngymError, did_you_mean
from turngym.envs.core.tables import latex, markdown, print_table
from turngym.scripts.options import read
from turngym.scripts.report_figures import Panel, color, csv_text, save_panels
from turngym.scripts.study.records import DATA, Records, merge_records, read_records, write_records
from turngym.scripts.study.tables import TABLES, Rows, tables_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowOptions:
    """Which studies are shown, and how."""

    studies: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of studies, or study.json files (also .gz); the cells of several are put together."""
    tables: tuple[str, ...] = ()
    """Tables that are shown, if not the study's own; `all` for every one."""
    out: Path | None = None
    """Folder for study.md, CSV and LaTeX files, figures and study.json."""


def main(argv: Sequence[str]) -> int:
    """Run `turngym study show` with `argv` (without the verb itself)."""
    options = read(ShowOptions, argv, prog="turngym study show", description=__doc__)
    if not options.studies:
        raise TurngymError("name the folder of a study, or its study.json")
    study = merge_records({str(path): read_records(path.expanduser()) for path in options.studies})
    if options.tables:
        study = replace(study, tables=tuple(TABLES) if options.tables == ("all",) else options.tables)
    for name in study.tables:
        if name not in TABLES:
            raise TurngymError(
                f"there is no table {name!r}.{did_you_mean(name, TABLES)} There are: {', '.join(TABLES)}"
            )
    for name, table in tables_of(study).items():
        print_table(table, name)
        print(TABLES[name.rpartition(": ")[2]].about + "\n")
    if options.out is not None:
        write_tables(study, options.out)
        print(f"written to {options.out}")
    return 0


def write_tables(study: Records, out: Path) -> str:
    """Writes study.md, each table as CSV and LaTeX, curves.png and .pdf by world, and study.json into `out`.

    The numbers are the same in all of them. Returns the Markdown; the same records give the same bytes.
    """
    out.mkdir(parents=True, exist_ok=True)
    parts = [f"# {study.title}", *([study.about] if study.about else []), _methods(study)]
    explained: set[str] = set()
    for title, table in tables_of(study).items():
        name = title.rpartition(": ")[2]
        stem = title.replace(": ", "-").replace("/", "-")
        (out / f"{stem}.csv").write_text(csv_text(table), encoding="utf-8")
        (out / f"{stem}.tex").write_text(latex(table), encoding="utf-8")
        parts += [f"## {title}", markdown(table)]
        if name not in explained:
            parts.append(TABLES[name].about)
            explained.add(name)
    # figures need matplotlib, which comes with the extra `train`
    if importlib.util.find_spec("matplotlib") is not None:
        for world, rows in study.worlds.items():
            if any(len(record.evaluations) > 1 for seeds in rows.values() for record in seeds.values()):
                draw_curves(rows, out / f"{world}-curves.png", out / f"{world}-curves.pdf")
                parts.append(f"![Success against steps and CPU time, {world}]({world}-curves.png)")
    text = "\n\n".join(parts) + "\n"
    (out / "study.md").write_text(text, encoding="utf-8")
    write_records(study, out / DATA)
    return text


def _methods(study: Records) -> str:
    about = dict.fromkeys((record.method, record.about) for record in study.records)
    return f"{len(study.records)} cells; methods: " + "; ".join(f"{name}: {text}" for name, text in about) + "."


def draw_curves(rows: Rows, *paths: Path) -> None:
    """Draws the success of every method against steps, and against CPU seconds: means with their 95 % bands."""
    panels = [Panel(f"success by {name}", partial(_curves, rows=rows, by=name)) for name in ("step", "CPU seconds")]
    save_panels(panels, *paths)


def _curves(axis: Any, rows: Rows, by: str) -> None:
    for place, (name, seeds) in enumerate(rows.items()):
        records = list(seeds.values())
        steps = [point.step for point in records[0].evaluations]
        points = [[record.evaluations[number] for record in records] for number in range(len(steps))]
        means = [over_seeds([point.tasks for point in column]) for column in points]
        across = steps if by == "step" else [sum(p.cost.cpu for p in column) / len(column) for column in points]
        axis.plot(across, [100 * one.mean for one in means], marker="o", markersize=3, label=name, **color(place))
        low, high = ([100 * getattr(one, end) for one in means] for end in ("low", "high"))
        axis.fill_between(across, low, high, color=color(place)["color"], alpha=0.12, linewidth=0)
    axis.set(xlabel=by, ylabel="success (%)", ylim=(0, None))
    axis.legend()
