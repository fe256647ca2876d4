"""Collects queries of many requests into calls of the retriever that answer them together."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from turngym.retrieval.core import Hit, RetrieverUnavailable
from turngym.retrieval.fork_safety import renew_in_children

Found = tuple[Hit, ...]
Search = Callable[[Sequence[str], int], Sequence[Sequence[Hit]]]


@dataclass(slots=True, kw_only=True)
class Waiting:
    """One query that waits for its batch."""

    query: str
    k: int
    submission: int
    deadline: float
    answer: Future[Found] = field(default_factory=Future)


class MicroBatcher:
    """Calls `search(queries, k)` for whatever is waiting: at once when idle, else after a short wait for company.

    A batch never mixes values of k, because an approximate index may answer the first 3 of 10 differently from 3.
    Threads start with the first query, so a process that forks before has none to lose; a child starts its own.
    """

    def __init__(
        self,
        search: Search,
        *,
        max_batch: int = 64,
        window: float = 0.003,
        workers: int = 1,
        max_waiting: int = 32_768,
        on_batch: Callable[[int], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._search, self._on_batch, self._clock = search, on_batch, clock
        self._max_batch, self._window, self._max_waiting = max_batch, window, max_waiting
        self._workers = workers
        self._closed = False
        self.renew()
        renew_in_children(self)

    def renew(self) -> None:
        """Empty queue and no threads: a new batcher, or a forked child whose parent's locks may be held for ever."""
        self._changed = threading.Condition()
        self._queue: deque[Waiting] = deque()
        self._threads: list[threading.Thread] = []
        self._submissions = 0
        self._present, self._company = 0, 1
        self._running: dict[int, float] = {}

    def submit(self, queries: Sequence[str], k: int, deadline: float) -> list[Future[Found]]:
        """One future per query; `deadline` (on the clock) is when its client has stopped waiting.

        Raises:
            RetrieverUnavailable: too many queries wait already, or the batcher is closed.
        """
        with self._changed:
            if self._closed:
                raise RetrieverUnavailable("the retrieval server is stopping")
            if len(self._queue) + len(queries) > self._max_waiting:
                raise RetrieverUnavailable(
                    f"{len(self._queue)} queries are waiting already (at most {self._max_waiting}); ask again later"
                )
            self._submissions += 1
            added = [Waiting(query=q, k=k, submission=self._submissions, deadline=deadline) for q in queries]
            self._queue.extend(added)
            self._present += 1
            while len(self._threads) < self._workers:
                name = f"retrieval-{len(self._threads)}"
                # daemons: a search that hangs must not keep the process from ending
                self._threads.append(threading.Thread(target=self._work, name=name, daemon=True))
                self._threads[-1].start()
            # a worker that waits for company sleeps until all of it is there
            if self._complete() or len(self._queue) == len(added):
                self._changed.notify_all()
        return [waiting.answer for waiting in added]

    def load(self) -> tuple[int, float]:
        """How many queries wait, and for how many seconds the oldest running call of the retriever has been running."""
        # a copy: workers begin and end without the lock
        running = list(self._running.values())
        return len(self._queue), self._clock() - min(running) if running else 0.0

    def close(self, timeout: float = 1.0) -> None:
        """Refuse new queries, answer those that wait, and give the threads `timeout` seconds to finish."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        until = self._clock() + timeout
        for thread in self._threads:
            thread.join(max(0.0, until - self._clock()))
        with self._changed:
            left, self._queue = list(self._queue), deque()
        _fail(left, RetrieverUnavailable("the retrieval server stopped before this query was searched"))

    def _work(self) -> None:
        while batch := self._take():
            me = threading.get_ident()
            self._running[me] = self._clock()
            try:
                self._answer(batch)
            finally:
                del self._running[me]

    def _take(self) -> list[Waiting]:
        """The next batch; empty when closed and nothing waits."""
        batch: list[Waiting] = []
        while not batch:
            with self._changed:
                while not self._queue:
                    if self._closed:
                        return []
                    self._changed.wait()
                self._coalesce()
                batch, late = self._pick()
            _fail(late, RetrieverUnavailable("the deadline passed while the query was waiting for the retriever"))
        return batch

    def _coalesce(self) -> None:
        """Wait for company if the last batch had some; never when one client alone asks."""
        until = self._clock() + self._window
        while self._queue and not self._complete() and (left := until - self._clock()) > 0:
            self._changed.wait(left)

    def _complete(self) -> bool:
        """As many clients wait as the last batch served, or a batch is full."""
        return self._present >= self._company or len(self._queue) >= self._max_batch or self._closed

    def _pick(self) -> tuple[list[Waiting], list[Waiting]]:
        """(batch of the first waiting query's k, those whose deadline has passed); both leave the queue."""
        now, batch, late = self._clock(), list[Waiting](), list[Waiting]()
        stay: deque[Waiting] = deque()
        while self._queue and len(batch) < self._max_batch:
            waiting = self._queue.popleft()
            if waiting.deadline <= now:
                late.append(waiting)
            elif not batch or waiting.k == batch[0].k:
                batch.append(waiting)
            else:
                stay.append(waiting)
        self._queue.extendleft(reversed(stay))
        if batch:
            self._company = len({waiting.submission for waiting in batch})
        self._present = len({waiting.submission for waiting in self._queue})
        return batch, late

    def _answer(self, batch: list[Waiting]) -> None:
        if self._on_batch is not None:
            self._on_batch(len(batch))
        try:
            found = self._call(batch)
        except RetrieverUnavailable as error:
            _fail(batch, error)
        except Exception as error:
            if len(batch) == 1:
                _fail(batch, error)
            else:
                # one bad query must not fail the others that happened to come with it
                for waiting in batch:
                    self._answer([waiting])
        else:
            for waiting, hits in zip(batch, found, strict=True):
                waiting.answer.set_result(hits)

    def _call(self, batch: list[Waiting]) -> list[Found]:
        found = [tuple(hits) for hits in self._search([waiting.query for waiting in batch], batch[0].k)]
        if len(found) != len(batch):
            raise RetrieverUnavailable(f"the retriever gave {len(found)} answers to {len(batch)} queries")
        for hits in found:
            for hit in hits:
                if not math.isfinite(hit.score):
                    raise ValueError(f"the retriever gave passage {hit.passage.id!r} the score {hit.score}")
        return found


def _fail(batch: Sequence[Waiting], error: Exception) -> None:
    for waiting in batch:
        waiting.answer.set_exception(error)
