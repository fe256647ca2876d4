"""The retrieval server: POST /retrieve, GET /health, GET /stats. Every answer is JSON, errors included.

HTTP -> fast_retrieve or Flask -> RetrievalService (cache, one search per query) -> MicroBatcher -> retriever
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence, Sized
from concurrent.futures import Future
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turngym.core.errors import RetrievalError
from turngym.retrieval.answer_cache import Answers, Key
from turngym.retrieval.batching import Found, MicroBatcher
from turngym.retrieval.core import Retriever, RetrieverUnavailable, renew_in_children
from turngym.retrieval.http_format import (
    FINGERPRINT_HEADER,
    BadRequest,
    RetrievalServerSettings,
    normalize,
    read_request,
    reply_body,
)

if TYPE_CHECKING:
    from flask import Flask, Response

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

    def __init__(self, retriever: Retriever, settings: RetrievalServerSettings | None = None) -> None:
        self.settings = settings or RetrievalServerSettings()
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
            if flight.exception() is None:  # ends: it has landed
                self._memory.keep(key, flight.result())  # ends: it has landed
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


WsgiApp = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]
Answer = Callable[[RetrievalService, bytes], tuple[bytes, int]]
JSON = "application/json"
REASONS = {200: "OK", 400: "Bad Request", 422: "Unprocessable Entity", 503: "Service Unavailable"}
"""Reason phrases of the statuses that `Answer` gives."""


def fast_retrieve(flask: WsgiApp, service: RetrievalService, answer: Answer) -> WsgiApp:
    """Wraps the application `flask` so that well-formed search requests bypass it and get the same answer.

    Flask's routing and objects cost more than everything else that is done for a request. Whatever HTTP itself refuses
    (another method, type or address, a body without a length or too large) and every error of ours goes to Flask.
    """

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        began, length = time.perf_counter(), search_length(environ)
        if not 0 <= length <= service.settings.max_body:
            return flask(environ, start_response)
        asked = environ["wsgi.input"].read(length)
        try:
            body, status = answer(service, asked)
            reason = REASONS[status]
        except Exception:
            # Flask answers once more, so that the error is logged and becomes a 500
            return flask({**environ, "wsgi.input": BytesIO(asked)}, start_response)
        service.stats.answered(status, time.perf_counter() - began)
        headers = [("Content-Type", JSON), ("Content-Length", str(len(body)))]
        start_response(f"{status} {reason}", [*headers, (FINGERPRINT_HEADER, service.fingerprint)])
        return [body]

    return application


def search_length(environ: dict[str, Any]) -> int:
    """Bytes of a search request's body; -1 for other requests, and for those that do not say."""
    if environ["REQUEST_METHOD"] != "POST" or environ["PATH_INFO"] != "/retrieve":
        return -1
    length = environ.get("CONTENT_LENGTH", "")
    plain = "HTTP_TRANSFER_ENCODING" not in environ and length.isdecimal() and length.isascii()
    return int(length) if plain and environ.get("CONTENT_TYPE", "").lower() == JSON else -1


ROUTES = "POST /retrieve, GET /health, GET /stats"


def create_app(retriever: Retriever | RetrievalService, settings: RetrievalServerSettings | None = None) -> Flask:
    """Makes a WSGI application that serves `retriever`; `app.extensions["retrieval"]` is its service.

    Raises RetrievalError if Flask is not installed.
    """
    try:
        from flask import Flask, abort, request
    except ImportError as error:
        raise RetrievalError("the retrieval server needs Flask: pip install 'turngym[serve]'") from error
    service = retriever if isinstance(retriever, RetrievalService) else RetrievalService(retriever, settings)
    # both paths are given, because Flask cannot find them for a package inside a namespace
    here = str(Path(__file__).parent)
    app = Flask("turngym.retrieval.server", root_path=here, instance_path=here, static_folder=None)
    app.extensions["retrieval"] = service
    app.config["MAX_CONTENT_LENGTH"] = service.settings.max_body

    @app.post("/retrieve")
    def retrieve() -> Response:
        began = time.perf_counter()
        # a web page may send text/plain or a form to any address, but JSON only to servers that allow it (CORS)
        if request.mimetype != "application/json":
            abort(415)
        body, status = _retrieve(service, request.get_data(cache=False))
        service.stats.answered(status, time.perf_counter() - began)
        return _json(body, status, {FINGERPRINT_HEADER: service.fingerprint})

    @app.get("/health")
    def health() -> Response:
        health = service.health()
        return _json(_dump(health), 200 if health["status"] == "ok" else 503)

    @app.get("/stats")
    def stats() -> Response:
        return _json(_dump(service.statistics()), 200)

    @app.errorhandler(Exception)
    def refused(error: Exception) -> Response:
        status = getattr(error, "code", None)
        if not isinstance(status, int):
            app.logger.exception("request failed", exc_info=error)
            return _json(_dump({"error": f"internal error: {type(error).__name__}"}), 500)
        said = {
            404: f"there is no {request.method} {request.path}",
            405: f"{request.path} does not take {request.method}",
            415: "send Content-Type: application/json",
            413: f"the body is larger than {service.settings.max_body} bytes",
        }
        if request.path == "/retrieve":
            service.stats.answered(status)
        allowed = getattr(error, "valid_methods", None)
        headers = {"Allow": ", ".join(sorted(allowed))} if allowed else None
        return _json(_dump({"error": said.get(status, str(error)), "valid": ROUTES}), status, headers)

    app.wsgi_app = fast_retrieve(app.wsgi_app, service, _retrieve)  # type: ignore[assignment, method-assign]
    return app


def _retrieve(service: RetrievalService, body: bytes) -> tuple[bytes, int]:
    """(JSON, HTTP status) of one search request."""
    try:
        asked = read_request(body, service.settings)
        return reply_body(service.search(asked.queries, asked.k), asked.scores), 200
    except BadRequest as error:
        return _dump(error.as_json()), error.status
    except RetrieverUnavailable as error:
        return _dump({"error": str(error)}), 503


def _dump(value: Any) -> bytes:
    return json.dumps(value).encode()


def _json(body: bytes, status: int, headers: dict[str, str] | None = None) -> Response:
    from flask import Response

    return Response(body, status=status, headers=headers, mimetype="application/json")
