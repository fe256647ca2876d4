"""The HTTP base of the ASGI servers (OpenEnv, MCP), in uvicorn: who may ask, how much, for how long, and a good end.

By itself uvicorn lets a request take for ever to arrive, refuses work when many connections are silent, and at its end
closes connections whose request is on its way.

1. `AsgiServer` and its connections: the same limits as those of `serving.py`.
2. `JsonBodies`, `KeyedClients`: requests that are checked before the application sees them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from turngym.agents.client_keys import ClientKeys
from turngym.agents.request_origin import Access
from turngym.agents.serving import FRESH, LINGER, MAX_HEADERS, Timeouts, access_of, room, stop_on_signals, url_of
from turngym.core.errors import TurngymError
from turngym.core.plugins import need
from turngym.core.redaction import excerpt
from turngym.core.strict_json import JsonError, strict_json

# part of an extra: where it is missing, the server says what to install
try:
    import h11
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ImportError:
    H11Protocol = object  # type: ignore[assignment, misc]

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
        """Raises TurngymError if uvicorn is not installed, or the address cannot be listened on.

        Args:
            extra: extra of turngym to install where uvicorn is missing, for the error.
            connections: most connections at the same time. A new one takes the place of the one idle longest.
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
            h11_max_incomplete_event_size=MAX_HEADERS,
            ws_max_size=MAX_MESSAGE,
            timeout_keep_alive=int(timeouts.idle),
            timeout_graceful_shutdown=max(1, round(drain)),
        )
        self._server = uvicorn.Server(config)

    @property
    def url(self) -> str:
        """What clients take as their base URL."""
        return url_of(self.host, self.port)

    def run(self) -> None:
        """Answer until `stop` or SIGINT; then answer what was accepted."""
        # uvicorn raises the signal again after a clean end
        with contextlib.suppress(KeyboardInterrupt):
            self._server.run(sockets=[self._listener])

    def stop_on_signals(self) -> None:
        """SIGTERM, SIGINT and SIGHUP stop this server; a second one at once. Call in the main thread."""
        stop_on_signals(self.stop)

    def stop(self) -> None:
        """Stop listening, answer what was accepted, return from `run`; safe in any thread."""
        self._server.should_exit = True


def _listen_socket(host: str, port: int) -> socket.socket:
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise TurngymError(f"cannot listen on {host}, port {port}: {why}; choose a free port") from error
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
            await refuse(send, 403, refusal, receive)
        else:
            # before it is accepted, a WebSocket is an HTTP request: closing it answers 403
            await receive()
            await send({"type": "websocket.close", "code": 1008, "reason": excerpt(refusal, 100)})

    def _refusal(self, headers: list[tuple[bytes, bytes]]) -> str | None:
        checked: dict[bytes, list[str]] = {b"host": [], b"origin": []}
        for name, value in headers:
            if name in checked:
                checked[name].append(value.decode("latin-1"))
        host, origin = (", ".join(values) if values else None for values in checked.values())
        return self.access.refusal(host, origin)


CLOSE = (b"connection", b"close")
HEADER_PIECE = 4 * 2**10
"""Bytes of headers that are parsed at a time: h11 looks at their limit only between two pieces."""


class LimitedProtocol(H11Protocol):
    """One connection, with a time limit for each request; an idle one gives way to new clients.

    uvicorn calls the public methods.
    """

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
            size = HEADER_PIECE if self.conn.their_state is h11.IDLE else len(data)
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
        """Whether the connection is between two requests."""
        return self.cycle is None or self.cycle.response_complete

    def _make_room(self) -> None:
        silent = [
            connection
            for connection in self.connections
            if isinstance(connection, LimitedProtocol) and connection.silent()
        ]
        victim = min(silent, key=lambda connection: connection.heard, default=self)
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
    """A body that is refused before the application sees it. `whole` says whether all of it has arrived."""

    def __init__(self, status: int, text: str, *, whole: bool = True) -> None:
        super().__init__(text)
        self.status, self.whole = status, whole


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
                body = await self._read(scope, receive)
            self._check(scope, body)
        except TimeoutError:
            await refuse(send, 408, f"the body did not arrive in {self.seconds:g} s")
        except _Refused as error:
            await refuse(send, error.status, str(error), None if error.whole else receive)
        except ConnectionError:
            return
        else:
            await self.app(scope, _again(body, receive), send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        body, more_body = bytearray(), True
        # the length that is stated counts before the first byte is asked for
        length = int(dict(scope["headers"]).get(b"content-length", b"0"))
        while True:
            if max(length, len(body)) > self.max_body:
                raise _Refused(413, f"the body is larger than {self.max_body} bytes", whole=not more_body)
            if not more_body:
                return bytes(body)
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ConnectionError("the client went away")
            body += message.get("body", b"")
            more_body = message.get("more_body", False)

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


async def refuse(send: Send, status: int, text: str, rest: Receive | None = None) -> None:
    """Answer with one line of JSON, and end the connection.

    What is left of a body is read from `rest` for up to `LINGER` seconds: else the client may see a reset, no answer.
    """
    body = json.dumps({"error": text}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*headers, (b"connection", b"close")]})
    await send({"type": "http.response.body", "body": body, "more_body": rest is not None})
    if rest is not None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER):
                while (await rest()).get("more_body", False):
                    pass
        await send({"type": "http.response.body"})


CLIENT = "turngym.client"
"""Where an ASGI scope has the name of the client whose key came with the request."""


class KeyedClients:
    """ASGI middleware: 401 without a client's key. `scope[CLIENT]` tells the application whose key it was."""

    def __init__(self, app: AsgiApp, keys: ClientKeys) -> None:
        self.app, self.keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            client = self.keys.client_of(dict(scope["headers"]).get(b"authorization", b"").decode("latin-1"))
            if client is None:
                await refuse(send, 401, "the key is missing or wrong: send Authorization: Bearer KEY", receive)
                return
            scope = {**scope, CLIENT: client}
        await self.app(scope, receive, send)


def _again(body: bytes, receive: Receive) -> Receive:
    """`receive` that gives the body once more, and then waits for the client to go away."""
    left = [body]

    async def read() -> Message:
        return {"type": "http.request", "body": left.pop(), "more_body": False} if left else await receive()

    return read
