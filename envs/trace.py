"""Traces: episodes on disk, one JSON line each, appended and flushed, read back exactly."""

from __future__ import annotations

import json
import warnings
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, overload

from turngym.envs.common.episode_line import SCHEMA, TraceError, episode_from_json, episode_to_json
from turngym.envs.common.full_disk import no_room
from turngym.envs.core import TurngymError
from turngym.envs.episode import Episode

__all__ = [
    "SCHEMA",
    "TraceEpisodes",
    "TraceError",
    "TraceProblem",
    "TraceWriter",
    "episode_from_json",
    "episode_to_json",
    "iter_episodes",
    "iter_places",
    "iter_trace",
    "read_episodes",
    "read_trace",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceProblem:
    """A line that was skipped: `line` counts from 1."""

    line: int
    reason: str
    torn: bool = False
    """It is the last line and the file ends inside it, as a kill leaves it."""

    def __str__(self) -> str:
        return f"line {self.line}: {self.reason}"


class TraceWriter:
    """Appends episodes to a file; each is one write and one flush, so that a killed run keeps what was finished.

    Nothing in an existing file is changed. If it ends in a torn line, the next episode starts on a line of its own.
    Several writers, in other processes too, may append to one file: each line is written under a lock on it, so that
    lines never mix. Who must be alone with a file (`turngym eval`, `rollout`, ...) locks it for as long as it runs.

    Raises TraceError where the file cannot be opened.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        with _said(self.path, "nothing was written"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # no buffer: after a failure it would hold half a line, and write it when the next one is
            self._file: Any = self.path.open("a+b", buffering=0)

    def write(self, episode: Episode) -> int:
        """Append one episode; the byte of the file at which its line begins.

        Raises TraceError, before anything is written, if `meta` is not JSON-able; and where the disk is full or fails:
        then nothing of this episode stays in the file, and a later one may be written when there is room.
        """
        line = episode_to_json(episode).encode("ascii") + b"\n"
        with _said(self.path, "the episodes before it are in the file, whole"), _alone(self._file):
            end = self._file.seek(0, 2)
            begins = end
            if end and not _ends_a_line(self._file):
                line, begins = b"\n" + line, end + 1
            try:
                rest = memoryview(line)
                while rest:
                    rest = rest[self._file.write(rest) :]
            except BaseException:
                # half a line would stay for good
                self._file.truncate(end)
                raise
        return begins

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_episodes(path: str | Path) -> list[Episode]:
    """All readable episodes in file order; a warning counts and names damaged lines, a torn last one excepted.

    Raises TraceError as `read_trace`.
    """
    return list(iter_episodes(path))


def iter_episodes(path: str | Path) -> Iterator[Episode]:
    """As `read_episodes`, one at a time; the warning comes at the end."""
    episodes, damaged, first = 0, 0, None
    for item in iter_trace(path):
        if isinstance(item, Episode):
            episodes += 1
            yield item
        elif not item.torn:
            damaged, first = damaged + 1, first or item
    if first is not None:
        warnings.warn(
            f"{path}: {damaged} of {episodes + damaged} lines are damaged and left out: {first}", stacklevel=2
        )


def read_trace(path: str | Path) -> tuple[list[Episode], list[TraceProblem]]:
    """All readable episodes in file order, and the lines that were skipped with the reasons.

    Raises TraceError if there is no such file or a line has a newer schema (then an upgrade helps, skipping does not).
    """
    episodes: list[Episode] = []
    problems: list[TraceProblem] = []
    for item in iter_trace(path):
        if isinstance(item, Episode):
            episodes.append(item)
        else:
            problems.append(item)
    return episodes, problems


def iter_trace(path: str | Path) -> Iterator[Episode | TraceProblem]:
    """As `read_trace`, one line at a time: files may be larger than memory."""
    return (item for _, item in iter_places(path))


def iter_places(path: str | Path) -> Iterator[tuple[int, Episode | TraceProblem]]:
    """As `iter_trace`, each with the byte at which its line begins: where `TraceEpisodes` finds it again."""
    path = Path(path)
    if not path.is_file():
        raise TraceError(f"there is no trace file {path}")
    begins = 0
    # bytes: a line that is not UTF-8 is one problem among others, text mode would stop there
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            place, begins = begins, begins + len(line)
            if not line.strip():
                continue
            torn = not line.endswith(b"\n")
            try:
                item: Episode | TraceProblem = episode_from_json(line.decode("utf-8"))
            # before TurngymError below: a newer schema concerns the whole file
            except TraceError as error:
                raise TraceError(f"{path}, line {number}: {error}") from error
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError, TurngymError) as error:
                item = TraceProblem(line=number, reason=_reason(error, torn), torn=torn)
            yield place, item


class TraceEpisodes(Sequence[Episode]):
    """Some episodes of a trace, each read from the file when it is asked for: eight bytes of memory for each."""

    def __init__(self, path: str | Path, places: Iterable[int]) -> None:
        """`places`: the bytes at which their lines begin, as `iter_places` and `TraceWriter.write` give them."""
        self._path, self._places = Path(path), array("q", places)

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, number: int) -> Episode: ...
    @overload
    def __getitem__(self, number: slice) -> TraceEpisodes: ...
    def __getitem__(self, number: int | slice) -> Episode | TraceEpisodes:
        if isinstance(number, slice):
            return TraceEpisodes(self._path, self._places[number])
        return next(self._read((self._places[number],)))

    def __iter__(self) -> Iterator[Episode]:
        return self._read(self._places)

    def _read(self, places: Iterable[int]) -> Iterator[Episode]:
        try:
            with self._path.open("rb") as file:
                for place in places:
                    file.seek(place)
                    yield episode_from_json(file.readline().decode("utf-8"))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise TraceError(f"{self._path} has changed since its episodes were found in it: {error}") from error


def _ends_a_line(file: IO[bytes]) -> bool:
    file.seek(-1, 2)
    return file.read(1) == b"\n"


@contextmanager
def _alone(file: IO[bytes]) -> Iterator[None]:
    """The only one that writes to `file`, as far as others ask, too."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX)
    except (ImportError, OSError):  # no locks on this system or file system
        yield
        return
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)


@contextmanager
def _said(path: Path, kept: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        why = "no room left on the disk" if no_room(error) else error.strerror or str(error)
        raise TraceError(f"{path} cannot be written: {why}; {kept}") from error


def _reason(error: Exception, torn: bool) -> str:
    if isinstance(error, (json.JSONDecodeError, UnicodeDecodeError)):
        text = f"not valid JSON ({error})"
    elif isinstance(error, KeyError):
        text = f"the field {error} is missing"
    else:
        text = str(error) or type(error).__name__
    return f"torn: the file ends inside this line; {text}" if torn else text
