"""What searches for an environment? BM25 over the questions' own corpus, or whatever the caller names."""

from __future__ import annotations

import os
from functools import lru_cache

from cachetools import LRUCache, cached

from turngym.core.errors import EnvBackendError, RetrievalError, TaskError, TurngymError
from turngym.core.rows import Stamp
from turngym.envs.search.questions import Question
from turngym.envs.search.sources import Corpus, Source
from turngym.retrieval.bm25_retriever import BM25Retriever
from turngym.retrieval.core import Hit, Retriever, RetrieverUnavailable, searched
from turngym.retrieval.hybrid import Reranker, RerankingRetriever, open_reranker
from turngym.retrieval.open_retriever import open_retriever, spec_stamp

_KEPT = 50_000
"""Passages of all that are kept; the last retriever is kept however large it is."""
MAX_QUERY = 2000
"""Characters of a query that are searched; the published server cuts as well (at 256 tokens)."""


class Searcher:
    """Searches for one question at a time. What it opens is shared by all environments of the process."""

    def __init__(self, source: Source, retriever: Retriever | str | None, rerank: Reranker | str | None) -> None:
        self._source = source
        self._given = retriever
        self._rerank = rerank
        # as the files are now: what was edited since another environment opened it is opened anew
        self._stamps = tuple(spec_stamp(given) if isinstance(given, str) else () for given in (retriever, rerank))

    def retriever(self, question: Question) -> Retriever:
        """The retriever for this question, opened when first needed.

        Raises:
            TaskError: none was given and the question has no corpus of its own.
            EnvBackendError: it could not be reached.
        """
        try:
            corpus = self._source.corpus(question)
            retriever_stamp, rerank_stamp = self._stamps
            opened = _opened(self._given, retriever_stamp, os.getpid()) if isinstance(self._given, str) else self._given
            if opened is None and corpus is not None:
                opened = own_retriever(corpus)
            if opened is not None:
                rerank = _loaded(self._rerank, rerank_stamp) if isinstance(self._rerank, str) else self._rerank
                return opened if rerank is None else RerankingRetriever(opened, rerank)
        except RetrieverUnavailable as error:
            raise EnvBackendError(f"the retriever cannot be opened: {error}") from error
        except RetrievalError as error:
            raise TurngymError(f"the retriever cannot be opened: {error}") from error
        raise TaskError(
            f"{question.task_id}: {question.data_source} questions come without a corpus; say what is searched with "
            "retriever=, an index folder (`turngym index build`) or the URL of a retrieval server"
        )

    def search(self, question: Question, query: str, k: int) -> tuple[Hit, ...]:
        """Finds `k` hits at most, best first; none if nothing matches. Raises EnvBackendError where the search
        failed."""
        retriever = self.retriever(question)
        try:
            [hits] = searched(retriever, [query[:MAX_QUERY]], k)
            return hits
        except RetrieverUnavailable as error:
            raise EnvBackendError(f"{question.task_id}: the search failed: {error}") from error
        except RetrievalError as error:
            raise TurngymError(f"{question.task_id}: the retriever refuses the search: {error}") from error


# one larger than the cache takes all of it; a value that does not fit would be built for every search
@cached(LRUCache(_KEPT, getsizeof=lambda retriever: min(len(retriever), _KEPT)), key=lambda corpus: corpus.sha256)
def own_retriever(corpus: Corpus) -> BM25Retriever:
    """BM25 over `corpus` in this process. It is built once, and the last ones used are cached."""
    return BM25Retriever.from_passages(corpus.passages)


@lru_cache(maxsize=8)
def _opened(spec: str, _stamp: Stamp, process: int) -> Retriever:
    """One retriever per spec, state of its files and process: a forked child must not use its parent's connections."""
    return open_retriever(spec)


@lru_cache(maxsize=2)
def _loaded(spec: str, _stamp: Stamp) -> Reranker:
    """A reranker's model is loaded once per process."""
    return open_reranker(spec)
