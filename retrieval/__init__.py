"""Retrieval: BM25 as Lucene ranks, dense and hybrid search, their server and client.

    from turngym.retrieval import open_retriever
    hits = open_retriever("bm25:corpus.jsonl").search(["who wrote Hamlet"], 3)

`__init__.pyi` lists the public names; each is imported when it is first used.
"""

import lazy_loader as _lazy

__getattr__, __dir__, __all__ = _lazy.attach_stub(__name__, __file__)
