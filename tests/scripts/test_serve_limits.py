"""The foundation of the servers: idle and slow clients, connections beyond the limit, an end under load."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from running_site import RunningSite, until

flask = pytest.importorskip("flask", reason="the servers need turngym[serve]")
pytest.importorskip("waitress", reason="the servers need turngym[serve]")

from turngym.agents.serving import (  # noqa: E402
    DrainingServer,
    Front,
    Timeouts,
    room,
)

GET = b"GET /wait HTTP/1.1\r\nHost: localhost\r\n\r\n"


class Site(RunningSite):
    """An application whose answers wait for `gate`, on a running server."""

    def __init__(self, drain: float = 20.0, **settings: Any) -> None:
        app = flask.Flask("site", static_folder=None)
        self.gate, self.asked = threading.Event(), 0

        @app.get("/")
        def now() -> str:
            return "now"

        @app.get("/wait")
        def wait() -> str:
            self.asked += 1
            assert self.gate.wait(20)
            return "waited"

        @app.get("/large")
        def large() -> bytes:
            return bytes(30 << 20)

        @app.post("/")
        def echo() -> bytes:
            return bytes(flask.request.get_data())

        front = Front(
            app=app,
            path="",
            threads=4,
            max_body=1 << 20,
            refuse=lambda status, text: json.dumps({"error": text}).encode(),
            **settings,
        )
        super().__init__(DrainingServer(front, drain=drain))

    def ask(self, path: str = "/") -> tuple[int, bytes]:
        client = http.client.HTTPConnection(self.server.host, self.server.port, timeout=20)
        client.request("GET", path)
        answer = client.getresponse()
        found = answer.status, answer.read()
        client.close()
        return found


@pytest.fixture
def serve() -> Iterator[Callable[..., Site]]:
    made: list[Site] = []

    def start(**settings: Any) -> Site:
        made.append(Site(**settings))
        return made[-1]

    yield start
    for site in made:
        site.stop()


def closed(client: socket.socket) -> bytes:
    """What the server sent before it closed."""
    parts = []
    try:
        while part := client.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def test_idle_connections_keep_nobody_out(serve: Callable[..., Site]) -> None:
    """500 are open, 200 are kept: the next request is answered, and who waits for its answer is not closed."""
    site = serve(connections=200)
    waiting = site.connect()
    waiting.sendall(GET)
    until(lambda: site.asked == 1)
    idle = [site.connect() for _ in range(500)]
    assert site.ask() == (200, b"now")
    assert len(site.server._server.active_channels) <= 201
    site.gate.set()
    assert waiting.recv(65536).startswith(b"HTTP/1.1 200")
    for client in (waiting, *idle):
        client.close()


def test_a_connection_without_a_request_is_closed(serve: Callable[..., Site]) -> None:
    site = serve(timeouts=Timeouts(idle=1.0))
    with site.connect() as client:
        assert closed(client) == b""


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param([b"GET / HTTP/1.1\r\n", *[b"X-%d: x\r\n" % n for n in range(200)]], id="headers"),
        pytest.param([b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999\r\n\r\n", *[b"x"] * 200], id="body"),
        pytest.param(
            [b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n", *[b"1\r\nx\r\n"] * 200],
            id="chunks",
        ),
    ],
)
def test_a_client_that_sends_slowly_is_closed(serve: Callable[..., Site], parts: list[bytes]) -> None:
    """It is never silent, so a time-out between two reads would never close it."""
    site = serve(timeouts=Timeouts(receive=1.0))
    with site.connect() as client:
        with contextlib.suppress(ConnectionError):
            for part in parts:
                client.sendall(part)
                time.sleep(0.05)
            pytest.fail("the server took all of it")
        until(lambda: not site.server._server.active_channels)
    assert site.ask() == (200, b"now")


def test_a_client_that_takes_nothing_of_its_answer_is_closed(serve: Callable[..., Site]) -> None:
    site = serve(timeouts=Timeouts(send=1.0))
    with site.connect() as client:
        client.sendall(GET.replace(b"/wait", b"/large"))
        until(lambda: len(site.server._server.active_channels) == 1)
        until(lambda: not site.server._server.active_channels)


def test_the_end_answers_what_was_accepted_and_what_is_on_its_way(serve: Callable[..., Site]) -> None:
    """64 clients, 4 threads: the 60 that wait for a thread are answered too, and each connection is closed."""
    site = serve()
    clients = [site.connect() for _ in range(64)]
    for client in clients:
        client.sendall(GET)
    until(lambda: site.asked == 4)
    site.server.stop()
    until(lambda: site.server._server.leaving)
    site.gate.set()
    answers = [closed(client) for client in clients]
    site.thread.join(20)
    assert not site.thread.is_alive()
    assert [answer.split(b"\r\n")[0] for answer in answers] == [b"HTTP/1.1 200 OK"] * 64
    assert sum(b"Connection: close" in answer for answer in answers) == 64
    assert site.server.drained


def test_the_end_does_not_wait_for_clients_that_never_stop_asking(serve: Callable[..., Site]) -> None:
    site = serve()
    failures: list[str] = []

    def keep_asking() -> None:
        client = http.client.HTTPConnection(site.server.host, site.server.port, timeout=20)
        while True:
            try:
                client.request("GET", "/")
                answer = client.getresponse()
                answer.read()
            except ConnectionError:
                return  # refused: the server no longer listens
            except Exception as error:
                failures.append(repr(error))
                return

    asking = [threading.Thread(target=keep_asking) for _ in range(4)]
    for thread in asking:
        thread.start()
    time.sleep(0.3)
    site.server.stop()
    site.thread.join(10)
    assert not site.thread.is_alive()
    for thread in asking:
        thread.join(20)
    assert failures == []
    assert site.server.drained


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET / HTTP/1.1\r\nHost: rebound.example\r\nConnection: close\r\n\r\n", 403),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nOrigin: https://elsewhere.example\r\nConnection: close\r\n\r\n", 403),
        (b"GET / HTTP/1.0\r\n\r\n", 403),
        (b"GET http://rebound.example/ HTTP/1.1\r\nHost: rebound.example\r\nConnection: close\r\n\r\n", 403),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: rebound.example\r\nConnection: close\r\n\r\n", 403),
        (b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999999\r\n\r\n", 413),
        (b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 70_000 + b"\r\n\r\n", 431),
        (b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: x\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00 nonsense\r\n\r\n", 400),
    ],
)
def test_what_is_refused_before_the_application_sees_it(serve: Callable[..., Site], sent: bytes, status: int) -> None:
    site = serve()
    with site.connect() as client:
        client.sendall(sent)
        head, _, body = closed(client).partition(b"\r\n\r\n")
    assert int(head.split(b" ")[1]) == status
    assert b"Content-Type: application/json" in head
    assert set(json.loads(body)) == {"error"}
    assert site.asked == 0


TWO_LENGTHS = (
    b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 4\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
)


@pytest.mark.parametrize("sent", [TWO_LENGTHS, TWO_LENGTHS.replace(b"HTTP/1.1", b"HTTP/1.0")])
def test_a_request_with_two_lengths_is_the_last_of_its_connection(serve: Callable[..., Site], sent: bytes) -> None:
    """What a server in between takes for the next request is not answered (RFC 9112, 6.1)."""
    site = serve()
    with site.connect() as client:
        client.sendall(sent + GET)
        answer = closed(client)
    assert answer.count(b"HTTP/1.1 ") + answer.count(b"HTTP/1.0 ") == 1
    assert site.asked == 0


@pytest.mark.parametrize("how", ["length", "chunks", "expect"])
def test_who_sends_too_much_is_told_so(serve: Callable[..., Site], how: str) -> None:
    """The answer arrives although the client sends on: a reset would take its place."""
    site = serve()
    size, more = 20 << 20, b"Expect: 100-continue\r\n" if how == "expect" else b""
    length = b"Transfer-Encoding: chunked" if how == "chunks" else b"Content-Length: %d" % size
    with site.connect() as client:
        client.sendall(b"POST / HTTP/1.1\r\nHost: localhost\r\n" + more + length + b"\r\n\r\n")
        if how != "expect":
            client.sendall((b"%x\r\n" % size if how == "chunks" else b"") + bytes(size))
        answer = closed(client)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"larger than 1048576 bytes" in answer
    until(lambda: not site.server._server.active_channels)


def test_who_is_refused_and_sends_on_is_closed(serve: Callable[..., Site]) -> None:
    site = serve()
    with site.connect() as client:
        client.sendall(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            for _ in range(200):
                client.sendall(b"x")
                time.sleep(0.05)
            pytest.fail("the server read all of it")
    assert site.ask() == (200, b"now")


def test_connections_fit_the_limit_of_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    limits = [256, 700]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: limits.__setitem__(0, both[0]))
    assert room(100) == 100
    assert limits[0] == 100 + 128 + 256
    assert room(1000) == 700 - 128 - 256
    assert limits[0] == 700


def test_the_defaults_are_those_of_the_documentation() -> None:
    assert Timeouts() == replace(Timeouts(), receive=60.0, idle=75.0, send=60.0)
