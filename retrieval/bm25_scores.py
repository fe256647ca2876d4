"""How a passage is scored by BM25, and how a query finds its best documents exactly.

The score is Lucene's, in its own arithmetic (float32, with document lengths that fit one byte):

    score(query, document) = sum over the query's terms of  weight - weight / (1 + tf * inverse)
    weight  = qtf * idf
    idf     = ln(1 + (N - df + 0.5) / (df + 0.5))
    inverse = 1 / (k1 * ((1 - b) + b * length / avgdl))

N counts documents with at least one term; avgdl uses exact lengths, `length` is what one byte keeps of it.
Lucene itself (Pyserini) would need Java.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from turngym.retrieval.bm25_index import IndexArrays

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
        """Adds the terms of `later` to `documents`, dropping those that fall behind; sets `sums` back to 0."""
        totals = sums[documents]
        sums[documents] = 0
        for number, (clause, most) in enumerate(zip(later, to_come, strict=False)):
            able = totals + most >= least * _SAFE
            documents, totals = documents[able], totals[able]
            if number == 0:
                order = np.argsort(documents)
                documents, totals = documents[order], totals[order]
            posted = self._parts.rows[clause.start : clause.end]
            if len(documents) * _LOOKUP_COST > len(posted):
                sums[posted] = self._scores(clause, posted)
                totals += sums[documents]
                sums[posted] = 0
            else:
                places = np.searchsorted(posted, documents)
                places[places == len(posted)] = 0
                have = np.flatnonzero(posted[places] == documents)
                totals[have] += self._scores(clause, documents[have], places[have])
            if len(totals) > k:
                least = max(least, _kth(totals, k))
        return documents, totals

    def _scores(self, clause: _Clause, rows: np.ndarray, places: np.ndarray | None = None) -> np.ndarray:
        """float32 contributions of a term to `rows`, which are its postings: all, or those at `places`."""
        postings = slice(clause.start, clause.end) if places is None else places + clause.start
        if self._ready is not None and clause.once:
            return self._ready[postings]
        scaled = self._parts.tfs[postings].astype(np.float32)
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
