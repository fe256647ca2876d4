"""Batches searched in processes of their own: HTTP and searching then never wait for one interpreter lock.

A crash of native code or a search that hangs costs the queries it was working on, not the server: the process is
replaced. Indexes are mapped, so processes share their pages; an encoder with a model is in memory once per process.
"""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Callable, Sequence, Sized
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from turngym.retrieval.core import Hit, Passage, RetrievalError, Retriever, RetrieverUnavailable

Opener = Callable[[], Retriever]
"""Opens the retriever: importable by name, or a `functools.partial` of something that is."""
SMALL = 4
"""Queries below which a batch stays in this process: sending it away would cost more than it gains."""


class ProcessRetriever:
    """Searches small batches here and others in `processes` children, as many at a time as there are children."""

    def __init__(self, opener: Opener, *, processes: int = 1, small: int = SMALL, patience: float = 60.0) -> None:
        """Open the retriever here and in the children, and wait until all are ready.

        Args:
            small: Fewest queries that go to a child.
            patience: Seconds after which a child that does not answer is replaced.

        Raises:
            RetrievalError: what `opener` raised, here or in a child.
        """
        self._opener, self._small, self._patience = opener, small, patience
        self._free: SimpleQueue[_Child | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        # first, so that they open the index while this process does
        self._children = [_Child(opener) for _ in range(processes)]
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
        child = self._free.get()
        try:
            if child is None:
                child = self._replacement()
            return child.search(queries, k, self._patience)
        finally:
            # a child that failed is replaced when one is needed next
            self._free.put(child if child is not None and child.usable else None)

    def close(self) -> None:
        """Close the retriever here and end the children, those that are searching too; twice is fine."""
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
            child = _Child(self._opener)
            self._children = [*(old for old in self._children if old.usable), child]
        try:
            child.wait_until_ready(self.fingerprint)
        except RetrievalError as error:
            raise RetrieverUnavailable(f"the retriever could not be started again: {error}") from error
        return child


class _Child:
    """One process and this end of its pipe."""

    def __init__(self, opener: Opener) -> None:
        # a fork would copy locks that other threads of the server hold at that moment
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(opener, theirs), name="retrieval", daemon=True)
        self._process.start()
        # while this process held the child's end too, the pipe of a dead child would never end
        theirs.close()
        self.usable = True

    def wait_until_ready(self, fingerprint: str) -> None:
        """Raises RetrievalError with what went wrong, or if the child opened another index."""
        try:
            kind, value = self._pipe.recv()
        except (EOFError, OSError) as error:
            self.end()
            ended = f"({self._ended()})"
            raise RetrievalError(f"the retriever's process ended while it opened the index {ended}") from error
        if (kind, value) != ("ready", fingerprint):
            self.end()
            raise RetrievalError(f"the index is now {value}; it was {fingerprint}" if kind == "ready" else value)

    def search(self, queries: Sequence[str], k: int, patience: float) -> list[list[Hit]]:
        try:
            self._pipe.send((list(queries), k))
            if not self._pipe.poll(patience):
                self.end()
                raise RetrieverUnavailable(f"the retriever gave no answer in {patience:g} s; its process was ended")
            kind, value = self._pipe.recv()
        except (EOFError, OSError) as error:
            self.end()
            raise RetrieverUnavailable(f"the retriever's process ended during a search ({self._ended()})") from error
        if kind == "found":
            return [
                [Hit(passage=Passage(id=i, title=t, text=x), score=score) for i, t, x, score in row] for row in value
            ]
        raise RetrieverUnavailable(value) if kind == "unavailable" else RetrievalError(value)

    def end(self) -> None:
        """Close the pipe, which ends an idle child, and the process if that does not help."""
        self.usable = False
        self._pipe.close()
        self._process.join(0.5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _ended(self) -> str:
        return f"exit code {self._process.exitcode}"


def _work(opener: Opener, pipe: Connection) -> None:
    """The child: one search after the other until the other end of the pipe closes, or its process dies."""
    # Ctrl-C reaches the whole group; the parent decides when this process ends
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a handler of the parent is not for this process
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        retriever = opener()
        pipe.send(("ready", retriever.fingerprint))
    except RetrievalError as error:
        pipe.send(("failed", str(error)))
        return
    with suppress(EOFError, OSError):
        while True:
            queries, k = pipe.recv()
            pipe.send(_answer(retriever, queries, k))
    retriever.close()


def _answer(retriever: Retriever, queries: Sequence[str], k: int) -> tuple[str, Any]:
    """What goes back: plain tuples, which cost less than dataclasses to send."""
    try:
        return "found", [
            [(hit.passage.id, hit.passage.title, hit.passage.text, float(hit.score)) for hit in hits]
            for hits in retriever.search(queries, k)
        ]
    except RetrieverUnavailable as error:
        return "unavailable", str(error)
    except Exception as error:
        return "error", f"{type(error).__name__}: {error}"
