"""The file of a packed result: what it holds, how it is written and read. `packed.py` makes and checks such files."""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Literal
from zlib import crc32

import msgspec

from turngym.agents.evaluation.scores import EvaluationError
from turngym.agents.play_spec import EvalSpec
from turngym.core.episode import Episode
from turngym.core.errors import TurngymError
from turngym.core.plugin_values import LARGEST_VALUE
from turngym.core.spec import read, to_table
from turngym.core.trace import episode_from_json, episode_to_json
from turngym.core.user_files import bounded_bytes, too_many_values
from turngym.core.whole_files import written_whole

FORMAT, VERSION = "turngym-packed-result", 3
FACTS = ("spec", "agent", "versions", "date", "seconds", "tokens", "scores")
"""What the head says of the episodes."""
SUFFIX = ".result.xz"
MOST_BYTES = 2**28
"""Largest content of a file that is read: a few kilobytes can unpack to more than there is memory."""
MOST_LINE, MOST_VALUES = 2**25, 2_000_000
"""Bytes and JSON values of a line at most: a value takes up to 27 times its bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedResult:
    """The content of a packed result."""

    spec: EvalSpec
    """What was played and by whom, without addresses and folders."""
    agent: str
    """Name of who played, for people."""
    versions: Mapping[str, str]
    """Versions of the packages that played."""
    date: str
    seconds: float
    tokens: Mapping[str, int] | None
    """Sampled and other token ids; the ids themselves are not packed."""
    scores: Mapping[str, Any]
    """The table, as `Scores.to_json` gives it."""
    episodes: tuple[Episode, ...]
    """The episodes without token ids, log-probabilities and timings."""
    seal: str = ""
    """SHA-256 of all of the above, as the file states it."""
    broken: tuple[str, ...] = ()
    """What was changed in the file since it was sealed."""

    def lines(self) -> list[str]:
        """The file's lines: the head, then one for each episode. The head's `sha256` covers everything else."""
        facts = {name: getattr(self, name) for name in FACTS} | {"spec": json.loads(json.dumps(to_table(self.spec)))}
        rows = []
        for episode in self.episodes:
            # a line's own checksum stands in the head, so that a changed episode is read and named, not refused
            line = episode_to_json(episode).rpartition(',"crc":"')[0] + "}"
            rows.append((_name(episode), line))
        head = {"format": FORMAT, "version": VERSION, **facts, "checksums": _checksums(facts, rows)}
        return [json.dumps({**head, "sha256": _digest(head, rows)}, sort_keys=True), *(line for _, line in rows)]

    def write(self, path: str | Path) -> Path:
        """Writes the file and returns its path. Raises EvaluationError, and writes nothing, if the file would exceed
        the limits of `read_result`."""
        data = "\n".join(self.lines()).encode("ascii")
        with written_whole(path) as scratch:
            scratch.write_bytes(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))
            try:
                read_result(scratch)
            except EvaluationError as error:
                why = str(error).partition(": ")[2]
                raise EvaluationError(f"{path} is not written, for nobody could read it: {why}") from error
        return Path(path)


def flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of every value inside of nested mappings and lists."""
    if isinstance(value, Mapping | list):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            yield from flat(f"{name}.{key}" if name else str(key), item)
    else:
        yield name, value


# The seal.

Rows = Sequence[tuple[str, str]]
"""The name and the line of every episode."""


def _name(episode: Episode) -> str:
    return f"{episode.task.task_id} sample {episode.sample}"


def _checksums(facts: Mapping[str, Any], rows: Rows) -> dict[str, str]:
    """CRC-32 of every setting and other fact, of the table and of every episode: shows where a seal is broken."""
    values = {"table": facts["scores"]} | {k: v for k, v in flat("", facts) if not k.startswith("scores.")}
    lines = {name: json.dumps(value, sort_keys=True) for name, value in values.items()}
    lines |= {name: line[:-1] for name, line in rows}
    return {name: f"{crc32(line.encode()):08x}" for name, line in lines.items()}


def _digest(head: Mapping[str, Any], rows: Rows) -> str:
    """SHA-256 of the file's text, but for the seal itself."""
    return sha256("\n".join([json.dumps(head, sort_keys=True), *(line for _, line in rows)]).encode()).hexdigest()


def _broken(first: str, stated: Mapping[str, Any], rows: Rows) -> list[str]:
    """What was changed since the file with the head `first`, which holds `stated`, was sealed.

    It compares the file's text, not parsed values: a setting that a later version added is not part of the seal.
    """
    facts = {name: stated[name] for name in FACTS}
    head = {"format": FORMAT, "version": VERSION, **facts, "checksums": stated["checksums"]}
    if _digest(head, rows) != stated["sha256"]:
        before, checksums = stated["checksums"], _checksums(facts, rows)
        changed = [name for name in sorted(before.keys() | checksums.keys()) if before.get(name) != checksums.get(name)]
        lines = [f"seal: {name} was changed after the file was packed" for name in changed]
        return lines or ["seal: the content has another SHA-256 than the file states"]
    if first != json.dumps({**head, "sha256": stated["sha256"]}, sort_keys=True):
        return ["seal: the file holds more than is read of it, which no seal covers"]
    return []


class _Head(msgspec.Struct):
    """The first line of a file, which anyone may have written."""

    format: Literal["turngym-packed-result"]
    version: Literal[3]
    spec: dict[str, Any]
    agent: str
    versions: dict[str, str]
    date: str
    seconds: Annotated[float, msgspec.Meta(ge=0.0, le=LARGEST_VALUE)]
    tokens: dict[str, int] | None
    scores: dict[str, Any]
    checksums: dict[str, str]
    sha256: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]


def read_sealed(path: str | Path) -> PackedResult:
    """Reads a packed result whose numbers are about to be shown. Raises EvaluationError as `read_result` does, and for
    one that is not as it was packed."""
    result = read_result(path)
    if result.broken:
        raise EvaluationError(f"{path}: {result.broken[0]}; turngym result check {path} names all that differs")
    return result


UNPACKER_BYTES = 1 << 27
"""Memory of the unpacker itself, by the file's own head; packed results need 66 MB."""


def read_result(path: str | Path) -> PackedResult:
    """Reads a packed result; it is not checked. Raises EvaluationError for another file or a damaged one."""
    try:
        unpack = lzma.LZMADecompressor(memlimit=UNPACKER_BYTES)
        lines = unpack.decompress(bounded_bytes(path, MOST_BYTES), MOST_BYTES).split(b"\n")
        if not unpack.eof:
            raise ValueError(f"it is cut, or unpacks to more than {MOST_BYTES >> 20} MiB")
        if unpack.unused_data:
            raise ValueError(f"{len(unpack.unused_data):,} bytes stand behind its end")
        for number, line in enumerate(lines, start=1):
            if len(line) > MOST_LINE or too_many_values(line, MOST_VALUES):
                raise ValueError(f"line {number} has more than {MOST_LINE:,} bytes or {MOST_VALUES:,} values")
        first, *rows = (line.decode("ascii") for line in lines)
        head = json.loads(first)
        msgspec.convert(head, _Head)
        if not rows:
            raise ValueError("it has no episodes; valid: at least one")
        episodes = tuple(map(episode_from_json, rows))
        return PackedResult(
            **{**{name: head[name] for name in FACTS}, "spec": read(EvalSpec, head["spec"], "its spec")},
            episodes=episodes,
            seal=head["sha256"],
            broken=tuple(
                _broken(first, head, [(_name(episode), row) for episode, row in zip(episodes, rows, strict=True)])
            ),
        )
    except (OSError, lzma.LZMAError, msgspec.ValidationError, TurngymError, ValueError, RecursionError) as error:
        why = getattr(error, "strerror", None) or error
        raise EvaluationError(f"{path} is not a packed result: {why}") from error
