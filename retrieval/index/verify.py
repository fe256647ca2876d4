"""The checks that a finished index must pass before it is moved into place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from turngym.retrieval.bm25 import BM25Retriever
from turngym.retrieval.core import Encoder, RetrievalError, Retriever
from turngym.retrieval.dense.retriever import DenseRetriever
from turngym.retrieval.index.manifest import FAISS, LUCENE, PASSAGES, IndexManifest
from turngym.retrieval.lucene import LuceneIndex
from turngym.retrieval.passages import PassageStore

SAMPLE = 64
"""Passages that are looked up again."""
LEAST = 0.5
"""Share of them that must be found: less means a broken index, not a coarse one."""


def verify_index(
    work: Path,
    manifest: IndexManifest,
    encoder: Encoder | None,
    vectors: Path,
    report: Callable[[str, int, int | None], None],
) -> dict[str, float]:
    """Look a sample of passages up by their own words and vectors; return the share found per part.

    Raises:
        RetrievalError: numbers of rows that differ, or too few passages that find themselves.
    """
    shares: dict[str, float] = {}
    with PassageStore(work / PASSAGES) as store:
        rng = np.random.default_rng(0)
        rows = np.sort(rng.choice(len(store), min(SAMPLE, len(store)), replace=False))
        report("check", 0, len(rows))
        if manifest.faiss is not None and encoder is not None:
            shares["vectors"] = _vectors(work, manifest, encoder, store, vectors, rows)
        if (work / LUCENE).is_dir():
            shares["words"] = _words(work, store, rows)
        report("check", len(rows), len(rows))
    for part, share in shares.items():
        if share < LEAST:
            raise RetrievalError(
                f"{work}: only {share:.0%} of {len(rows)} sampled passages find themselves by their {part}; "
                "the index is too coarse or damaged: choose a finer factory, higher search settings, or --restart"
            )
    return shares


def _vectors(
    work: Path, manifest: IndexManifest, encoder: Encoder, store: PassageStore, vectors: Path, rows: np.ndarray
) -> float:
    """Share of rows whose stored vector finds the row, or a passage with the same words."""
    assert manifest.faiss is not None
    retriever = DenseRetriever(work / FAISS, store, encoder, fingerprint="check", parameters=manifest.faiss.parameters)
    shards = [np.load(path, mmap_mode="r") for path in sorted(vectors.glob("*.npy"))]
    starts = np.cumsum([0, *(len(shard) for shard in shards)])
    places = np.searchsorted(starts, rows, side="right") - 1
    wanted = np.stack([shards[i][row - starts[i]] for i, row in zip(places, rows, strict=True)])
    # a passage without a known word has the zero vector, which finds nothing by design
    used = wanted.any(1)
    if not used.any():
        return 1.0
    _, found = retriever.search_vectors(np.ascontiguousarray(wanted[used], np.float32), 10)
    hits = [row in line or _has_twin(store, row, line) for row, line in zip(rows[used], found, strict=True)]
    return float(np.mean(hits))


def _has_twin(store: PassageStore, row: int, found: np.ndarray) -> bool:
    """Whether a passage with the same words is among the rows `found`: of many equal ones only ten are."""
    wanted = store[int(row)].contents
    return any(store[int(other)].contents == wanted for other in found if other >= 0)


def _words(work: Path, store: PassageStore, rows: np.ndarray) -> float:
    """Share of rows found among the ten best for their own first words."""
    index = LuceneIndex.open(work / LUCENE)
    if len(index) != len(store):
        raise RetrievalError(f"{work}: {len(index)} passages indexed for {len(store)}; build again with --restart")
    retriever: Retriever = BM25Retriever(index, store)
    sampled = [store[int(row)] for row in rows]
    hits = retriever.search([" ".join(passage.contents.split()[:40]) for passage in sampled], 10)
    # by their words and not their ids: of many equal passages only ten are found
    found = [any(hit.passage.contents == one.contents for hit in line) for one, line in zip(sampled, hits, strict=True)]
    return float(np.mean(found))
