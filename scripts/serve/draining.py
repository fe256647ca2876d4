"""Waitress in front of an application, and an end that loses nothing: what was accepted is answered first."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from turngym.envs.core import TurngymError

if TYPE_CHECKING:
    from flask import Flask

CROWD, GATHER = 8, 0.001
"""Connections from which events are gathered, and for how many seconds."""
_STEP = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """An application, and what a server in front of it must know."""

    app: Flask
    path: str
    """What clients put behind the address, such as /v1."""
    threads: int
    """Requests in work at the same time; each that waits holds one."""
    connections: int
    """Connections open at the same time."""
    max_body: int
    """Largest body of a request, bytes."""
    refuse: Callable[[int, str], bytes]
    """JSON body of what waitress answers itself, by status and text: malformed HTTP, bodies that are too large."""
    leave: Callable[[], None]
    """Told when the end begins, so that the health check can say so."""
    sweep: Callable[[], object] | None = None
    """Called every `sweep_every` seconds while the server runs."""
    sweep_every: float = 5.0
    max_headers: int = 64 * 2**10
    """Largest headers of a request, bytes."""
    patience: int = 120
    """Seconds after which a silent connection is closed."""


class DrainingServer:
    """Listens from construction on (port 0: a free one); `run` answers until `stop`."""

    def __init__(self, front: Front, *, host: str = "127.0.0.1", port: int = 0, drain: float = 10.0) -> None:
        """`drain`: seconds that accepted requests get to finish after `stop`.

        Raises:
            TurngymError: waitress is not installed, or the address cannot be listened on.
        """
        self._front, self._drain = front, drain
        self._server = _listen(front, host, port)
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
            if len(server.active_channels) > CROWD:
                time.sleep(GATHER)

    def _sweep(self, over: threading.Event) -> None:
        while self._front.sweep is not None and not over.wait(self._front.sweep_every):
            self._front.sweep()

    def _end(self) -> None:
        """Waits for the wish to stop, then lets the loop of waitress close what is idle until nothing is left."""
        self._wishes.get()
        self._front.leave()
        self._in_loop(self._close_listener)
        until = time.monotonic() + self._drain
        while time.monotonic() < until and self._server.active_channels:
            self._in_loop(self._close_idle)
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

    def _close_listener(self) -> None:
        self._server.del_channel()
        self._server.socket.close()

    def _close_idle(self) -> None:
        for channel in list(self._server.active_channels.values()):
            if not channel.requests and channel.request is None and not channel.total_outbufs_len:
                channel.will_close = True

    def _close_everything(self) -> None:
        from waitress import wasyncore

        wasyncore.close_all(self._server._map)


def _listen(front: Front, host: str, port: int) -> Any:
    """A waitress server on one socket."""
    try:
        from waitress import create_server
    except ImportError as error:
        raise TurngymError("the server needs waitress: pip install 'turngym[serve]'") from error
    # waitress warns whenever a request waits for a thread, which is what a queue is for
    logging.getLogger("waitress.queue").setLevel(logging.ERROR)
    try:
        server = create_server(
            front.app,
            host=host,
            port=port,
            threads=front.threads,
            connection_limit=front.connections,
            max_request_header_size=front.max_headers,
            # waitress refuses bodies from its limit on, not only above it
            max_request_body_size=front.max_body + 1,
            channel_request_lookahead=1,  # without it a client that went away is not noticed
            channel_timeout=front.patience,
            asyncore_use_poll=True,
            ident="turngym",
        )
    except (OSError, ValueError, OverflowError) as error:
        raise TurngymError(f"cannot listen on {host}, port {port}: {error}; choose a free port") from error
    if not hasattr(server, "active_channels"):
        server.close()
        raise TurngymError(f"host {host!r} stands for several addresses; name one, such as 127.0.0.1")
    server.channel_class = _channel(front)
    return server


def _channel(front: Front) -> Any:
    """Connections on which waitress's own refusals are JSON as well; they never reach the application."""
    from waitress.channel import HTTPChannel
    from waitress.task import ErrorTask

    class JsonErrorTask(ErrorTask):
        def execute(self) -> None:
            error, limit = self.request.error, front.max_body
            text = f"the body is larger than {limit} bytes" if error.code == 413 else f"{error.reason}: {error.body}"
            body = front.refuse(error.code, text)
            self.status = f"{error.code} {error.reason}"
            self.response_headers.append(("Content-Type", "application/json"))
            self.set_close_on_finish()
            self.content_length = len(body)
            self.write(body)

    class JsonChannel(HTTPChannel):
        error_task_class = JsonErrorTask

    return JsonChannel
