"""Fakes for the server and its client: a retriever that can be held, and an HTTP server that says what it is told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

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


class CannedServer:
    """Answers each POST with what `answer(path, body)` returns and records what was asked; GETs are 404 unless told."""

    def __init__(self, answer: Callable[[str, bytes], Reply]) -> None:
        self.asked: list[tuple[str, bytes]] = []
        self.pages: dict[str, Reply] = {}
        self.headers: dict[str, str] = {}
        canned = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                canned.asked.append((self.path, body))
                self.reply(answer(self.path, body))

            def do_GET(self) -> None:
                missing = (404, "application/json", b'{"detail":"Not Found"}')
                self.reply(canned.pages.get(self.path, missing))

            def reply(self, reply: Reply) -> None:
                status, kind, body = reply
                self.send_response(status)
                for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **canned.headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: Any) -> None:
                pass

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *args: Any) -> None:
                """A client that has given up is what some tests are about."""

        self._server = Quiet(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/retrieve"

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def echo() -> EchoRetriever:
    return EchoRetriever()


@pytest.fixture
def canned() -> Iterator[Callable[[Callable[[str, bytes], Reply]], CannedServer]]:
    """Start servers that answer POSTs by a function."""
    servers: list[CannedServer] = []

    def start(answer: Callable[[str, bytes], Reply]) -> CannedServer:
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
