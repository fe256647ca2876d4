"""Uvicorn for the ASGI applications (OpenEnv, MCP), with the limits that the other servers have.

Uvicorn lets a request take for ever to arrive, refuses work when many connections are silent, and at its end closes
connections whose request is on its way; the protocol in `uvicorn_protocol` does not.
"""

from __future__ import annotations

import contextlib
import signal
import socket

from turngym.envs.core import TurngymError
from turngym.scripts.serve.web.asgi import Guarded
from turngym.scripts.serve.web.front import Timeouts, access_of
from turngym.scripts.serve.web.waitress_server import room
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
        from turngym.scripts.serve.web.uvicorn_protocol import limited

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
