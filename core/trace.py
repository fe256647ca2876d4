"""Traces: episodes on disk, one line of JSON each, appended and flushed, and read back exactly.

A trace begins with the settings with which its episodes are played (`TraceWriter`'s `spec`), whole; each episode names
them by the first digits of their hash. A file of several traces has the settings of each (`read_specs`).

Every line ends with the checksum of what stands before it, so that a byte that changed on disk is noticed when the
line is read. A killed writer leaves at most one torn line, at the end. docs/traces.md names the fields.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import time
import warnings
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Annotated, Any

import msgspec
import numpy as np
from filelock import SoftFileLock
from numpy.typing import NDArray

from turngym.core.closing import Closes
from turngym.core.episode import Episode, EpisodeError, TopK, Turn, check_numbers
from turngym.core.errors import TurngymError, is_disk_full
from turngym.core.line_file import LineFile
from turngym.core.plugin_values import checked_number
from turngym.core.redaction import brief, without_keys
from turngym.core.sequences import LazySequence
from turngym.core.task import content_hash
from turngym.core.user_files import json_of

SCHEMA = 2
"""Version of the line format. A reader refuses newer ones."""
DIGITS = 12
"""Digits of a hash of settings (`digits_of`)."""
_HEAD = re.compile(rb'\s*\{\s*"schema"\s*:\s*\d+\s*,\s*"spec"\s*:\s*\{')
"""How a line begins that holds settings and no episode, also where another program wrote it anew."""
LOCKED, LOOK = 60.0, 0.002
"""Seconds for which another writer may hold the lock on a trace, and seconds between two tries."""
_TASK_FIELDS = ("env_id", "task_id", "sha256", "split", "category", "cluster")


class _Held(Exception):
    """Another writer does not let go of a trace."""


class TraceError(TurngymError):
    """A trace file cannot be read at all, or an episode cannot be written."""


def episode_to_json(episode: Episode) -> str:
    """Writes an episode as one line of ASCII JSON without a newline; equal episodes give equal lines.

    Raises TraceError if JSON cannot hold the episode's `meta`.
    """
    record = {
        "schema": SCHEMA,
        "task": {name: value for name in _TASK_FIELDS if (value := getattr(episode.task, name)) or name != "cluster"},
        "seed": episode.seed,
        "sample": episode.sample,
        "group": episode.group,
        "status": episode.status,
        "success": episode.success,
        "ret": float(episode.episode_return),
        "score": float(episode.score),
        "system": episode.system,
        "segments": episode.segments,
        "turns": [_turn_to_record(turn) for turn in episode.turns],
        "final_observation": episode.final_observation,
        "timings": {name: float(value) for name, value in episode.timings.items()},
        "meta": dict(episode.meta),
        "spec": episode.spec,
    }
    try:
        # ASCII keeps lone surrogates, which UTF-8 cannot encode, and no torn line ends inside a character
        return add_checksum(json.dumps(record, allow_nan=False, separators=(",", ":"), default=plain_value))
    except (TypeError, ValueError) as error:
        where = f"task {episode.task.task_id}, sample {episode.sample}"
        raise TraceError(
            f"an episode ({where}) cannot be written as JSON: {error}; its meta is {episode.meta!r}"
        ) from None


def episode_from_json(line: str) -> Episode:
    """Reads the episode of one line. A line without a checksum passes, for a person may have edited it.

    Raises TraceError for a newer schema; ValueError for damage: another checksum, a field that is missing or of another
    type.
    """
    check_checksum(line.encode("utf-8", "surrogatepass"))
    record = json_of(line)
    if not isinstance(record, dict) or "schema" not in record:
        raise ValueError('not an episode: there is no "schema"')
    version = record["schema"]
    if isinstance(version, int) and version > SCHEMA:
        raise TraceError(f"schema version {version}; this turngym reads up to version {SCHEMA}: upgrade turngym")
    if type(version) is not int or version != SCHEMA:
        raise ValueError(f"schema version {version!r} is not {SCHEMA}, the one that is read")
    # what an episode was worth is never guessed
    if "score" not in record:
        raise ValueError("its score is missing")
    if "ret" in record:
        record["episode_return"] = record.pop("ret")
    turns = record.get("turns")
    try:
        for turn in turns if isinstance(turns, list) else ():
            if isinstance(turn, dict) and turn.get("teacher") is not None:
                teacher = msgspec.convert(turn["teacher"], _Teacher, dec_hook=array_of)
                ids = teacher.ids.reshape((-1, teacher.k))
                turn["teacher"] = TopK(ids=ids, logp=teacher.logp.reshape(ids.shape), tail=teacher.tail)
        episode = msgspec.convert(record, Episode, dec_hook=array_of)
    # another type; contradictions; a number that no array can hold
    except (msgspec.ValidationError, EpisodeError, OverflowError) as error:
        raise ValueError(str(error)) from error
    for name in ("goal_rate", "answer_f1"):
        if (share := episode.meta.get(name)) is not None:
            checked_number(f"{name} in its meta", share, least=0.0, most=1.0, error=ValueError)
    return episode


def array_of(kind: Any, values: Any) -> NDArray[Any]:
    """int32 or float32 of a list of JSON. Raises ValueError where it holds something else, OverflowError where a number
    does not fit."""
    if type(values) is not list:
        raise ValueError("it must be a list")
    if kind == NDArray[np.float32]:
        if odd := [
            number for number in values if type(number) not in (float, int) and number not in ("inf", "-inf", "nan")
        ]:
            raise ValueError(f"it must be a list of numbers and not hold {brief(odd[0], 40)}")
        return np.array([*map(float, values)], dtype=np.float32)
    try:
        # unlike NumPy, array() refuses 1.7; it takes true for 1, so the types of zeros and ones are looked at: those of
        # thousands of ids would take as long as all else
        ids = np.array(array("i", values), dtype=np.int32)
        are_integers = all(type(values[index]) is int for index in np.flatnonzero(ids >> 1 == 0))
    except TypeError:
        are_integers = False
    if not are_integers:
        raise ValueError("it must be a list of whole numbers")
    return ids


class _Teacher(msgspec.Struct):
    k: Annotated[int, msgspec.Meta(ge=1)]
    ids: NDArray[np.int32]
    logp: NDArray[np.float32]
    tail: NDArray[np.float32] | None = None


def plain_value(value: Any) -> Any:
    """The JSON value that stands for an object that JSON does not know. Raises TypeError for objects in an
    environment's `meta`."""
    if isinstance(value, TopK):
        tail = {} if value.tail is None else {"tail": value.tail}
        return {"k": value.ids.shape[1], "ids": value.ids.ravel(), "logp": value.logp.ravel(), **tail}
    if isinstance(value, np.ndarray) and value.dtype.kind == "f":
        # NumPy's shortest decimal form of a float32 is half as long as the same number as a float64, and as exact. JSON
        # has no infinities; float() reads these strings back
        numbers = map(float, value.astype(np.float32).astype(str))
        return [number if math.isfinite(number) else str(number) for number in numbers]
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"JSON has no {type(value).__name__}")


_ALWAYS = (
    "index",
    "observation",
    "admissible",
    "response",
    "action",
    "verdict",
    "reward",
    "segment",
    "prompt_span",
    "response_span",
    "logprobs",
    "finish",
    "policy_version",
    "origin",
    "judge_scores",
    "hint",
    "teacher",
)
"""Fields of a turn that every line has, in its order; of others it has those that differ from their default."""
_SELDOM = {
    name: Turn.__dataclass_fields__[name].default
    for name in ("progress", "judge_votes", "judge_cut", "hint_prompt_ids", "excluded", "begun", "version_spans")
}


def _turn_to_record(turn: Turn) -> dict[str, Any]:
    # an array is only compared with None
    differ = [
        name
        for name, usual in _SELDOM.items()
        if (value := getattr(turn, name)) is not None and (usual is None or value != usual)
    ]
    return {name: getattr(turn, name) for name in (*_ALWAYS, *differ)} | {"reward": float(turn.reward)}


_MARK, _END = b',"crc":"', b'"}'
_LENGTH = len(_MARK) + 8 + len(_END)


def add_checksum(line: str) -> str:
    """Turns `{...}` into `{...,"crc":"0123abcd"}`, with the CRC-32 of what stands before that last field.

    No key that this process knows is in it: every record of an episode or of a turn comes through here.

    `line` is one JSON object with at least one field, in ASCII, without a newline.
    """
    body = without_keys(line[:-1])
    return f'{body},"crc":"{zlib.crc32(body.encode("ascii")):08x}"}}'


def has_checksum(line: bytes) -> bool:
    tail = line.rstrip()[-_LENGTH:]
    return tail.startswith(_MARK) and tail.endswith(_END)


def check_checksum(line: bytes) -> None:
    """Raises ValueError if a line with a checksum is not as it was written; lines without one pass."""
    line = line.rstrip()
    if not has_checksum(line):
        return
    stored = line[-len(_END) - 8 : -len(_END)]
    if b"%08x" % zlib.crc32(memoryview(line)[:-_LENGTH]) != stored:
        raise ValueError(
            "it was changed after it was written (its checksum differs); a line that was edited on purpose is read "
            'without its field "crc"'
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceProblem:
    """A line that was skipped."""

    line: int
    """Counted from 1."""
    reason: str
    torn: bool = False
    """Whether the file ends inside this line, as a kill leaves it."""

    def __str__(self) -> str:
        return f"line {self.line}: {self.reason}"


class TraceWriter(Closes):
    """Appends episodes to a file. Each is written and flushed at once, so that a killed run keeps what was finished.

    Nothing in an existing file is changed. If it ends in a torn line, the next episode starts on a line of its own.
    Several writers, in other processes too, may append to one file: each line is written under a lock, so lines never
    mix. A program that must be the only writer (`turngym eval`, `rollout`, ...) holds `locked_file` as long as it runs.

    Raises TraceError if the file cannot be opened.
    """

    def __init__(self, path: str | Path, spec: Mapping[str, Any] | None = None) -> None:
        """`spec` is the table of the settings with which the episodes are played; None: nobody knows them.

        It is written before the first episode: where none is played, the file stays empty, and other settings may
        follow.
        """
        self.path = Path(path)
        self._spec, self._unwritten = "" if spec is None else digits_of(spec), spec
        with trace_errors(self.path, "nothing was written"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._lines = LineFile(self.path)

    def write(self, episode: Episode) -> int:
        """Appends one episode and returns the byte of the file at which its line begins.

        Raises TraceError if JSON cannot hold its `meta`, if a field has a type that no reader takes (an environment may
        give a number for a text), or if the disk is full or fails. Nothing of the episode is in the file then, and
        later ones may be written when there is room.
        """
        text = episode_to_json(replace(episode, spec=self._spec) if self._spec else episode)
        try:
            episode_from_json(text)
        except ValueError as error:
            where = f"task {episode.task.task_id}, sample {episode.sample}"
            raise TraceError(f"an episode ({where}) is not written, for nobody could read it: {error}") from None
        line = text.encode("ascii") + b"\n"
        outcome = "the episodes before it are in the file, whole"
        with trace_errors(self.path, outcome), _write_lock(self._lines.file):
            if self._unwritten is not None and self._spec not in read_specs(self.path):
                self._lines.append(header_line(self._unwritten))
            self._unwritten = None
            return self._lines.append(line)

    def close(self) -> None:
        self._lines.close()


def holds_episodes(path: str | Path) -> bool:
    """Whether something was written into a trace: a writer that was opened leaves an empty file."""
    return Path(path).is_file() and Path(path).stat().st_size > 0


def digits_of(spec: Mapping[str, Any]) -> str:
    """The first digits of a hash of settings, by which episodes name the settings they were played with."""
    return content_hash(spec)[:DIGITS]


def header_line(spec: Mapping[str, Any]) -> bytes:
    """The line with which episodes that are played with `spec` begin."""
    head = {"schema": SCHEMA, "spec": spec}
    return add_checksum(json.dumps(head, ensure_ascii=True, separators=(",", ":"))).encode("ascii") + b"\n"


def is_header(line: bytes) -> bool:
    """Whether a line of a trace holds settings and no episode."""
    return _HEAD.match(line) is not None


def read_specs(path: str | Path) -> dict[str, dict[str, Any]]:
    """The settings that a trace holds, by the digits with which its episodes name them; {} for a missing file.

    Raises TraceError for a line of settings that was changed after it was written.
    """
    specs: dict[str, dict[str, Any]] = {}
    path = Path(path)
    if not path.is_file():
        return specs
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not is_header(line):
                continue
            try:
                check_checksum(line)
            except ValueError as error:
                raise TraceError(f"{path}, line {number}: {error}") from error
            # a torn line, behind which the next writer began one of its own, is written again
            with contextlib.suppress(ValueError):
                spec = json_of(line)["spec"]
                specs[digits_of(spec)] = spec
    return specs


def iter_episodes(path: str | Path, vocabulary: int | None = None) -> Iterator[Episode]:
    """Yields all readable episodes in file order.

    At the end, a warning counts damaged lines and names the first; a torn last line is skipped without one. With a
    `vocabulary`, the episodes are for training a model of so many ids. Raises TraceError as `iter_trace` does.
    """
    episodes, damaged, first = 0, 0, None
    for item in iter_trace(path, vocabulary):
        if isinstance(item, Episode):
            episodes += 1
            yield item
        elif not item.torn:
            damaged, first = damaged + 1, first or item
    if first is not None:
        warnings.warn(
            f"{path}: {damaged} of {episodes + damaged} lines are damaged and left out: {first}", stacklevel=2
        )


def read_episodes(path: str | Path, vocabulary: int | None = None) -> list[Episode]:
    """The episodes of `iter_episodes` as a list."""
    return list(iter_episodes(path, vocabulary))


def read_trace(path: str | Path) -> tuple[list[Episode], list[TraceProblem]]:
    """(readable episodes in file order, lines that were skipped). Raises TraceError as `iter_trace` does."""
    items = list(iter_trace(path))
    return (
        [item for item in items if isinstance(item, Episode)],
        [item for item in items if isinstance(item, TraceProblem)],
    )


def iter_trace(path: str | Path, vocabulary: int | None = None) -> Iterator[Episode | TraceProblem]:
    """Yields every line as an episode or as the problem with it, one at a time: files may be larger than memory.

    Raises TraceError if there is no such file, or if a line has a newer schema: an upgrade helps then, skipping does
    not. With a `vocabulary`, also for a line with numbers that a model of so many ids cannot be trained on
    (`check_numbers`): whoever wrote one such line wrote others.
    """
    return (item for _, item in iter_places(path, vocabulary))


def iter_places(path: str | Path, vocabulary: int | None = None) -> Iterator[tuple[int, Episode | TraceProblem]]:
    """Reads as `iter_trace` does, with the byte at which each line begins, from which `TraceEpisodes` reads it
    again."""
    path = Path(path)
    if not path.is_file():
        raise TraceError(f"there is no trace file {path}")
    begins = 0
    # in bytes, because text mode would stop at a line that is not UTF-8, which is one problem among others
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            offset, begins = begins, begins + len(line)
            if not line.strip():
                continue
            torn = not line.endswith(b"\n")
            try:
                if is_header(line):
                    check_checksum(line)
                    # a torn line of settings is a problem like a torn episode
                    json_of(line)
                    continue
                item: Episode | TraceProblem = episode_from_json(line.decode("utf-8"))
            # a newer schema concerns the whole file
            except TraceError as error:
                raise TraceError(f"{path}, line {number}: {error}") from error
            except ValueError as error:
                malformed = isinstance(error, (json.JSONDecodeError, UnicodeDecodeError))
                text = f"not valid JSON ({error})" if malformed else str(error) or type(error).__name__
                reason = f"torn: the file ends inside this line; {text}" if torn else text
                item = TraceProblem(line=number, reason=reason, torn=torn)
                # an id or a number that no array can hold
                if vocabulary is not None and isinstance(error.__cause__, OverflowError):
                    raise TraceError(f"{path}, line {number}: {error}") from error
            if vocabulary is not None and isinstance(item, Episode):
                try:
                    check_numbers(item, vocabulary)
                except EpisodeError as error:
                    raise TraceError(f"{path}, line {number}: {error}") from error
            yield offset, item


class TraceEpisodes(LazySequence[Episode]):
    """Some episodes of a trace, each read from the file when it is asked for: eight bytes of memory per episode."""

    def __init__(self, path: str | Path, places: Iterable[int]) -> None:
        """Takes the bytes at which the lines begin, as `iter_places` and `TraceWriter.write` give them."""
        self.path, self._places = Path(path), array("q", places)

    def __len__(self) -> int:
        return len(self._places)

    def item(self, index: int) -> Episode:
        return next(self._read((self._places[index],)))

    def __iter__(self) -> Iterator[Episode]:
        return self._read(self._places)

    def _read(self, places: Iterable[int]) -> Iterator[Episode]:
        try:
            with self.path.open("rb") as file:
                for offset in places:
                    file.seek(offset)
                    yield episode_from_json(file.readline().decode("utf-8"))
        except (OSError, ValueError) as error:
            raise TraceError(f"{self.path} has changed since its episodes were found in it: {error}") from error


@contextmanager
def _write_lock(file: IO[bytes]) -> Iterator[None]:
    """Waits until no other writer has the lock on `file`, and holds it. Raises OSError after `LOCKED` seconds: whoever
    has it stands still, for a line takes milliseconds."""
    try:
        import fcntl

        end = time.monotonic() + LOCKED
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise _Held from None
                time.sleep(LOOK)
    except _Held:
        raise TimeoutError(f"another process has held its lock for {LOCKED:g} s") from None
    # not a POSIX system, or a file system without locks; `locked_file` warns of that
    except (ImportError, OSError):
        path = Path(file.name)
        with SoftFileLock(path.with_name(f".{path.name}.held"), timeout=LOCKED):
            yield
        return
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)


@contextmanager
def trace_errors(path: Path, kept: str) -> Iterator[None]:
    """Turns OSError into a TraceError that ends with what was `kept`."""
    try:
        yield
    except OSError as error:
        why = "no room left on the disk" if is_disk_full(error) else error.strerror or str(error)
        raise TraceError(f"{path} cannot be written: {why}; {kept}") from error
