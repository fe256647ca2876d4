"""What people see of results: tables as text and Markdown, and JSON files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Any, TextIO

Table = tuple[list[str], list[list[str]]]
"""Header and rows."""


def columns(*tables: Table) -> Table:
    """Turns tables with one row per run into one table with a column per run, which fits a terminal."""
    names = [row[0] for row in tables[0][1]]
    lines = [
        [label, *(row[place] for row in rows)] for header, rows in tables for place, label in enumerate(header) if place
    ]
    return ["", *names], lines


def markdown(table: Table) -> str:
    """The table in Markdown; the first column is aligned left, the others right."""
    header, rows = table
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def print_table(table: Table, title: str = "") -> None:
    """Prints the table on standard output, for a terminal."""
    from rich.console import Console

    Console().print(_rich_table(table, title))


def table_text(table: Table, title: str = "") -> str:
    """The table as plain text, as wide as it needs to be."""
    from rich.console import Console

    page = StringIO()
    # rich cuts cells to the width of the console, which without a terminal is 80
    Console(file=page, width=1000, color_system=None).print(_rich_table(table, title))
    return "".join(line.rstrip() + "\n" for line in page.getvalue().splitlines())


def _rich_table(table: Table, title: str) -> Any:
    from rich.table import Table as RichTable

    header, rows = table
    drawn = RichTable(title=title or None)
    for place, name in enumerate(header):
        drawn.add_column(name, justify="right" if place else "left")
    for row in rows:
        drawn.add_row(*row)
    return drawn


def write_json(path: str | Path, value: Any) -> None:
    """Writes JSON with sorted keys so that a reader never sees half a file."""
    with atomic_write(path) as file:
        file.write(json.dumps(value, indent=1, sort_keys=True) + "\n")


@contextmanager
def atomic_write(path: str | Path) -> Iterator[TextIO]:
    """A text file that replaces `path` once all of it is written; after an error, the old file stays."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(path.name + ".tmp")
    with scratch.open("w", encoding="utf-8") as file:
        yield file
    os.replace(scratch, path)
