"""What people see: a progress bar while episodes finish, and result tables as text, Markdown and JSON files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Any, TextIO

from turngym.envs.core.episode import Episode

Table = tuple[list[str], list[list[str]]]
"""Header and rows."""


@contextmanager
def progress_bar(title: str, total: int, *, enabled: bool = True) -> Iterator[Callable[[Episode], None]]:
    """A bar on standard error with the success rate so far; call what it yields with each finished episode."""
    if not enabled or not total:
        yield lambda episode: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    shape = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    wins = errors = count = 0
    with Progress(*shape, console=Console(stderr=True)) as progress:
        bar = progress.add_task(title, total=total, note="")

        def update(episode: Episode) -> None:
            nonlocal wins, errors, count
            errors += episode.status.is_error
            count += not episode.status.is_error
            wins += episode.success and not episode.status.is_error
            note = f"success {100 * wins / max(count, 1):.1f} %" + (f", {errors} errors" if errors else "")
            progress.update(bar, advance=1, note=note)

        yield update


def markdown(table: Table) -> str:
    """The table in Markdown, first column to the left, the others to the right."""
    header, rows = table
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def columns(*tables: Table) -> Table:
    """Tables with one row per run as a single one with a column per run: fits a terminal."""
    names = [row[0] for row in tables[0][1]]
    lines = [
        [label, *(row[place] for row in rows)] for header, rows in tables for place, label in enumerate(header) if place
    ]
    return ["", *names], lines


def print_table(table: Table, title: str = "") -> None:
    """The table on standard output, for a terminal."""
    from rich.console import Console

    Console().print(_drawn(table, title))


def table_text(table: Table, title: str = "") -> str:
    """The table as plain text, as wide as it needs to be."""
    from rich.console import Console

    page = StringIO()
    # rich cuts cells to the width of the console, which without a terminal is 80
    Console(file=page, width=1000, color_system=None).print(_drawn(table, title))
    return "".join(line.rstrip() + "\n" for line in page.getvalue().splitlines())


def _drawn(table: Table, title: str) -> Any:
    from rich.table import Table as RichTable

    header, rows = table
    shown = RichTable(title=title or None)
    for place, name in enumerate(header):
        shown.add_column(name, justify="right" if place else "left")
    for row in rows:
        shown.add_row(*row)
    return shown


def write_json(path: str | Path, value: Any) -> None:
    """Write JSON so that a reader never sees half a file."""
    with whole_file(path) as file:
        file.write(json.dumps(value, indent=1, sort_keys=True) + "\n")


@contextmanager
def whole_file(path: str | Path) -> Iterator[TextIO]:
    """A file that takes the place of `path` when all of it is written; after an error, what was there stays."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(path.name + ".tmp")
    with scratch.open("w", encoding="utf-8") as file:
        yield file
    os.replace(scratch, path)


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"
