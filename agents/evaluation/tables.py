"""What people see: a progress bar while episodes finish, and result tables as text, Markdown and JSON files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Any, TextIO

from turngym.agents.evaluation.scores import ScoreRow, Scores
from turngym.envs.episode import Episode

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


def success_table(runs: Mapping[str, Scores]) -> Table:
    """One row per run: Avg@n by category and overall and pass@n with 95 % intervals; percent.

    Runs with different numbers of samples per task have columns of their own: Avg@1 and Avg@4 are not the same measure.
    """
    names = list(dict.fromkeys(row.name for scores in runs.values() for row in scores.categories))
    samples = sorted({scores.overall.samples for scores in runs.values()}, reverse=True)
    header = ["run", *names, *(f"Avg@{n} [95 %]" for n in samples), *(f"pass@{n} [95 %]" for n in samples), "tasks"]
    return header, [_success_row(name, scores, names, samples) for name, scores in runs.items()]


def behavior_table(runs: Mapping[str, Scores]) -> Table:
    """One row per run: turns, invalid actions, truncations, goal conditions, errors."""
    header = ["run", "turns", "turns (won)", "invalid %", "malformed %", "cut by turns %", "cut by context %"]
    header += ["goal conditions %", "score", "errors"]
    rows = []
    for name, scores in runs.items():
        cells = [f"{scores.turns:.1f}", "-" if scores.success_turns is None else f"{scores.success_turns:.1f}"]
        cells += [_percent(scores.invalid_rate), _percent(scores.verdicts["malformed"])]
        cells += [_percent(scores.truncated[key]) for key in ("truncated_turns", "truncated_tokens")]
        cells += ["-" if scores.goal_rate is None else _percent(scores.goal_rate), f"{scores.score:.3f}"]
        rows.append([name, *cells, str(scores.errors)])
    return header, rows


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


def _success_row(name: str, scores: Scores, names: Sequence[str], samples: Sequence[int]) -> list[str]:
    rows: dict[str, ScoreRow] = {row.name: row for row in scores.categories}
    cells = [_percent(rows[category].avg.mean) if category in rows else "-" for category in names]
    overall, best = scores.overall, scores.overall.pass_intervals[max(scores.overall.pass_at)]
    for own in (str(overall.avg), str(best)):
        cells += [own if n == overall.samples else "-" for n in samples]
    return [name, *cells, str(overall.avg.tasks)]


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"
