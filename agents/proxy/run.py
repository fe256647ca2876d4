"""Waitress in front of the proxy, and an end that loses no finished turn: what was accepted is answered first."""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import threading
import time
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from turngym.agents.proxy.errors import ApiError, ProxyError
from turngym.agents.proxy.service import ProxyService

if TYPE_CHECKING:
    from flask import Flask

SPARE = 8
"""Threads beyond the requests that may be under way: refusals and /healthz never wait for completions."""
MAX_HEADERS = 64 * 2**10
_STEP = 0.02


class ProxyServer:
    """Listens from construction on (port 0: a free one); `run` answers until `stop`."""

    def __init__(self, app: Flask, *, host: str = "127.0.0.1", port: int = 8080, drain: float = 30.0) -> None:
        """`drain`: seconds that accepted requests get to finish after `stop`.

        Raises:
            ProxyError: waitress is not installed, or the address cannot be listened on.
        """
        self.service: ProxyService = app.extensions["proxy"]
        self._drain = drain
        self._server = _listen(app, host, port, self.service)
        self.host, self.port = host, int(self._server.effective_port)
        self._wishes: SimpleQueue[str] = SimpleQueue()
        self.drained = False
        """After `run`: whether every accepted request was answered."""

    @property
    def url(self) -> str:
        """What clients take as their base URL."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/v1"

    def run(self) -> None:
        """Answer requests until `stop`, ending idle sessions. The service stays open: its owner closes it."""
        over = threading.Event()
        threads = [
            threading.Thread(target=self._end, name="proxy-end", daemon=True),
            threading.Thread(target=self._sweep, args=(over,), name="proxy-sweep", daemon=True),
        ]
        for thread in threads:
            thread.start()
        try:
            self._server.run()
        finally:
            self.stop()
            over.set()
            threads[1].join()
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

    def _sweep(self, over: threading.Event) -> None:
        while not over.wait(min(self.service.settings.idle / 4, 5.0)):
            self.service.sweep()

    def _end(self) -> None:
        """Waits for the wish to stop, then lets the loop of waitress close what is idle until nothing is left."""
        self._wishes.get()
        self.service.stopping = True
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


def _listen(app: Flask, host: str, port: int, service: ProxyService) -> Any:
    """A waitress server on one socket, whose own refusals are JSON as well."""
    try:
        from waitress import create_server
        from waitress.channel import HTTPChannel
        from waitress.task import ErrorTask
    except ImportError as error:
        raise ProxyError("the proxy needs waitress: pip install 'turngym[serve]'") from error
    limit = service.settings.max_body

    class JsonErrorTask(ErrorTask):
        """Malformed HTTP and bodies that are too large never reach the application."""

        def execute(self) -> None:
            error = self.request.error
            text = f"the body is larger than {limit} bytes" if error.code == 413 else f"{error.reason}: {error.body}"
            body = json.dumps(ApiError(error.code, text).as_json()).encode()
            self.status = f"{error.code} {error.reason}"
            self.response_headers.append(("Content-Type", "application/json"))
            self.set_close_on_finish()
            self.content_length = len(body)
            self.write(body)

    class JsonChannel(HTTPChannel):
        error_task_class = JsonErrorTask

    # waitress warns whenever a request waits for a thread, which is what a queue is for
    logging.getLogger("waitress.queue").setLevel(logging.ERROR)
    try:
        server = create_server(
            app,
            host=host,
            port=port,
            threads=service.settings.max_waiting + SPARE,
            connection_limit=4 * service.settings.max_waiting + 100,
            max_request_header_size=MAX_HEADERS,
            max_request_body_size=limit + 1,
            channel_request_lookahead=1,  # without it a client that went away is not noticed
            channel_timeout=int(service.settings.deadline) + 60,
            asyncore_use_poll=True,
            ident="turngym",
        )
    except (OSError, ValueError, OverflowError) as error:
        raise ProxyError(f"cannot listen on {host}, port {port}: {error}; choose a free port") from error
    if not hasattr(server, "active_channels"):
        server.close()
        raise ProxyError(f"host {host!r} stands for several addresses; name one, such as 127.0.0.1")
    server.channel_class = JsonChannel
    return server
