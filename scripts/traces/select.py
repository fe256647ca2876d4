"""Choosing episodes from trace files: the options that the trace verbs share."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import tyro

from turngym.envs.core import TurngymError, Verdict
from turngym.envs.episode import Episode, Status
from turngym.envs.trace import TraceError, TraceProblem, iter_trace

T = TypeVar("T")
Repeated = Annotated[T, tyro.conf.UseAppendAction, tyro.conf.EnumChoicesFromValues]
"""An option that is given once per value: options that swallow all following words would swallow the files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Select:
    """Which episodes to take; all conditions must hold."""

    status: Repeated[tuple[Status, ...]] = ()
    """Only episodes that ended like this (repeat the option for several)."""
    outcome: Literal["any", "won", "lost"] = "any"
    """Only episodes that solved their task, or that did not."""
    category: Repeated[tuple[str, ...]] = ()
    """Only tasks of this category, for example `heat` (repeat the option for several)."""
    task: str = ""
    """Only tasks whose id contains this text."""
    verdict: Repeated[tuple[Verdict, ...]] = ()
    """Only episodes with at least one turn judged like this (repeat the option for several)."""
    limit: int | None = None
    """Stop after this many episodes."""

    def takes(self, episode: Episode) -> bool:
        """Whether the conditions hold for `episode` (the limit aside)."""
        return (
            (not self.status or episode.status in self.status)
            and (self.outcome == "any" or episode.success == (self.outcome == "won"))
            and (not self.category or episode.task.category in self.category)
            and self.task in episode.task.task_id
            and (not self.verdict or any(turn.verdict in self.verdict for turn in episode.turns))
        )


def require_traces(paths: Sequence[Path]) -> None:
    """Look at the beginning of each file. Raises TurngymError for one in which no line is an episode, or for no file.

    For who writes: `selected` finds that out only when it is read, which is too late to leave nothing behind.
    """
    if not paths:
        raise TurngymError("no trace file was given; name one or more files of JSON lines")
    for path in paths:
        problems = list[TraceProblem]()
        for item in iter_trace(path):
            if isinstance(item, Episode):
                break
            problems.append(item)
        else:
            _refuse(path, problems)


def selected(paths: Sequence[Path], select: Select) -> Iterator[Episode]:
    """The chosen episodes of the files, in order; lines that cannot be read are reported on standard error.

    Raises TurngymError for a file in which no line is an episode.
    """
    if not paths:
        raise TurngymError("no trace file was given; name one or more files of JSON lines")
    taken = 0
    for path in paths:
        for episode in _readable(path):
            if select.limit is not None and taken >= select.limit:
                return
            if select.takes(episode):
                taken += 1
                yield episode


def _readable(path: Path) -> Iterator[Episode]:
    """The episodes of one file; TraceError at its end where it had lines and none was an episode."""
    found, problems = False, list[TraceProblem]()
    for item in iter_trace(path):
        if isinstance(item, Episode):
            found = True
        else:
            problems.append(item)
        if found:  # so it is a trace, and not any file with a thousand lines to complain of
            for problem in problems:
                print(f"{path}: skipped {problem}", file=sys.stderr)
            problems.clear()
        if isinstance(item, Episode):
            yield item
    _refuse(path, problems)


def _refuse(path: Path, problems: Sequence[TraceProblem]) -> None:
    """Of a file without an episode; a torn line alone is what a killed run leaves."""
    if not all(problem.torn for problem in problems):
        raise TraceError(f"{path} is no trace: none of its {len(problems)} lines is an episode ({problems[0]})")
