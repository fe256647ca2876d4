"""faiss with its traps handled: slow default batches, eager loading, threads after a fork, raw error texts."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from turngym.retrieval.core import RetrievalError

MATRIX_FROM = 4
"""Queries from which one matrix product beats a scan for each; measured, for 128 and 384 dimensions alike."""
SCAN_ALONE, MATRIX_ALONE = 1 << 26, 1 << 31
"""Multiplications up to which one thread answers: about 10 ms scanning, 50 ms by a matrix product."""
_ready = False
_per_dimension = True


def load_faiss() -> ModuleType:
    """The faiss module, set up once per process.

    After a fork the child keeps to one OpenMP thread: the parent's threads do not exist there, and a second thread
    would wait for them forever.

    Raises:
        RetrievalError: not installed.
    """
    global _ready, _per_dimension
    try:
        import faiss
    except ImportError as error:
        raise RetrievalError("dense retrieval needs faiss: pip install 'turngym[dense]'") from error
    if not _ready:
        # 20 in versions that count queries; 128,000 in those that count queries times dimensions
        _per_dimension = faiss.cvar.distance_compute_blas_threshold > 1000
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=lambda: faiss.omp_set_num_threads(1))
        _ready = True
    return faiss  # type: ignore[no-any-return]


@contextmanager
def quickest(index: Any, queries: int, *, exact: bool) -> Iterator[None]:
    """In this block and thread, faiss answers `queries` queries of `index` in the quickest way.

    Batches of `MATRIX_FROM` and more become a matrix product: faiss' own threshold leaves 64 queries eight times
    slower, while too low a one makes a single query wait twice as long. The threshold is one global for all indexes,
    so it is set before each search; it changes speed and last digits, nothing else.

    A small exact search runs in the calling thread alone: faiss needs twice the work to split one query between
    threads, and where cores are busy its threads spin for each other far longer than the search takes.
    """
    faiss = load_faiss()
    faiss.cvar.distance_compute_blas_threshold = MATRIX_FROM * (index.d if _per_dimension else 1)
    alone = MATRIX_ALONE if queries >= MATRIX_FROM else SCAN_ALONE
    threads = faiss.omp_get_max_threads()
    if exact and queries * index.ntotal * index.d <= alone:
        faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(threads)


def make_index(factory: str, dim: int) -> Any:
    """An empty inner product index from a factory string (`Flat`, `SQ8`, `HNSW32`, `IVF4096,SQ8`, ...).

    Raises:
        RetrievalError: faiss does not know the string, or it does not fit the dimension.
    """
    faiss = load_faiss()
    try:
        return faiss.index_factory(dim, factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        raise RetrievalError(
            f"faiss cannot make {factory!r} with {dim} dimensions ({_reason(error)}); try Flat, SQ8, HNSW32, "
            "IVF1024,Flat or IVF4096,SQ8"
        ) from error


def read_index(path: str | Path, *, mapped: bool = True) -> Any:
    """An index from a file; mapped, its pages are read when needed and shared between processes.

    `IO_FLAG_MMAP_IFC` maps Flat, SQ, IVF and HNSW alike; the older `IO_FLAG_MMAP` reads Flat and SQ into memory.

    Raises:
        RetrievalError: no such file, or not an index.
    """
    faiss = load_faiss()
    flag = getattr(faiss, "IO_FLAG_MMAP_IFC", faiss.IO_FLAG_MMAP) if mapped else 0
    if not Path(path).is_file():
        raise RetrievalError(f"{path}: there is no such faiss index; build the index again")
    try:
        return faiss.read_index(str(path), flag)
    except RuntimeError as error:
        raise RetrievalError(f"{path}: damaged faiss index ({_reason(error)}); build the index again") from error


def set_parameters(index: Any, settings: Mapping[str, float]) -> None:
    """Set search parameters by faiss' names (`nprobe`, `efSearch`, `k_factor_rf`), through wrappers too.

    Raises:
        RetrievalError: a name or value that this index does not take.
    """
    faiss = load_faiss()
    space = faiss.ParameterSpace()
    for name, value in settings.items():
        try:
            space.set_index_parameter(index, name, value)
        except RuntimeError as error:
            kind = type(faiss.downcast_index(index)).__name__
            raise RetrievalError(
                f"{kind} takes no search setting {name}={value:g} ({_reason(error)}); IVF takes nprobe, HNSW efSearch, "
                "refining indexes k_factor_rf"
            ) from error


def train_index(index: Any, vectors: np.ndarray) -> None:
    """Train on `vectors [n, dim]` where the kind of index needs it.

    Raises:
        RetrievalError: too few vectors.
    """
    if index.is_trained:
        return
    try:
        index.train(vectors)
    except RuntimeError as error:
        raise RetrievalError(
            f"{len(vectors)} vectors cannot train this index ({_reason(error)}); choose fewer clusters, or Flat"
        ) from error


def _reason(error: RuntimeError) -> str:
    """What a faiss error says, without the place in its source."""
    return re.sub(r"^Error in .*?\.(?:cpp|h):\d+: (?:Error: )?", "", " ".join(str(error).split()))
