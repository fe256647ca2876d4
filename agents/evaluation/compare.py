"""Two evaluations of one panel side by side: differences paired by task, and which of their settings differ."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from turngym.agents.evaluation.differing import decisive, differing, flat_settings, in_words
from turngym.agents.evaluation.held import EvaluationError
from turngym.agents.evaluation.rescore import rescore
from turngym.agents.evaluation.results import FORMAT, IDENTITY, EpisodeRow
from turngym.agents.evaluation.scores import category_rank
from turngym.agents.evaluation.statistics import Interval, ScoreError, clustered, paired_difference
from turngym.agents.evaluation.tables import Table, table_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """An evaluation as its trace or its results file has it."""

    path: str
    settings: Mapping[str, Any]
    rows: tuple[EpisodeRow, ...]
    """Without those that ended in errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRow:
    """Avg@n of both on the tasks of one category, or of all."""

    name: str
    first: Interval
    second: Interval
    difference: Interval
    """The second minus the first, paired by task."""

    @property
    def tasks(self) -> int:
        return self.difference.tasks


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two evaluations of the same tasks."""

    rows: tuple[ComparedRow, ...]
    """Categories, then all tasks."""
    differ: Mapping[str, tuple[Any, Any]]
    """Settings that are not the same: name to (first, second)."""

    def table(self) -> Table:
        """One row per category, and all."""
        header = ["", "first %", "second %", "second minus first [95 %]", "tasks"]
        return header, [
            [row.name, _percent(row.first), _percent(row.second), str(row.difference), str(row.tasks)]
            for row in self.rows
        ]

    def notes(self) -> list[str]:
        """A line for every setting that differs."""
        return [f"{name} differs: {first!r} and {second!r}" for name, (first, second) in self.differ.items()]

    def __str__(self) -> str:
        return table_text(self.table()) + "".join(f"{line}\n" for line in self.notes())


def read_recorded(path: str | Path) -> Recorded:
    """Read a trace, a results file (`*.json`), or the folder of an evaluation (its trace, else its results file).

    Raises EvaluationError where there is nothing of the kind.
    """
    path = Path(path).expanduser()
    if path.is_dir() and not (path / "trace.jsonl").is_file() and (path / "results.json").is_file():
        path = path / "results.json"
    if path.suffix == ".json":
        settings, rows = _read_results(path)
    else:
        result = rescore(path)
        settings, rows = dict(result.settings), [EpisodeRow.of(outcome) for outcome in result.outcomes]
    return Recorded(path=str(path), settings=settings, rows=tuple(row for row in rows if not row.is_error))


def compare_recorded(first: str | Path, second: str | Path, *, different_settings: bool = False) -> Comparison:
    """Avg@n of `second` minus `first`, by category and overall, paired by task with clustered 95 % intervals.

    Raises:
        ScoreError: they played other tasks (by id, or by sha256); the message names the settings that differ. Or
            settings differ that change the game and not the player (turns, arguments of gym.make, temperature, preset),
            unless `different_settings`.
        EvaluationError: there is no evaluation at one of the paths.
    """
    one, other = read_recorded(first), read_recorded(second)
    differ = differing(flat_settings(one.settings), flat_settings(other.settings))
    comparison = Comparison(rows=(), differ=differ)
    try:
        _check_hashes(one.rows, other.rows)
        rows = tuple(_compared(name, one.rows, other.rows) for name in _categories(one.rows))
    except ScoreError as error:
        said = "; ".join(comparison.notes()) or "none of their settings differs"
        raise ScoreError(f"{one.path} and {other.path} cannot be compared: {error} ({said})") from error
    if not different_settings and (theirs := decisive(differ)):
        raise ScoreError(
            f"{one.path} and {other.path} were played otherwise ({in_words(theirs)}): their difference would be one of "
            "settings, too; compare them anyway with --different-settings (different_settings=True)"
        )
    return Comparison(rows=rows, differ=differ)


def _read_results(path: Path) -> tuple[dict[str, Any], list[EpisodeRow]]:
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EvaluationError(f"{path} cannot be read as a results file: {error}") from error
    if not isinstance(table, dict) or table.get("format") != FORMAT:
        raise EvaluationError(f"{path} has no format {FORMAT!r}: name the trace that it was made from")
    settings = {**{name: table.get(name) for name in IDENTITY}, **table["settings"]}
    return settings, [EpisodeRow.from_json(row) for row in table["episodes"]]


def _check_hashes(first: Sequence[EpisodeRow], second: Sequence[EpisodeRow]) -> None:
    hashes = {row.task_id: row.sha256 for row in first}
    for row in second:
        if hashes.get(row.task_id, row.sha256) != row.sha256:
            raise ScoreError(
                f"{row.task_id} has sha256 {hashes[row.task_id][:12]} in the first and {row.sha256[:12]} in the "
                "second: same name, another task"
            )


def _categories(rows: Sequence[EpisodeRow]) -> list[str | None]:
    """Categories in the order of tables, then None for all tasks."""
    names = sorted({row.category for row in rows}, key=category_rank)
    return [*names, None]


def _compared(category: str | None, first: Sequence[EpisodeRow], second: Sequence[EpisodeRow]) -> ComparedRow:
    one, other = _means(category, first), _means(category, second)
    difference = paired_difference(one, other)
    name = "all" if category is None else category
    intervals = (clustered(list(means.values())) for means in (one, other))
    return ComparedRow(name=name, first=next(intervals), second=next(intervals), difference=difference)


def _means(category: str | None, rows: Sequence[EpisodeRow]) -> dict[str, float]:
    """Task id to the mean success of its samples."""
    tasks: dict[str, list[bool]] = {}
    for row in rows:
        if category is None or row.category == category:
            tasks.setdefault(row.task_id, []).append(row.success)
    return {task: fmean(wins) for task, wins in tasks.items()}


def _percent(interval: Interval) -> str:
    return f"{100 * interval.mean:.1f}"
