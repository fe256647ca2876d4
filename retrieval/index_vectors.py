"""How passages become a faiss index on disk: encoded in shards, then indexed without holding the index in memory.

`write_vectors` encodes, `add_vectors` indexes. Flat, SQ and IVF files are written shard by shard in faiss' own formats.
These are not taken on trust: a small trial must come out byte for byte as faiss writes it, or else the index is built
in memory.
"""

from __future__ import annotations

import os
import re
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from turngym.core.errors import RetrievalError
from turngym.core.user_files import library_path
from turngym.retrieval.core import Encoder, Passage, passage_vectors, vector_size
from turngym.retrieval.faiss_index import add_to_index, load_faiss, make_index, read_index, train_index

_ADD = 16_384
"""Vectors per call of faiss."""
_LISTS = b"ilar"
"""Begins the inverted lists in the file of an IVF index."""
Vectors = NDArray[np.float32]
Done = Callable[[int], None]
"""Is called with a number of vectors after they were added."""


def blocks(shards: Sequence[Vectors]) -> Iterator[Vectors]:
    """Yields contiguous float32 pieces of all shards in order."""
    for shard in shards:
        for start in range(0, len(shard), _ADD):
            yield np.ascontiguousarray(shard[start : start + _ADD], np.float32)


def write_flat(index: Any, shards: Sequence[Vectors], rows: int, file: IO[bytes], done: Done) -> bool:
    """Writes a trained Flat or SQ index with the vectors of all shards; returns False and writes nothing for others."""
    faiss = load_faiss()
    if not isinstance(index, (faiss.IndexFlat, faiss.IndexScalarQuantizer)):
        return False
    empty = faiss.serialize_index(index).tobytes()
    probe = np.random.default_rng(0).standard_normal((3, index.d)).astype(np.float32)
    trial = faiss.clone_index(index)
    trial.add(probe)
    written = faiss.serialize_index(trial).tobytes()
    # the length for three vectors is read, because faiss counts floats for one kind and bytes for the other
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
    """Whether `write_lists` writes this empty IVF index as faiss does; tried with the vectors `draw(clusters)`."""
    faiss = load_faiss()
    if not isinstance(index, faiss.IndexIVF):
        return False
    lists = _LISTS + struct.pack("<QQ", index.nlist, index.code_size) + b"sprs" + bytes(8)
    if not faiss.serialize_index(index).tobytes().endswith(lists):
        return False
    trial, full = draw(index.nlist), faiss.clone_index(index)
    full.add(trial)
    parts = [_sorted_codes(index, part) for part in (trial[: len(trial) // 2], trial[len(trial) // 2 :])]
    return b"".join(_ivf_file(index, parts)) == faiss.serialize_index(full).tobytes()


def write_lists(index: Any, shards: Sequence[Vectors], folder: Path, file: IO[bytes], done: Done) -> None:
    """Encodes every shard into `folder`, skipping those that are there, then gathers list after list into `file`.

    `folder` gets the encoded shards, and may have some of an earlier build.
    """
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
    record = np.dtype([("list", "<i8"), ("row", "<i8"), ("code", np.uint8, (index.code_size,))])
    out = np.empty(len(shard), record)
    width = index.coarse_code_size()
    start = 0
    for block in blocks([shard]):
        coded = index.sa_encode(block)
        list_numbers = np.zeros((len(block), 8), np.uint8)
        # faiss packs the number of a list into as few bytes as it needs, the lowest first
        list_numbers[:, :width] = coded[:, :width]
        part = out[start : start + len(block)]
        part["list"], part["code"] = list_numbers.view("<i8")[:, 0], coded[:, width:]
        start += len(block)
    out["row"] = np.arange(len(shard))
    return out[np.argsort(out["list"], kind="stable")]


def _ivf_file(index: Any, parts: Sequence[NDArray[np.void]]) -> Iterator[bytes]:
    """Yields the file of `index` with the codes of all parts, piece by piece."""
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


def _head(start: bytes, rows: int) -> bytes:
    """The head of a file: four bytes of kind, four of dimension, then the number of rows, then the rest of `start`."""
    return start[:8] + struct.pack("<Q", rows) + start[16:]


Progress = Callable[[str, int, int | None], None]
_BLOCK = 1024
"""Passages per call of the encoder."""


def write_vectors(store: Sequence[Passage], encoder: Encoder, folder: Path, shard_rows: int, report: Progress) -> None:
    """Encodes passages into `folder/00000.npy` ... (float32 `[shard_rows, dim]`), skipping shards that are there."""
    folder.mkdir(exist_ok=True)
    for start in range(0, len(store), shard_rows):
        rows = min(shard_rows, len(store) - start)
        path = folder / f"{start // shard_rows:05d}.npy"
        with suppress(OSError, ValueError):
            if np.load(path, mmap_mode="r").shape == (rows, vector_size(encoder)):
                report("vectors", start + rows, len(store))
                continue
        scratch = path.with_suffix(".tmp")
        with scratch.open("wb") as file:
            head = {"descr": "<f4", "fortran_order": False, "shape": (rows, vector_size(encoder))}
            np.lib.format.write_array_header_1_0(file, head)
            for first in range(start, start + rows, _BLOCK):
                block = store[first : min(first + _BLOCK, start + rows)]
                try:
                    vectors = passage_vectors(encoder, block)
                except RetrievalError as error:
                    raise RetrievalError(f"passages {first} to {first + len(block) - 1}: {error}") from error
                file.write(vectors.astype("<f4", copy=False).data)
                report("vectors", first + len(block), len(store))
            file.flush()
            # before the rename, which may reach the disk first: a shard with a final name but lost content would be
            # skipped
            os.fsync(file.fileno())
        os.replace(scratch, path)


def add_vectors(folder: Path, path: Path, factory: str, dim: int, rows: int, report: Progress) -> None:
    """Trains on a sample, adds all shards in order, and writes the faiss index to `path` unless it is there.

    Flat, SQ and IVF go to disk shard by shard, and a killed build continues with the shards that it has coded. Other
    kinds (HNSW, wrappers) keep all codes in memory until they are written, but the vectors of one piece only.

    Args:
        rows: number of passages. Raises RetrievalError if the shards have another number of vectors.
        report: is called with `training` at its start, then with `index`, the vectors done, and all vectors.
    """
    if path.is_file():
        return
    shards = [np.load(shard, mmap_mode="r") for shard in sorted(folder.glob("*.npy"))]
    if (total := sum(len(shard) for shard in shards)) != rows:
        raise RetrievalError(f"{folder}: {total} vectors for {rows} passages; build again with --restart")
    faiss = load_faiss()
    index = _trained(shards, path, factory, dim, report)
    codes, added = path.with_name(path.name + ".lists"), 0

    def done(count: int) -> None:
        nonlocal added
        added += count
        report("index", added, rows)

    scratch = path.with_name(path.name + ".tmp")
    with scratch.open("wb") as file:
        streamed = write_flat(index, shards, rows, file, done)
        # two vectors per cluster fill most clusters; the form of the file depends on how many are empty
        if not streamed and streams_ivf(index, lambda clusters: sample(shards, min(rows, 2 * clusters))):
            write_lists(index, shards, codes, file, done)
            streamed = True
    if not streamed:
        for block in blocks(shards):
            add_to_index(index, block)
            done(len(block))
        faiss.write_index(index, str(library_path(scratch.parent) / scratch.name))
    os.replace(scratch, path)
    shutil.rmtree(codes, ignore_errors=True)
    _trained_path(path).unlink(missing_ok=True)


def _trained(shards: Sequence[NDArray[np.float32]], path: Path, factory: str, dim: int, report: Progress) -> Any:
    """The empty, trained index. It is kept on disk until the index is written, because training takes long."""
    faiss = load_faiss()
    trained_path = _trained_path(path)
    if trained_path.is_file():
        return read_index(trained_path, mapped=False)
    index = make_index(factory, dim)
    if not index.is_trained:
        report("training", 0, None)
        train_index(index, sample(shards, min(sum(map(len, shards)), training_rows(factory))))
        scratch = trained_path.with_name(trained_path.name + ".tmp")
        faiss.write_index(index, str(library_path(scratch.parent) / scratch.name))
        os.replace(scratch, trained_path)
    return index


def _trained_path(path: Path) -> Path:
    return path.with_name(path.name + ".trained")


def training_rows(factory: str) -> int:
    """Number of vectors for training: 48 per cluster (faiss warns below 39), at least 65,536."""
    match = re.search(r"IVF(\d+)", factory)
    return max(65_536, 48 * int(match.group(1)) if match else 0)


def sample(shards: Sequence[NDArray[np.float32]], rows: int) -> NDArray[np.float32]:
    """Draws `rows` vectors evenly without replacement, the same ones for the same sizes."""
    sizes = [len(shard) for shard in shards]
    chosen = np.sort(np.random.default_rng(0).choice(sum(sizes), rows, replace=False))
    bounds = np.searchsorted(chosen, np.cumsum([0, *sizes]))
    starts = np.cumsum([0, *sizes])
    rows_of = [chosen[bounds[i] : bounds[i + 1]] - starts[i] for i in range(len(shards))]
    return np.concatenate([np.asarray(shard[own], np.float32) for shard, own in zip(shards, rows_of, strict=True)])
