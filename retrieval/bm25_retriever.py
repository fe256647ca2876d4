"""BM25 as a retriever of passages, with Lucene's ranking over title and text, as Search-R1 has it through Pyserini.

`LuceneIndex` finds ids of documents; `BM25Retriever` finds passages with it. `lucene_text.py` cuts text into terms;
the formula is in `bm25_scores.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from turngym.core.errors import RetrievalError
from turngym.retrieval.bm25_build import build_index
from turngym.retrieval.bm25_index import IndexArrays, Settings, open_parts
from turngym.retrieval.bm25_scores import IndexSearcher
from turngym.retrieval.core import Hit, Passage, check_request, checked_passage
from turngym.retrieval.lucene_text import analyze


class LuceneIndex:
    """A BM25 index over English terms, in memory or mapped from a folder; threads may share it.

    Scores are float32 and ties go to the smaller id, as Pyserini's LuceneSearcher ranks. Documents that share no term
    with the query are never found.
    """

    def __init__(self, parts: IndexArrays) -> None:
        self._parts: IndexArrays | None = parts
        self._searcher = IndexSearcher(parts)
        self.settings = parts.settings
        self.statistics = parts.statistics
        self.fingerprint = parts.statistics.fingerprint(parts.settings)
        """Identifies documents, analysis and constants."""

    @classmethod
    def build(
        cls,
        docs: Iterable[tuple[str, str]],
        folder: str | Path | None = None,
        *,
        k1: float = 0.9,
        b: float = 0.4,
        progress: Callable[[int], None] | None = None,
    ) -> LuceneIndex:
        """Indexes (id, text) pairs; row n is the n-th pair.

        With a folder, the index is moved there in one step at the end, memory stays bounded, and a build that was
        killed continues where its files end.

        Args:
            folder: a new or an empty one, or one with an index, which is replaced; None: the index stays in memory.
            k1: how much repeats of a term count, 0 (not at all) to 100.
            b: how much long documents are discounted, 0 to 1.
            progress: is called after every thousand documents with the number read so far.

        Raises:
            RetrievalError: an id repeats or is no text, the folder holds something else, or another process builds it.
        """
        settings = Settings(k1=float(k1), b=float(b))
        parts = build_index(docs, None if folder is None else Path(folder), settings, progress)
        return cls(parts) if parts is not None else cls.open(Path(str(folder)))

    @classmethod
    def open(cls, folder: str | Path) -> LuceneIndex:
        """Map an index that `build` wrote.

        Raises:
            RetrievalError: no index, damaged, or of another version.
        """
        return cls(open_parts(Path(folder)))

    @property
    def ids(self) -> Sequence[str]:
        """External id of each row."""
        return self._opened().ids

    def __len__(self) -> int:
        return self.statistics.documents

    def search(self, query: str, k: int) -> list[tuple[str, float]]:
        """(id, score) of the best `k` (>= 1) documents, best first.

        Raises:
            RetrievalError: k below 1, or the index is closed.
        """
        rows, scores = self.search_rows(query, k)
        ids = self._opened().ids
        return [(ids[row], score) for row, score in zip(rows.tolist(), scores.tolist(), strict=True)]

    def search_rows(self, query: str, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Searches as `search` does, and returns (rows int32, scores float32)."""
        parts = self._opened()
        if k < 1:
            raise RetrievalError(f"k={k}: at least one document must be asked for")
        number = parts.terms.number
        counted = ((number(term), times) for term, times in Counter(analyze(query)).items())
        terms = [(term, times) for term, times in counted if term is not None]
        return self._searcher.search(terms, int(k))

    def close(self) -> None:
        """Releases the arrays and files. Twice is fine."""
        if self._parts is not None:
            for store in self._parts.stores:
                store.close()
            self._parts = None
            del self._searcher

    def _opened(self) -> IndexArrays:
        if self._parts is None:
            raise RetrievalError("this LuceneIndex is closed")
        return self._parts


def indexed_documents(passages: Iterable[Passage]) -> Iterable[tuple[str, str]]:
    """(id, text) of passages as BM25 indexes them: title and text in one."""
    return ((passage.id, passage.contents) for passage in passages)


class BM25Retriever:
    """A `Retriever` over a `LuceneIndex` and the passages that it was made of; threads may share it."""

    def __init__(self, index: LuceneIndex, passages: Sequence[Passage]) -> None:
        """Takes an index and its passages, row by row the same; both are closed with the retriever.

        Raises:
            RetrievalError: their counts or a few ids show that they are not of the same corpus.
        """
        if len(index) != len(passages):
            raise RetrievalError(f"the index has {len(index)} documents, but there are {len(passages)} passages")
        for row in {0, len(index) // 2, len(index) - 1} if len(index) else ():
            if index.ids[row] != passages[row].id:
                raise RetrievalError(
                    f"row {row} is {index.ids[row]!r} in the index and {passages[row].id!r} in the passages; they are "
                    "of different corpora: build the index again"
                )
        self._index = index
        self._passages = passages
        self.fingerprint = f"bm25:{index.fingerprint}"
        """Identifies the passages, the analysis, k1 and b."""

    @classmethod
    def from_passages(cls, passages: Iterable[Passage], *, k1: float = 0.9, b: float = 0.4) -> BM25Retriever:
        """Indexes passages in memory. Raises RetrievalError if an id repeats."""
        stored = passages if isinstance(passages, Sequence) else tuple(passages)
        for passage in stored:
            checked_passage(passage, "a passage of the corpus")
        return cls(LuceneIndex.build(indexed_documents(stored), k1=k1, b=b), stored)

    def __len__(self) -> int:
        return len(self._index)

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """Finds for each query `k` passages at most, best first, ties by id; none if no term is shared.

        Raises:
            RetrievalError: one string instead of a sequence of them, k below 1, or closed.
        """
        check_request(queries, k)
        answers: list[list[Hit]] = []
        for query in queries:
            rows, scores = self._index.search_rows(query, k)
            pairs = zip(rows.tolist(), scores.tolist(), strict=True)
            answers.append([Hit(passage=self._passages[row], score=score) for row, score in pairs])
        return answers

    def close(self) -> None:
        """Releases the index and the passages. Twice is fine."""
        self._index.close()
        close = getattr(self._passages, "close", None)
        if close is not None:
            close()
