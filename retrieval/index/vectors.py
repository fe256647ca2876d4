"""The vectors of an index: written in shards, then put into a faiss index shard by shard."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turngym.retrieval.core import Encoder, Passage, RetrievalError
from turngym.retrieval.dense.faiss_io import load_faiss, make_index, read_index, train_index
from turngym.retrieval.index.stream import blocks, streams_ivf, write_flat, write_lists

Progress = Callable[[str, int, int | None], None]

_BLOCK = 1024
"""Passages per call of the encoder."""


def write_vectors(store: Sequence[Passage], encoder: Encoder, folder: Path, shard_rows: int, report: Progress) -> None:
    """Encode the passages into `folder/00000.npy` ... (float32 `[shard_rows, dim]`), skipping shards that are there."""
    folder.mkdir(exist_ok=True)
    for start in range(0, len(store), shard_rows):
        rows = min(shard_rows, len(store) - start)
        path = folder / f"{start // shard_rows:05d}.npy"
        if not _whole(path, rows, encoder.dim):
            _write_shard(path, store, encoder, start, rows, lambda done: report("vectors", done, len(store)))
        report("vectors", start + rows, len(store))


def add_vectors(folder: Path, path: Path, factory: str, dim: int, rows: int, report: Progress) -> None:
    """Train on a sample, add all shards in order, write the faiss index to `path` unless it is there.

    Flat, SQ and IVF go to disk shard by shard, and a killed build goes on with the shards it has coded. Other kinds
    (HNSW, wrappers) hold their codes in memory until they are written, but vectors of one piece of a shard only.
    """
    if path.is_file():
        return
    shards = [np.load(shard, mmap_mode="r") for shard in sorted(folder.glob("*.npy"))]
    if (total := sum(len(shard) for shard in shards)) != rows:
        raise RetrievalError(f"{folder}: {total} vectors for {rows} passages; build again with --restart")
    faiss = load_faiss()
    index = _trained(shards, path, factory, dim, report)
    coded, added = path.with_name(path.name + ".lists"), 0

    def done(count: int) -> None:
        nonlocal added
        added += count
        report("index", added, rows)

    scratch = path.with_name(path.name + ".tmp")
    with scratch.open("wb") as file:
        streamed = write_flat(index, shards, rows, file, done)
        # Two vectors per cluster fill most clusters: the file's form depends on how many are empty.
        if not streamed and streams_ivf(index, lambda clusters: sample(shards, min(rows, 2 * clusters))):
            write_lists(index, shards, coded, file, done)
            streamed = True
    if not streamed:
        for block in blocks(shards):
            index.add(block)
            done(len(block))
        faiss.write_index(index, str(scratch))
    os.replace(scratch, path)
    shutil.rmtree(coded, ignore_errors=True)
    _trained_path(path).unlink(missing_ok=True)


def _trained(shards: Sequence[NDArray[np.float32]], path: Path, factory: str, dim: int, report: Progress) -> Any:
    """The empty index, trained; kept on disk until the index is written, since training is worth keeping."""
    faiss = load_faiss()
    kept = _trained_path(path)
    if kept.is_file():
        return read_index(kept, mapped=False)
    index = make_index(factory, dim)
    if not index.is_trained:
        report("training", 0, None)
        train_index(index, sample(shards, min(sum(map(len, shards)), training_rows(factory))))
        scratch = kept.with_name(kept.name + ".tmp")
        faiss.write_index(index, str(scratch))
        os.replace(scratch, kept)
    return index


def _trained_path(path: Path) -> Path:
    return path.with_name(path.name + ".trained")


def training_rows(factory: str) -> int:
    """Vectors that training should see: 48 per cluster (faiss warns below 39), at least 65,536."""
    found = re.search(r"IVF(\d+)", factory)
    return max(65_536, 48 * int(found.group(1)) if found else 0)


def default_parameters(factory: str, rows: int) -> dict[str, float]:
    """Search settings that suit a factory string: faiss' own, one probed cluster of thousands, find too little."""
    if found := re.search(r"IVF(\d+)", factory):
        return {"nprobe": float(max(32, int(found.group(1)) // 32))}
    if "HNSW" in factory:
        return {"efSearch": 64.0}
    return {}


def sample(shards: Sequence[NDArray[np.float32]], rows: int, seed: int = 0) -> NDArray[np.float32]:
    """`rows` vectors drawn evenly without replacement, the same ones for the same sizes."""
    sizes = [len(shard) for shard in shards]
    chosen = np.sort(np.random.default_rng(seed).choice(sum(sizes), rows, replace=False))
    bounds = np.searchsorted(chosen, np.cumsum([0, *sizes]))
    starts = np.cumsum([0, *sizes])
    parts = [
        np.asarray(shard[chosen[bounds[i] : bounds[i + 1]] - starts[i]], np.float32) for i, shard in enumerate(shards)
    ]
    return np.concatenate(parts)


def _whole(path: Path, rows: int, dim: int) -> bool:
    try:
        return bool(np.load(path, mmap_mode="r").shape == (rows, dim))
    except (OSError, ValueError):
        return False


def _write_shard(
    path: Path, store: Sequence[Passage], encoder: Encoder, start: int, rows: int, done: Callable[[int], None]
) -> None:
    scratch = path.with_suffix(".tmp")
    with scratch.open("wb") as file:
        np.lib.format.write_array_header_1_0(
            file, {"descr": "<f4", "fortran_order": False, "shape": (rows, encoder.dim)}
        )
        for place in range(start, start + rows, _BLOCK):
            block = store[place : min(place + _BLOCK, start + rows)]
            vectors = np.ascontiguousarray(encoder.encode_passages(block), "<f4")
            if vectors.shape != (len(block), encoder.dim) or not np.isfinite(vectors).all():
                raise RetrievalError(
                    f"the encoder gave shape {vectors.shape} or values that are not finite for passages {place} to "
                    f"{place + len(block) - 1}; [{len(block)}, {encoder.dim}] finite floats are needed"
                )
            file.write(vectors.data)
            done(place + len(block))
        file.flush()
        # before the rename, which may reach the disk first: a finished name with lost content would be skipped
        os.fsync(file.fileno())
    os.replace(scratch, path)
