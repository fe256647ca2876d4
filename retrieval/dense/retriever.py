"""Dense retrieval over a faiss index; the traps of faiss are handled here and in `faiss_io`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turngym.retrieval.checks import check_request
from turngym.retrieval.core import Encoder, Hit, Passage, RetrievalError
from turngym.retrieval.dense.faiss_io import (
    load_faiss,
    make_index,
    quickest,
    read_index,
    set_parameters,
    train_index,
)
from turngym.retrieval.passages import corpus_sha256

SPARE = 8
"""Rows fetched beyond k from an exact index, so that near ties are ordered after exact scoring."""
_BLOCK = 1024
"""Passages encoded at a time."""


class DenseRetriever:
    """Inner product search: faiss row `i` is `passages[i]`. Safe across threads and after a fork.

    The same query gives the same hits alone and in any batch: faiss sums a single query and a batch in different order,
    so hits of an exact index are scored again row by row; equal scores go by row.
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
        """Search `index`, a faiss index or the path of one.

        Args:
            fingerprint: Fixes corpus, encoder and index; `parameters` are added to it.
            parameters: faiss search settings by name (`nprobe`, `efSearch`, ...).

        Raises:
            RetrievalError: sizes that do not fit together, or a setting the index does not have.
        """
        self._index = read_index(index) if isinstance(index, (str, Path)) else index
        self._passages, self._encoder = passages, encoder
        if self._index.ntotal != len(passages):
            raise RetrievalError(
                f"the index has {self._index.ntotal} vectors for {len(passages)} passages; build it again"
            )
        if self._index.d != encoder.dim:
            raise RetrievalError(f"the index has {self._index.d} dimensions, the encoder {encoder.dim}; build it again")
        settings = dict(sorted((parameters or {}).items()))
        set_parameters(self._index, settings)
        self._exact = type(self._index).__name__.startswith("IndexFlat")
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
        """Encode and index passages in memory: for small corpora.

        Raises:
            RetrievalError: a factory string that faiss does not know, or too few passages to train it.
        """
        blocks: Iterable[NDArray[np.float32]] = (
            encoder.encode_passages(passages[start : start + _BLOCK]) for start in range(0, len(passages), _BLOCK)
        )
        # the empty block gives the shape where there are no passages
        vectors = np.concatenate([np.zeros((0, encoder.dim), np.float32), *blocks])
        index = make_index(factory, encoder.dim)
        train_index(index, vectors)
        index.add(vectors)
        named = f"dense:{factory}:{encoder.fingerprint}:corpus={corpus_sha256(passages)[:16]}"
        return cls(index, passages, encoder, fingerprint=named, parameters=parameters)

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    def __len__(self) -> int:
        """Passages that can be found."""
        return len(self._passages)

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        check_request(queries, k)
        if not queries:
            return []
        vectors = np.ascontiguousarray(self._encoder.encode_queries(queries), np.float32)
        scores, rows = self.search_vectors(vectors, k)
        return [
            [Hit(passage=self._passages[row], score=score) for score, row in zip(*found, strict=True) if row >= 0]
            for found in zip(scores.tolist(), rows.tolist(), strict=True)
        ]

    def search_vectors(self, vectors: NDArray[np.float32], k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """(scores, rows), both `[n, k]`, best first; unused places at the end have row -1.

        A zero vector (a query without a known word) finds nothing: every passage is equally far.
        """
        if self._index is None:
            raise RetrievalError("this retriever is closed")
        wanted = min(k, self._index.ntotal)
        if not wanted:
            return np.zeros((len(vectors), 0), np.float32), np.zeros((len(vectors), 0), np.int64)
        with quickest(self._index, len(vectors), exact=self._exact):
            scores, rows = self._index.search(vectors, min(wanted + SPARE * self._exact, self._index.ntotal))
        if self._exact:
            scores = _score(self._index, vectors, rows)
        rows = np.where(vectors.any(1, keepdims=True), rows, -1)
        # faiss fills up with row -1; those go last, whatever their score says.
        scores = np.where(rows >= 0, scores, -np.inf)
        order = np.lexsort((rows, -scores), axis=1)[:, :wanted]
        return np.take_along_axis(scores, order, 1), np.take_along_axis(rows, order, 1)

    def close(self) -> None:
        """Unmap the index and the passages; twice is fine."""
        self._index = None
        close = getattr(self._passages, "close", None)
        if close is not None:
            close()


def _score(index: Any, vectors: NDArray[np.float32], rows: NDArray[np.int64]) -> NDArray[np.float32]:
    """Inner products of `vectors [n, dim]` with the index rows `[n, k]`, each summed in the same order."""
    faiss = load_faiss()
    stored = faiss.rev_swig_ptr(index.get_xb(), index.ntotal * index.d).reshape(index.ntotal, index.d)
    scores = np.empty(rows.shape, np.float32)
    for place, vector in enumerate(vectors):
        # not a matrix product, whose order of summation depends on its shape; row -1 may score anything, it goes last
        scores[place] = (stored[np.maximum(rows[place], 0)] * vector).sum(1)
    return scores
