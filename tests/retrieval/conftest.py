"""Fakes for the server and its client: a retriever that can be held, and an HTTP server that says what it is told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from servers import Answer, JsonServer

from turngym.retrieval.core import Hit, Passage, Retriever


class EchoRetriever:
    """Finds `k` passages named after the query; `gate` holds every search, `failures` are raised first."""

    fingerprint = "echo:1"

    def __init__(self) -> None:
        self.calls: list[tuple[list[str], int]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)
        self.failures: list[Exception] = []
        self.poison: Exception | None = None
        self.score = 1.0
        self.closed = 0

    def __len__(self) -> int:
        return 7

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        self.calls.append((list(queries), k))
        self.entered.release()
        assert self.gate.wait(20)
        if self.failures:
            raise self.failures.pop(0)
        if self.poison is not None and "poison" in queries:
            raise self.poison
        return [[self.hit(query, place) for place in range(k)] for query in queries]

    def hit(self, query: str, place: int) -> Hit:
        passage = Passage(id=f"{query}#{place}", title=f"About {query}", text=f"Line {place}.\nMore.")
        return Hit(passage=passage, score=self.score - place / 8)

    def close(self) -> None:
        self.closed += 1


Reply = tuple[int, str, bytes]
"""Status, content type, body."""


class CannedServer(JsonServer):
    """Answers each POST with what `answer(path, body)` returns and records what was asked; GETs are 404 unless told."""

    def __init__(self, answer: Callable[[str, Any], Reply]) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.pages: dict[str, Reply] = {}
        self.headers: dict[str, str] = {}

        def reply(path: str, body: Any, headers: Any) -> Answer:
            if body is None:
                status, kind, said = self.pages.get(path, (404, "application/json", b'{"detail":"Not Found"}'))
            else:
                self.asked.append((path, body))
                status, kind, said = answer(path, body)
            return Answer(said, status, {"Content-Type": kind, **self.headers})

        super().__init__(reply)
        self.url += "/retrieve"


@pytest.fixture
def echo() -> EchoRetriever:
    return EchoRetriever()


@pytest.fixture
def canned() -> Iterator[Callable[[Callable[[str, Any], Reply]], CannedServer]]:
    """Start servers that answer POSTs by a function."""
    servers: list[CannedServer] = []

    def start(answer: Callable[[str, Any], Reply]) -> CannedServer:
        servers.append(CannedServer(answer))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def serve() -> Iterator[Callable[..., Any]]:
    """Start real servers (waitress on a free port of this machine) for retrievers; keywords are ServerSettings."""
    from turngym.agents.serving import DrainingServer, retrieval_front
    from turngym.retrieval.http_format import RetrievalServerSettings
    from turngym.retrieval.server import RetrievalApp

    running: list[tuple[DrainingServer, threading.Thread]] = []

    def start(retriever: Retriever, *, drain: float = 5.0, threads: int = 16, **settings: Any) -> DrainingServer:
        app = RetrievalApp(retriever, RetrievalServerSettings(**settings))
        server = DrainingServer(retrieval_front(app, threads=threads), drain=drain)

        def run() -> None:
            try:
                server.run()
            finally:
                app.service.close()

        thread = threading.Thread(target=run)
        thread.start()
        running.append((server, thread))
        return server

    yield start
    for server, thread in running:
        server.stop()
        server.stop()
        thread.join(10)
        assert not thread.is_alive()
