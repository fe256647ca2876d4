"""The HTTP base of every server here: who may ask, how much, for how long, and an end that loses nothing.

    server = DrainingServer(retrieval_front(create_app(retriever)), host="127.0.0.1", port=8000)
    server.stop_on_signals()
    server.run()

Flask applications (retrieval, shop, proxy, traces) run in waitress, ASGI applications (OpenEnv, MCP) in uvicorn. Both
get the same rules, and what they lack is added here. One base on uvicorn was measured: a search costs as much CPU time,
but while other processes keep all cores busy one event loop gets the share of one thread, and with 64 clients it
answered a third to a half of the searches that waitress's threads did.

1. What a server must know of its application: `Front`, `Timeouts`.
2. `DrainingServer` on waitress: room for new clients, time-outs of a whole request, draining.
3. Connections of waitress, and the words in which they refuse.
4. `AsgiServer` on uvicorn and its connections, with the same limits.
5. `JsonBodies`: bodies that are read and checked before an ASGI application sees them.
6. The fronts of retrieval, shop and traces; that of the proxy is in scripts/serve_proxy.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import resource
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from turngym.agents.access import Access
from turngym.agents.client_keys import ClientKeys
from turngym.envs.core.errors import TurngymError
from turngym.envs.core.plugins import need
from turngym.envs.core.settings import JsonError, strict_json

if TYPE_CHECKING:
    from flask import Flask

    from turngym.retrieval.server import RetrievalService

# Each server comes with an extra of its own, so either may be missing: its class then says what to install.
try:
    from waitress import wasyncore
    from waitress.adjustments import Adjustments
    from waitress.channel import ClientDisconnected, HTTPChannel
    from waitress.parser import HTTPRequestParser
    from waitress.server import TcpWSGIServer
    from waitress.task import ErrorTask, WSGITask
except ImportError:
    HTTPChannel = HTTPRequestParser = TcpWSGIServer = ErrorTask = WSGITask = object
try:
    import h11
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ImportError:
    H11Protocol = object  # type: ignore[assignment, misc]

# What a server must know of its application.

FRESH = 0.2
"""Seconds in which a new connection may send its request although the server is leaving."""
SPARE_FILES = 256
"""File descriptors for everything but connections."""
BURST = 64
"""Connections that are accepted at a time."""
LINGER = 2.0
"""Seconds for which what a refused client still sends is read and thrown away. Closing earlier would reset the
connection, and most clients would then see the reset in place of the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Seconds that a connection gets."""

    receive: float = 60.0
    """From the first byte of a request to its last, however steadily bytes trickle in."""
    idle: float = 75.0
    """Without a request."""
    send: float = 60.0
    """For which a client may take nothing of its answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """A Flask application with its limits."""

    app: Flask
    path: str
    """What clients put behind the address, such as /v1."""
    threads: int
    """Requests in work at the same time; each that waits holds one."""
    max_body: int
    """Largest body of a request, bytes."""
    refuse: Callable[[int, str], bytes]
    """Makes the body of an answer to what never reaches the application, from its status and a text: malformed HTTP,
    bodies that are too large, other sites."""
    media: str = "application/json"
    """Content type of what `refuse` makes."""
    leave: Callable[[], None] = lambda: None
    """Called when the end begins, so that the health check can say so."""
    sweep: Callable[[], object] | None = None
    """Called every `sweep_every` seconds while the server runs."""
    sweep_every: float = 5.0
    connections: int = 1000
    """Connections open at the same time; the one that is idle for longest makes room."""
    max_headers: int = 64 * 2**10
    """Largest headers of a request, bytes."""
    timeouts: Timeouts = Timeouts()


def access_of(host: str, names: tuple[str, ...]) -> Access:
    """The access rule of a server on `host` that also answers to `names`. Raises TurngymError for invalid names."""
    try:
        return Access(host=host, names=names)
    except ValueError as error:
        raise TurngymError(str(error)) from None


def room(connections: int) -> int:
    """Connections that this process may have: `connections`, where its limit of open files can be raised to that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + 2 * BURST + SPARE_FILES
    if resource.RLIM_INFINITY in (soft, hard) or soft >= wanted:
        return connections
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(min(connections, soft - 2 * BURST - SPARE_FILES), 16)


def _url(host: str, port: int, path: str = "") -> str:
    return f"http://[{host}]:{port}{path}" if ":" in host else f"http://{host}:{port}{path}"


# The server of Flask applications: waitress.

CROWD, GATHER = 8, 0.001
"""Connections from which events are gathered, and for how many seconds."""
STEP = 0.02
"""Seconds between two looks at what is left at the end."""


class DrainingServer:
    """Listens from construction on (port 0: a free one); `run` answers until `stop`."""

    def __init__(
        self, front: Front, *, host: str = "127.0.0.1", port: int = 0, drain: float = 10.0, hosts: tuple[str, ...] = ()
    ) -> None:
        """`drain`: seconds that accepted requests get to finish after `stop`. `hosts`: names beside the loopback's own.

        Raises TurngymError if waitress is not installed, or the address cannot be listened on.
        """
        self._front, self._drain = front, drain
        need("waitress", "the server", "serve")
        self._server = _listen_waitress(front, host, port, hosts)
        self.host, self.port = host, int(self._server.effective_port)
        self._wishes: SimpleQueue[str] = SimpleQueue()
        self.drained = False
        """After `run`: whether every accepted request was answered."""

    @property
    def url(self) -> str:
        """What clients take as their base URL."""
        return _url(self.host, self.port, self._front.path)

    def run(self) -> None:
        """Answer requests until `stop`. What is behind the application stays open: its owner closes it."""
        over = threading.Event()
        sweeping = threading.Thread(target=self._sweep, args=(over,), name="server-sweep", daemon=True)
        threading.Thread(target=self._end, name="server-end", daemon=True).start()
        sweeping.start()
        try:
            self._loop()
        finally:
            # a loop that ended by itself or by an error must also release the thread that waits for the wish
            self.stop()
            over.set()
            sweeping.join()
            self._server.task_dispatcher.shutdown(timeout=5)

    def stop(self) -> None:
        """Stop listening, answer what was accepted, return from `run`; a second call does not wait any longer.

        Safe in a signal handler: putting into a SimpleQueue takes no lock that the interrupted code may hold.
        """
        self._wishes.put("stop")

    def stop_on_signals(self) -> None:
        """SIGTERM and SIGINT stop this server; a second one at once. Call in the main thread."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.stop())

    def _loop(self) -> None:
        """The loop of waitress, which looks at every connection each time it wakes.

        With many connections that takes more time than the answers do, so then it wakes for several events at once.
        """
        server = self._server
        while server._map:
            server.asyncore.loop(timeout=1, use_poll=True, map=server._map, count=1)
            server.tend()
            if len(server.active_channels) > CROWD:
                time.sleep(GATHER)

    def _sweep(self, over: threading.Event) -> None:
        while self._front.sweep is not None and not over.wait(self._front.sweep_every):
            self._front.sweep()

    def _end(self) -> None:
        """Wait for the wish to stop, then let the loop of waitress close what is idle until nothing is left."""
        self._wishes.get()
        self._front.leave()
        self._in_loop(self._server.leave)
        until = time.monotonic() + self._drain
        while time.monotonic() < until and self._server.active_channels:
            self._in_loop(self._server.close_idle)
            try:
                self._wishes.get(timeout=STEP)
                break
            except Empty:
                continue
        self.drained = not self._server.active_channels
        self._in_loop(lambda: wasyncore.close_all(self._server._map))

    def _in_loop(self, step: Callable[[], None]) -> None:
        # when the loop is over, its pipe is closed
        with contextlib.suppress(OSError):
            self._server.trigger.pull_trigger(step)


def _listen_waitress(front: Front, host: str, port: int, names: tuple[str, ...]) -> Any:
    """A server that listens already. Raises TurngymError where it cannot."""
    # waitress warns whenever a request waits for a thread, which is what a queue is for
    logging.getLogger("waitress.queue").setLevel(logging.ERROR)
    access = access_of(host, names)
    connections = room(front.connections)
    try:
        settings = Adjustments(
            host=host,
            port=port,
            threads=front.threads,
            # above ours, which makes room instead of waiting
            connection_limit=connections + 2 * BURST,
            # waitress's own 8 KiB cost a look at every connection for each
            recv_bytes=2**16,
            max_request_header_size=front.max_headers,
            # waitress refuses bodies from its limit on, not only above it
            max_request_body_size=front.max_body + 1,
            channel_request_lookahead=1,  # without it a client that went away is not noticed
            channel_timeout=int(front.timeouts.idle),
            asyncore_use_poll=True,
            ident="turngym",
        )
        if len(settings.listen) != 1:
            raise TurngymError(f"host {host!r} stands for several addresses; name one, such as 127.0.0.1")
        made = WaitressServer(_guarded(front, access), map={}, adj=settings, sockinfo=settings.listen[0])
    except (OSError, ValueError, OverflowError) as error:
        raise TurngymError(f"cannot listen on {host}, port {port}: {error}; choose a free port") from error
    made.channel_class = type(
        "Channel", (Channel,), {"error_task_class": type("Refusal", (Refusal,), {"front": front})}
    )
    made.front, made.most = front, connections
    return made


WsgiApp = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


def _guarded(front: Front, access: Access) -> WsgiApp:
    """The application of `front` behind the rule of `access`: 403 for what it refuses."""

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        refusal = access.refusal(environ.get("HTTP_HOST"), environ.get("HTTP_ORIGIN"))
        if refusal is None:
            return front.app(environ, start_response)
        body = front.refuse(403, refusal)
        start_response("403 Forbidden", [("Content-Type", front.media), ("Content-Length", str(len(body)))])
        return [body]

    return application


class WaitressServer(TcpWSGIServer):
    """waitress with a limit of connections, time-outs of whole requests and an end of our own."""

    leaving = False
    next_check = 0.0
    front: Front
    most: int

    def handle_accept(self) -> None:
        for _ in range(BURST):
            before = len(self.active_channels)
            super().handle_accept()
            if len(self.active_channels) <= before:
                return

    def tend(self) -> None:
        """Close what is overdue, and what must make room. Only in the loop's own thread, outside of its poll."""
        now = time.monotonic()
        if now >= self.next_check:
            self.next_check = now + 1.0
            for channel in list(self.active_channels.values()):
                if channel.overdue(now, self.front):
                    channel.handle_close()
        if len(self.active_channels) > self.most:
            self._make_room()

    def _make_room(self) -> None:
        waiting = [channel for channel in self.active_channels.values() if not channel.requests]
        # who has begun a request goes after who is silent
        waiting.sort(key=lambda channel: (channel.began is not None, channel.last_activity))
        for channel in waiting[: len(self.active_channels) - self.most]:
            channel.handle_close()

    def leave(self) -> None:
        """Accept what has connected, then no more; from now on each answer is the last of its connection."""
        self.leaving = True
        with contextlib.suppress(OSError):
            self.handle_accept()
        self.del_channel()
        self.socket.close()

    def close_idle(self) -> None:
        for channel in list(self.active_channels.values()):
            if channel.idle() and not channel.has_news():
                channel.handle_close()


# Connections of waitress: how long each takes, and the words in which it refuses.


class Refusal(ErrorTask):
    """The answer to what waitress cannot parse or refuses; it never reaches the application."""

    front: Front

    def service(self) -> None:
        # waitress would name the path of what it could not parse, which has none
        try:
            super().service()
        except ClientDisconnected:
            self.close_on_finish = True

    def execute(self) -> None:
        error, front = self.request.error, self.front
        # an encoding that nobody knows is the client's fault; from 500 on it would be counted as ours
        code, reason = (400, "Bad Request") if error.code == 501 else (error.code, error.reason)
        large = f"the body is larger than {front.max_body} bytes"
        body = front.refuse(code, large if code == 413 else f"{reason}: {error.body}")
        self.status = f"{code} {reason}"
        self.response_headers.append(("Content-Type", front.media))
        self.set_close_on_finish()
        self.channel.refused = True
        self.content_length = len(body)
        self.write(body)


class Answer(WSGITask):
    """An answer of the application; while the server leaves, the last of its connection."""

    def build_response_header(self) -> bytes:
        if self.channel.server.leaving:
            self.set_close_on_finish()
        return bytes(super().build_response_header())


class Parser(HTTPRequestParser):
    """Parses a request. Where two headers say its length, somebody in between may have read the other one."""

    def parse_header(self, header_plus: bytes) -> None:
        super().parse_header(header_plus)
        both = self.chunked and "CONTENT_LENGTH" in self.headers
        # waitress takes the header out where it understands it, which HTTP/1.0 does not have
        if both or "TRANSFER_ENCODING" in self.headers:
            # answered, and then closed (RFC 9112, 6.1): what follows may be part of this body
            self.headers["CONNECTION"] = "close"
        if self.content_length >= self.adj.max_request_body_size:
            # the body is not asked for: it is refused by its length
            self.expect_continue = False


class Channel(HTTPChannel):
    """One connection that knows how long everything takes."""

    task_class, error_task_class, parser_class = Answer, Refusal, Parser
    began: float | None = None
    """When the first byte of the request came that is not complete yet."""
    refused = False
    """Whether the last request was answered before all of it had come."""
    lingers: float | None = None
    """Until when what a refused client still sends is read and thrown away."""

    def handle_close(self) -> None:
        if self.refused and self.connected and self.lingers is None and not self.total_outbufs_len:
            try:
                self.socket.shutdown(socket.SHUT_WR)
            except OSError:
                super().handle_close()
            else:
                self.lingers, self.will_close = time.monotonic() + LINGER, False
            return
        super().handle_close()

    def readable(self) -> bool:
        return self.lingers is not None or bool(super().readable())

    def writable(self) -> bool:
        return self.lingers is None and bool(super().writable())

    def received(self, data: bytes) -> bool:
        if self.lingers is not None:
            return False
        self.began = time.monotonic() if self.began is None else self.began
        found = super().received(data)
        if self.request is None:
            self.began = None
        return bool(found)

    def overdue(self, now: float, front: Front) -> bool:
        """Whether a request takes too long to arrive, none comes, or nothing of the answer is taken."""
        if self.lingers is not None:
            return now > self.lingers
        if self.began is not None and now - self.began > front.timeouts.receive:
            return True
        if self.idle() and time.time() - self.last_activity > front.timeouts.idle:
            return True
        # who holds the lock is writing, and has not tried to send yet
        if not self.total_outbufs_len or not self.outbuf_lock.acquire(blocking=False):
            return False
        stalled = self.total_outbufs_len and time.time() - self.last_activity > front.timeouts.send
        self.outbuf_lock.release()
        return bool(stalled)

    def idle(self) -> bool:
        """Whether nothing is in work, on its way or still to be sent."""
        return not (self.requests or self.request is not None or self.total_outbufs_len)

    def has_news(self) -> bool:
        """Whether a request is on its way: bytes that were not read yet, or a client that has just connected."""
        if time.time() - self.creation_time < FRESH and self.last_activity == self.creation_time:
            return True
        try:
            return bool(self.socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except OSError:
            return False


# The server of ASGI applications: uvicorn.
#
# By itself uvicorn lets a request take for ever to arrive, refuses work when many connections are silent, and at its
# end closes connections whose request is on its way.

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]
MAX_MESSAGE = 8 << 20
"""Bytes of a message of a WebSocket."""


class AsgiServer:
    """Listens from construction on (port 0: a free one); `run` answers until a signal or `stop`."""

    def __init__(
        self,
        app: AsgiApp,
        *,
        extra: str,
        host: str = "127.0.0.1",
        port: int = 0,
        drain: float = 10.0,
        hosts: tuple[str, ...] = (),
        timeouts: Timeouts | None = None,
        connections: int = 1000,
    ) -> None:
        """`extra` names what to install where uvicorn is missing. Other arguments as `DrainingServer` has them.

        Raises TurngymError if uvicorn is not installed, or the address cannot be listened on.
        """
        need("uvicorn", "the server", extra)
        timeouts = timeouts or Timeouts()
        access = access_of(host, hosts)
        self._listener = _listen_socket(host, port)
        self.host, self.port = host, int(self._listener.getsockname()[1])
        config = uvicorn.Config(
            Guarded(app, access),
            http=type("Protocol", (LimitedProtocol,), {"timeouts": timeouts, "most": room(connections)}),
            loop="asyncio",
            log_level="error",
            server_header=False,
            h11_max_incomplete_event_size=64 * 2**10,
            ws_max_size=MAX_MESSAGE,
            timeout_keep_alive=int(timeouts.idle),
            timeout_graceful_shutdown=max(1, round(drain)),
        )
        self._server = uvicorn.Server(config)

    @property
    def url(self) -> str:
        """What clients take as their base URL."""
        return _url(self.host, self.port)

    def run(self) -> None:
        """Answer until `stop` or SIGINT; then answer what was accepted."""
        # uvicorn raises the signal again after a clean end
        with contextlib.suppress(KeyboardInterrupt):
            self._server.run(sockets=[self._listener])

    def stop_on_signals(self) -> None:
        """SIGTERM, too, stops this server and lets the caller go on after `run`. Call in the main thread."""
        signal.signal(signal.SIGTERM, _interrupt)

    def stop(self) -> None:
        """Stop listening, answer what was accepted, return from `run`; safe in any thread."""
        self._server.should_exit = True


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _listen_socket(host: str, port: int) -> socket.socket:
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError) as error:
        raise TurngymError(f"cannot listen on {host}, port {port}: {error}; choose a free port") from error
    listener.setblocking(False)
    # asyncio sets it only on sockets that name their protocol; without it the body of every answer on a connection that
    # stays open waits 40 ms for the client to acknowledge the headers
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


class Guarded:
    """An ASGI application behind the rule of `access`: 403 for what it refuses, WebSockets included."""

    def __init__(self, app: AsgiApp, access: Access) -> None:
        self.app, self.access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = None if scope["type"] == "lifespan" else self._refusal(scope["headers"])
        if refusal is None:
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await refuse(send, 403, refusal)
        else:
            # before it is accepted, a WebSocket is an HTTP request: closing it answers 403
            await receive()
            await send({"type": "websocket.close", "code": 1008, "reason": refusal[:100]})

    def _refusal(self, headers: list[tuple[bytes, bytes]]) -> str | None:
        found: dict[bytes, list[str]] = {b"host": [], b"origin": []}
        for name, value in headers:
            if name in found:
                found[name].append(value.decode("latin-1"))
        host, origin = (", ".join(values) if values else None for values in found.values())
        return self.access.refusal(host, origin)


CLOSE = (b"connection", b"close")
PIECE = 4 * 2**10
"""Bytes of headers that are parsed at a time: h11 looks at their limit only between two pieces."""


class LimitedProtocol(H11Protocol):
    """One connection with a time for each request and room for new clients. uvicorn calls the public methods."""

    timeouts = Timeouts()
    most = 1000
    timer: asyncio.TimerHandle | None = None
    """Ends a request that does not arrive."""
    leaving = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.heard = time.monotonic()
        # the first byte has to come, too
        self._arm()
        if len(self.connections) > self.most:
            self._make_room()

    def data_received(self, data: bytes) -> None:
        self.heard = time.monotonic()
        while data:
            if self.transport.is_closing() or self.transport.get_protocol() is not self:
                return
            size = PIECE if self.conn.their_state is h11.IDLE else len(data)
            super().data_received(data[:size])
            data = data[size:]
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            if self.timer is None:
                self._arm()
        else:
            self._disarm()
        if self.leaving and self.cycle is not None:
            self.cycle.keep_alive = False

    def handle_events(self) -> None:
        super().handle_events()
        names = {name for name, _ in self.headers or ()}
        if {b"content-length", b"transfer-encoding"} <= names and CLOSE not in self.headers:
            # as `Parser` does: answered, and then closed
            self.headers.append(CLOSE)

    def on_response_complete(self) -> None:
        self._disarm()
        super().on_response_complete()

    def handle_websocket_upgrade(self, event: Any) -> None:
        self._disarm()
        super().handle_websocket_upgrade(event)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        self.leaving = True
        if self.silent():
            # what was sent before the end began may not have been read yet
            self.loop.call_later(FRESH, self._close_silent)
        else:
            super().shutdown()

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        body = json.dumps({"error": msg}).encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def silent(self) -> bool:
        """Whether no request is in work."""
        return self.cycle is None or self.cycle.response_complete

    def _make_room(self) -> None:
        silent = [other for other in self.connections if isinstance(other, LimitedProtocol) and other.silent()]
        victim = min(silent, key=lambda other: other.heard, default=self)
        # it leaves by itself only after this turn of the loop, in which others may come
        self.connections.discard(victim)
        victim.transport.abort()

    def _close_silent(self) -> None:
        if not self.transport.is_closing() and self.silent():
            super().shutdown()

    def _arm(self) -> None:
        self._disarm()
        self.timer = self.loop.call_later(self.timeouts.receive, self.transport.abort)

    def _disarm(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


# Bodies of an ASGI application, read before it: whole, in time, of a bounded size, and strict JSON.
#
# Frameworks read JSON as Python does, NaN and half surrogate pairs included, and then fail to write an answer about it.


class _Refused(Exception):
    """A body that the application does not see: status and one line."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class JsonBodies:
    """ASGI middleware: a body that is no JSON gets 400, of another content type 415, too large 413, too slow 408.

    Messages of a WebSocket that are no JSON are answered with `complaint(text)` and never reach the application.
    """

    def __init__(
        self,
        app: AsgiApp,
        *,
        max_body: int = 8 << 20,
        seconds: float = 60.0,
        complaint: Callable[[str], str] = lambda text: json.dumps({"error": text}),
    ) -> None:
        self.app, self.max_body, self.seconds, self.complaint = app, max_body, seconds, complaint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self.app(scope, self._messages(receive, send), send)
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self.seconds):
                body = await self._read(receive)
            self._check(scope, body)
        except TimeoutError:
            await refuse(send, 408, f"the body did not arrive in {self.seconds:g} s")
        except _Refused as error:
            await refuse(send, error.status, str(error))
        except ConnectionError:
            return
        else:
            await self.app(scope, _again(body, receive), send)

    async def _read(self, receive: Receive) -> bytes:
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ConnectionError("the client went away")
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > self.max_body:
                if more:
                    await _discard(receive)
                raise _Refused(413, f"the body is larger than {self.max_body} bytes")
            if not more:
                return bytes(body)

    def _check(self, scope: Scope, body: bytes) -> None:
        if not body:
            return
        kind = dict(scope["headers"]).get(b"content-type", b"")
        # any page may send text/plain or a form to any address, but JSON only to who allows it (CORS)
        if kind.partition(b";")[0].strip().lower() != b"application/json":
            raise _Refused(415, "send Content-Type: application/json")
        try:
            strict_json(body)
        except JsonError as error:
            raise _Refused(400, str(error)) from None

    def _messages(self, receive: Receive, send: Send) -> Receive:
        async def read() -> Message:
            while True:
                message = await receive()
                if message["type"] != "websocket.receive":
                    return message
                text = message.get("text")
                try:
                    # half surrogate pairs are let through here, for `strict_json` to refuse
                    sent = message.get("bytes") or b"" if text is None else text.encode("utf-8", "surrogatepass")
                    if isinstance(strict_json(sent), dict):
                        return message
                    complaint = "a message must be a JSON object"
                except JsonError as error:
                    complaint = str(error).replace("the body", "the message", 1)
                await send({"type": "websocket.send", "text": self.complaint(complaint)})

        return read


async def refuse(send: Send, status: int, text: str) -> None:
    """Answer with one line of JSON; the connection ends, because not all of the body may have been read."""
    body = json.dumps({"error": text}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*headers, (b"connection", b"close")]})
    await send({"type": "http.response.body", "body": body})


async def _discard(receive: Receive) -> None:
    """Read what is left of a body, as long as `LINGER` allows."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER):
            while (await receive()).get("more_body", False):
                pass


CLIENT = "turngym.client"
"""Where an ASGI scope has the name of the client whose key came with the request."""


class KeyedClients:
    """ASGI middleware: 401 without a client's key; the application reads in `scope[CLIENT]` whose it was."""

    def __init__(self, app: AsgiApp, keys: ClientKeys) -> None:
        self.app, self.keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            client = self.keys.client_of(dict(scope["headers"]).get(b"authorization", b"").decode("latin-1"))
            if client is None:
                await refuse(send, 401, "the key is missing or wrong: send Authorization: Bearer KEY")
                return
            scope = {**scope, CLIENT: client}
        await self.app(scope, receive, send)


def _again(body: bytes, receive: Receive) -> Receive:
    """`receive` that gives the body once more, and then waits for the client to go away."""
    left = [body]

    async def read() -> Message:
        return {"type": "http.request", "body": left.pop(), "more_body": False} if left else await receive()

    return read


# The fronts of the Flask applications.

RETRIEVAL_THREADS = 96
"""Each waiting request holds a thread, so this bounds how many queries of single-query clients can share a batch.
Threads that wait cost little; the retriever itself runs in the service's own few."""


def retrieval_front(app: Flask, *, threads: int = RETRIEVAL_THREADS) -> Front:
    """The front of `retrieval.server.create_app`; its refusals count among the answers of /stats."""
    service: RetrievalService = app.extensions["retrieval"]

    def refuse(status: int, text: str) -> bytes:
        service.stats.answered(status)
        return json.dumps({"error": text}).encode()

    return Front(
        app=app,
        path="/retrieve",
        threads=threads,
        max_body=service.settings.max_body,
        refuse=refuse,
        leave=service.leave,
    )


def page_front(app: Flask, *, threads: int) -> Front:
    """The front of an application that answers with pages: the shop and the traces."""
    # an application explains forms that are too large, up to a point; one without a limit takes none
    max_body = 4 * (app.config["MAX_CONTENT_LENGTH"] or 0)
    return Front(
        app=app,
        path="/",
        threads=threads,
        max_body=max_body,
        refuse=lambda status, text: f"{status}: {text}\n".encode(),
        media="text/plain; charset=utf-8",
    )
