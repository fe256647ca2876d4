"""Counts and latencies of a running server."""

from __future__ import annotations

import threading
from collections import Counter, deque
from typing import Any

RECENT = 4096
"""Requests over which latency percentiles are taken."""


class Stats:
    """Numbers that many threads add to. Durations are in seconds and come from a monotonic clock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._statuses: Counter[str] = Counter()
        self._batches: Counter[int] = Counter()
        self._recent: deque[float] = deque(maxlen=RECENT)

    def add(self, **counts: int) -> None:
        """Count events by name."""
        with self._lock:
            self._counts.update(counts)

    def batch(self, size: int) -> None:
        """One call of the retriever with `size` queries."""
        with self._lock:
            self._batches[size] += 1

    def answered(self, status: int, seconds: float | None = None) -> None:
        """One answered search request; without a duration where it never came to a search."""
        with self._lock:
            self._statuses[str(status)] += 1
            if seconds is not None:
                self._recent.append(seconds)

    def as_json(self) -> dict[str, Any]:
        """All numbers; latencies in milliseconds over the last requests, batch sizes by powers of two."""
        with self._lock:
            counts, batches, recent = dict(self._counts), dict(self._batches), sorted(self._recent)
            statuses = dict(sorted(self._statuses.items()))
        searched, calls = sum(size * count for size, count in batches.items()), sum(batches.values())
        sizes: Counter[int] = Counter()
        for size, count in batches.items():
            sizes[1 << (size - 1).bit_length()] += count
        return {
            "requests": sum(statuses.values()),
            "by_status": statuses,
            "queries": counts.get("queries", 0),
            "cache": {name: counts.get(name, 0) for name in ("hits", "joined", "misses")},
            "batches": {
                "calls": calls,
                "queries": searched,
                "mean": round(searched / calls, 2) if calls else None,
                "largest": max(batches, default=None),
                "up_to": {str(size): sizes[size] for size in sorted(sizes)},
            },
            "latency_ms": {name: _percentile(recent, part) for name, part in PERCENTILES.items()},
        }


PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


def _percentile(ordered: list[float], part: float) -> float | None:
    """Nearest rank, in milliseconds; None without data."""
    if not ordered:
        return None
    # the ceiling in whole numbers: a product of floats may fall on the wrong side
    rank = max(0, -(-int(part * 1000) * len(ordered) // 1000) - 1)
    return round(ordered[rank] * 1000, 3)
