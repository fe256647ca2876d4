"""Uvicorn with our limits, and bodies that are read before the application: on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from malformed import MALFORMED
from running_site import RunningSite, until

pytest.importorskip("uvicorn", reason="the server needs turngym[openenv] or turngym[mcp]")

from turngym.agents.client_keys import ClientKeys
from turngym.agents.serving import CLIENT, AsgiServer, JsonBodies, KeyedClients, Timeouts

GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


class Site(RunningSite):
    """An application that waits for `gate` before it answers with the body that it got; on a running server."""

    def __init__(self, max_body: int = 1 << 20, seconds: float = 60.0, **settings: Any) -> None:
        self.gate, self.asked = threading.Event(), 0
        self.gate.set()
        app = JsonBodies(self.answer, max_body=max_body, seconds=seconds)
        super().__init__(AsgiServer(app, extra="openenv", **settings))

    async def answer(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            raise RuntimeError("no lifespan")  # uvicorn then goes on without
        message = await receive()
        if scope["type"] == "websocket":
            await send({"type": "websocket.accept"})
            while (message := await receive())["type"] == "websocket.receive":
                await send({"type": "websocket.send", "text": message["text"]})
            return
        self.asked += 1
        while not self.gate.is_set():
            await asyncio.sleep(0.01)
        headers = [(b"content-length", str(len(message["body"])).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": message["body"]})

    def ask(self, sent: bytes) -> tuple[int, bytes]:
        with self.connect() as client:
            client.sendall(sent)
            head, _, body = client.recv(65536).partition(b"\r\n\r\n")
            while int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]) > len(body):
                body += client.recv(65536)
            return int(head.split(b" ")[1]), body


@pytest.fixture
def serve() -> Iterator[Callable[..., Site]]:
    made: list[Site] = []

    def start(**settings: Any) -> Site:
        made.append(Site(**settings))
        return made[-1]

    yield start
    for site in made:
        site.stop()


def post(body: bytes, kind: str = "application/json", more: str = "") -> bytes:
    head = f"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n{more}\r\n"
    return head.encode() + body


def test_bodies_arrive_whole(serve: Callable[..., Site]) -> None:
    site = serve()
    body = json.dumps({"text": "ä" * 100_000}).encode()
    assert site.ask(post(body)) == (200, body)
    assert site.ask(GET) == (200, b"")
    chunked = (
        "POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    assert site.ask(chunked.encode() + b'4\r\n{"a"\r\n4\r\n: 1}\r\n0\r\n\r\n') == (200, b'{"a": 1}')


@pytest.mark.parametrize("form", [form for form in MALFORMED if form not in ("empty", "no object")])
def test_bodies_that_are_no_json(serve: Callable[..., Site], form: str) -> None:
    site = serve()
    status, body = site.ask(post(MALFORMED[form]))
    assert status == 400
    assert "the body" in json.loads(body)["error"]
    assert site.asked == 0


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (post(b"{}", "text/plain"), 415),
        (post(b"{}", "application/x-www-form-urlencoded"), 415),
        (post(b"{}", more="Origin: https://elsewhere.example\r\n"), 403),
        (post(b"{}").replace(b"localhost", b"rebound.example"), 403),
        (post(b"{}").replace(b"Host: localhost\r\n", b"Host: localhost, rebound.example\r\n"), 403),
        (GET.replace(b"1.1", b"1.0").replace(b"Host: localhost\r\n", b""), 403),
        (post(b"[" + b"1," * 600 + b"1]"), 413),
        (GET.replace(b"\r\n\r\n", b"\r\nX: " + b"x" * 70_000), 400),
        # whole, and in one piece
        (GET.replace(b"\r\n\r\n", b"\r\nX: " + b"x" * 70_000 + b"\r\n\r\n"), 400),
        (GET.replace(b"\r\n\r\n", b"".join(b"\r\nX-%d: %d" % (n, n) for n in range(9000)) + b"\r\n\r\n"), 400),
        (b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n", 400),
        (b"\x16\x03\x01\x02\x00 nonsense\r\n\r\n", 400),
    ],
)
def test_what_is_refused_before_the_application_sees_it(serve: Callable[..., Site], sent: bytes, status: int) -> None:
    site = serve(max_body=1000)
    found, body = site.ask(sent)
    assert found == status
    assert set(json.loads(body)) == {"error"}
    assert site.asked == 0


def test_a_request_with_two_lengths_is_the_last_of_its_connection(serve: Callable[..., Site]) -> None:
    site = serve()
    head = post(b"{}", more="Transfer-Encoding: chunked\r\n").removesuffix(b"{}")
    with site.connect() as client:
        client.sendall(head + b"2\r\n{}\r\n0\r\n\r\n" + GET)
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    assert answer.count(b"HTTP/1.1 200") == 1
    assert b"connection: close" in answer.lower()


def test_who_sends_too_much_is_told_so(serve: Callable[..., Site]) -> None:
    """The answer arrives although the client sends on: a reset would take its place."""
    site = serve(max_body=1000)
    assert site.ask(post(bytes(20 << 20)))[0] == 413
    assert site.asked == 0


def test_only_clients_with_a_key_are_answered() -> None:
    keys = ClientKeys({"ann": "a" * 16})
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope[CLIENT])
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    site = RunningSite(AsgiServer(KeyedClients(app, keys), extra="mcp"))
    site.gate = threading.Event()
    for sent, status in ((b"", b"401"), (b"Bearer wrong", b"401"), (b"Bearer " + b"a" * 16, b"200")):
        with site.connect() as client:
            client.sendall(GET.replace(b"\r\n\r\n", b"\r\nAuthorization: " + sent + b"\r\n\r\n"))
            assert client.recv(65536).startswith(b"HTTP/1.1 " + status)
    site.stop()
    assert seen == ["ann"]


def test_headers_up_to_the_limit_are_read(serve: Callable[..., Site]) -> None:
    assert serve().ask(GET.replace(b"\r\n\r\n", b"\r\nX: " + b"x" * 60_000 + b"\r\n\r\n")) == (200, b"")


def test_the_body_of_an_answer_does_not_wait_for_its_headers_to_be_acknowledged(serve: Callable[..., Site]) -> None:
    """Without TCP_NODELAY each answer on a connection that stays open takes 40 ms longer."""
    site = serve()
    site.gate.clear()
    with site.connect() as client:
        client.sendall(GET)
        until(lambda: site.asked == 1)
        (connection,) = site.server._server.server_state.connections
        held = connection.transport.get_extra_info("socket")
        assert held.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
        site.gate.set()
        assert client.recv(65536).startswith(b"HTTP/1.1 200")


def test_websockets_of_other_sites_and_messages_that_are_no_json(serve: Callable[..., Site]) -> None:
    client = pytest.importorskip("websockets.sync.client")
    exceptions = pytest.importorskip("websockets.exceptions")
    site = serve()
    url = site.server.url.replace("http", "ws")
    with client.connect(url) as own:
        own.send('{"a": 1}')
        assert own.recv() == '{"a": 1}'
        own.send('{"a": NaN}')
        assert json.loads(own.recv()) == {"error": "the message has NaN, which is no JSON number"}
        own.send("[]")
        assert "must be a JSON object" in own.recv()
        own.send(b"\xff")
        assert "not UTF-8" in own.recv()
        own.send('{"b": 2}')
        assert own.recv() == '{"b": 2}'
    with pytest.raises(exceptions.InvalidStatus) as refused:
        client.connect(url, origin="https://elsewhere.example")
    assert refused.value.response.status_code == 403


def test_idle_connections_keep_nobody_out(serve: Callable[..., Site]) -> None:
    site = serve(connections=200)
    site.gate.clear()
    waiting = site.connect()
    waiting.sendall(GET)
    until(lambda: site.asked == 1)
    idle = [site.connect() for _ in range(500)]
    asking = threading.Timer(0.2, site.gate.set)
    asking.start()
    assert site.ask(GET) == (200, b"")
    assert waiting.recv(65536).startswith(b"HTTP/1.1 200")
    assert len(site.server._server.server_state.connections) <= 201
    for client in (waiting, *idle):
        client.close()


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param([b"GET / HTTP/1.1\r\n", *[b"X-%d: x\r\n" % n for n in range(200)]], id="headers"),
        pytest.param([post(b"x" * 999)[:-999], *[b"x"] * 200], id="body"),
        pytest.param([], id="nothing"),
    ],
)
def test_a_client_that_sends_slowly_is_closed(serve: Callable[..., Site], parts: list[bytes]) -> None:
    site = serve(timeouts=Timeouts(receive=1.0))
    with site.connect() as client, contextlib.suppress(ConnectionError):
        for part in parts:
            client.sendall(part)
            time.sleep(0.05)
        assert client.recv(1) == b""
    assert site.ask(GET) == (200, b"")


def test_a_body_that_comes_slowly_is_told_so(serve: Callable[..., Site]) -> None:
    site = serve(seconds=0.5)
    assert site.ask(post(b"x" * 999)[:-900]) == (408, b'{"error": "the body did not arrive in 0.5 s"}')


def test_the_end_answers_what_was_accepted_and_what_is_on_its_way(serve: Callable[..., Site]) -> None:
    site = serve()
    site.gate.clear()
    clients = [site.connect() for _ in range(64)]
    for client in clients[:32]:
        client.sendall(GET)
    until(lambda: site.asked == 32)
    until(lambda: len(site.server._server.server_state.connections) == 64)
    for client in clients[32:]:
        client.sendall(GET)
    site.server.stop()
    time.sleep(0.3)
    site.gate.set()
    answers = [b"".join(iter(lambda client=client: client.recv(65536), b"")) for client in clients]  # type: ignore[misc]
    site.thread.join(20)
    assert not site.thread.is_alive()
    assert [answer.split(b"\r\n")[0] for answer in answers] == [b"HTTP/1.1 200 OK"] * 64
