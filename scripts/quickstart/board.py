"""Bars on standard error: a thread keeps them up to date from the files that are written meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Look = Callable[[], tuple[int, str]]
"""What is done, and a note on it."""
SECONDS = 0.5
"""Between two looks."""


@dataclass(slots=True)
class Board:
    """What is under way, one bar each."""

    progress: Any
    _looks: dict[Any, Look] = field(default_factory=dict)

    def add(self, name: str, total: int, look: Look) -> None:
        """Another bar."""
        self._looks[self.progress.add_task(name, total=total, note="starting")] = look

    def update(self) -> None:
        """Look at everything once."""
        for bar, look in list(self._looks.items()):
            done, note = look()
            self.progress.update(bar, completed=done, note=note)


@contextmanager
def open_board() -> Iterator[Board]:
    """A board whose bars move until the context ends."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    note = TextColumn("{task.fields[note]}")
    shape = (TextColumn("{task.description:>8}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), note)
    over = threading.Event()
    with Progress(*shape, console=Console(stderr=True), refresh_per_second=2) as progress:
        board = Board(progress)

        def watch() -> None:
            while not over.wait(SECONDS):
                board.update()

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield board
        finally:
            over.set()
            thread.join()
            board.update()


def training_look(folder: Path) -> Look:
    """Steps done by the run in `folder`, and its newest numbers in words."""
    # here, not in `look`: that runs in the board's thread, and torch must not be imported in two threads at once
    from turngym.trainers.run.metrics import iter_metrics
    from turngym.trainers.run.progress import describe

    rows = folder / "metrics.jsonl"
    seen, found = -1, (0, "starting")

    def look() -> tuple[int, str]:
        nonlocal seen, found
        size = rows.stat().st_size if rows.exists() else -1
        # only when there are new ones: all are read, and the methods need the cores
        if size != seen:
            latest: dict[str, object] = {"step": 0}
            for row in iter_metrics(folder):
                latest.update(row)
            seen, found = size, (int(str(latest["step"])), describe(latest).partition("  ")[2])
        return found

    return look


def evaluation_look(trace: Path) -> Look:
    """Episodes in a trace that is being written."""
    seen = [0, 0]

    def look() -> tuple[int, str]:
        if trace.exists():
            with trace.open("rb") as file:
                file.seek(seen[0])
                new = file.read()
            seen[0] += len(new)
            seen[1] += new.count(b"\n")
        return seen[1], "evaluation"

    return look
