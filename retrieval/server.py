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

from turngym.retrieval.answer_cache import Answers, Key
from turngym.retrieval.batching import Hits, MicroBatcher
from turngym.retrieval.core import Retriever, RetrieverUnavailable, renew_in_children
from turngym.retrieval.http_format import (
    FINGERPRINT_HEADER,
    BadRequest,
    RetrievalServerSettings,
    normalize,
    read_request,
    reply_body,
)

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


class RetrievalService:
    """Answers requests of many threads from one retriever, which `close` closes.

    It remembers answers, searches a query once however many requests ask for it at the same time, and keeps deadlines.
    """

    def __init__(self, retriever: Retriever, settings: RetrievalServerSettings) -> None:
        self.settings = settings
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
        self._flights: dict[Key, Future[Hits]] = {}
        self._memory = Answers(self.settings.cache)
        self.stats = Stats()
        self._batcher = MicroBatcher(
            self._retriever.search,
            max_batch=self.settings.max_batch,
            window=self.settings.window_ms / 1000,
            workers=self.settings.workers,
            max_waiting=self.settings.max_waiting,
            on_batch=self.stats.batch,
        )

    def search(self, queries: Sequence[str], k: int) -> list[Hits]:
        """Hits for each query, best first.

        Raises:
            RetrieverUnavailable: the retriever failed or was too slow; that is not remembered.
        """
        deadline = time.monotonic() + self.settings.deadline
        keys = [(normalize(query), k) for query in queries]
        answers, flights = self._start(keys, deadline)
        for key, flight in flights.items():
            answers[key] = self._wait(flight, deadline)
        return [answers[key] for key in keys]

    def _start(self, keys: Sequence[Key], deadline: float) -> tuple[dict[Key, Hits], dict[Key, Future[Hits]]]:
        """(remembered answers, running searches); other requests may have started some of these."""
        known: dict[Key, Hits] = {}
        flights: dict[Key, Future[Hits]] = {}
        wanted = list(dict.fromkeys(keys))
        with self._lock:
            # one lock for both: an answer is in the memory before its search leaves the running ones
            for key in wanted:
                stored = self._memory.get(key)
                if stored is not None:
                    known[key] = stored
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

    def _landed(self, key: Key, flight: Future[Hits]) -> None:
        with self._lock:
            if flight.exception() is None:  # ends: it has landed
                self._memory.keep(key, flight.result())  # ends: it has landed
            if self._flights.get(key) is flight:
                del self._flights[key]

    def _wait(self, flight: Future[Hits], deadline: float) -> Hits:
        try:
            return flight.result(max(0.0, deadline - time.monotonic()))
        except RetrieverUnavailable:
            raise
        except TimeoutError as error:
            raise RetrieverUnavailable(f"the retriever did not answer within {self.settings.deadline:g} s") from error
        except Exception as error:
            raise RetrieverUnavailable(f"the retriever failed: {type(error).__name__}: {error}") from error

    def health(self) -> dict[str, Any]:
        """What is served, and the `status`: ok, stopping, or stuck (a search takes longer than the deadline)."""
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
ROUTES = {"/retrieve": "POST", "/health": "GET", "/stats": "GET"}
_VALID = ", ".join(f"{method} {path}" for path, method in ROUTES.items())


class RetrievalApp:
    """The WSGI application that serves `retriever`: routing and objects of a framework cost more than everything else
    that is done for a search."""

    def __init__(self, retriever: Retriever, settings: RetrievalServerSettings | None = None) -> None:
        self.service = RetrievalService(retriever, settings or RetrievalServerSettings())

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        began, headers = time.perf_counter(), {"Content-Type": JSON}
        path, method, searched = environ["PATH_INFO"], environ["REQUEST_METHOD"], False
        answer: bytes | dict[str, Any]
        try:
            if path not in ROUTES:
                status, answer = 404, {"error": f"there is no {method} {path}", "valid": _VALID}
            elif method != ROUTES[path] and (method, ROUTES[path]) != ("HEAD", "GET"):
                status, answer = 405, {"error": f"{path} does not take {method}", "valid": _VALID}
                headers["Allow"] = ROUTES[path]
            elif path == "/stats":
                status, answer = 200, self.service.statistics()
            elif path == "/health":
                health = self.service.health()
                status, answer = 200 if health["status"] == "ok" else 503, health
            elif (refusal := self._refusal(environ)) is not None:
                status, answer = refusal
            else:
                length = environ.get("CONTENT_LENGTH") or "0"
                status, answer = retrieve(self.service, environ["wsgi.input"].read(int(length)))
                headers[FINGERPRINT_HEADER], searched = self.service.fingerprint, True
        except Exception as error:
            log.exception("request failed")
            status, answer = 500, {"error": f"internal error: {type(error).__name__}"}
        if path == "/retrieve" and status != 500:
            self.service.stats.answered(status, time.perf_counter() - began if searched else None)
        body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        headers["Content-Length"] = str(len(body))
        start_response(f"{status} {HTTPStatus(status).phrase}", list(headers.items()))
        return [] if method == "HEAD" else [body]

    def _refusal(self, environ: dict[str, Any]) -> tuple[int, dict[str, Any]] | None:
        """(status, answer) for a body that is not read: another type, or too large."""
        # a web page may send text/plain or a form to any address, but JSON only to servers that allow it (CORS)
        if environ.get("CONTENT_TYPE", "").partition(";")[0].strip().lower() != JSON:
            return 415, {"error": f"send Content-Type: {JSON}", "valid": _VALID}
        most = self.service.settings.max_body
        if int(environ.get("CONTENT_LENGTH") or 0) > most:
            return 413, {"error": f"the body is larger than {most} bytes", "valid": _VALID}
        return None


def retrieve(service: RetrievalService, body: bytes) -> tuple[int, bytes | dict[str, Any]]:
    """(HTTP status, JSON or what becomes JSON) of one search request."""
    try:
        request = read_request(body, service.settings)
        return 200, reply_body(service.search(request.queries, request.k), request.scores)
    except BadRequest as error:
        return error.status, error.as_json()
    except RetrieverUnavailable as error:
        return 503, {"error": str(error)}
