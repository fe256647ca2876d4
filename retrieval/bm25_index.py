"""What a BM25 index consists of, and how it lies on disk. `bm25_scores.py` searches it."""

from __future__ import annotations

import bisect
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import numpy as np

from turngym.core.errors import RetrievalError
from turngym.core.manifest import CHECKED, Files, changed_files, read_manifest
from turngym.core.memory_mapped import BlobStore, map_array
from turngym.core.sequences import LazySequence
from turngym.core.user_files import json_object
from turngym.retrieval.lucene_text import ANALYSIS

VERSION: Final = 1
"""Version of the files on disk."""
FEW_TERMS = 1 << 16
"""Up to this many ids or terms are kept as Python objects, for speed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Constants of the score."""

    k1: float = 0.9
    """How much repeats of a term count, 0 (not at all) to 100."""
    b: float = 0.4
    """How much long documents are discounted, 0 to 1."""

    def __post_init__(self) -> None:
        if not 0 <= self.k1 <= 100 or not 0 <= self.b <= 1:
            raise RetrievalError(f"k1={self.k1}, b={self.b}: k1 must be from 0 to 100 and b from 0 to 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Figures of a corpus that its scores depend on, and the hash of its content."""

    documents: int
    scored: int
    """Documents with at least one term."""
    tokens: int
    """Terms in all documents, repeats counted."""
    content: str
    """sha256 over ids and texts in order."""

    def fingerprint(self, settings: Settings) -> str:
        """sha256 over everything that results depend on."""
        facts = [VERSION, ANALYSIS, float(settings.k1), float(settings.b), self.documents, self.content]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


class Names(LazySequence[str]):
    """Strings by number over a blob store, decoded when asked for."""

    def __init__(self, blobs: Sequence[bytes]) -> None:
        self._blobs = blobs

    def __len__(self) -> int:
        return len(self._blobs)

    def item(self, index: int) -> str:
        return self._blobs[index].decode("utf-8", "surrogatepass")


class TermTable:
    """Number of a term among sorted ones: a dict while small, else a binary search in mapped bytes with a memo."""

    def __init__(self, terms: Sequence[bytes]) -> None:
        self._terms = terms
        small = len(terms) <= FEW_TERMS
        self._numbers = {term: number for number, term in enumerate(Names(terms))} if small else None
        self._memo: dict[str, int | None] = {}

    def __len__(self) -> int:
        return len(self._terms)

    def number(self, term: str) -> int | None:
        """The row of `term` in the postings; None if no document has it."""
        if self._numbers is not None:
            return self._numbers.get(term)
        # -1 stands for unknown, because None is an answer; one lookup, because another thread may empty the memo
        remembered = self._memo.get(term, -1)
        if remembered != -1:
            return remembered
        wanted = term.encode("utf-8", "surrogatepass")
        position = bisect.bisect_left(self._terms, wanted)
        row = position if position < len(self._terms) and self._terms[position] == wanted else None
        if len(self._memo) >= FEW_TERMS:
            self._memo.clear()
        self._memo[term] = row
        return row


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexArrays:
    """Arrays of an index. `starts[t]` to `starts[t + 1]` are the postings of term t, by ascending row."""

    settings: Settings
    statistics: Statistics
    terms: TermTable
    ids: Sequence[str]
    starts: np.ndarray
    """int64 `[terms + 1]`."""
    rows: np.ndarray
    """int32 `[postings]`: documents."""
    tfs: np.ndarray
    """uint8, uint16 or uint32 `[postings]`: how often the term is in the document."""
    peaks: np.ndarray
    """float32 `[terms]`: the largest tf * inverse norm, which bounds what the term can contribute."""
    norms: np.ndarray
    """uint8 `[documents]`: length bytes."""
    ranks: np.ndarray
    """int32 `[documents]`: place of the id among all ids in ascending order, which decides ties."""
    stores: tuple[BlobStore, ...] = ()
    """Stores to close with the index."""


def rank_ids(ids: Sequence[bytes]) -> np.ndarray:
    """int32 `[documents]`: the place of each id by its UTF-8 bytes. Raises RetrievalError if one repeats."""
    count, block = len(ids), 1 << 16
    width = max((len(name) for name in ids), default=1)
    names = np.empty(count, f"S{max(width, 1)}")
    for start in range(0, count, block):
        names[start : start + block] = ids[start : start + block]
    order = np.argsort(names, kind="stable")
    names = names[order]
    repeated = np.flatnonzero(names[1:] == names[:-1])
    if len(repeated):
        first, second = order[repeated[0]], order[repeated[0] + 1]
        name = bytes(names[repeated[0]]).decode("utf-8", "surrogatepass")
        raise RetrievalError(f"id {name!r} is used by documents {first} and {second} (counted from 0); ids must differ")
    ranks = np.empty(count, np.int32)
    ranks[order] = np.arange(count, dtype=np.int32)
    return ranks


def peaks_of(starts: np.ndarray, rows: np.ndarray, tfs: np.ndarray, inverses: np.ndarray) -> np.ndarray:
    """float32 `[terms]`: the largest tf * inverse norm of each term.

    Args:
        starts: int64 [terms + 1]; the postings of term t are `starts[t]` to `starts[t + 1]`, at least one.
        rows: row of each posting's document, int32 [postings].
        tfs: how often the term occurs in that document, [postings].
        inverses: inverse norm of each document, float32 [documents].
    """
    count, block = len(starts) - 1, 1 << 22
    peaks = np.zeros(count, np.float32)
    first = 0
    while first < count:
        # at least one term, however many postings it has
        last = max(int(np.searchsorted(starts, starts[first] + block, side="right")) - 1, first + 1)
        begin, end = int(starts[first]), int(starts[last])
        scaled = tfs[begin:end].astype(np.float32) * inverses[rows[begin:end]]
        # every term has a posting; reduceat would give one without any the first value of the next term
        peaks[first:last] = np.maximum.reduceat(scaled, starts[first:last] - begin)
        first = last
    return peaks


MANIFEST = "manifest.json"
FORMAT: Final = "turngym-lucene-bm25"


@dataclass(frozen=True, slots=True, kw_only=True)
class BM25Manifest:
    """What lies in the folder of an index."""

    settings: Settings
    statistics: Statistics
    files: Files
    format: Literal["turngym-lucene-bm25"] = FORMAT
    version: Literal[1] = VERSION
    analysis: Literal["english-porter-1"] = ANALYSIS


def is_index(folder: Path) -> bool:
    """Whether a folder was written by this package (it may be damaged or old)."""
    try:
        return json_object(folder / MANIFEST, RetrievalError).get("format") == FORMAT
    except RetrievalError:
        return False


def open_parts(folder: Path) -> IndexArrays:
    """Maps the arrays of an index folder.

    Raises:
        RetrievalError: no index, another version, or a file is missing, cut off or changed.
    """
    path = folder / MANIFEST
    manifest = read_manifest(path, BM25Manifest, lambda why: RetrievalError(f"{why}; build the index again"))
    if wrong := changed_files(folder, manifest.files, limit=CHECKED):
        raise RetrievalError(f"{folder}: {'; '.join(wrong)}; build the index again")
    arrays = {name: map_array(folder / f"{name}.npy") for name in ("starts", "rows", "tfs", "peaks", "norms", "ranks")}
    ids, terms = BlobStore(folder / "ids"), BlobStore(folder / "terms")
    names = Names(ids)
    return IndexArrays(
        settings=manifest.settings,
        statistics=manifest.statistics,
        terms=TermTable(terms),
        ids=list(names) if len(names) <= FEW_TERMS else names,
        stores=(ids, terms),
        **arrays,
    )
