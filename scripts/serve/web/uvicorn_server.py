"""Uvicorn for the ASGI applications (OpenEnv, MCP), with the limits that the other servers have.

Uvicorn lets a request take for ever to arrive, refuses work when many connections are silent, and at its end closes
connections whose request is on its way; the protocol here does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import time
from typing import Any

from turngym.envs.core import TurngymError
from turngym.scripts.serve.web.asgi import Guarded
from turngym.scripts.serve.web.front import Timeouts, access_of
from turngym.scripts.serve.web.waitress_server import FRESH, room
from turngym.trainers.adapters.extras import need
from turngym.trainers.adapters.json_bodies import AsgiApp

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
            http=_protocol_class(timeouts, room(connections)),
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
    return listener


def _protocol_class(timeouts: Timeouts, most: int) -> Any:
    """HTTP connections with a time for each request, and with room for who comes."""
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Protocol(H11Protocol):
        timer: asyncio.TimerHandle | None = None
        leaving = False

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.heard = time.monotonic()
            # the first byte has to come, too
            self._arm(timeouts.receive)
            if len(self.connections) > most:
                silent = [other for other in self.connections if isinstance(other, Protocol) and other.silent()]
                victim = min(silent, key=lambda other: other.heard, default=self)
                # it leaves by itself only after this turn of the loop, in which others may come
                self.connections.discard(victim)
                victim.transport.abort()

        def data_received(self, data: bytes) -> None:
            self.heard = time.monotonic()
            super().data_received(data)
            if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
                if self.timer is None:
                    self._arm(timeouts.receive)
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
            headers = [
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                ("connection", "close"),
            ]
            for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
            self.transport.close()

        def silent(self) -> bool:
            """Whether no request is in work."""
            return self.cycle is None or self.cycle.response_complete

        def _close_silent(self) -> None:
            if not self.transport.is_closing() and self.silent():
                super().shutdown()

        def _arm(self, seconds: float) -> None:
            self._disarm()
            self.timer = self.loop.call_later(seconds, self.transport.abort)

        def _disarm(self) -> None:
            if self.timer is not None:
                self.timer.cancel()
                self.timer = None

    return Protocol
