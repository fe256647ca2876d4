"""A server that runs in a thread while a test talks to it over real sockets."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Any


class RunningSite:
    """Runs `server` until `stop`; its application waits for `gate`."""

    def __init__(self, server: Any) -> None:
        self.server = server
        self.thread = threading.Thread(target=server.run, daemon=True)
        self.thread.start()

    gate: threading.Event

    def connect(self) -> socket.socket:
        return socket.create_connection((self.server.host, self.server.port), timeout=20)

    def stop(self) -> None:
        self.gate.set()
        self.server.stop()
        self.thread.join(20)


def until(condition: Callable[[], bool]) -> None:
    """Wait for it, twenty seconds at most."""
    for _ in range(2000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it never happened")
