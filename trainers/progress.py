"""What a person sees while a run trains: one live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Protocol, Self

SHOWN = (("loss", "loss {:.3f}"), ("success", "success {:.0%}"), ("depth/cap", "depth {}"), ("eval/avg", "Avg {:.1%}"))


class Progress(Protocol):
    """Receives each metrics row and the name of the phase that is running."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: Any) -> None: ...

    def phase(self, name: str) -> None: ...

    def row(self, row: Mapping[str, Any]) -> None: ...


class NoProgress:
    """Says nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        return

    def phase(self, name: str) -> None:
        return

    def row(self, row: Mapping[str, Any]) -> None:
        return


class LiveProgress:
    """A bar with the step, the time left and the latest numbers; `every` spaces the lines when not on a terminal."""

    def __init__(self, title: str, total: int, start: int = 0, every: int = 10) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        self.title, self.total, self.every = title, total, every
        self.console = Console(stderr=True)
        columns = ("[bold]{task.description}", "{task.fields[phase]:<8}")
        self.bar = Bar(
            *(TextColumn(text) for text in columns),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[numbers]}"),
            console=self.console,
            transient=True,
        )
        self.task = self.bar.add_task(title, total=total, completed=start, phase="", numbers="")
        self.latest: dict[str, Any] = {}

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.console.is_terminal:
            self.bar.stop()
        self.console.print(f"{self.title}: {describe(self.latest)}", highlight=False)

    def phase(self, name: str) -> None:
        self.bar.update(self.task, phase=name)

    def row(self, row: Mapping[str, Any]) -> None:
        self.latest.update(row)
        text = describe(self.latest)
        # without "step N", which the bar counts itself
        self.bar.update(self.task, completed=row["step"], numbers=text.partition("  ")[2])
        if not self.console.is_terminal and (row["kind"] == "eval" or row["step"] % self.every == 0):
            self.console.print(f"{self.title}: {text}", highlight=False)


def describe(row: Mapping[str, Any]) -> str:
    """`step 10  loss 0.412  success 25%  depth 12  Avg 31.0%` from the numbers that are there."""
    parts = [text.format(row[name]) for name, text in SHOWN if row.get(name) is not None]
    return "  ".join([f"step {row.get('step', 0)}", *parts])
