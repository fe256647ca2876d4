"""What a person sees while episodes are played: a live bar on a terminal, a line a minute in a log file.

A real model may take minutes for its first episode, so turns and tokens are counted where they come about: by the
rollout and the local engine, in `ACTIVITY`, for the whole process. The counts are for people alone; nothing depends on
them. Workers in other processes count there, so that of those only whole episodes are seen here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Self

from turngym.core.episode import Episode

FIRST_LINE, LINE_EVERY = 30.0, 60.0
"""Seconds before the first line of a log, and between lines."""
LAST_LINE = 2.0
"""Seconds that the line under way gets at the end."""


@dataclass(slots=True)
class Activity:
    """What this process has played since it began."""

    turns: int = 0
    """Turns of the agent."""
    malformed: int = 0
    """Turns from which no action could be read."""
    tokens: int = 0
    """Tokens that a local engine drew."""
    playing: int = 0
    """Episodes that have begun and not ended; the latest rollout's."""
    deepest: int = 0
    """Turns of the longest of those."""
    limit: int | None = None
    """Most turns of an episode, where that is known; the latest rollout's."""

    def since(self, earlier: Activity, seconds: float) -> str:
        """`120 turns (2.0/s), 3,400 tokens (57/s), 4 malformed, 8 playing at turn 15`."""
        turns, tokens = self.turns - earlier.turns, self.tokens - earlier.tokens
        parts = [f"{turns:,} turns ({turns / max(seconds, 1e-9):.1f}/s)"]
        if tokens:
            parts.append(f"{tokens:,} tokens ({tokens / max(seconds, 1e-9):.0f}/s)")
        if malformed := self.malformed - earlier.malformed:
            parts.append(f"{100 * malformed / max(turns, 1):.0f} % malformed")
        if self.playing:
            parts.append(f"{self.playing} playing at turn {self.deepest + 1}")
        return ", ".join(parts)


ACTIVITY = Activity()


class LogLines:
    """Prints what `line()` says now and then while its context is open, from a thread of its own."""

    def __init__(self, line: Callable[[], str], console: Any) -> None:
        self._line, self._console = line, console
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._closing.set()
        # a terminal that takes nothing (Ctrl-S) keeps nobody
        self._thread.join(LAST_LINE)

    def _run(self) -> None:
        wait = FIRST_LINE
        while not self._closing.wait(wait):
            self._console.print(self._line(), highlight=False, soft_wrap=True)
            wait = LINE_EVERY


@contextmanager
def progress_bar(title: str, total: int, *, enabled: bool = True) -> Iterator[Callable[[Episode], None]]:
    """Shows a bar on standard error, or lines if that is no terminal. Call the yielded function with each finished
    episode."""
    if not enabled or not total:
        yield lambda episode: None
        return
    # here, because rich takes a tenth of a second to import
    from rich import progress as bars
    from rich.console import Console

    begun, start = replace(ACTIVITY), time.monotonic()
    count = wins = errors = ended_turns = 0

    def result() -> str:
        # failed episodes say nothing about the agent, so the rate leaves them out
        scored = count - errors
        return (f"success {100 * wins / scored:.1f} %, " if scored else "") + (f"{errors} errors, " if errors else "")

    def rates() -> str:
        return result() + ACTIVITY.since(begun, time.monotonic() - start)

    def turns_left(turns: int) -> float:
        # turns for each episode that ended, those of the others included: the ones that ended first were short
        mean, playing = turns / count, min(ACTIVITY.playing, total - count)
        if ACTIVITY.limit is None:
            return mean * (total - count)
        most = max(playing * ACTIVITY.limit - (turns - ended_turns), 0)
        return min(mean * playing, most) + min(mean, ACTIVITY.limit) * (total - count - playing)

    def line() -> str:
        spent = time.monotonic() - start
        left = ""
        if count:
            turns = max(ACTIVITY.turns - begun.turns, ended_turns)
            left = f", about {clock(spent * turns_left(turns) / max(turns, 1))} left"
        return f"{title}: {count}/{total} episodes, {rates()}, {clock(spent)}{left}"

    class Rates(bars.ProgressColumn):
        max_refresh = 0.5

        def render(self, task: Any) -> Any:
            from rich.text import Text

            return Text(rates())

    console = Console(stderr=True)
    columns = bars.BarColumn(bar_width=20), bars.MofNCompleteColumn(), Rates()
    bar = bars.Progress(
        bars.TextColumn("{task.description}"),
        *columns,
        bars.TimeElapsedColumn(),
        bars.TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )

    with LogLines(line, console) if not console.is_terminal else bar:
        row = bar.add_task(title, total=total)

        def update(episode: Episode) -> None:
            nonlocal count, wins, errors, ended_turns
            count, errors = count + 1, errors + episode.status.is_error
            wins += episode.success and not episode.status.is_error
            ended_turns += episode.depth
            bar.update(row, advance=1)

        yield update


def clock(seconds: float) -> str:
    """`0:02:05`."""
    return str(timedelta(seconds=round(seconds)))
