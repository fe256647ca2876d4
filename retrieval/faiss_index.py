"""What turngym asks of faiss: making, filling, reading, tuning and searching an index, with the traps handled.

These are: slow default batches, eager loading, threads after a fork, and error texts with places in its source.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turngym.core.errors import RetrievalError
from turngym.core.redaction import brief
from turngym.core.user_files import library_path

MATRIX_FROM = 4
"""Queries from which on one matrix product is faster than a scan for each (measured at 128 and 384 dimensions)."""
SCAN_ALONE, MATRIX_ALONE = 1 << 26, 1 << 31
"""Up to this many multiplications one thread answers: about 10 ms for scans, 50 ms for a matrix product."""
_ready = False
_per_dimension = True


def load_faiss() -> ModuleType:
    """Imports faiss and sets it up once per process. Raises RetrievalError if it is not installed.

    After a fork, the child uses one OpenMP thread only: the parent's threads do not exist there, and a second thread
    would wait for them forever.
    """
    global _ready, _per_dimension
    try:
        import faiss
    except ImportError as error:
        raise RetrievalError("dense retrieval needs faiss: pip install 'turngym[dense]'") from error
    if not _ready:
        # the default is 20 in versions that count queries, 128,000 in those that count queries times dimensions
        _per_dimension = faiss.cvar.distance_compute_blas_threshold > 1000
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=lambda: faiss.omp_set_num_threads(1))
        _ready = True
    return faiss  # type: ignore[no-any-return]


@contextmanager
def quickest(index: Any, queries: int, *, exact: bool) -> Iterator[None]:
    """Lets faiss answer `queries` queries of `index` in the quickest way, in this block and thread.

    Batches of `MATRIX_FROM` and more become a matrix product. With faiss' own threshold, 64 queries are eight times
    slower; with too low a one, a single query takes twice as long. The threshold is one global for all indexes, so it
    is set before each search. It changes speed and last digits only.

    A small exact search runs in the calling thread alone: splitting one query between threads doubles the work, and on
    busy cores the threads of faiss spin for each other far longer than the search takes.
    """
    faiss = load_faiss()
    faiss.cvar.distance_compute_blas_threshold = MATRIX_FROM * (index.d if _per_dimension else 1)
    limit = MATRIX_ALONE if queries >= MATRIX_FROM else SCAN_ALONE
    threads = faiss.omp_get_max_threads()
    if exact and queries * index.ntotal * index.d <= limit:
        faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(threads)


def make_index(factory: str, dim: int) -> Any:
    """Makes an empty inner product index from a factory string (`Flat`, `SQ8`, `HNSW32`, `IVF4096,SQ8`, ...).

    Raises:
        RetrievalError: faiss does not know the string, or it does not fit the dimension.
    """
    faiss = load_faiss()
    with _refusals(f"faiss cannot make {factory!r} with {dim} dimensions", f"try {_KINDS}"):
        return faiss.index_factory(dim, factory, faiss.METRIC_INNER_PRODUCT)


_KINDS = "Flat, SQ8, HNSW32, IVF1024,Flat or IVF4096,SQ8"


@contextmanager
def _refusals(action: str, advice: str) -> Iterator[None]:
    """Inside, what faiss raises becomes a RetrievalError."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        # without the place in its source
        reason = re.sub(r"^Error in .*?\.(?:cpp|h):\d+: (?:Error: )?", "", " ".join(str(error).split()))
        raise RetrievalError(f"{action} ({reason}); {advice}") from error


SMALL_FILE = 1 << 20
"""Most bytes of a file that is read rather than mapped."""


def read_index(path: str | Path, *, mapped: bool = True) -> Any:
    """Reads an index from a file; if mapped, its pages are read when needed and shared between processes.

    `IO_FLAG_MMAP_IFC` maps Flat, SQ, IVF and HNSW alike; the older `IO_FLAG_MMAP` reads Flat and SQ into memory.

    Raises:
        RetrievalError: no such file, or not an index.
    """
    faiss = load_faiss()
    if not Path(path).is_file():
        raise RetrievalError(f"{path}: there is no such faiss index; build the index again")
    # faiss' mapped reader ends the process if a file ends within its header; there is little to share in a small one
    mapped = mapped and Path(path).stat().st_size > SMALL_FILE
    flag = getattr(faiss, "IO_FLAG_MMAP_IFC", faiss.IO_FLAG_MMAP) if mapped else 0
    # no list in it is longer than the file, whatever length it says
    if hasattr(faiss, "set_deserialization_vector_byte_limit"):
        faiss.set_deserialization_vector_byte_limit(Path(path).stat().st_size + SMALL_FILE)
    with _refusals(f"{path}: damaged faiss index", "build the index again"):
        return faiss.read_index(str(library_path(Path(path).parent) / Path(path).name), flag)


RANGES = {"nprobe": (1, 2**20), "ef": (1, 2**20), "k_factor": (1, 2**10)}
"""Least and largest value of search settings by how their names begin. Memory grows with the last two."""


def default_parameters(factory: str) -> dict[str, float]:
    """Search settings for a factory string. faiss' own, such as one probed cluster of thousands, find too little."""
    if match := re.search(r"IVF(\d+)", factory):
        return {"nprobe": float(max(32, int(match.group(1)) // 32))}
    if "HNSW" in factory:
        return {"efSearch": 64.0}
    return {}


def set_parameters(index: Any, settings: Mapping[str, float]) -> None:
    """Sets search parameters by faiss' names (`nprobe`, `efSearch`, `k_factor_rf`), through wrappers too.

    Raises:
        RetrievalError: a name or value that this index does not take.
    """
    faiss = load_faiss()
    space = faiss.ParameterSpace()
    for name, value in settings.items():
        # faiss takes any number, cuts it to a whole one, and fails in the search or finds nothing
        kind = name.rpartition("quantizer_")[2]
        least, most = next((bounds for start, bounds in RANGES.items() if kind.startswith(start)), (0, 2**31 - 1))
        integral = not kind.startswith("k_factor")
        in_range = isinstance(value, int | float) and least <= value <= most
        if not in_range or (integral and value != int(value)):
            wanted = f"a {'whole ' * integral}number from {least} to {most:,}"
            raise RetrievalError(f"the search setting {name} is {value!r}; it must be {wanted}")
        advice = "IVF takes nprobe, HNSW efSearch, refining indexes k_factor_rf"
        with _refusals(f"{_kind(index)} takes no search setting {name}={value:g}", advice):
            space.set_index_parameter(index, name, value)


def try_index(factory: str, dim: int, parameters: Mapping[str, float], rows: int) -> None:
    """Adds and searches as many random vectors as `rows` allow, up to 256, which takes no time beside encoding.

    Kinds that must be trained are not tried, because the number of vectors that they need may be larger.

    Raises:
        RetrievalError: this kind of index cannot be filled or searched.
    """
    index = make_index(factory, dim)
    if not index.is_trained or not rows:
        return
    vectors = np.random.default_rng(0).standard_normal((min(rows, 256), dim)).astype(np.float32)
    add_to_index(index, vectors)
    set_parameters(index, parameters)
    search_index(index, vectors[:1], 1)


def add_to_index(index: Any, vectors: np.ndarray) -> None:
    """Adds `vectors [n, dim]` to a trained index. Raises RetrievalError where faiss cannot."""
    with _refusals(f"{_kind(index)} cannot take {len(vectors)} vectors", f"try the factory {_KINDS}"):
        index.add(vectors)


def search_index(index: Any, vectors: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """(scores, rows) of faiss, both `[n, k]`. Raises RetrievalError where faiss cannot search with its settings."""
    advice = "give other search settings, or build it with another factory"
    with _refusals(f"{_kind(index)} cannot be searched", advice):
        scores, rows = index.search(vectors, k)
    return scores, rows


def _kind(index: Any) -> str:
    return type(load_faiss().downcast_index(index)).__name__


def train_index(index: Any, vectors: np.ndarray) -> None:
    """Trains on `vectors [n, dim]` if the kind of index needs it. Raises RetrievalError for too few vectors."""
    if not index.is_trained:
        with _refusals(f"{len(vectors)} vectors cannot train this index", "choose fewer clusters, or Flat"):
            index.train(vectors)


def check_index(index: Any, passages: int, dim: int) -> None:
    """Raises RetrievalError unless `index` finds rows of so many passages by inner product."""
    faiss = load_faiss()
    if not isinstance(index, faiss.Index):
        raise RetrievalError(f"the index is {brief(index, 80)}; it must be a faiss index, or the path of one")
    if index.metric_type != faiss.METRIC_INNER_PRODUCT:
        names = {faiss.METRIC_L2: "L2", faiss.METRIC_L1: "L1"}
        raise RetrievalError(
            f"{_kind(index)} measures by the metric {names.get(index.metric_type, index.metric_type)}; valid: "
            "METRIC_INNER_PRODUCT, which gives vectors of length 1 the same order as L2"
        )
    if index.ntotal != passages:
        raise RetrievalError(f"the index has {index.ntotal} vectors for {passages} passages; build it again")
    if index.d != dim:
        raise RetrievalError(f"the index has {index.d} dimensions, the encoder {dim}; build it again")
    if passages and (ids := _own_ids(index)) is not None:
        seen = np.zeros(passages, bool)
        for block in ids:
            seen[block[(block >= 0) & (block < passages)]] = True
        # there are as many ids as passages: where all rows are among them, nothing else is
        if not seen.all():
            raise RetrievalError(
                f"the index has ids of its own, and {passages - int(seen.sum())} of the rows 0 to {passages - 1} are "
                "not among them; every passage must have one vector, whose id is its row"
            )


def _own_ids(index: Any) -> Iterable[NDArray[np.int64]] | None:
    """The ids that an index gives its vectors, in parts; None where they are counted from 0."""
    faiss = load_faiss()
    inner = faiss.downcast_index(index)
    while isinstance(inner, faiss.IndexPreTransform | faiss.IndexRefine):
        inner = faiss.downcast_index(inner.index if isinstance(inner, faiss.IndexPreTransform) else inner.base_index)
    # it knows its own ids; those of the index in it are places of this list
    if isinstance(inner, faiss.IndexIDMap):
        return [faiss.vector_to_array(inner.id_map)]
    if isinstance(inner, faiss.IndexIVF):
        lists = inner.invlists
        sizes = ((number, lists.list_size(number)) for number in range(inner.nlist))
        return (faiss.rev_swig_ptr(lists.get_ids(number), size) for number, size in sizes if size)
    return None


def stored_vectors(index: Any) -> NDArray[np.float32]:
    """The vectors of a flat index, [rows, dim], without a copy."""
    vectors: NDArray[np.float32] = load_faiss().rev_swig_ptr(index.get_xb(), index.ntotal * index.d)
    return vectors.reshape(index.ntotal, index.d)
