"""Checksums of the files of a folder of ours (a model, a checkpoint), in a file beside them."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from turngym.envs.common.sealed_line import check_seal, seal
from turngym.envs.core import TurngymError

FILE = "turngym.sums"
"""Sizes and CRC-32s by file name; a folder without it (of another program, of an older version) is not compared."""
CHEAP = 1 << 32
"""Up to this many bytes a folder is compared whenever it is loaded: a second or two, less than reading it."""
_BLOCK = 1 << 24


class ChangedFileError(TurngymError):
    """A file is not as it was written."""


def write_sums(folder: Path, *, without: Collection[str] = ()) -> Path:
    """Write `turngym.sums` for all files under `folder`, except those under the names `without`."""
    names = [name for name in _files(folder) if name.partition("/")[0] not in without]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # crc32 lets other threads run
        facts = dict(zip(names, pool.map(lambda name: _describe(folder / name), names), strict=True))
    path, scratch = folder / FILE, folder / f"{FILE}.writing"
    try:
        scratch.write_text(seal(json.dumps({"files": facts})) + "\n", encoding="ascii")
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)
    return path


def changed_files(folder: Path, *, limit: float = float("inf")) -> list[str]:
    """What is wrong with the files that `turngym.sums` names; empty without it.

    Sizes are always compared, contents while they are no more than `limit` bytes together. Missing files are reported.
    """
    facts = read_sums(folder)
    contents = sum(size for size, _ in facts.values()) <= limit
    problems = []
    for name, (size, checksum) in sorted(facts.items()):
        path = folder / name
        if not path.is_file():
            problems.append(f"{name} is missing")
        elif (found := path.stat().st_size) != size:
            problems.append(f"{name} has {found} bytes, {size} were written")
        elif contents and _describe(path)[1] != checksum:
            problems.append(f"{name} was changed after it was written (its checksum differs)")
    return problems


def check_sums(folder: str | Path) -> None:
    """Raises ChangedFileError where a folder that is about to be loaded is not as it was written."""
    folder = Path(folder)
    if problems := changed_files(folder, limit=CHEAP):
        raise ChangedFileError(
            f"{folder} is damaged: {'; '.join(problems)}. Take another copy; if you changed it on purpose, delete "
            f"{folder / FILE}"
        )


def read_sums(folder: Path) -> Mapping[str, tuple[int, int]]:
    """(bytes, CRC-32) by file name; empty without `turngym.sums`. Raises ChangedFileError where that is damaged."""
    path = folder / FILE
    if not path.is_file():
        return {}
    try:
        line = path.read_bytes()
        check_seal(line)
        found: Any = json.loads(line)["files"]
        return {name: (int(size), int(checksum)) for name, (size, checksum) in found.items()}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ChangedFileError(
            f"{path} is damaged ({error}); delete it if the other files there are known to be whole"
        ) from error


def _files(folder: Path) -> list[str]:
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in names if name != FILE)


def _describe(path: Path) -> tuple[int, int]:
    size = checksum = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            size, checksum = size + len(block), zlib.crc32(block, checksum)
    return size, checksum
