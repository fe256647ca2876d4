"""What an index consists of, in memory or mapped: postings by term, lengths, ids and their order."""

from __future__ import annotations

import bisect
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from turngym.retrieval.blobs import BlobStore
from turngym.retrieval.core import RetrievalError
from turngym.retrieval.lucene.analysis import ANALYSIS

VERSION = 1
"""Of the files on disk."""
SMALL = 1 << 16
"""Up to this many ids or terms are held as Python objects, for speed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Constants of the score."""

    k1: float = 0.9
    """How soon repeats of a term stop counting."""
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
        """sha256 of everything that fixes what is found."""
        facts = [VERSION, ANALYSIS, float(settings.k1), float(settings.b), self.documents, self.content]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


class Names(Sequence[str]):
    """Strings by number over a blob store, decoded when asked for."""

    def __init__(self, blobs: Sequence[bytes]) -> None:
        self._blobs = blobs

    def __len__(self) -> int:
        return len(self._blobs)

    @overload
    def __getitem__(self, number: int) -> str: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[str]: ...
    def __getitem__(self, number: int | slice) -> str | Sequence[str]:
        if isinstance(number, slice):
            return [name.decode("utf-8", "surrogatepass") for name in self._blobs[number]]
        return self._blobs[number].decode("utf-8", "surrogatepass")

    def __iter__(self) -> Iterator[str]:
        return (name.decode("utf-8", "surrogatepass") for name in self._blobs)


class TermTable:
    """Number of a term among sorted ones: a dict while small, else a binary search in mapped bytes with a memo."""

    def __init__(self, terms: Sequence[bytes]) -> None:
        self._terms = terms
        small = len(terms) <= SMALL
        self._numbers = {term: number for number, term in enumerate(Names(terms))} if small else None
        self._memo: dict[str, int | None] = {}

    def __len__(self) -> int:
        return len(self._terms)

    def number(self, term: str) -> int | None:
        """The row of `term` in the postings; None where no document has it."""
        if self._numbers is not None:
            return self._numbers.get(term)
        try:
            return self._memo[term]
        except KeyError:
            pass
        wanted = term.encode("utf-8", "surrogatepass")
        place = bisect.bisect_left(self._terms, wanted)
        found = place if place < len(self._terms) and self._terms[place] == wanted else None
        if len(self._memo) >= SMALL:
            self._memo.clear()
        self._memo[term] = found
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
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
    """int32 `[documents]`: place of the id among all ids in ascending order; decides ties."""
    held: tuple[BlobStore, ...] = ()
    """Stores to close with the index."""


def rank_ids(ids: Sequence[bytes]) -> np.ndarray:
    """int32 `[documents]`: the place of each id in ascending order of UTF-8 bytes.

    Raises:
        RetrievalError: an id repeats.
    """
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
    """float32 `[terms]`: the largest tf * inverse norm of each term; `inverses` is float32 `[documents]`."""
    count, block = len(starts) - 1, 1 << 22
    peaks = np.zeros(count, np.float32)
    first = 0
    while first < count:
        # one term at least, however many postings it has
        last = max(int(np.searchsorted(starts, starts[first] + block, side="right")) - 1, first + 1)
        begin, end = int(starts[first]), int(starts[last])
        scaled = tfs[begin:end].astype(np.float32) * inverses[rows[begin:end]]
        # no term is without a posting: reduceat would give it the first value of the next one
        peaks[first:last] = np.maximum.reduceat(scaled, starts[first:last] - begin)
        first = last
    return peaks
