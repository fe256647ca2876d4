"""A retriever behind HTTP: our server or an original Search-R1 server, used like any other retriever.

Failed requests are retried with jitter until a deadline; a `Breaker` keeps every episode from asking a dead server.
Both are a loop and a counter: a retry library would be one more package of the base install.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from turngym.core.clean_keys import clean_address
from turngym.core.errors import RetrievalError
from turngym.core.http_client import (
    PASSING,
    BadReply,
    HttpClient,
    HttpReply,
    LoopThread,
    NotReached,
    read_json,
    retry_after,
)
from turngym.core.numbers import Count, NotNegative, Number, Positive, Seed
from turngym.core.redaction import redacted
from turngym.core.spec import Spec, read
from turngym.retrieval.answer_cache import Answers
from turngym.retrieval.core import Hit, RetrieverUnavailable, check_request, renew_in_children
from turngym.retrieval.http_format import FINGERPRINT_HEADER, WireError, normalize, read_reply, request_body

MOST_NAME = 400
"""Characters of a server's fingerprint at most; it goes into reports."""


class Breaker:
    """A circuit breaker: opens after `failures` failures in a row; after `cooldown` seconds one caller may try."""

    def __init__(self, failures: int, cooldown: float, clock: Callable[[], float]) -> None:
        self._limit, self._cooldown, self._clock = failures, cooldown, clock
        self._lock = threading.Lock()
        self._failed = 0
        self._reason = ""
        self._retry_at = 0.0

    def refusal(self) -> str | None:
        """Says why the server should not be asked now; None if it may be. A caller that asks must report the
        outcome."""
        with self._lock:
            if self._failed < self._limit:
                return None
            left = self._retry_at - self._clock()
            if left > 0:
                return f"not asked: it failed {self._failed} times in a row, next try in {left:.1f} s; {self._reason}"
            # this caller tries, and the others are refused for another cooldown
            self._retry_at = self._clock() + self._cooldown
            return None

    def succeeded(self) -> None:
        with self._lock:
            self._failed, self._reason = 0, ""

    def failed(self, reason: str) -> None:
        with self._lock:
            self._failed += 1
            self._reason = reason
            self._retry_at = self._clock() + self._cooldown


class ClientSettings(Spec):
    """Time-outs, retries and cache of a client. Durations are in seconds."""

    deadline: Positive = 20.0
    """Seconds for one `search`, with all attempts and waits."""
    connect: Positive = 3.0
    """Seconds for one connection."""
    attempt: Positive = 15.0
    """Seconds for one request and its whole answer; our server gives up after 12 s by itself."""
    retries: Number = 2
    """Further attempts after a failed one."""
    backoff: NotNegative = 0.1
    """Mean wait before the first retry; doubles with each."""
    breaker_failures: Count = 3
    """Failed searches in a row after which the server is not asked for a while."""
    breaker_cooldown: NotNegative = 5.0
    """How long it is not asked."""
    cache: Number = 8_192
    """Queries whose answers are remembered, 4 kB each (a longer one counts as several); 0 remembers none."""
    chunk: Count = 512
    """Most queries per request."""
    max_query_chars: Count = 32_768
    """Longer queries are cut, because a server would refuse them."""
    max_answer: Count = 64 * 2**20
    """Largest answer that is read, in bytes."""
    seed: Seed = 0
    """Seeds the jitter of the waits."""


class HttpRetriever:
    """Asks `url` (with or without `/retrieve`). Threads may share it; a forked child or a pickled copy gets its own
    connections. Proxy settings of the environment are not used, because a retrieval server is in the same network.
    """

    def __init__(
        self,
        url: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        **settings: Any,
    ) -> None:
        """Connects with the first search. `settings` are fields of ClientSettings: `HttpRetriever(url, deadline=5)`.

        Args:
            url: address of the server, with or without `/retrieve`.
            clock: seconds, never stepping back.
            sleep: waits between two attempts; gets the seconds.

        Raises:
            RetrievalError: the url is invalid, or httpx is not installed.
            SettingsError: a setting is unknown or out of its range.
        """
        try:
            import httpx  # noqa: F401
        except ImportError as error:
            raise RetrievalError("asking a retrieval server needs httpx: pip install 'turngym[serve]'") from error
        self._base = _base(url)
        self._given, self.settings = settings, read(ClientSettings, settings, "retrieval client")
        self._clock, self._sleep = clock, sleep
        self._fingerprint: str | None = None
        self._closed = False
        self.renew()
        renew_in_children(self)

    def renew(self) -> None:
        """Starts with connections, locks and a cache of this process alone."""
        self._lock = threading.Lock()
        self._connection: tuple[LoopThread, HttpClient] | None = None
        self._memory = Answers(self.settings.cache)
        self._random = random.Random(self.settings.seed)
        self._breaker = Breaker(self.settings.breaker_failures, self.settings.breaker_cooldown, self._clock)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(HttpRetriever, self._base, **self._given), ()

    @property
    def url(self) -> str:
        return f"{self._base}/retrieve"

    @property
    def fingerprint(self) -> str:
        """The server's own, from /health; the url if the server has none.

        Raises:
            RetrieverUnavailable: the server cannot be reached.
        """
        if self._fingerprint is None:
            until = self._clock() + self.settings.deadline
            health = self._attempts("GET", "/health", b"", until)
            served: Any = None
            with suppress(BadReply):
                reply = read_json(health.body) if health.status == 200 else None
                served = reply.get("fingerprint") if isinstance(reply, dict) else None
            is_usable = isinstance(served, str) and 0 < len(served) <= MOST_NAME and served.isprintable()
            self._fingerprint = served if is_usable else f"url:{self.url}"
        return self._fingerprint

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """Finds for each query `k` hits at most, best first.

        Raises:
            RetrieverUnavailable: no readable answer within the deadline; the cause is chained.
        """
        check_request(queries, k)
        until = self._clock() + self.settings.deadline
        keys = [(normalize(query[: self.settings.max_query_chars]), k) for query in queries]
        with self._lock:
            answers = {key: stored for key in keys if (stored := self._memory.get(key)) is not None}
        missing = [key for key in dict.fromkeys(keys) if key not in answers]
        for start in range(0, len(missing), self.settings.chunk):
            part = missing[start : start + self.settings.chunk]
            for key, hits in zip(part, self._ask([query for query, _ in part], k, until), strict=True):
                answers[key] = tuple(hits)
                with self._lock:
                    self._memory.keep(key, answers[key])
        return [list(answers[key]) for key in keys]

    def close(self) -> None:
        """Closes the connections. Twice is fine; a later search raises RetrieverUnavailable."""
        with self._lock:
            connection, self._connection, self._closed = self._connection, None, True
        if connection is not None:
            loop, http = connection
            loop.run(http.close())
            loop.close()

    def _ask(self, queries: list[str], k: int, until: float) -> list[list[Hit]]:
        refusal = self._breaker.refusal()
        if refusal is not None:
            raise RetrieverUnavailable(f"{self.url} {refusal}")
        answers: list[list[Hit]] = []

        # called within the attempt, because an answer that cannot be read is retried like a missing one
        def check(reply: HttpReply) -> None:
            if reply.status == 200:
                fingerprint = reply.headers.get(FINGERPRINT_HEADER)
                expected = self._fingerprint = self._fingerprint or fingerprint
                if fingerprint not in (None, expected):
                    raise WireError(
                        f"the server now serves another index, {fingerprint}; this client began with {expected}"
                    )
                answers[:] = read_reply(reply.body, len(queries), k)

        try:
            reply = self._attempts("POST", "/retrieve", request_body(queries, k), until, check)
        except RetrieverUnavailable as error:
            self._breaker.failed(str(error.__cause__ or error))
            raise
        # whatever the status, because a server that refuses this request is alive
        self._breaker.succeeded()
        if reply.status != 200:
            raise RetrieverUnavailable(f"{self.url} refused the request with status {reply.status}: {reply.text(300)}")
        return answers

    def _attempts(
        self, method: str, path: str, body: bytes, until: float, check: Callable[[HttpReply], None] | None = None
    ) -> HttpReply:
        """The answer of the first attempt that succeeds, or whose status a retry cannot help."""
        began, attempt = self._clock(), 0
        while True:
            attempt += 1
            # seconds that the server asks to wait
            after = 0.0
            try:
                reply = self._once(method, path, body, until)
                if reply.status in PASSING:
                    after = retry_after(reply.headers) or 0.0
                    raise WireError(f"status {reply.status}: {reply.text(300)}")
                if check is not None:
                    check(reply)
                return reply
            except Exception as error:
                with self._lock:
                    # jitter, because clients that failed together must not come back together
                    wait = max(after, self.settings.backoff * 2 ** (attempt - 1) * (0.5 + self._random.random()))
                left = until - self._clock()
                if self._closed or attempt > self.settings.retries or wait >= left:
                    elapsed = self._clock() - began
                    hint = "; is `turngym serve retrieval` running there?" if isinstance(error, NotReached) else ""
                    raise RetrieverUnavailable(
                        f"{self._base}{path} gave no usable answer in {attempt} attempt{'s' * (attempt > 1)} "
                        f"and {elapsed:.1f} s (deadline {self.settings.deadline:g} s): "
                        f"{type(error).__name__}: {error}{hint}"
                    ) from error
                self._sleep(wait)

    def _once(self, method: str, path: str, body: bytes, until: float) -> HttpReply:
        left = max(0.001, until - self._clock())
        with self._lock:
            if self._closed:
                raise RetrieverUnavailable(f"the client of {self.url} is closed")
            if self._connection is None:
                self._connection = LoopThread("turngym-retriever"), HttpClient(connect=self.settings.connect)
            loop, http = self._connection
        seconds = min(self.settings.attempt, left)
        call = http.send(method, f"{self._base}{path}", body or None, seconds=seconds, limit=self.settings.max_answer)
        return loop.run(call)


def _base(url: str) -> str:
    url = clean_address("retriever url", url, RetrievalError)
    if "?" in url or "#" in url:
        raise RetrievalError(f"retriever url {redacted(url)!r} has a ? or a # in it; write http://HOST:PORT")
    return url.rstrip("/").removesuffix("/retrieve").rstrip("/")
