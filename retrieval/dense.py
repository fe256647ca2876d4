"""Dense retrieval over a faiss index, whose sums differ in their last digit between a single query and a batch."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turngym.core.errors import RetrievalError
from turngym.retrieval.core import (
    Encoder,
    Hit,
    Passage,
    RetrieverUnavailable,
    check_request,
    checked_passage,
    passage_vectors,
    query_vectors,
    vector_size,
)
from turngym.retrieval.corpus import corpus_sha256
from turngym.retrieval.faiss_index import (
    add_to_index,
    check_index,
    default_parameters,
    load_faiss,
    make_index,
    quickest,
    read_index,
    search_index,
    set_parameters,
    stored_vectors,
    train_index,
)

SPARE_ROWS = 8
"""Rows that are fetched beyond k from an exact index, so that near ties can be ordered after exact scoring."""
_ROUNDING = 1e-5
"""How far faiss' inner product of two vectors of length 1 may be from ours, since it sums in the order of its kernel:
at most 4e-6 for 4,096 dimensions."""
_BLOCK = 1024
"""Passages that are encoded at a time."""
CHECKED_NUMBERS = 1 << 26
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
        check_index(self._index, len(passages), vector_size(encoder))
        settings = dict(sorted((parameters or {}).items()))
        set_parameters(self._index, settings)
        self._exact = type(self._index).__name__.startswith("IndexFlat")
        # the clusters that IVF looks into may hold no passage
        clusters = load_faiss().try_extract_index_ivf(self._index)
        self._compares_all = clusters is None
        if clusters is not None and clusters.nprobe == 1 < clusters.nlist and "nprobe" not in settings:
            warnings.warn(
                f"the index is searched in 1 of its {clusters.nlist:,} clusters, as faiss does where nobody says more, "
                "and misses most of what is near; the search setting nprobe says in how many",
                stacklevel=2,
            )
        if self._exact and 0 < self._index.ntotal * self._index.d <= CHECKED_NUMBERS:
            stored = stored_vectors(self._index)
            # both are NaN where one number is; unlike np.isfinite of all, they take no memory
            if not np.isfinite((stored.min(), stored.max())).all():
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

        Raises:
            RetrievalError: a factory string that faiss does not know, or too few passages to train it.
        """
        for passage in passages:
            checked_passage(passage, "a passage of the corpus")
        parts = (passages[start : start + _BLOCK] for start in range(0, len(passages), _BLOCK))
        dim = vector_size(encoder)
        blocks = (passage_vectors(encoder, part) for part in parts)
        # the empty block gives the shape where there are no passages
        vectors = np.concatenate([np.zeros((0, dim), np.float32), *blocks])
        index = make_index(factory, dim)
        train_index(index, vectors)
        add_to_index(index, vectors)
        fingerprint = f"dense:{factory}:{encoder.fingerprint}:corpus={corpus_sha256(passages)[:16]}"
        settings = {**default_parameters(factory), **(parameters or {})}
        return cls(index, passages, encoder, fingerprint=fingerprint, parameters=settings)

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
        vectors = query_vectors(self._encoder, queries)
        scores, rows = self.search_vectors(vectors, k)
        return [
            [Hit(passage=self._passages[row], score=score) for score, row in zip(*answer, strict=True) if row >= 0]
            for answer in zip(scores.tolist(), rows.tolist(), strict=True)
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
            fetched = min(wanted + SPARE_ROWS * self._exact, self._index.ntotal)
            distances, rows = search_index(self._index, vectors, fetched)
        nonzero = np.any(vectors, axis=1, keepdims=True)
        _check_found(rows, self._index.ntotal)
        if self._compares_all and (nonzero[:, 0] & (rows < 0).all(1)).any():
            raise RetrieverUnavailable("the index found nothing at all: its vectors are not finite")
        scores = _score(self._index, vectors, rows) if self._exact else distances
        if not np.isfinite(scores[rows >= 0]).all():
            raise RetrieverUnavailable("the index gave a score that is not finite: a vector holds too large a number")
        rows = np.where(nonzero, rows, -1)
        if self._exact and rows.shape[1] < self._index.ntotal:
            self._add_ties(vectors, scores, rows, distances[:, -1], wanted)
        # faiss fills up with row -1, which goes last whatever its score
        scores = np.where(rows >= 0, scores, -np.inf)
        order = np.lexsort((rows, -scores), axis=1)[:, :wanted]
        return np.take_along_axis(scores, order, 1), np.take_along_axis(rows, order, 1)

    def _add_ties(
        self,
        vectors: NDArray[np.float32],
        scores: NDArray[np.float32],
        rows: NDArray[np.int64],
        worst: NDArray[np.float32],
        wanted: int,
    ) -> None:
        """Searches again, by range, where rows that faiss left out may tie with the best `wanted`, and replaces those
        `scores` and `rows` [n, fetched]. They may if the worst fetched score, `worst` [n], is within rounding of the
        last wanted one."""
        least = -np.partition(-scores, wanted - 1, axis=1)[:, wanted - 1]
        stored = stored_vectors(self._index)
        for query in np.flatnonzero(rows[:, 0] >= 0):
            longest = np.linalg.norm(stored[rows[query]], axis=1).max()
            margin = _ROUNDING * float(np.linalg.norm(vectors[query]) * longest)
            if worst[query] < least[query] - margin:
                continue
            vector = vectors[query : query + 1]
            _, _, near = self._index.range_search(vector, float(least[query]) - margin)
            exact = _score(self._index, vector, near[None])[0]
            best = np.lexsort((near, -exact))[: rows.shape[1]]
            scores[query, : len(best)], rows[query, : len(best)] = exact[best], near[best]

    def close(self) -> None:
        """Unmaps the index and the passages. Twice is fine."""
        self._index = None
        close = getattr(self._passages, "close", None)
        if close is not None:
            close()


def _check_found(rows: NDArray[np.int64], passages: int) -> None:
    """Raises RetrieverUnavailable where the ids that were found are not different rows; -1 fills up."""
    if not ((rows >= -1) & (rows < passages)).all():
        raise RetrieverUnavailable(f"the index gave the id {rows.max()}; its ids must be rows, 0 to {passages - 1}")
    ordered = np.sort(rows, axis=1)
    if ((np.diff(ordered, axis=1) == 0) & (ordered[:, 1:] >= 0)).any():
        raise RetrieverUnavailable("the index gave one id twice; every passage must have one vector")


def _score(index: Any, vectors: NDArray[np.float32], rows: NDArray[np.int64]) -> NDArray[np.float32]:
    """Inner products of `vectors [n, dim]` with the index rows `[n, k]`, each summed in the same order."""
    stored = stored_vectors(index)
    scores = np.empty(rows.shape, np.float32)
    for query, vector in enumerate(vectors):
        # no matrix product, whose order of summation depends on its shape; the score of row -1 does not matter
        with np.errstate(over="ignore", invalid="ignore"):
            scores[query] = (stored[np.maximum(rows[query], 0)] * vector).sum(1)
    return scores
