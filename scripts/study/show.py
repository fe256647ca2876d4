"""Shows studies: their tables in the terminal, and as Markdown, CSV, LaTeX and figures in a folder.

Examples:
    turngym study show runs/mine
    turngym study show runs/mine --tables accuracy cost
    turngym study show runs/mine/tables/study.json more.json.gz --out runs/both    # cells of several machines
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

from turngym.core.errors import TurngymError, did_you_mean
from turngym.core.setting import Positional
from turngym.core.spec import Spec
from turngym.core.tables import lines_of, markdown, markup, print_table
from turngym.core.user_files import keep_inputs
from turngym.core.whole_files import atomic_write
from turngym.scripts.options import read_options
from turngym.scripts.report_figures import curve_panels, save_panels, write_table
from turngym.trainers.study.merge import merge_records
from turngym.trainers.study.records import DATA, Records, read_records, write_records
from turngym.trainers.study.tables import TABLES, notes_of, tables_of


class ShowOptions(Spec):
    """Which studies are shown, and how."""

    studies: Positional[tuple[Path, ...]]
    """Folders of studies, or study.json files (also .gz); the cells of several are put together."""
    tables: tuple[str, ...] = ()
    """Tables that are shown, if not the study's own; `all` for every one."""
    out: Path | None = None
    """Folder for study.md, CSV and LaTeX files, figures and study.json."""


def main(argv: Sequence[str]) -> int:
    """Run `turngym study show` with `argv` (without the verb itself)."""
    options = read_options(ShowOptions, argv, prog="turngym study show", about=__doc__)
    study = merge_records({str(path): read_records(path) for path in options.studies})
    if options.tables:
        study = replace(study, tables=tuple(TABLES) if options.tables == ("all",) else options.tables)
    for name in study.tables:
        if name not in TABLES:
            raise TurngymError(
                f"there is no table {name!r}.{did_you_mean(name, TABLES)} There are: {', '.join(TABLES)}"
            )
    for shown in tables_of(study):
        print_table(shown.table, shown.title)
        print(shown.caption + "\n")
    for note in notes_of(study):
        print(note)
    if options.out is not None:
        if len(options.studies) > 1:
            # cells of others may not take the place of a study's own
            places = [file for path in options.studies for file in (path, path / DATA, path / "tables" / DATA)]
            keep_inputs(options.out / DATA, places, TurngymError)
        write_tables(study, options.out)
        print(f"written to {options.out}")
    return 0


def write_tables(study: Records, out: str | Path) -> str:
    """Writes study.md, each table as CSV and LaTeX, curves.png and .pdf by world, and study.json into `out`.

    The numbers are the same in all of them. Returns the Markdown; the same records give the same bytes.
    """
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    methods = dict.fromkeys(f"{record.method}: {record.about}" for record in study.records)
    parts = [f"# {markup(study.title, 'markdown')}", *([lines_of(study.about)] if study.about else [])]
    parts.append(lines_of(f"{len(study.records)} cells; methods: {'; '.join(methods)}."))
    for shown in tables_of(study):
        stem = shown.title.replace(": ", "-").replace("/", "-")
        for kind in ("csv", "tex"):
            write_table(shown.table, out / f"{stem}.{kind}", shown.caption)
        parts += [f"## {markup(shown.title, 'markdown')}", markdown(shown.table), shown.caption]
    parts += [lines_of("\n".join(f"- {note}" for note in notes))] if (notes := notes_of(study)) else []
    # figures need matplotlib, which comes with the extra `train`
    if importlib.util.find_spec("matplotlib") is not None:
        for world, rows in study.worlds.items():
            if any(len(record.evaluations) > 1 for seeds in rows.values() for record in seeds.values()):
                panels = curve_panels(rows, ("step", "cpu"))
                save_panels(panels, out / f"{world}-curves.png", out / f"{world}-curves.pdf")
                title = f"Success against steps and CPU time, {markup(world, 'markdown')}"
                parts.append(f"![{title}]({quote(world)}-curves.png)")
    text = "\n\n".join(parts) + "\n"
    with atomic_write(out / "study.md") as file:
        file.write(text)
    write_records(study, out / DATA)
    return text
