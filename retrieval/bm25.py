"""BM25 as a retriever of passages: Lucene's ranking over title and text, as Search-R1 has it through Pyserini."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from turngym.retrieval.core import Hit, Passage, RetrievalError
from turngym.retrieval.lucene import LuceneIndex


def indexed_documents(passages: Iterable[Passage]) -> Iterable[tuple[str, str]]:
    """(id, text) of passages as BM25 indexes them: title and text in one."""
    return ((passage.id, passage.contents) for passage in passages)


class BM25Retriever:
    """A `Retriever` over a `LuceneIndex` and the passages it was made of. Safe across threads."""

    def __init__(self, index: LuceneIndex, passages: Sequence[Passage]) -> None:
        """Take an index and its passages, row by row the same; both are closed with the retriever.

        Raises:
            RetrievalError: they are not of the same corpus, as far as counts and a few ids tell.
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
        """Fixes what is found: the passages, the analysis, k1 and b."""

    @classmethod
    def from_passages(cls, passages: Iterable[Passage], *, k1: float = 0.9, b: float = 0.4) -> BM25Retriever:
        """Index passages in memory.

        Raises:
            RetrievalError: an id repeats.
        """
        kept = passages if isinstance(passages, Sequence) else tuple(passages)
        return cls(LuceneIndex.build(indexed_documents(kept), k1=k1, b=b), kept)

    @classmethod
    def open(cls, folder: str | Path, passages: Sequence[Passage]) -> BM25Retriever:
        """Map an index folder; `passages` are those it was built of, in the same order, such as a `PassageStore`.

        Raises:
            RetrievalError: no index, a damaged one, or one of other passages.
        """
        return cls(LuceneIndex.open(folder), passages)

    @property
    def passages(self) -> Sequence[Passage]:
        """What can be found, by row."""
        return self._passages

    def __len__(self) -> int:
        return len(self._index)

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """For each query at most `k` passages, best first, ties by id; none where no term is shared.

        Raises:
            RetrievalError: one string instead of a sequence of them, k below 1, or closed.
        """
        if isinstance(queries, str):
            raise RetrievalError(f"queries is the string {queries[:40]!r}; give a sequence of strings")
        return [self._hits(query, k) for query in queries]

    def _hits(self, query: str, k: int) -> list[Hit]:
        rows, scores = self._index.search_rows(query, k)
        passages = self._passages
        return [
            Hit(passage=passages[row], score=score) for row, score in zip(rows.tolist(), scores.tolist(), strict=True)
        ]

    def close(self) -> None:
        """Let the index and the passages go; twice is fine."""
        self._index.close()
        close = getattr(self._passages, "close", None)
        if close is not None:
            close()
