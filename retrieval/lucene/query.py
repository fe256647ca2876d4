"""Finds the best documents of a query exactly, without looking at postings that cannot matter.

Terms are taken by what they can contribute at most, highest first. Once the terms still to come cannot lift an unseen
document over the k-th best so far, only the documents seen are looked up in them, fewer at every term.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from turngym.retrieval.lucene.parts import Parts
from turngym.retrieval.lucene.scoring import contributions, idf, inverse_norms

_FEW = 4096
"""A posting list this short is added at once: looking whether it can be skipped costs more."""
_LOOKUP_COST = 10
"""Looking one document up in a list costs about as much as adding this many of its postings."""
_PRECOMPUTED = 1 << 22
"""Up to this many postings have their scores held ready for queries that name a term once."""
_SAFE = 1 - 1e-6
"""Bounds are compared with this margin, wider than any rounding of float32."""


@dataclass(frozen=True, slots=True)
class _Clause:
    start: int
    end: int
    weight: np.float32
    bound: float
    once: bool


class Searcher:
    """Ranks the documents of one index; safe across threads."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        stats, settings = parts.statistics, parts.settings
        self._inverses = inverse_norms(settings.k1, settings.b, stats.tokens, stats.scored)[parts.norms]
        self._spare: deque[np.ndarray] = deque()
        self._ready = self._precomputed() if len(parts.rows) <= _PRECOMPUTED else None

    def search(self, terms: Iterable[tuple[int, int]], k: int) -> tuple[np.ndarray, np.ndarray]:
        """(rows, float32 scores) of the best `k` documents; `terms` are (number, times in the query)."""
        clauses = sorted((self._clause(*term) for term in terms), key=lambda clause: (-clause.bound, clause.start))
        sums = self._borrow()
        seen, totals = self._collect(clauses, k, sums)
        # only after a search that came to its end: after an error it may not be zero
        self._spare.append(sums)
        # Lucene adds the terms' float scores in double and rounds once, too
        return self._best(seen, totals.astype(np.float32), k)

    def _borrow(self) -> np.ndarray:
        """One number per document, all zero."""
        try:
            # not `if self._spare`: another thread may take the last one in between
            return self._spare.pop()
        except IndexError:
            return np.zeros(len(self._parts.norms))

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
            # contributions are positive: a sum of 0 is a document not seen before
            fresh = rows[before == 0]
            seen.append(fresh)
            count += len(fresh)
        else:
            done = len(clauses)
        found = np.concatenate(seen) if seen else np.zeros(0, np.int32)
        return self._refine(found, sums, clauses[done:], to_come[done:], k, least)

    def _refine(
        self, found: np.ndarray, sums: np.ndarray, rest: list[_Clause], to_come: np.ndarray, k: int, least: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Add the terms of `rest` to the documents `found`, dropping those that fall behind; takes `sums` back to 0."""
        totals = sums[found]
        sums[found] = 0
        for number, (clause, left) in enumerate(zip(rest, to_come, strict=False)):
            able = totals + left >= least * _SAFE
            found, totals = found[able], totals[able]
            if number == 0:
                order = np.argsort(found)
                found, totals = found[order], totals[order]
            listed = self._parts.rows[clause.start : clause.end]
            if len(found) * _LOOKUP_COST > len(listed):
                sums[listed] = self._scores(clause, listed)
                totals += sums[found]
                sums[listed] = 0
            else:
                places = np.searchsorted(listed, found)
                places[places == len(listed)] = 0
                have = np.flatnonzero(listed[places] == found)
                totals[have] += self._scores(clause, found[have], places[have])
            if len(totals) > k:
                least = max(least, _kth(totals, k))
        return found, totals

    def _scores(self, clause: _Clause, rows: np.ndarray, places: np.ndarray | None = None) -> np.ndarray:
        """float32 contributions of a term to `rows`, which are its postings, all or those at `places`."""
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
        # step by step as `contributions`, or the last bit could differ
        return weights - weights / scaled


def _kth(values: np.ndarray, k: int) -> float:
    """The k-th largest of at least k values."""
    return float(np.partition(values, len(values) - k)[len(values) - k])
