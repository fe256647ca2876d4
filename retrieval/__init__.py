"""Retrieval: BM25 as Lucene ranks, dense and hybrid search, their server and client. Imports no other room.

    from turngym.retrieval import open_retriever
    hits = open_retriever("bm25:corpus.jsonl").search(["who wrote Hamlet"], 3)

The names in `__all__` may be relied on; each is imported when it is first used.
"""

from importlib import import_module as _import_module
from typing import Any as _Any

_PUBLIC = {
    "BM25Retriever": "turngym.retrieval.bm25",
    "CoverageReranker": "turngym.retrieval.rerank",
    "CrossEncoderReranker": "turngym.retrieval.rerank",
    "DenseRetriever": "turngym.retrieval.dense.retriever",
    "Encoder": "turngym.retrieval.core",
    "EncoderStyle": "turngym.retrieval.encoders.hugging_face",
    "HashingEncoder": "turngym.retrieval.encoders.hashing",
    "Hit": "turngym.retrieval.core",
    "HttpRetriever": "turngym.retrieval.client",
    "HuggingFaceEncoder": "turngym.retrieval.encoders.hugging_face",
    "HybridRetriever": "turngym.retrieval.hybrid",
    "Passage": "turngym.retrieval.core",
    "Reranker": "turngym.retrieval.rerank",
    "RerankingRetriever": "turngym.retrieval.rerank",
    "RetrievalError": "turngym.retrieval.core",
    "Retriever": "turngym.retrieval.core",
    "RetrieverUnavailable": "turngym.retrieval.core",
    "corpus_sha256": "turngym.retrieval.corpus",
    "open_retriever": "turngym.retrieval.open",
    "read_corpus": "turngym.retrieval.corpus",
}
"""Public name -> module that has it; `__init__.pyi` says the same to type checkers."""

__all__ = list(_PUBLIC)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> _Any:
    # the same as turngym.envs.common.lazy, which this room may not import
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(_PUBLIC)
