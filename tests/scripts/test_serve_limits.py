"""The foundation of the servers, on real sockets: Flask behind waitress, ASGI behind uvicorn, with the same limits."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import flask
import pytest
from late import late
from malformed import MALFORMED
from servers import RunningSite, until

from turngym.agents.client_keys import ClientKeys
from turngym.agents.serving import DrainingServer, Front, Timeouts, page_front, room
from turngym.agents.serving_asgi import CLIENT, AsgiServer, JsonBodies, KeyedClients
from turngym.core.errors import TurngymError

GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
WAIT = b"GET /wait HTTP/1.1\r\nHost: localhost\r\n\r\n"


class Site(RunningSite):
    """A server whose application answers POST with the body, GET with `now`, and GET /wait once `gate` is open."""

    def __init__(self, server: Any) -> None:
        self.gate, self.asked = threading.Event(), 0
        super().__init__(server)

    @property
    def connections(self) -> int:
        """Connections that are open now."""
        inner = self.server._server
        return len(inner.active_channels if hasattr(inner, "active_channels") else inner.server_state.connections)

    def ask(self, sent: bytes) -> tuple[int, bytes]:
        """Status and body of the answer to one request."""
        with self.connect() as client:
            client.sendall(sent)
            head, _, body = client.recv(65536).partition(b"\r\n\r\n")
            while int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]) > len(body):
                body += client.recv(65536)
            return int(head.split(b" ")[1]), body


class FlaskSite(Site):
    def __init__(self, drain: float = 20.0, **settings: Any) -> None:
        app = flask.Flask("site", static_folder=None)

        @app.before_request
        def count() -> None:
            self.asked += 1

        @app.get("/")
        def now() -> str:
            return "now"

        @app.get("/wait")
        def wait() -> str:
            assert self.gate.wait(20)
            return "waited"

        @app.get("/large")
        def large() -> bytes:
            return bytes(30 << 20)

        @app.post("/")
        def echo() -> bytes:
            return bytes(flask.request.get_data())

        def refuse(status: int, text: str) -> bytes:
            return json.dumps({"error": text}).encode()

        front = Front(app=app, path="", threads=4, **{"max_body": 1 << 20, "refuse": refuse, **settings})
        super().__init__(DrainingServer(front, drain=drain))


class AsgiSite(Site):
    def __init__(self, max_body: int = 1 << 20, seconds: float = 60.0, **settings: Any) -> None:
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
        while scope["path"] == "/wait" and not self.gate.is_set():
            await asyncio.sleep(0.01)
        body = message["body"] if scope["method"] == "POST" else b"now"
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
        await send({"type": "http.response.body", "body": body})


Serve = Callable[..., Any]
asgi = pytest.mark.skipif(find_spec("uvicorn") is None, reason="the server needs turngym[openenv] or turngym[mcp]")
both = pytest.mark.parametrize("kind", [FlaskSite, pytest.param(AsgiSite, marks=asgi)])


@pytest.fixture
def serve() -> Iterator[Serve]:
    made: list[Site] = []

    def start(kind: Callable[..., Site], **settings: Any) -> Site:
        made.append(kind(**settings))
        return made[-1]

    yield start
    for site in made:
        site.stop()


def post(body: bytes, kind: str = "application/json", more: str = "") -> bytes:
    head = f"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n{more}\r\n"
    return head.encode() + body


def closed(client: socket.socket) -> bytes:
    """What the server sent before it closed."""
    parts = []
    try:
        while part := client.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


# --- What both promise


@both
def test_idle_connections_keep_nobody_out(serve: Serve, kind: Any) -> None:
    """500 are open, 200 are kept: the next request is answered, and who waits for its answer is not closed."""
    site = serve(kind, connections=200)
    waiting = site.connect()
    waiting.sendall(WAIT)
    until(lambda: site.asked == 1)
    idle = [site.connect() for _ in range(500)]
    assert site.ask(GET) == (200, b"now")
    assert site.connections <= 201
    site.gate.set()
    assert waiting.recv(65536).startswith(b"HTTP/1.1 200")
    for client in (waiting, *idle):
        client.close()


SLOWLY = {
    "headers": [b"GET / HTTP/1.1\r\n", *[b"X-%d: x\r\n" % n for n in range(200)]],
    "body": [post(b"x" * 999)[:-999], *[b"x"] * 200],
    "chunks": [b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n", *[b"1\r\nx\r\n"] * 200],
}


@both
@pytest.mark.parametrize("how", late(SLOWLY, "chunks"))
def test_a_client_that_sends_slowly_is_closed(serve: Serve, kind: Any, how: str) -> None:
    """It is never silent, so a time-out between two reads would never close it."""
    site = serve(kind, timeouts=Timeouts(receive=1.0))
    with site.connect() as client:
        with contextlib.suppress(ConnectionError):
            for part in SLOWLY[how]:
                client.sendall(part)
                time.sleep(0.05)
            pytest.fail("the server took all of it")
        until(lambda: not site.connections)
    assert site.ask(GET) == (200, b"now")


@pytest.mark.long
@both
@pytest.mark.parametrize(("hours", "idle"), [(10, 60.0), (-10, 1.0)])
def test_clocks_that_step_close_nothing_and_keep_nothing_open(
    serve: Serve, kind: Any, hours: int, idle: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, real = serve(kind, timeouts=Timeouts(idle=idle)), time.time
    client = http.client.HTTPConnection(site.server.host, site.server.port, timeout=20)
    client.request("GET", "/")
    assert client.getresponse().read() == b"now"
    same = client.sock
    monkeypatch.setattr("time.time", lambda: real() + hours * 3600)
    if hours < 0:
        assert closed(same) == b""
    else:
        # the server looks once a second
        time.sleep(1.5)
        client.request("GET", "/")
        assert client.getresponse().read() == b"now"
        assert client.sock is same
    client.close()


@both
def test_the_end_answers_what_was_accepted_and_what_is_on_its_way(serve: Serve, kind: Any) -> None:
    """64 clients, of whom Flask's four threads serve four: the others are answered too, and each is closed."""
    site = serve(kind)
    clients = [site.connect() for _ in range(64)]
    for client in clients[:32]:
        client.sendall(WAIT)
    until(lambda: site.asked == (4 if kind is FlaskSite else 32))
    until(lambda: site.connections == 64)
    for client in clients[32:]:
        client.sendall(WAIT)
    site.server.stop()
    time.sleep(0.3)
    site.gate.set()
    answers = [closed(client) for client in clients]
    site.thread.join(20)
    assert not site.thread.is_alive()
    assert [answer.split(b"\r\n")[0] for answer in answers] == [b"HTTP/1.1 200 OK"] * 64
    if kind is FlaskSite:
        assert sum(b"Connection: close" in answer for answer in answers) == 64
        assert site.server.drained


@both
@pytest.mark.parametrize("version", [b"HTTP/1.1", b"HTTP/1.0"])
def test_a_request_with_two_lengths_is_the_last_of_its_connection(serve: Serve, kind: Any, version: bytes) -> None:
    """What a server in between takes for the next request is not answered (RFC 9112, 6.1)."""
    site = serve(kind)
    head = post(b"{}", more="Transfer-Encoding: chunked\r\n").removesuffix(b"{}").replace(b"HTTP/1.1", version)
    with site.connect() as client:
        client.sendall(head + b"2\r\n{}\r\n0\r\n\r\n" + GET)
        answer = closed(client)
    assert answer.count(b"HTTP/1.1 ") + answer.count(b"HTTP/1.0 ") == 1
    assert b"connection: close" in answer.lower()


LONG = b"\r\nX: " + b"x" * 70_000
MANY = b"".join(b"\r\nX-%d: %d" % (n, n) for n in range(9000))
HEADERS = {
    "another host": post(b"{}").replace(b"localhost", b"rebound.example"),
    "another host, absolute": b"GET http://rebound.example/ HTTP/1.1\r\nHost: rebound.example\r\n\r\n",
    "two hosts": post(b"{}").replace(b"localhost\r\n", b"localhost\r\nHost: rebound.example\r\n"),
    "a list of hosts": post(b"{}").replace(b"localhost\r\n", b"localhost, rebound.example\r\n"),
    "another origin": post(b"{}", more="Origin: https://elsewhere.example\r\n"),
    "no host": b"GET / HTTP/1.0\r\n\r\n",
    "a body too large": post(b"").replace(b"Length: 0", b"Length: 1000000000000"),
    "a length below zero": b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
    "no chunk": b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
    "no encoding": b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: x\r\n\r\n",
    "a long header that does not end": GET.replace(b"\r\n\r\n", LONG),
    "a long header": GET.replace(b"\r\n\r\n", LONG + b"\r\n\r\n"),
    "many headers": GET.replace(b"\r\n\r\n", MANY + b"\r\n\r\n"),
    "no HTTP": b"\x16\x03\x01\x02\x00 nonsense\r\n\r\n",
}
STATUS = {**dict.fromkeys(list(HEADERS)[:6], 403), "a body too large": 413}


@both
@pytest.mark.parametrize("what", HEADERS)
def test_what_is_refused_before_the_application_sees_it(serve: Serve, kind: Any, what: str) -> None:
    site = serve(kind)
    status, body = site.ask(HEADERS[what])
    # waitress tells headers that are too large from others that it cannot read; uvicorn reads no second host
    other = 431 if kind is FlaskSite and "header" in what else 400
    assert status == (other if kind is AsgiSite and what == "two hosts" else STATUS.get(what, other))
    assert set(json.loads(body)) == {"error"}
    assert site.asked == 0


@both
@pytest.mark.parametrize("how", ["length", "chunks", "expect"])
def test_who_sends_too_much_is_told_so(serve: Serve, kind: Any, how: str) -> None:
    """The answer arrives although the client sends on: a reset would take its place."""
    site = serve(kind)
    size, more = 20 << 20, b"Expect: 100-continue\r\n" if how == "expect" else b""
    length = b"Transfer-Encoding: chunked" if how == "chunks" else b"Content-Length: %d" % size
    head = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with site.connect() as client:
        client.sendall(head + more + length + b"\r\n\r\n")
        if how != "expect":
            client.sendall((b"%x\r\n" % size if how == "chunks" else b"") + bytes(size))
        answer = closed(client)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"larger than 1048576 bytes" in answer
    until(lambda: not site.connections)


# --- Flask behind waitress


def test_a_client_that_takes_nothing_of_its_answer_is_closed(serve: Serve) -> None:
    site = serve(FlaskSite, timeouts=Timeouts(send=1.0))
    with site.connect() as client:
        client.sendall(WAIT.replace(b"/wait", b"/large"))
        until(lambda: site.connections == 1)
        until(lambda: not site.connections)


@pytest.mark.long
def test_the_end_does_not_wait_for_clients_that_never_stop_asking(serve: Serve) -> None:
    site = serve(FlaskSite)
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


@pytest.mark.long
def test_who_is_refused_and_sends_on_is_closed(serve: Serve) -> None:
    site = serve(FlaskSite)
    with site.connect() as client:
        client.sendall(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            for _ in range(200):
                client.sendall(b"x")
                time.sleep(0.05)
            pytest.fail("the server read all of it")
    assert site.ask(GET) == (200, b"now")


def test_connections_fit_the_limit_of_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    limits = [256, 700]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: limits.__setitem__(0, both[0]))
    assert room(100) == 100
    assert limits[0] == 100 + 128 + 256
    assert room(1000) == 700 - 128 - 256
    assert limits[0] == 700


def test_a_port_that_does_not_exist_is_refused() -> None:
    """The system takes 70000 for 4464."""
    with pytest.raises(TurngymError, match="port 70000: ports go from 0 to 65535"):
        DrainingServer(page_front(flask.Flask("site"), threads=1), port=70000)


# --- ASGI behind uvicorn


@asgi
def test_bodies_arrive_whole(serve: Serve) -> None:
    site = serve(AsgiSite)
    body = json.dumps({"text": "ä" * 100_000}).encode()
    assert site.ask(post(body)) == (200, body)
    assert site.ask(GET) == (200, b"now")
    chunked = (
        "POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    assert site.ask(chunked.encode() + b'4\r\n{"a"\r\n4\r\n: 1}\r\n0\r\n\r\n') == (200, b'{"a": 1}')


@asgi
@pytest.mark.parametrize("form", ["not UTF-8", "NaN", "deep"])
def test_bodies_that_are_no_json(serve: Serve, form: str) -> None:
    site = serve(AsgiSite)
    status, body = site.ask(post(MALFORMED[form]))
    assert status == 400
    assert "the body" in json.loads(body)["error"]
    assert site.asked == 0


@asgi
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


@asgi
def test_headers_up_to_the_limit_are_read(serve: Serve) -> None:
    assert serve(AsgiSite).ask(GET.replace(b"\r\n\r\n", b"\r\nX: " + b"x" * 60_000 + b"\r\n\r\n")) == (200, b"now")


@asgi
def test_the_body_of_an_answer_does_not_wait_for_its_headers_to_be_acknowledged(serve: Serve) -> None:
    """Without TCP_NODELAY each answer on a connection that stays open takes 40 ms longer."""
    site = serve(AsgiSite)
    with site.connect() as client:
        client.sendall(WAIT)
        until(lambda: site.asked == 1)
        (connection,) = site.server._server.server_state.connections
        held = connection.transport.get_extra_info("socket")
        assert held.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
        site.gate.set()
        assert client.recv(65536).startswith(b"HTTP/1.1 200")


@asgi
def test_websockets_of_other_sites_and_messages_that_are_no_json(serve: Serve) -> None:
    client = pytest.importorskip("websockets.sync.client")
    exceptions = pytest.importorskip("websockets.exceptions")
    site = serve(AsgiSite)
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


@asgi
def test_a_body_that_comes_slowly_is_told_so(serve: Serve) -> None:
    site = serve(AsgiSite, seconds=0.5)
    assert site.ask(post(b"x" * 999)[:-900]) == (408, b'{"error": "the body did not arrive in 0.5 s"}')


@asgi
@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded"])
def test_only_json_is_taken(serve: Serve, kind: str) -> None:
    site = serve(AsgiSite)
    assert site.ask(post(b"{}", kind))[0] == 415
    assert site.asked == 0
