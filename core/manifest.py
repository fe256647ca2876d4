"""What a folder of ours says of itself: its facts as sealed JSON, and the size and checksum of every file.

`write_manifest` and `read_manifest` are the only ones who know how a manifest is sealed. Behind them nothing is checked
again: a manifest that is read is as it was written, and of this version.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypedDict, TypeVar
from zlib import crc32

import msgspec

from turngym.core.user_files import json_object
from turngym.core.whole_files import written_whole

T = TypeVar("T")
FIELD = "crc32"
"""Field of a manifest with the checksum of the others."""
CHECKED = 1 << 25
"""Files of up to this many bytes together are compared whenever they are opened: tens of milliseconds."""


class FileFacts(TypedDict):
    bytes: int
    crc32: int


Files = Mapping[str, FileFacts]
"""Size and checksum by name."""


def write_manifest(path: Path, facts: Mapping[str, Any]) -> None:
    """Writes `facts`, which JSON can hold, with their checksum; the file is whole or as it was."""
    plain = json.loads(json.dumps(facts))  # as it will be read: keys are texts
    with written_whole(path) as scratch:
        scratch.write_text(json.dumps({**plain, FIELD: _checksum(plain)}, indent=1) + "\n", encoding="utf-8")


def read_manifest(path: Path, kind: type[T], error: Callable[[str], Exception]) -> T:
    """Reads what `write_manifest` wrote as a `kind`, whose Literals name the versions that are accepted.

    Raises `error` for one that is missing, was changed, or is of another version.
    """
    fields = json_object(path, error)
    try:
        if fields.pop(FIELD, None) != _checksum(fields):
            raise ValueError("it was changed after it was written: its checksum differs")
        return msgspec.convert(fields, kind)
    except (ValueError, msgspec.ValidationError) as reason:
        raise error(f"{path} is damaged, or of another version: {reason}") from reason


def _checksum(facts: Mapping[str, Any]) -> int:
    return crc32(json.dumps(facts, sort_keys=True).encode())


def describe_file(path: Path) -> FileFacts:
    size = checksum = 0
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            size, checksum = size + len(block), crc32(block, checksum)
    return {"bytes": size, "crc32": checksum}


def describe_files(folder: Path, names: Iterable[str]) -> dict[str, FileFacts]:
    order = sorted(names)
    # crc32 releases the interpreter lock, so the files are read in parallel; ends: files have an end
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return dict(zip(order, pool.map(lambda name: describe_file(folder / name), order), strict=True))


def files_under(folder: Path, *, without: Collection[str] = ()) -> list[str]:
    """Names of all files under `folder` except those that are called, or are in a folder called, one of `without`."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return [name for name in names if name.partition("/")[0] not in without]


def changed_files(folder: Path, files: Files, *, limit: float = CHECKED) -> list[str]:
    """Compares files with what `describe_files` recorded, and says of each one that differs what is wrong with it.

    Sizes are always compared, checksums only while the files have at most `limit` bytes together.
    """
    contents = sum(facts["bytes"] for facts in files.values()) <= limit
    problems = []
    for name, facts in sorted(files.items()):
        path = folder / name
        if not path.is_file():
            problems.append(f"{name} is missing")
        elif (size := path.stat().st_size) != facts["bytes"]:
            problems.append(f"{name} has {size} bytes, {facts['bytes']} were written")
        elif contents and describe_file(path) != facts:
            problems.append(f"{name} was changed after it was written (its checksum differs)")
    return problems
