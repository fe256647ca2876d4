"""Writes faiss index files without holding the index: Flat, SQ and IVF go to disk shard by shard.

The file forms are faiss' own and are not taken on trust: a small trial must come out byte for byte as faiss writes it,
or the caller falls back to an index in memory.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from turngym.retrieval.dense.faiss_io import load_faiss

_ADD = 16_384
"""Vectors per call of faiss."""
_LISTS = b"ilar"
"""Starts the inverted lists in the file of an IVF index."""

Vectors = NDArray[np.float32]
Done = Callable[[int], None]


def blocks(shards: Sequence[Vectors]) -> Iterator[Vectors]:
    """Contiguous float32 pieces of all shards in order."""
    for shard in shards:
        for start in range(0, len(shard), _ADD):
            yield np.ascontiguousarray(shard[start : start + _ADD], np.float32)


def write_flat(index: Any, shards: Sequence[Vectors], rows: int, file: IO[bytes], done: Done) -> bool:
    """Write an empty trained index with the vectors of all shards; False (and nothing written) for other kinds."""
    faiss = load_faiss()
    if not isinstance(index, (faiss.IndexFlat, faiss.IndexScalarQuantizer)):
        return False
    empty = faiss.serialize_index(index).tobytes()
    probe = np.random.default_rng(0).standard_normal((3, index.d)).astype(np.float32)
    trial = faiss.clone_index(index)
    trial.add(probe)
    written = faiss.serialize_index(trial).tobytes()
    # of three vectors, read instead of computed: faiss counts floats for one kind and bytes for the other
    length = int.from_bytes(written[len(empty) - 8 : len(empty)], "little")

    def head(count: int) -> bytes:
        return _head(empty[:-8], count) + struct.pack("<Q", count * length // 3)

    if not length or head(3) + index.sa_encode(probe).tobytes() != written:
        return False
    file.write(head(rows))
    for block in blocks(shards):
        file.write(index.sa_encode(block).data)
        done(len(block))
    return True


def streams_ivf(index: Any, draw: Callable[[int], Vectors]) -> bool:
    """Whether `write_lists` writes this trained, empty index as faiss does; tried with the vectors `draw(clusters)`."""
    faiss = load_faiss()
    if not isinstance(index, faiss.IndexIVF) or not _ends_in_lists(faiss.serialize_index(index).tobytes(), index):
        return False
    trial, full = draw(index.nlist), faiss.clone_index(index)
    full.add(trial)
    parts = [_sorted_codes(index, part) for part in (trial[: len(trial) // 2], trial[len(trial) // 2 :])]
    return b"".join(_ivf_file(index, parts)) == faiss.serialize_index(full).tobytes()


def write_lists(index: Any, shards: Sequence[Vectors], folder: Path, file: IO[bytes], done: Done) -> None:
    """Encode every shard into `folder` (skipping those that are there), then gather list after list into `file`."""
    folder.mkdir(exist_ok=True)
    parts = []
    for number, shard in enumerate(shards):
        path = folder / f"{number:05d}.npy"
        if not path.is_file():
            scratch = path.with_suffix(".tmp")
            with scratch.open("wb") as out:
                np.save(out, _sorted_codes(index, shard))
            os.replace(scratch, path)
        parts.append(np.load(path, mmap_mode="r"))
        done(len(shard))
    for piece in _ivf_file(index, parts):
        file.write(piece)


def _sorted_codes(index: Any, shard: Vectors) -> NDArray[np.void]:
    """`[rows]` records (list, row within the shard, code), ordered by list, then row."""
    kind = np.dtype([("list", "<i8"), ("row", "<i8"), ("code", np.uint8, (index.code_size,))])
    out = np.empty(len(shard), kind)
    width = index.coarse_code_size()
    start = 0
    for block in blocks([shard]):
        coded = index.sa_encode(block)
        number = np.zeros((len(block), 8), np.uint8)
        # faiss packs the number of a list into as few bytes as it needs, the lowest first
        number[:, :width] = coded[:, :width]
        part = out[start : start + len(block)]
        part["list"], part["code"] = number.view("<i8")[:, 0], coded[:, width:]
        start += len(block)
    out["row"] = np.arange(len(shard))
    return out[np.argsort(out["list"], kind="stable")]


def _ivf_file(index: Any, parts: Sequence[NDArray[np.void]]) -> Iterator[bytes]:
    """The file of `index` with the codes of all parts, piece by piece."""
    faiss = load_faiss()
    empty = faiss.serialize_index(index).tobytes()
    borders = [np.searchsorted(part["list"], np.arange(index.nlist + 1)) for part in parts]
    sizes = np.sum([np.diff(border) for border in borders], axis=0).astype("<u8")
    used = np.flatnonzero(sizes)
    yield _head(empty[: empty.rindex(_LISTS)], int(sizes.sum()))
    yield _LISTS + struct.pack("<QQ", index.nlist, index.code_size)
    # faiss' own rule for which of its two forms is written
    if len(used) > index.nlist // 2:
        yield b"full" + struct.pack("<Q", index.nlist) + sizes.tobytes()
    else:
        pairs = np.stack([used.astype("<u8"), sizes[used]], axis=1)
        yield b"sprs" + struct.pack("<Q", pairs.size) + pairs.tobytes()
    starts = np.cumsum([0, *(len(part) for part in parts)])
    for number in used:
        pieces = [part[border[number] : border[number + 1]] for part, border in zip(parts, borders, strict=True)]
        yield b"".join(piece["code"].tobytes() for piece in pieces)
        yield b"".join((piece["row"] + start).tobytes() for piece, start in zip(pieces, starts, strict=False))


def _ends_in_lists(empty: bytes, index: Any) -> bool:
    return empty.endswith(_LISTS + struct.pack("<QQ", index.nlist, index.code_size) + b"sprs" + bytes(8))


def _head(start: bytes, rows: int) -> bytes:
    """Four bytes of kind, four of dimension, then the number of rows, then what else there is."""
    return start[:8] + struct.pack("<Q", rows) + start[16:]
