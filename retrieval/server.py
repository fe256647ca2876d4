"""The retrieval server: POST /retrieve, GET /health, GET /stats. Every answer is JSON, errors included.

HTTP -> RetrievalApp -> RetrievalService (cache, one search per query) -> MicroBatcher -> retriever
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence, Sized
from concurrent.futures import Future
from functools import partial
from http import HTTPStatus
from typing import Any

from cachetools import LRUCache

from turngym.retrieval.batching import Found, MicroBatcher
from turngym.retrieval.core import Retriever, RetrieverUnavailable, renew_in_children
from turngym.retrieval.wire import FINGERPRINT_HEADER, BadRequest, ServerSettings, normalize, read_request, reply_body

log = logging.getLogger(__name__)
RECENT = 4096
"""Latency percentiles are over this many requests."""
PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


class Stats:
    """Counts and latencies, to which many threads add. Durations are in seconds, from a monotonic clock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._statuses: Counter[str] = Counter()
        self._batches: Counter[int] = Counter()
        self._recent: deque[float] = deque(maxlen=RECENT)

    def add(self, **counts: int) -> None:
        """Counts events by name."""
        with self._lock:
            self._counts.update(counts)

    def batch(self, size: int) -> None:
        """Counts one call of the retriever with `size` queries."""
        with self._lock:
            self._batches[size] += 1

    def answered(self, status: int, seconds: float | None = None) -> None:
        """Counts one answered request; it has no duration if it never came to a search."""
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


def _percentile(ordered: list[float], part: float) -> float | None:
    """The nearest rank, in milliseconds; None without data."""
    if not ordered:
        return None
    # the ceiling in whole numbers, because a product of floats may fall on the wrong side
    rank = max(0, -(-int(part * 1000) * len(ordered) // 1000) - 1)
    return round(ordered[rank] * 1000, 3)


Key = tuple[str, int]
"""A query and its k."""


class RetrievalService:
    """Answers requests of many threads from one retriever, which `close` closes.

    It remembers answers, searches a query once however many requests ask for it at the same time, and keeps deadlines.
    """

    def __init__(self, retriever: Retriever, settings: ServerSettings | None = None) -> None:
        self.settings = settings or ServerSettings()
        self.fingerprint = retriever.fingerprint
        self.passages = len(retriever) if isinstance(retriever, Sized) else None
        self.stopping = False
        self._retriever = retriever
        self._started = time.monotonic()
        self.renew()
        renew_in_children(self)

    def renew(self) -> None:
        """Makes everything that a forked child must have for itself."""
        self._lock = threading.Lock()
        self._flights: dict[Key, Future[Found]] = {}
        self._memory: LRUCache[Key, Found] = LRUCache(self.settings.cache)
        self.stats = Stats()
        self._batcher = MicroBatcher(
            self._retriever.search,
            max_batch=self.settings.max_batch,
            window=self.settings.window_ms / 1000,
            workers=self.settings.workers,
            max_waiting=self.settings.max_waiting,
            on_batch=self.stats.batch,
        )

    def search(self, queries: Sequence[str], k: int) -> list[Found]:
        """Hits for each query, best first.

        Raises:
            RetrieverUnavailable: the retriever failed or was too slow; that is not remembered.
        """
        deadline = time.monotonic() + self.settings.deadline
        keys = [(normalize(query), k) for query in queries]
        known, flights = self._start(keys, deadline)
        for key, flight in flights.items():
            known[key] = self._wait(flight, deadline)
        return [known[key] for key in keys]

    def _start(self, keys: Sequence[Key], deadline: float) -> tuple[dict[Key, Found], dict[Key, Future[Found]]]:
        """(remembered answers, running searches); other requests may have started some of these."""
        known: dict[Key, Found] = {}
        flights: dict[Key, Future[Found]] = {}
        wanted = list(dict.fromkeys(keys))
        with self._lock:
            # one lock for both: an answer is in the memory before its search leaves the running ones
            for key in wanted:
                found = self._memory.get(key)
                if found is not None:
                    known[key] = found
                elif key in self._flights:
                    flights[key] = self._flights[key]
            new = [key for key in wanted if key not in known and key not in flights]
            joined = len(flights)
            if new:
                answers = self._batcher.submit([query for query, _ in new], new[0][1], deadline)
                flights.update(zip(new, answers, strict=True))
                self._flights.update(zip(new, answers, strict=True))
        # outside the lock, because a callback runs at once in this thread if the answer is there already
        for key in new:
            flights[key].add_done_callback(partial(self._landed, key))
        self.stats.add(queries=len(keys), hits=len(known), joined=joined, misses=len(new))
        return known, flights

    def _landed(self, key: Key, flight: Future[Found]) -> None:
        with self._lock:
            # an LRUCache of size 0 refuses every entry
            if flight.exception() is None and self.settings.cache:
                self._memory[key] = flight.result()
            if self._flights.get(key) is flight:
                del self._flights[key]

    def _wait(self, flight: Future[Found], deadline: float) -> Found:
        try:
            return flight.result(max(0.0, deadline - time.monotonic()))
        except RetrieverUnavailable:
            raise
        except TimeoutError as error:
            raise RetrieverUnavailable(f"the retriever did not answer within {self.settings.deadline:g} s") from error
        except Exception as error:
            raise RetrieverUnavailable(f"the retriever failed: {type(error).__name__}: {error}") from error

    def health(self) -> dict[str, Any]:
        """What is served, and the `status`: ok, stopping, or stuck (a search has run for longer than the deadline)."""
        busy = self._batcher.load()[1]
        status = "stopping" if self.stopping else "stuck" if busy > self.settings.deadline else "ok"
        return {
            "status": status,
            "passages": self.passages,
            "fingerprint": self.fingerprint,
            "topk": self.settings.topk,
            "max_topk": self.settings.max_topk,
        }

    def statistics(self) -> dict[str, Any]:
        waiting, busy = self._batcher.load()
        state = {"waiting": waiting, "busy_s": round(busy, 3), "remembered": len(self._memory)}
        return {"uptime_s": round(time.monotonic() - self._started, 3), **self.stats.as_json(), **state}

    def leave(self) -> None:
        """Makes `health` say that this server is about to end."""
        self.stopping = True

    def close(self, timeout: float = 1.0) -> None:
        """Answers waiting queries for at most `timeout` seconds, then closes the retriever. Twice is fine."""
        self.leave()
        self._batcher.close(timeout)
        self._retriever.close()


JSON = "application/json"
REASONS = {status.value: status.phrase for status in HTTPStatus}
ROUTES = {"/retrieve": "POST", "/health": "GET", "/stats": "GET"}
VALID = ", ".join(f"{method} {path}" for path, method in ROUTES.items())


class RetrievalApp:
    """The WSGI application of a service; every answer is JSON, errors included.

    Without a web framework, whose routing and objects cost more than everything else that is done for a request.
    """

    def __init__(self, service: RetrievalService) -> None:
        self.service = service

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        headers: list[tuple[str, str]] = []
        try:
            status, body = self._answer(environ, headers)
        except Exception as error:
            log.exception("request failed", exc_info=error)
            status, body = 500, _dump({"error": f"internal error: {type(error).__name__}"})
        headers += [("Content-Type", JSON), ("Content-Length", str(len(body)))]
        start_response(f"{status} {REASONS[status]}", headers)
        return [b"" if environ["REQUEST_METHOD"] == "HEAD" else body]

    def _answer(self, environ: dict[str, Any], headers: list[tuple[str, str]]) -> tuple[int, bytes]:
        """(status, body) of one request; adds to `headers`."""
        began, service, path = time.perf_counter(), self.service, environ["PATH_INFO"]
        method = ROUTES.get(path)
        asked = "GET" if environ["REQUEST_METHOD"] == "HEAD" else environ["REQUEST_METHOD"]
        if asked != method:
            if method is None:
                return self._refused(path, 404, f"there is no {asked} {path}")
            headers.append(("Allow", method))
            return self._refused(path, 405, f"{path} does not take {asked}")
        if path == "/health":
            found = service.health()
            return 200 if found["status"] == "ok" else 503, _dump(found)
        if path == "/stats":
            return 200, _dump(service.statistics())
        # a web page may send text/plain or a form to any address, but JSON only to servers that allow it (CORS)
        if environ.get("CONTENT_TYPE", "").partition(";")[0].strip().lower() != JSON:
            return self._refused(path, 415, f"send Content-Type: {JSON}")
        # a body without a length is empty: servers give the length of one that came in chunks
        length = environ.get("CONTENT_LENGTH", "")
        size = int(length) if length.isascii() and length.isdecimal() else 0
        if size > service.settings.max_body:
            return self._refused(path, 413, f"the body is larger than {service.settings.max_body} bytes")
        status, body = _retrieve(service, environ["wsgi.input"].read(size))
        service.stats.answered(status, time.perf_counter() - began)
        headers.append((FINGERPRINT_HEADER, service.fingerprint))
        return status, body

    def _refused(self, path: str, status: int, why: str) -> tuple[int, bytes]:
        if path == "/retrieve":
            self.service.stats.answered(status)
        return status, _dump({"error": why, "valid": VALID})


def create_app(retriever: Retriever, settings: ServerSettings | None = None) -> RetrievalApp:
    """Makes a WSGI application that serves `retriever`."""
    return RetrievalApp(RetrievalService(retriever, settings))


def _retrieve(service: RetrievalService, body: bytes) -> tuple[int, bytes]:
    """(HTTP status, JSON) of one search request."""
    try:
        asked = read_request(body, service.settings)
        return 200, reply_body(service.search(asked.queries, asked.k), asked.scores)
    except BadRequest as error:
        return error.status, _dump(error.as_json())
    except RetrieverUnavailable as error:
        return 503, _dump({"error": str(error)})


def _dump(value: Any) -> bytes:
    return json.dumps(value).encode()
