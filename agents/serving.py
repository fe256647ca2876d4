"""Waitress in front of an application, and an end that loses nothing: what was accepted is answered first."""

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

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol
from waitress.channel import ClientDisconnected, HTTPChannel
from waitress.task import ErrorTask, WSGITask

from turngym.agents.access import Access
from turngym.envs.core.errors import TurngymError
from turngym.envs.core.plugins import need
from turngym.envs.core.settings import JsonError, strict_json

if TYPE_CHECKING:
    from flask import Flask

    from turngym.retrieval.server import RetrievalService

# An application, and what a server in front of it must know.

FRESH = 0.2
"""Seconds in which a new connection may send its request although the server is leaving."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Seconds that a connection gets."""

    receive: float = 60.0
    """From the first byte of a request to its last: who sends a byte now and then holds nothing for longer."""
    idle: float = 75.0
    """Without a request."""
    send: float = 60.0
    """For which a client may take nothing of its answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """An application, and what a server in front of it must know."""

    app: Flask
    path: str
    """What clients put behind the address, such as /v1."""
    threads: int
    """Requests in work at the same time; each that waits holds one."""
    max_body: int
    """Largest body of a request, bytes."""
    refuse: Callable[[int, str], bytes]
    """Body of what is refused before the application sees it, by status and text: malformed HTTP, bodies that are too
    large, other sites."""
    media: str = "application/json"
    """Content type of what `refuse` gives."""
    leave: Callable[[], None] = lambda: None
    """Told when the end begins, so that the health check can say so."""
    sweep: Callable[[], object] | None = None
    """Called every `sweep_every` seconds while the server runs."""
    sweep_every: float = 5.0
    connections: int = 1000
    """Connections open at the same time; the one that is idle for longest makes room."""
    max_headers: int = 64 * 2**10
    """Largest headers of a request, bytes."""
    timeouts: Timeouts = Timeouts()


def access_of(host: str, names: tuple[str, ...]) -> Access:
    """Who may ask a server on `host`. Raises TurngymError for names that are none."""
    try:
        return Access(host=host, names=names)
    except ValueError as error:
        raise TurngymError(str(error)) from None


# The rule of `access` in front of a WSGI application.

WsgiApp = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


def guarded(front: Front, access: Access) -> WsgiApp:
    """The application of `front`; requests that `access` refuses get a 403 and never reach it."""

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        said = access.refusal(environ.get("HTTP_HOST"), environ.get("HTTP_ORIGIN"))
        if said is None:
            return front.app(environ, start_response)
        body = front.refuse(403, said)
        start_response("403 Forbidden", [("Content-Type", front.media), ("Content-Length", str(len(body)))])
        return [body]

    return application


# Waitress on one socket, with what it does not have: JSON refusals, time for a whole request, room for who comes.

SPARE_FILES = 256
"""Descriptors for everything but connections."""
BURST = 64
"""Connections that are accepted at a time."""


def listen(front: Front, host: str, port: int, names: tuple[str, ...]) -> Any:
    """A server that listens already. Raises TurngymError where it cannot, or without waitress."""
    try:
        from waitress.adjustments import Adjustments

    except ImportError as error:
        raise TurngymError("the server needs waitress: pip install 'turngym[serve]'") from error
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
        made = _server_class()(guarded(front, access), map={}, adj=settings, sockinfo=settings.listen[0])
    except (OSError, ValueError, OverflowError) as error:
        raise TurngymError(f"cannot listen on {host}, port {port}: {error}; choose a free port") from error
    made.channel_class = channel_of(front)
    made.front, made.most = front, connections
    return made


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


def _server_class() -> Any:
    from waitress.server import TcpWSGIServer

    class Server(TcpWSGIServer):
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

    return Server


CROWD, GATHER = 8, 0.001
"""Connections from which events are gathered, and for how many seconds."""
_STEP = 0.02


class DrainingServer:
    """Listens from construction on (port 0: a free one); `run` answers until `stop`."""

    def __init__(
        self,
        front: Front,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        drain: float = 10.0,
        hosts: tuple[str, ...] = (),
    ) -> None:
        """`drain`: seconds that accepted requests get to finish after `stop`. `hosts`: names beside the loopback's own.

        Raises:
            TurngymError: waitress is not installed, or the address cannot be listened on.
        """
        self._front, self._drain = front, drain
        self._server = listen(front, host, port, hosts)
        self.host, self.port = host, int(self._server.effective_port)
        self._wishes: SimpleQueue[str] = SimpleQueue()
        self.drained = False
        """After `run`: whether every accepted request was answered."""

    @property
    def url(self) -> str:
        """What clients take as their base URL."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}{self._front.path}"

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
        """Waits for the wish to stop, then lets the loop of waitress close what is idle until nothing is left."""
        self._wishes.get()
        self._front.leave()
        self._in_loop(self._server.leave)
        until = time.monotonic() + self._drain
        while time.monotonic() < until and self._server.active_channels:
            self._in_loop(self._server.close_idle)
            try:
                self._wishes.get(timeout=_STEP)
                break
            except Empty:
                continue
        self.drained = not self._server.active_channels
        self._in_loop(self._close_everything)

    def _in_loop(self, step: Any) -> None:
        # when the loop is over, its pipe is closed
        with contextlib.suppress(OSError):
            self._server.trigger.pull_trigger(step)

    def _close_everything(self) -> None:
        from waitress import wasyncore

        wasyncore.close_all(self._server._map)


# What the draining server must know of each application that it runs.

RETRIEVAL_THREADS = 96
"""Each waiting request holds a thread, so this bounds how many queries of single-query clients can share a batch.
Threads that wait cost little; the retriever itself runs in the service's own few."""
SPARE = 8
"""The proxy's threads beyond the requests that may be under way: refusals and /healthz never wait for completions."""


def retrieval_front(app: Flask, *, threads: int = RETRIEVAL_THREADS) -> Front:
    """Of `retrieval.server.app.create_app`; its refusals count among the answers of /stats."""
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


def webshop_front(app: Flask, *, threads: int) -> Front:
    """Of `envs.webshop.web.app.create_app`."""
    from turngym.envs.webshop.web import MAX_FORM

    # the application explains forms that are too large, up to a point
    return _pages(app, threads, max_body=4 * MAX_FORM)


def trace_front(app: Flask) -> Front:
    """Of `scripts.traces.app.create_app`, which takes no bodies."""
    return _pages(app, threads=4, max_body=0)


def _pages(app: Flask, threads: int, max_body: int) -> Front:
    return Front(
        app=app,
        path="/",
        threads=threads,
        max_body=max_body,
        refuse=lambda status, text: f"{status}: {text}\n".encode(),
        media="text/plain; charset=utf-8",
    )


# Bodies of an ASGI application, read before it: whole, in time, of a bounded size, and strict JSON.
#
# Frameworks read JSON as Python does, NaN and half surrogate pairs included, and fail to write their answer about it.

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]
MAX_BODY = 8 << 20
SECONDS = 60.0


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
        max_body: int = MAX_BODY,
        seconds: float = SECONDS,
        complaint: Callable[[str], str] = lambda text: json.dumps({"error": text}),
    ) -> None:
        self.app, self.max_body, self.seconds, self.complaint = app, max_body, seconds, complaint

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
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
            if len(body) > self.max_body:
                raise _Refused(413, f"the body is larger than {self.max_body} bytes")
            if not message.get("more_body", False):
                return bytes(body)

    def _check(self, scope: MutableMapping[str, Any], body: bytes) -> None:
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
                    found = strict_json(message.get("bytes") or b"" if text is None else _encoded(text))
                    if isinstance(found, dict):
                        return message
                    said = "a message must be a JSON object"
                except JsonError as error:
                    said = str(error).replace("the body", "the message", 1)
                await send({"type": "websocket.send", "text": self.complaint(said)})

        return read


async def refuse(send: Send, status: int, text: str) -> None:
    """Answer with one line of JSON; the connection ends, because not all of the body may have been read."""
    body = json.dumps({"error": text}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*headers, (b"connection", b"close")]})
    await send({"type": "http.response.body", "body": body})


def _again(body: bytes, receive: Receive) -> Receive:
    """`receive` that gives the body once more, and then waits for the client to go away."""
    left = [body]

    async def read() -> Message:
        if left:
            return {"type": "http.request", "body": left.pop(), "more_body": False}
        return await receive()

    return read


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


# The rule of `access` in front of an ASGI application, WebSockets included.


class Guarded:
    """`app`; requests that `access` refuses get a 403 and never reach it."""

    def __init__(self, app: AsgiApp, access: Access) -> None:
        self.app, self.access = app, access

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        said = None if scope["type"] == "lifespan" else self._refusal(scope["headers"])
        if said is None:
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await refuse(send, 403, said)
        else:
            # before it is accepted, a WebSocket is an HTTP request: closing it answers 403
            await receive()
            await send({"type": "websocket.close", "code": 1008, "reason": said[:100]})

    def _refusal(self, headers: list[tuple[bytes, bytes]]) -> str | None:
        found: dict[bytes, list[str]] = {b"host": [], b"origin": []}
        for name, value in headers:
            if name in found:
                found[name].append(value.decode("latin-1"))
        host, origin = (", ".join(values) if values else None for values in found.values())
        return self.access.refusal(host, origin)


# HTTP connections of uvicorn with a time for each request, with room for who comes, and an end that loses nothing.

PIECE = 4 * 2**10
"""Bytes of headers that are parsed at a time: their limit is looked at only between two pieces."""


def limited(timeouts: Timeouts, most: int) -> type[LimitedProtocol]:
    """The protocol of a server whose connections get `timeouts` and of which `most` are kept."""
    return type("Protocol", (LimitedProtocol,), {"timeouts": timeouts, "most": most})


class LimitedProtocol(H11Protocol):
    """One connection. What uvicorn calls comes first, what it does not have follows."""

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


# Uvicorn for the ASGI applications (OpenEnv, MCP), with the limits that the other servers have.
#
# Uvicorn lets a request take for ever to arrive, refuses work when many connections are silent, and at its end closes
# connections whose request is on its way; the protocol in `uvicorn_protocol` does not.

CONNECTIONS = 1000
MAX_HEADERS = 64 * 2**10
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
        connections: int = CONNECTIONS,
    ) -> None:
        """`extra` names what to install where uvicorn is missing. Other arguments as `DrainingServer` has them.

        Raises:
            TurngymError: uvicorn is not installed, or the address cannot be listened on.
        """
        uvicorn = need("uvicorn", "the server", extra)

        timeouts = timeouts or Timeouts()
        access = access_of(host, hosts)
        self._listener = _listen(host, port)
        self.host, self.port = host, int(self._listener.getsockname()[1])
        config = uvicorn.Config(
            Guarded(app, access),
            http=limited(timeouts, room(connections)),
            loop="asyncio",
            log_level="error",
            server_header=False,
            h11_max_incomplete_event_size=MAX_HEADERS,
            ws_max_size=MAX_MESSAGE,
            timeout_keep_alive=int(timeouts.idle),
            timeout_graceful_shutdown=max(1, round(drain)),
        )
        self._server = uvicorn.Server(config)

    @property
    def url(self) -> str:
        """What clients take as their base URL."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

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


def _listen(host: str, port: int) -> socket.socket:
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError) as error:
        raise TurngymError(f"cannot listen on {host}, port {port}: {error}; choose a free port") from error
    listener.setblocking(False)
    # asyncio sets it only on sockets that name their protocol; without it the body of every answer on a connection that
    # stays open waits 40 ms for the client to acknowledge the headers
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


# Connections of waitress on which its own refusals are worded as ours; those never reach the application.


def channel_of(front: Front) -> type[Channel]:
    """The connections of a server of `front`."""
    return type("Channel", (Channel,), {"error_task_class": type("Refusal", (Refusal,), {"front": front})})


class Refusal(ErrorTask):
    """The answer to what waitress could not parse, or would not."""

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
        self.content_length = len(body)
        self.write(body)


class Answer(WSGITask):
    """An answer of the application; while the server leaves, the last of its connection."""

    def build_response_header(self) -> bytes:
        if self.channel.server.leaving:
            self.set_close_on_finish()
        return bytes(super().build_response_header())


class Channel(HTTPChannel):
    """One connection, which knows how long it takes."""

    task_class, error_task_class = Answer, Refusal
    began: float | None = None
    """When the first byte of the request came that is not complete yet."""

    def received(self, data: bytes) -> bool:
        self.began = time.monotonic() if self.began is None else self.began
        found = super().received(data)
        if self.request is None:
            self.began = None
        return bool(found)

    def overdue(self, now: float, front: Front) -> bool:
        """Whether a request takes too long to arrive, none comes, or nothing of the answer is taken."""
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
