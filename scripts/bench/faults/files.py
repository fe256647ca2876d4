"""Changed bytes: one random bit of a file is flipped, and what reads the file must refuse it, name it, or not care."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from turngym.envs.core.errors import TurngymError
from turngym.retrieval.core import RetrievalError
from turngym.scripts.bench.faults import targets
from turngym.scripts.bench.faults.older import OLDER
from turngym.scripts.bench.faults.tally import Tally

BAD = ("taken quietly", "traceback")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What was read: named contents, and how many problems the reader reported."""

    items: Mapping[str, bytes]
    problems: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A kind of file that this package writes and reads."""

    name: str
    write: Callable[[Path], None]
    read: Callable[[Path], targets.Found]
    """`items` and `problems` of a `Reading`."""


def flips(folder: Path, flips: int, seed: int, *, checksums: bool = True) -> Iterator[Tally]:
    """Every kind of file with `flips` changed bits, one at a time; places are drawn from all bytes of its files.

    Without `checksums`: files as older versions wrote and read them.
    """
    for number, (name, write, read) in enumerate(targets.TARGETS):
        if checksums:
            target = Target(name=name, write=write, read=read)
        else:
            target = Target(name=f"{name} without checksums", write=OLDER[name][0], read=OLDER[name][1])
        place = folder / f"{number}"
        place.mkdir(parents=True)
        target.write(place)
        yield flip_target(target, place, flips, np.random.default_rng([seed, number]))


def flip_target(target: Target, place: Path, flips: int, rng: np.random.Generator) -> Tally:
    """One kind of file."""
    tally = Tally(what=f"bit flip: {target.name}", bad=BAD)
    before = _read(target, place)
    assert isinstance(before, Reading), f"{target.name} cannot be read as it was written: {before}"
    paths = sorted(path for path in place.rglob("*") if path.is_file() and path.stat().st_size)
    ends = np.cumsum([path.stat().st_size for path in paths])
    for _ in range(flips):
        where = int(rng.integers(ends[-1]))
        number = int(np.searchsorted(ends, where, side="right"))
        offset = where - (int(ends[number - 1]) if number else 0)
        path, bit = paths[number], int(rng.integers(8))
        whole = path.read_bytes()
        changed = bytearray(whole)
        changed[offset] ^= 1 << bit
        _replace(path, bytes(changed))
        after = _read(target, place)
        tally.count(judge(before, after), f"{path.relative_to(place)}, byte {offset}, bit {bit}: {after!r:.200}")
        _replace(path, whole)
    return tally


def judge(before: Reading, after: Reading | Exception) -> str:
    """`taken quietly`: something else was read, or something is missing, and nothing was said about it."""
    if isinstance(after, TurngymError | RetrievalError):
        return "refused"
    if isinstance(after, Exception):
        return "traceback"
    if any(before.items.get(name) != content for name, content in after.items.items()):
        return "taken quietly"
    if len(after.items) == len(before.items):
        return "harmless"
    return "named" if after.problems else "taken quietly"


def _read(target: Target, place: Path) -> Reading | Exception:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            found = target.read(place)
        except Exception as error:
            return error
    ours = sum(issubclass(one.category, UserWarning) and "damaged" in str(one.message) for one in said)
    return Reading(items=found["items"], problems=found.get("problems", 0) + ours)


def _replace(path: Path, content: bytes) -> None:
    """Under a new inode: the old one may be mapped."""
    scratch = path.with_name(f".{path.name}.flip")
    scratch.write_bytes(content)
    scratch.replace(path)
