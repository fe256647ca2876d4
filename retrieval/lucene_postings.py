"""What a BM25 index consists of, how it lies on disk, and how a query finds its best documents exactly.

The score is Lucene's, in its own arithmetic (float32, with document lengths that fit one byte):

    score(query, document) = sum over the query's terms of  weight - weight / (1 + tf * inverse)
    weight  = qtf * idf
    idf     = ln(1 + (N - df + 0.5) / (df + 0.5))
    inverse = 1 / (k1 * ((1 - b) + b * length / avgdl))

N counts documents with at least one term; avgdl uses exact lengths, `length` is what one byte keeps of it.
Lucene itself (Pyserini) would need Java.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import math
from collections import deque
from collections.abc import Iterable, Sequence
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
    held: tuple[BlobStore, ...] = ()
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
    manifest = read_manifest(
        folder / MANIFEST, BM25Manifest, lambda why: RetrievalError(f"{why}; build the index again")
    )
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
        held=(ids, terms),
        **arrays,
    )


_EXACT = 24
"""Lengths below this plus 16 are kept exactly in a byte."""


def _lengths() -> np.ndarray:
    decoded = list(range(_EXACT))
    for code in range(256 - _EXACT):
        mantissa, shift = code & 7, (code >> 3) - 1
        decoded.append(_EXACT + (mantissa if shift < 0 else (mantissa | 8) << shift))
    return np.array(decoded, np.int64)


LENGTHS = _lengths()
"""int64 `[256]`: the length that each byte stands for, with three bits of mantissa after the exact ones."""


def encode_lengths(lengths: np.ndarray) -> np.ndarray:
    """uint8 `[documents]` of whole lengths `[documents]`, rounded down to a length that has a byte."""
    return (np.searchsorted(LENGTHS, lengths, side="right") - 1).astype(np.uint8)


def inverse_norms(k1: float, b: float, tokens: int, documents: int) -> np.ndarray:
    """float32 `[256]`: `inverse` of the score for each length byte; the average length is `tokens / documents`.

    Args:
        documents: number of documents with at least one term.
    """
    one, k, share = np.float32(1), np.float32(k1), np.float32(b)
    average = np.float32(tokens / documents) if documents else one
    with np.errstate(divide="ignore"):
        inverses = one / (k * ((one - share) + share * LENGTHS.astype(np.float32) / average))
    assert inverses.dtype == np.float32
    return inverses


def idf(found_in: int, documents: int) -> np.float32:
    """The weight of a term that `found_in` of `documents` have."""
    return np.float32(math.log(1 + (documents - found_in + 0.5) / (found_in + 0.5)))


def contributions(weight: np.float32, scaled: np.ndarray) -> np.ndarray:
    """float32 scores of one term from `scaled` = tf * inverse (float32, overwritten)."""
    scaled += np.float32(1)
    np.divide(weight, scaled, out=scaled)
    return np.subtract(weight, scaled, out=scaled)


_FEW = 4096
"""A posting list this short is added at once, because finding out whether it can be skipped costs more."""
_LOOKUP_COST = 10
"""Looking one document up in a list costs about as much as adding this many of its postings."""
_PRECOMPUTED = 1 << 22
"""Up to this many postings have their scores computed beforehand, for terms that are in a query once."""
_SAFE = 1 - 1e-6
"""Bounds are compared with this margin, which is wider than any rounding of float32."""


@dataclass(frozen=True, slots=True)
class _Clause:
    """A term of a query: where its postings are, its weight, and the most that it can contribute to a score."""

    start: int
    end: int
    weight: np.float32
    bound: float
    once: bool


class IndexSearcher:
    """Ranks the documents of one index; threads may share it.

    Terms are taken by the most that they can contribute, highest first. Once the terms still to come cannot lift an
    unseen document over the k-th best so far, only the documents seen are looked up in them, fewer at every term.
    """

    def __init__(self, parts: IndexArrays) -> None:
        self._parts = parts
        stats, settings = parts.statistics, parts.settings
        self._inverses = inverse_norms(settings.k1, settings.b, stats.tokens, stats.scored)[parts.norms]
        self._spare: deque[np.ndarray] = deque()
        self._ready = self._precomputed() if len(parts.rows) <= _PRECOMPUTED else None

    def search(self, terms: Iterable[tuple[int, int]], k: int) -> tuple[np.ndarray, np.ndarray]:
        """(rows, float32 scores) of the best `k` documents; `terms` are (number, times in the query)."""
        clauses = sorted((self._clause(*term) for term in terms), key=lambda clause: (-clause.bound, clause.start))
        try:
            # a zero for each document; not `if self._spare`, because another thread may take the last in between
            sums = self._spare.pop()
        except IndexError:
            sums = np.zeros(len(self._parts.norms))
        seen, totals = self._collect(clauses, k, sums)
        # only after a search that came to its end, because after an error it may not be zero
        self._spare.append(sums)
        # as Lucene does: add the terms' float scores in double, and round once
        return self._best(seen, totals.astype(np.float32), k)

    def _clause(self, number: int, times: int) -> _Clause:
        parts = self._parts
        start, end = int(parts.starts[number]), int(parts.starts[number + 1])
        weight = np.float32(times) * idf(end - start, parts.statistics.scored)
        bound = weight - weight / (np.float32(1) + parts.peaks[number])
        return _Clause(start, end, weight, float(bound), times == 1)

    def _collect(self, clauses: list[_Clause], k: int, sums: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(rows, float64 scores) of all documents that can be among the best `k`; `sums` is zero before and after."""
        to_come = np.cumsum([0.0, *(clause.bound for clause in reversed(clauses))])[::-1]
        seen: list[np.ndarray] = []
        count, least, done = 0, -np.inf, 0
        for done, clause in enumerate(clauses):
            if clause.end - clause.start > _FEW and count >= k:
                least = max(least, _kth(sums[np.concatenate(seen)], k))
                if to_come[done] < least * _SAFE:
                    break
            rows = self._parts.rows[clause.start : clause.end]
            before = sums[rows]
            sums[rows] = before + self._scores(clause, rows)
            # contributions are positive, so a sum of 0 is a document that was not seen before
            fresh = rows[before == 0]
            seen.append(fresh)
            count += len(fresh)
        else:
            done = len(clauses)
        documents = np.concatenate(seen) if seen else np.zeros(0, np.int32)
        return self._refine(documents, sums, clauses[done:], to_come[done:], k, least)

    def _refine(
        self, documents: np.ndarray, sums: np.ndarray, later: list[_Clause], to_come: np.ndarray, k: int, least: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Adds the terms of `rest` to the documents `found`, dropping those that fall behind; sets `sums` back to 0."""
        totals = sums[documents]
        sums[documents] = 0
        for number, (clause, left) in enumerate(zip(later, to_come, strict=False)):
            able = totals + left >= least * _SAFE
            documents, totals = documents[able], totals[able]
            if number == 0:
                order = np.argsort(documents)
                documents, totals = documents[order], totals[order]
            listed = self._parts.rows[clause.start : clause.end]
            if len(documents) * _LOOKUP_COST > len(listed):
                sums[listed] = self._scores(clause, listed)
                totals += sums[documents]
                sums[listed] = 0
            else:
                places = np.searchsorted(listed, documents)
                places[places == len(listed)] = 0
                have = np.flatnonzero(listed[places] == documents)
                totals[have] += self._scores(clause, documents[have], places[have])
            if len(totals) > k:
                least = max(least, _kth(totals, k))
        return documents, totals

    def _scores(self, clause: _Clause, rows: np.ndarray, places: np.ndarray | None = None) -> np.ndarray:
        """float32 contributions of a term to `rows`, which are its postings: all, or those at `places`."""
        which = slice(clause.start, clause.end) if places is None else places + clause.start
        if self._ready is not None and clause.once:
            return self._ready[which]
        scaled = self._parts.tfs[which].astype(np.float32)
        scaled *= self._inverses[rows]
        return contributions(clause.weight, scaled)

    def _best(self, rows: np.ndarray, scores: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        if len(rows) > k:
            able = scores >= _kth(scores, k)
            rows, scores = rows[able], scores[able]
        order = np.lexsort((self._parts.ranks[rows], -scores))[:k]
        return rows[order], scores[order]

    def _precomputed(self) -> np.ndarray:
        parts = self._parts
        counts = np.diff(parts.starts)
        weight_of = {count: idf(count, parts.statistics.scored) for count in np.unique(counts).tolist()}
        weights = np.array([weight_of[count] for count in counts.tolist()], np.float32)
        scaled = parts.tfs.astype(np.float32) * self._inverses[parts.rows]
        scaled += np.float32(1)
        weights = np.repeat(weights, counts)
        # step by step as in `contributions`, or the last bit could differ
        return weights - weights / scaled


def _kth(values: np.ndarray, k: int) -> float:
    """The k-th largest of at least k values."""
    return float(np.partition(values, len(values) - k)[len(values) - k])
