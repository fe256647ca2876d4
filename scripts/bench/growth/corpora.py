"""Measures over what is played on: products of a shop, passages of a corpus, tasks of a panel."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from turngym.scripts.bench.growth.measure import Measure, Work
from turngym.scripts.bench.growth.traces import SAMPLES, tasks

QUERIES = 200


def open_shop_build(folder: Path, size: int) -> Work:
    """A generated shop of `size` products, made up and written."""
    from turngym.scripts.bench.webshop.big import build_shop

    return lambda: build_shop(_fresh(folder), "generated", size)


def make_shop(folder: Path, size: int) -> None:
    open_shop_build(folder, size)()


def open_shop_search(folder: Path, size: int) -> Work:
    """`QUERIES` different queries, the exact best 50 of each."""
    from turngym.scripts.bench.webshop.big import open_catalog

    find, make_queries = open_catalog(folder / "index", "generated", size)
    return _asking(find, make_queries(QUERIES + 1))


def _asking(find: Any, queries: list[str]) -> Work:
    find(queries.pop())

    def work() -> None:
        for text in queries:
            find(text)

    return work


def make_store(folder: Path, size: int) -> None:
    """`size` made-up passages."""
    from turngym.retrieval.corpus import PassageStore
    from turngym.scripts.bench.retrieval.vectors import zipf_passages

    PassageStore.build(zipf_passages(size), folder / "passages").close()


def open_words_build(folder: Path, size: int) -> Work:
    """The BM25 index of passages that were written before."""
    from turngym.retrieval.bm25 import LuceneIndex, indexed_documents
    from turngym.retrieval.corpus import PassageStore

    store = PassageStore(folder / "passages")
    return lambda: LuceneIndex.build(indexed_documents(store), _fresh(folder)).close()


def make_words(folder: Path, size: int) -> None:
    make_store(folder, size)
    open_words_build(folder, size)()


def open_words_search(folder: Path, size: int) -> Work:
    """`QUERIES` questions, the best three passages of each."""
    from turngym.retrieval.bm25 import BM25Retriever
    from turngym.retrieval.corpus import PassageStore
    from turngym.scripts.bench.retrieval.vectors import zipf_queries

    bm25 = BM25Retriever.open(folder / "index", PassageStore(folder / "passages"))
    return _asking(lambda text: bm25.search([text], 3), zipf_queries(QUERIES + 1))


def make_manifest(folder: Path, size: int) -> None:
    from turngym.envs.panels import make_panel, write_panel

    write_panel(make_panel("bench", 1, "bench/Text-v0", {}, tasks(SAMPLES * size)), folder)


def open_panel(folder: Path, size: int) -> Work:
    """A panel read, and its hash compared."""
    from turngym.envs.panels import load_panel

    def work() -> None:
        assert len(load_panel("bench", folder).tasks) == size

    return work


def _fresh(folder: Path) -> Path:
    index = folder / "index"
    shutil.rmtree(index, ignore_errors=True)
    return index


SHOP: dict[str, Any] = {"per": "products", "sizes": (1000, 4000, 16_000), "full": (1000, 50_000, 1_180_000)}
PASSAGES: dict[str, Any] = {"per": "passages", "sizes": (3000, 10_000, 30_000), "full": (10_000, 100_000, 1_000_000)}
MAPPED = "pages of the mapped index"
MEASURES = (
    Measure(name="shop build", open=open_shop_build, holds="words and products of the index", **SHOP),
    Measure(name="shop search", open=open_shop_search, make=make_shop, shared="shop", holds=MAPPED, **SHOP),
    Measure(name="BM25 build", open=open_words_build, make=make_store, holds="words of the index", **PASSAGES),
    Measure(name="BM25 search", open=open_words_search, make=make_words, shared="words", holds=MAPPED, **PASSAGES),
    Measure(
        name="panel read",
        open=open_panel,
        make=make_manifest,
        per="tasks",
        sizes=(1000, 10_000),
        full=(1000, 10_000, 100_000),
        holds="its tasks",
    ),
)
