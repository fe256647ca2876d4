"""How queries of many requests are searched together, in this process and in others.

`MicroBatcher` collects waiting queries into calls of the retriever. `ProcessRetriever` searches batches in processes of
their own, so that HTTP and searching do not wait for one interpreter lock.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence, Sized
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from turngym.core.background_threads import SupervisedThread
from turngym.core.child_process import ChildProcess
from turngym.core.cpu_cores import threads_each
from turngym.core.errors import RetrievalError
from turngym.retrieval.core import Hit, Passage, Retriever, RetrieverUnavailable, checked_hits, renew_in_children

Hits = tuple[Hit, ...]
Search = Callable[[Sequence[str], int], Sequence[Sequence[Hit]]]


@dataclass(slots=True, kw_only=True)
class Waiting:
    """One query that waits for its batch."""

    query: str
    k: int
    submission: int
    deadline: float
    answer: Future[Hits] = field(default_factory=Future)


class MicroBatcher:
    """Calls `search(queries, k)` for all waiting queries: at once if idle, else after a short wait for more of them.

    A batch never mixes values of k, because the first 3 of 10 hits of an approximate index may differ from its 3 hits.
    Threads start with the first query, so a process that forks earlier has none to lose. A child starts its own.
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
        """Starts no thread.

        Args:
            search: gets queries and k, and returns the hits of each query. With `workers` above 1 several threads call
                it at once.
            max_batch: most queries of one call of `search`.
            window: most seconds that a batch waits for more queries; only if the last one served several clients.
            max_waiting: most queries that wait; queries that would exceed it are refused together.
            on_batch: is called with the number of queries before each call of `search`.
            clock: seconds, never stepping back.
        """
        self._search, self._on_batch, self._clock = search, on_batch, clock
        self._max_batch, self._window, self._max_waiting = max_batch, window, max_waiting
        self._workers = workers
        self._closed = False
        self.renew()
        renew_in_children(self)

    def renew(self) -> None:
        """Starts with an empty queue, new locks and no threads; in a forked child, old locks may be held forever."""
        self._changed = threading.Condition()
        self._queue: deque[Waiting] = deque()
        self._threads: list[threading.Thread] = []
        self._submissions = 0
        self._waiting_clients, self._last_clients = 0, 1
        self._running: dict[int, float] = {}

    def submit(self, queries: Sequence[str], k: int, deadline: float) -> list[Future[Hits]]:
        """Returns one future per query; at `deadline` (on the clock) the client stops waiting.

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
            number = self._submissions
            added = [Waiting(query=query, k=k, submission=number, deadline=deadline) for query in queries]
            self._queue.extend(added)
            self._waiting_clients += 1
            while len(self._threads) < self._workers:
                name = f"retrieval-{len(self._threads)}"
                # daemons, because a search that hangs must not keep the process from ending
                self._threads.append(SupervisedThread(self._work, name))
                self._threads[-1].start()
            # a worker that waits for more queries sleeps until the batch is complete
            if self._complete() or len(self._queue) == len(added):
                self._changed.notify_all()
        return [waiting.answer for waiting in added]

    def load(self) -> tuple[int, float]:
        """How many queries wait, and for how many seconds the oldest call of the retriever has been running."""
        # a copy, because workers begin and end without the lock
        running = list(self._running.values())
        return len(self._queue), self._clock() - min(running) if running else 0.0

    def close(self, timeout: float = 1.0) -> None:
        """Refuses new queries, answers waiting ones, and gives the threads `timeout` seconds to finish."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        until = self._clock() + timeout
        for thread in self._threads:
            thread.join(max(0.0, until - self._clock()))
        with self._changed:
            remaining, self._queue = list(self._queue), deque()
        _fail(remaining, RetrieverUnavailable("the retrieval server stopped before this query was searched"))

    def _work(self) -> None:
        while batch := self._take():
            thread = threading.get_ident()
            self._running[thread] = self._clock()
            try:
                self._answer(batch)
            except BaseException as error:
                unanswered = [waiting for waiting in batch if not waiting.answer.done()]
                _fail(unanswered, RetrieverUnavailable(f"the search failed: {error}"))
                raise
            finally:
                del self._running[thread]

    def _take(self) -> list[Waiting]:
        """The next batch; empty if closed and nothing waits."""
        batch: list[Waiting] = []
        while not batch:
            with self._changed:
                while not self._queue:
                    if self._closed:
                        return []
                    self._changed.wait()  # ends: `submit` and `close` say so; a daemon keeps no process
                # wait for more queries if the last batch had several clients; never if one client alone asks
                until = self._clock() + self._window
                while self._queue and not self._complete() and (left := until - self._clock()) > 0:
                    self._changed.wait(left)
                batch, late = self._pick()
            _fail(late, RetrieverUnavailable("the deadline passed while the query was waiting for the retriever"))
        return batch

    def _complete(self) -> bool:
        """Whether as many clients wait as the last batch served, or the batch is full."""
        return self._waiting_clients >= self._last_clients or len(self._queue) >= self._max_batch or self._closed

    def _pick(self) -> tuple[list[Waiting], list[Waiting]]:
        """Takes (a batch with the first waiting query's k, queries whose deadline has passed) from the queue."""
        now, batch, late = self._clock(), list[Waiting](), list[Waiting]()
        others: deque[Waiting] = deque()
        while self._queue and len(batch) < self._max_batch:
            waiting = self._queue.popleft()
            if waiting.deadline <= now:
                late.append(waiting)
            elif not batch or waiting.k == batch[0].k:
                batch.append(waiting)
            else:
                others.append(waiting)
        self._queue.extendleft(reversed(others))
        if batch:
            self._last_clients = len({waiting.submission for waiting in batch})
        self._waiting_clients = len({waiting.submission for waiting in self._queue})
        return batch, late

    def _answer(self, batch: list[Waiting]) -> None:
        if self._on_batch is not None:
            self._on_batch(len(batch))
        try:
            answers = self._search([waiting.query for waiting in batch], batch[0].k)
            if len(answers) != len(batch):
                raise RetrieverUnavailable(f"the retriever gave {len(answers)} answers to {len(batch)} queries")
        except RetrieverUnavailable as error:
            _fail(batch, error)
        except Exception as error:
            if len(batch) == 1:
                _fail(batch, error)
            else:
                # one bad query must not fail the others of its batch
                for waiting in batch:
                    self._answer([waiting])
        else:
            for waiting, hits in zip(batch, answers, strict=True):
                try:
                    waiting.answer.set_result(checked_hits(hits, waiting.k))
                except RetrieverUnavailable as error:
                    _fail([waiting], error)


def _fail(batch: Sequence[Waiting], error: Exception) -> None:
    for waiting in batch:
        waiting.answer.set_exception(error)


Opener = Callable[[], Retriever]
"""Opens the retriever; it is pickled for the children."""
SMALL_BATCH = 4
"""Batches of fewer queries are searched in this process, because sending them away costs more than it gains."""


class ProcessRetriever:
    """Searches small batches in this process and others in `processes` children, one batch per child at a time.

    If native code crashes or a search hangs, its queries fail and the child is replaced; the server continues. Indexes
    are mapped, so processes share their pages. An encoder with a model is in memory once per process.
    """

    def __init__(self, opener: Opener, *, processes: int = 1, small: int = SMALL_BATCH, patience: float = 60.0) -> None:
        """Opens the retriever here and in the children, and waits until all are ready.

        Args:
            patience: seconds after which a child that does not answer is replaced.

        Raises:
            RetrievalError: what `opener` raised, here or in a child.
        """
        self._opener, self._small, self._patience = opener, small, patience
        self._free: SimpleQueue[_Child | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        # the children first, so that they open the index while this process does
        self._threads = threads_each(processes)
        self._children = [_Child(opener, self._threads) for _ in range(processes)]
        try:
            self._here = opener()
        except BaseException:
            self._end_children()
            raise
        self.fingerprint = self._here.fingerprint
        try:
            for child in self._children:
                child.wait_until_ready(self.fingerprint)
                self._free.put(child)
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._here) if isinstance(self._here, Sized) else 0

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        if len(queries) < self._small:
            return self._here.search(queries, k)
        child = self._free.get()  # ends: whoever has one brings it back, after `patience` seconds at the latest
        try:
            if child is None:
                child = self._replacement()
            return child.search(queries, k, self._patience)
        finally:
            # a child that failed is replaced when it is needed next
            self._free.put(child if child is not None and child.usable else None)

    def close(self) -> None:
        """Closes the retriever here and ends the children, even those that are searching. Twice is fine."""
        with self._lock:
            self._closed = True
        self._end_children()
        self._here.close()

    def _end_children(self) -> None:
        with self._lock:
            children, self._children = self._children, []
        for child in children:
            child.end()

    def _replacement(self) -> _Child:
        with self._lock:
            if self._closed:
                raise RetrieverUnavailable("this retriever is closed")
            child = _Child(self._opener, self._threads)
            self._children = [*(old for old in self._children if old.usable), child]
        try:
            child.wait_until_ready(self.fingerprint)
        except RetrievalError as error:
            raise RetrieverUnavailable(f"the retriever could not be started again: {error}") from error
        return child


class _Child:
    """One child process and this end of its pipe."""

    def __init__(self, opener: Opener, threads: int) -> None:
        self._process = ChildProcess(_work, opener, name="turngym-retrieval", threads=threads)
        self._pipe = self._process.pipe
        self.usable = True

    def wait_until_ready(self, fingerprint: str) -> None:
        """Raises RetrievalError with the child's error, or if it opened another index."""
        try:
            kind, value = self._process.receive()
        except (EOFError, OSError) as error:
            raise RetrievalError(f"while it opened the index, the retriever's {self._death()}") from error
        if (kind, value) != ("ready", fingerprint):
            self.end()
            raise RetrievalError(f"the index is now {value}; it was {fingerprint}" if kind == "ready" else value)

    def search(self, queries: Sequence[str], k: int, patience: float) -> list[list[Hit]]:
        try:
            self._pipe.send((list(queries), k))
            if not self._pipe.poll(patience):
                self.end()
                raise RetrieverUnavailable(f"the retriever gave no answer in {patience:g} s; its process was ended")
            kind, value = self._pipe.recv()  # ends: it has begun, and `PIPE_WAIT` limits the rest
        except (EOFError, OSError) as error:
            raise RetrieverUnavailable(f"during a search, the retriever's {self._death()}") from error
        if kind == "found":
            return [
                [Hit(passage=Passage(id=id, title=title, text=text), score=score) for id, title, text, score in row]
                for row in value
            ]
        raise RetrieverUnavailable(value) if kind == "unavailable" else RetrievalError(value)

    def end(self) -> None:
        """Closes the pipe, which ends an idle child, and kills the process if that does not help."""
        self.usable = False
        self._process.end(0.5)

    def _death(self) -> str:
        self.usable = False
        return self._process.death()


def _work(pipe: Connection, opener: Opener) -> None:
    """Runs in the child: one search after the other until the pipe closes, as it does if the parent dies."""
    try:
        retriever = opener()
        pipe.send(("ready", retriever.fingerprint))
    except RetrievalError as error:
        pipe.send(("failed", str(error)))
        return
    with suppress(EOFError, OSError):
        while True:
            queries, k = pipe.recv()  # ends: with the parent, whose end of the pipe closes
            pipe.send(_answer(retriever, queries, k))
    retriever.close()


def _answer(retriever: Retriever, queries: Sequence[str], k: int) -> tuple[str, Any]:
    """The child's answer, in plain tuples, which cost less to send than dataclasses."""
    try:
        return "found", [
            [(hit.passage.id, hit.passage.title, hit.passage.text, float(hit.score)) for hit in hits]
            for hits in retriever.search(queries, k)
        ]
    except RetrieverUnavailable as error:
        return "unavailable", str(error)
    except Exception as error:
        return "error", f"{type(error).__name__}: {error}"
