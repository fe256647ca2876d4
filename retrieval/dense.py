"""Dense retrieval over a faiss index, with the traps of faiss handled.

These are: slow default batches, eager loading, threads after a fork, error texts with places in its source, and sums
that differ in their last digit between a single query and a batch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turngym.core.errors import RetrievalError
from turngym.core.redaction import brief
from turngym.core.user_files import library_path
from turngym.retrieval.core import Encoder, Hit, Passage, RetrieverUnavailable, check_request, checked_vectors
from turngym.retrieval.corpus import corpus_sha256

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
    alone = MATRIX_ALONE if queries >= MATRIX_FROM else SCAN_ALONE
    threads = faiss.omp_get_max_threads()
    if exact and queries * index.ntotal * index.d <= alone:
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
    try:
        return faiss.index_factory(dim, factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        raise RetrievalError(
            f"faiss cannot make {factory!r} with {dim} dimensions ({_reason(error)}); try Flat, SQ8, HNSW32, "
            "IVF1024,Flat or IVF4096,SQ8"
        ) from error


SMALL = 1 << 20
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
    mapped = mapped and Path(path).stat().st_size > SMALL
    flag = getattr(faiss, "IO_FLAG_MMAP_IFC", faiss.IO_FLAG_MMAP) if mapped else 0
    # no list in it is longer than the file, whatever length it says
    if hasattr(faiss, "set_deserialization_vector_byte_limit"):
        faiss.set_deserialization_vector_byte_limit(Path(path).stat().st_size + SMALL)
    try:
        return faiss.read_index(str(library_path(Path(path).parent) / Path(path).name), flag)
    except (RuntimeError, MemoryError) as error:
        raise RetrievalError(f"{path}: damaged faiss index ({_reason(error)}); build the index again") from error


RANGES = {"nprobe": (1, 2**20), "ef": (1, 2**20), "k_factor": (1, 2**10)}
"""Least and largest value of search settings by how their names begin. Memory grows with the last two."""


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
        least, most = next((found for start, found in RANGES.items() if kind.startswith(start)), (0, 2**31 - 1))
        whole = not kind.startswith("k_factor")
        number = isinstance(value, int | float) and least <= value <= most
        if not number or (whole and value != int(value)):
            wanted = f"a {'whole ' * whole}number from {least} to {most:,}"
            raise RetrievalError(f"the search setting {name} is {value!r}; it must be {wanted}")
        try:
            space.set_index_parameter(index, name, value)
        except RuntimeError as error:
            raise RetrievalError(
                f"{_kind(index)} takes no search setting {name}={value:g} ({_reason(error)}); IVF takes nprobe, "
                "HNSW efSearch, refining indexes k_factor_rf"
            ) from error


def try_index(factory: str, dim: int, parameters: Mapping[str, float], rows: int) -> None:
    """Adds and searches as many random vectors as `rows` allow, up to 256, which takes no time beside encoding.

    Kinds that must be trained are not tried, because the number of vectors that they need may be larger.

    Args:
        factory: the kind of index, as faiss writes it.
        dim: dimensions of a vector.
        parameters: faiss search settings by name.
        rows: number of passages.

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
    try:
        index.add(vectors)
    except RuntimeError as error:
        raise RetrievalError(
            f"{_kind(index)} cannot take {len(vectors)} vectors ({_reason(error)}); try the factory Flat, SQ8, HNSW32, "
            "IVF1024,Flat or IVF4096,SQ8"
        ) from error


def search_index(index: Any, vectors: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """(scores, rows) of faiss, both `[n, k]`. Raises RetrievalError where faiss cannot search with its settings."""
    try:
        scores, rows = index.search(vectors, k)
    except RuntimeError as error:
        raise RetrievalError(
            f"{_kind(index)} cannot be searched ({_reason(error)}); give other search settings, or build it with "
            "another factory"
        ) from error
    return scores, rows


def _kind(index: Any) -> str:
    return type(load_faiss().downcast_index(index)).__name__


def train_index(index: Any, vectors: np.ndarray) -> None:
    """Trains on `vectors [n, dim]` if the kind of index needs it. Raises RetrievalError for too few vectors."""
    if index.is_trained:
        return
    try:
        index.train(vectors)
    except RuntimeError as error:
        raise RetrievalError(
            f"{len(vectors)} vectors cannot train this index ({_reason(error)}); choose fewer clusters, or Flat"
        ) from error


def _reason(error: RuntimeError | MemoryError) -> str:
    """The text of a faiss error, without the place in its source."""
    return re.sub(r"^Error in .*?\.(?:cpp|h):\d+: (?:Error: )?", "", " ".join(str(error).split()))


SPARE = 8
"""Rows that are fetched beyond k from an exact index, so that near ties can be ordered after exact scoring."""
_ROUNDING = 1e-5
"""How far faiss' inner product of two vectors of length 1 may be from ours, since it sums in the order of its kernel:
at most 4e-6 for 4,096 dimensions."""
_BLOCK = 1024
"""Passages that are encoded at a time."""
LOOKED_AT = 1 << 26
"""Numbers of a flat index up to which all are looked at when it is opened, which takes a tenth of a second."""


class DenseRetriever:
    """Inner product search; faiss row `i` is `passages[i]`. It may be used by several threads and after a fork.

    The same query gives the same hits alone, in any batch and by any kernel of BLAS. Because faiss sums a single query
    and a batch in different orders, the hits of an exact index are scored again row by row; equal scores go by row,
    however many there are.
    """

    def __init__(
        self,
        index: Any,
        passages: Sequence[Passage],
        encoder: Encoder,
        *,
        fingerprint: str,
        parameters: Mapping[str, float] | None = None,
    ) -> None:
        """Takes a faiss index or the path of one.

        Args:
            index: a faiss index by inner product, or the path of one, whose pages are then mapped. Ids of its own
                (`IDMap`) are rows of `passages`.
            passages: one for each vector of the index, in the order of its rows.
            encoder: makes the vectors of queries; the one that made those of the passages.
            fingerprint: identifies corpus, encoder and index; `parameters` are added to it.
            parameters: faiss search settings by name (`nprobe`, `efSearch`, ...).

        Raises:
            RetrievalError: another metric, sizes or ids that do not fit together, vectors that are not finite, or a
                setting the index does not have.
        """
        self._index = read_index(index) if isinstance(index, (str, Path)) else index
        self._passages, self._encoder = passages, encoder
        _check_index(self._index, len(passages), encoder.dim)
        settings = dict(sorted((parameters or {}).items()))
        set_parameters(self._index, settings)
        self._exact = type(self._index).__name__.startswith("IndexFlat")
        # the clusters that IVF looks into may hold no passage
        self._compares_all = load_faiss().try_extract_index_ivf(self._index) is None
        if self._exact and 0 < self._index.ntotal * self._index.d <= LOOKED_AT and not _finite(_stored(self._index)):
            raise RetrievalError("the index holds vectors that are not finite, whose passages are never found")
        self._fingerprint = fingerprint + "".join(f":{name}={value:g}" for name, value in settings.items())

    @classmethod
    def from_passages(
        cls,
        passages: Sequence[Passage],
        encoder: Encoder,
        *,
        factory: str = "Flat",
        parameters: Mapping[str, float] | None = None,
    ) -> DenseRetriever:
        """Encodes and indexes passages in memory, for small corpora.

        Args:
            passages: the corpus; row n of the index is passage n.
            encoder: makes the vectors of passages and queries.
            factory: the kind of index, as faiss writes it (`Flat`, `HNSW32`, ...).
            parameters: search parameters of faiss, such as `nprobe`.

        Raises:
            RetrievalError: a factory string that faiss does not know, or too few passages to train it.
        """
        parts = (passages[start : start + _BLOCK] for start in range(0, len(passages), _BLOCK))
        blocks = (checked_vectors(encoder.encode_passages(part), len(part), encoder.dim) for part in parts)
        # the empty block gives the shape where there are no passages
        vectors = np.concatenate([np.zeros((0, encoder.dim), np.float32), *blocks])
        index = make_index(factory, encoder.dim)
        train_index(index, vectors)
        add_to_index(index, vectors)
        named = f"dense:{factory}:{encoder.fingerprint}:corpus={corpus_sha256(passages)[:16]}"
        return cls(index, passages, encoder, fingerprint=named, parameters=parameters)

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    def __len__(self) -> int:
        """Number of passages that can be found."""
        return len(self._passages)

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        check_request(queries, k)
        if not queries:
            return []
        vectors = checked_vectors(self._encoder.encode_queries(queries), len(queries), self._encoder.dim)
        scores, rows = self.search_vectors(vectors, k)
        return [
            [Hit(passage=self._passages[row], score=score) for score, row in zip(*found, strict=True) if row >= 0]
            for found in zip(scores.tolist(), rows.tolist(), strict=True)
        ]

    def search_vectors(self, vectors: NDArray[np.float32], k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """(scores, rows), both `[n, k]`, best first; unused places at the end have row -1.

        A zero vector (a query without a known word) finds nothing, because every passage is equally far. Raises
        RetrieverUnavailable where the index gives ids that are no rows, or scores that are not finite.
        """
        if self._index is None:
            raise RetrievalError("this retriever is closed")
        wanted = min(k, self._index.ntotal)
        if not wanted:
            return np.zeros((len(vectors), 0), np.float32), np.zeros((len(vectors), 0), np.int64)
        with quickest(self._index, len(vectors), exact=self._exact):
            found, rows = search_index(self._index, vectors, min(wanted + SPARE * self._exact, self._index.ntotal))
        asked = np.any(vectors, axis=1, keepdims=True)
        _check_found(rows, self._index.ntotal)
        if self._compares_all and (asked[:, 0] & (rows < 0).all(1)).any():
            raise RetrieverUnavailable("the index found nothing at all: its vectors are not finite")
        scores = _score(self._index, vectors, rows) if self._exact else found
        if not np.isfinite(scores[rows >= 0]).all():
            raise RetrieverUnavailable("the index gave a score that is not finite: a vector holds too large a number")
        rows = np.where(asked, rows, -1)
        if self._exact and rows.shape[1] < self._index.ntotal:
            self._add_ties(vectors, scores, rows, found[:, -1], wanted)
        # faiss fills up with row -1, which goes last whatever its score
        scores = np.where(rows >= 0, scores, -np.inf)
        order = np.lexsort((rows, -scores), axis=1)[:, :wanted]
        return np.take_along_axis(scores, order, 1), np.take_along_axis(rows, order, 1)

    def _add_ties(
        self,
        vectors: NDArray[np.float32],
        scores: NDArray[np.float32],
        rows: NDArray[np.int64],
        fetched: NDArray[np.float32],
        wanted: int,
    ) -> None:
        """Replaces `scores` and `rows` [n, fetched] of queries where a row that faiss has left out may be among the
        best `wanted`: its worst row's score, `fetched` [n], is no further from the last wanted one's than rounding."""
        least = -np.partition(-scores, wanted - 1, axis=1)[:, wanted - 1]
        stored = _stored(self._index)
        for place in np.flatnonzero(rows[:, 0] >= 0):
            longest = np.linalg.norm(stored[rows[place]], axis=1).max()
            margin = _ROUNDING * float(np.linalg.norm(vectors[place]) * longest)
            if fetched[place] < least[place] - margin:
                continue
            one = vectors[place : place + 1]
            _, _, near = self._index.range_search(one, float(least[place]) - margin)
            exact = _score(self._index, one, near[None])[0]
            best = np.lexsort((near, -exact))[: rows.shape[1]]
            scores[place, : len(best)], rows[place, : len(best)] = exact[best], near[best]

    def close(self) -> None:
        """Unmaps the index and the passages. Twice is fine."""
        self._index = None
        close = getattr(self._passages, "close", None)
        if close is not None:
            close()


def _check_index(index: Any, passages: int, dim: int) -> None:
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
        for part in ids:
            seen[part[(part >= 0) & (part < passages)]] = True
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
        sizes = ((place, lists.list_size(place)) for place in range(inner.nlist))
        return (faiss.rev_swig_ptr(lists.get_ids(place), size) for place, size in sizes if size)
    return None


def _finite(vectors: NDArray[np.float32]) -> bool:
    # both are NaN where one number is; unlike np.isfinite of all, they take no memory
    return bool(np.isfinite(vectors.min()) and np.isfinite(vectors.max()))


def _check_found(rows: NDArray[np.int64], passages: int) -> None:
    """Raises RetrieverUnavailable where the ids that were found are not different rows; -1 fills up."""
    if not ((rows >= -1) & (rows < passages)).all():
        raise RetrieverUnavailable(f"the index gave the id {rows.max()}; its ids must be rows, 0 to {passages - 1}")
    ordered = np.sort(rows, axis=1)
    if ((np.diff(ordered, axis=1) == 0) & (ordered[:, 1:] >= 0)).any():
        raise RetrieverUnavailable("the index gave one id twice; every passage must have one vector")


def _score(index: Any, vectors: NDArray[np.float32], rows: NDArray[np.int64]) -> NDArray[np.float32]:
    """Inner products of `vectors [n, dim]` with the index rows `[n, k]`, each summed in the same order."""
    stored = _stored(index)
    scores = np.empty(rows.shape, np.float32)
    for place, vector in enumerate(vectors):
        # no matrix product, whose order of summation depends on its shape; the score of row -1 does not matter
        with np.errstate(over="ignore", invalid="ignore"):
            scores[place] = (stored[np.maximum(rows[place], 0)] * vector).sum(1)
    return scores


def _stored(index: Any) -> NDArray[np.float32]:
    """The vectors of a flat index, [rows, dim], without a copy."""
    found: NDArray[np.float32] = load_faiss().rev_swig_ptr(index.get_xb(), index.ntotal * index.d)
    return found.reshape(index.ntotal, index.d)
