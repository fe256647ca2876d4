"""What a person sees while a run trains: one live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import resource
import time
from collections.abc import Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any, Protocol, Self

from turngym.envs.core.progress import ACTIVITY, LogLines, clock

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
    """A bar with the step, the time left and the latest numbers on a terminal.

    Elsewhere a line at every `every`-th step, and one a minute that says where the step stands.
    """

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
        self.lines = LogLines(self.line, self.console)
        self._phase, self._since, self._before = "start", time.monotonic(), replace(ACTIVITY)
        self._first: tuple[int, float] | None = None
        """The first step of this process that ended, and when: what comes before it is loading."""

    def __enter__(self) -> Self:
        self.bar.start() if self.console.is_terminal else self.lines.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop() if self.console.is_terminal else self.lines.__exit__()
        self.console.print(f"{self.title}: {describe(self.latest)}", highlight=False)

    def phase(self, name: str) -> None:
        self._phase, self._since, self._before = name, time.monotonic(), replace(ACTIVITY)
        self.bar.update(self.task, phase=name)

    def row(self, row: Mapping[str, Any]) -> None:
        self.latest.update(row)
        self._first = self._first or (row["step"], time.monotonic())
        text = describe(self.latest)
        # without "step N", which the bar counts itself
        self.bar.update(self.task, completed=row["step"], numbers=text.partition("  ")[2])
        if not self.console.is_terminal and (row["kind"] == "eval" or row["step"] % self.every == 0):
            self.console.print(f"{self.title}: {text}", highlight=False)

    def line(self) -> str:
        """`opd: step 3/50, rollout for 0:01:20, 96 turns (1.2/s), ..., 4.1 GB, 0:03:05 a step, about 2:24:00 left`"""
        now, step = time.monotonic(), self.latest.get("step", 0)
        spent = now - self._since
        parts = [f"{self.title}: step {min(step + 1, self.total)}/{self.total}, {self._phase} for {clock(spent)}"]
        if ACTIVITY.turns > self._before.turns:
            parts.append(ACTIVITY.since(self._before, spent))
        parts.append(f"{peak_memory() / 1e9:.1f} GB at most")
        if self._first is not None and step > self._first[0]:
            each = (now - self._first[1]) / (step - self._first[0])
            parts.append(f"{clock(each)} a step, about {clock(each * (self.total - step))} left")
        return ", ".join(parts)


def peak_memory() -> int:
    """Bytes that this process has held at most in main memory."""
    # kilobytes on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def describe(row: Mapping[str, Any]) -> str:
    """`step 10  loss 0.412  success 25%  depth 12  Avg 31.0%` from the numbers that are there."""
    parts = [text.format(row[name]) for name, text in SHOWN if row.get(name) is not None]
    return "  ".join([f"step {row.get('step', 0)}", *parts])
