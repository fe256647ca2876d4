"""Servers in threads of a test's process: those of the project, and one that answers what the test says."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Wait until `condition` holds."""
    tick, end = threading.Event(), time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        tick.wait(0.005)


class RunningSite:
    """Runs `server` until `stop`; its application may wait for `gate`."""

    def __init__(self, server: Any) -> None:
        self.server = server
        self.thread = threading.Thread(target=server.run, daemon=True)
        self.thread.start()

    gate: threading.Event | None = None

    def connect(self) -> socket.socket:
        return socket.create_connection((self.server.host, self.server.port), timeout=20)

    def stop(self) -> None:
        if self.gate is not None:
            self.gate.set()
        self.server.stop()
        self.thread.join(20)


@contextmanager
def running(server: Any) -> Iterator[str]:
    """The address of `server`, which runs inside the block."""
    site = RunningSite(server)
    try:
        yield server.url
    finally:
        site.stop()


@dataclass
class Answer:
    """What a request gets: JSON, or bytes as they are."""

    body: Any = None
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    """Sent besides the usual ones; one without a text is left out."""
    cut: bool = False
    """The connection breaks in the middle of the body."""
    drip: float = 0.0
    """Seconds over which the body comes, byte by byte."""


class JsonServer:
    """Answers requests with `reply(path, body, headers)`, its body None for GET; None ends the connection."""

    def __init__(self, reply: Callable[[str, Any, Mapping[str, str]], Answer | None], port: int = 0) -> None:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.respond(None)

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self.respond(json.loads(body) if body else None)

            def respond(self, body: Any) -> None:
                answer = reply(self.path, body, self.headers)
                if answer is None:
                    self.close_connection = True
                    return
                data = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
                self.send_response(answer.status)
                given = {"Content-Type": "application/json", "Content-Length": str(len(data)), **answer.headers}
                for name, text in given.items():
                    if text:
                        self.send_header(name, text)
                self.end_headers()
                if answer.drip:
                    for place in range(len(data)):
                        self.wfile.write(data[place : place + 1])
                        time.sleep(answer.drip / len(data))
                else:
                    self.wfile.write(data[: len(data) // 2] if answer.cut else data)
                self.close_connection = self.close_connection or answer.cut

            def log_message(self, *words: Any) -> None:
                return

        class Listener(ThreadingHTTPServer):
            daemon_threads = True
            allow_reuse_address = True
            request_queue_size = 128

            def handle_error(self, *where: Any) -> None:
                return  # clients that hang up are part of the tests

        self._http = Listener(("127.0.0.1", port), Handler)
        self.port = self._http.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Listen no more."""
        self._http.shutdown()
        self._http.server_close()
        self._thread.join(20)
