"""Between HTTP and the retriever: memory of answers, one search per query however many ask, deadlines."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence, Sized
from concurrent.futures import Future
from functools import partial
from typing import Any

from turngym.retrieval.core import Retriever, RetrieverUnavailable
from turngym.retrieval.fork_safety import renew_in_children
from turngym.retrieval.lru import LRU
from turngym.retrieval.server.batcher import Found, MicroBatcher
from turngym.retrieval.server.settings import ServerSettings
from turngym.retrieval.server.stats import Stats
from turngym.retrieval.wire import normalize

Key = tuple[str, int]


class RetrievalService:
    """Answers requests of many threads from one retriever, which it owns: `close` closes it."""

    def __init__(
        self,
        retriever: Retriever,
        settings: ServerSettings | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings or ServerSettings()
        self.fingerprint = retriever.fingerprint
        self.passages = len(retriever) if isinstance(retriever, Sized) else None
        self.stopping = False
        self._retriever, self._clock = retriever, clock
        self._started = clock()
        self.renew()
        renew_in_children(self)

    def renew(self) -> None:
        """Everything that a forked child must have for itself."""
        self._lock = threading.Lock()
        self._flights: dict[Key, Future[Found]] = {}
        self._memory: LRU[Key, Found] = LRU(self.settings.cache)
        self.stats = Stats()
        self._batcher = MicroBatcher(
            self._retriever.search,
            max_batch=self.settings.max_batch,
            window=self.settings.window_ms / 1000,
            workers=self.settings.workers,
            max_waiting=self.settings.max_waiting,
            on_batch=self.stats.batch,
            clock=self._clock,
        )

    def search(self, queries: Sequence[str], k: int) -> list[Found]:
        """Hits for each query, best first.

        Raises:
            RetrieverUnavailable: the retriever failed or was too slow; nothing of it is remembered.
        """
        deadline = self._clock() + self.settings.deadline
        keys = [(normalize(query), k) for query in queries]
        known, flights = self._start(keys, deadline)
        for key, flight in flights.items():
            known[key] = self._wait(flight, deadline)
        return [known[key] for key in keys]

    def _start(self, keys: Sequence[Key], deadline: float) -> tuple[dict[Key, Found], dict[Key, Future[Found]]]:
        """(answers remembered, searches under way), of which some were started by other requests."""
        known: dict[Key, Found] = {}
        flights: dict[Key, Future[Found]] = {}
        wanted = list(dict.fromkeys(keys))
        with self._lock:
            # one lock for both: what has landed is in the memory before it is no longer under way
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
        # outside the lock: a callback runs at once in this thread if the answer is there already
        for key in new:
            flights[key].add_done_callback(partial(self._landed, key))
        self.stats.add(queries=len(keys), hits=len(known), joined=joined, misses=len(new))
        return known, flights

    def _landed(self, key: Key, flight: Future[Found]) -> None:
        with self._lock:
            if flight.exception() is None:
                self._memory.put(key, flight.result())
            if self._flights.get(key) is flight:
                del self._flights[key]

    def _wait(self, flight: Future[Found], deadline: float) -> Found:
        try:
            return flight.result(max(0.0, deadline - self._clock()))
        except RetrieverUnavailable:
            raise
        except TimeoutError as error:
            raise RetrieverUnavailable(f"the retriever did not answer within {self.settings.deadline:g} s") from error
        except Exception as error:
            raise RetrieverUnavailable(f"the retriever failed: {type(error).__name__}: {error}") from error

    def health(self) -> dict[str, Any]:
        """`status` ok, stopping or stuck (a call of the retriever has run for longer than the deadline), and what
        is served."""
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
        return {"uptime_s": round(self._clock() - self._started, 3), **self.stats.as_json(), **state}

    def leave(self) -> None:
        """Say in `health` that this server is about to end."""
        self.stopping = True

    def close(self, timeout: float = 1.0) -> None:
        """Answer what waits (for at most `timeout` seconds), then close the retriever; twice is fine."""
        self.leave()
        self._batcher.close(timeout)
        self._retriever.close()
