"""Retrieval: BM25 as Lucene ranks, dense and hybrid search, their server and client. Imports no other room.

from turngym.retrieval import open_retriever
hits = open_retriever("bm25:corpus.jsonl").search(["who wrote Hamlet"], 3)

The names in `__all__` may be relied on; each is imported when it is first asked for.
"""

from importlib import import_module as _import_module
from typing import Any as _Any

_HOME = {
    "BM25Retriever": "bm25",
    "CoverageReranker": "rerank",
    "CrossEncoderReranker": "rerank",
    "DenseRetriever": "dense.retriever",
    "Encoder": "core",
    "EncoderStyle": "encoders.hugging_face",
    "HashingEncoder": "encoders.hashing",
    "Hit": "core",
    "HttpRetriever": "client",
    "HuggingFaceEncoder": "encoders.hugging_face",
    "HybridRetriever": "hybrid",
    "Passage": "core",
    "Reranker": "rerank",
    "RerankingRetriever": "rerank",
    "RetrievalError": "core",
    "Retriever": "core",
    "RetrieverUnavailable": "core",
    "corpus_sha256": "corpus",
    "open_retriever": "open",
    "read_corpus": "corpus",
}
"""Public name -> module of this folder; `__init__.pyi` says the same to type checkers, and a test compares the two."""
__all__ = list(_HOME)


def __getattr__(name: str) -> _Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(_import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
