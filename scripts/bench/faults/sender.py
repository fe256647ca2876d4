"""Malformed requests over real sockets: one thread, connections kept as long as a server keeps them."""

from __future__ import annotations

import re
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from turngym.scripts.bench.faults.malformed import KINDS, SILENT, Route, malformed

PATIENCE = 0.1
"""Seconds that a server gets to answer what is no complete request, before the client goes away."""
_LENGTH, _CLOSE = re.compile(rb"(?i)content-length: *(\d+)"), re.compile(rb"(?i)connection: *close")
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")
Count = Callable[[str, int | None, bytes], None]
"""(kind, status of the answer or None, what was sent)."""


@dataclass(slots=True)
class Sender:
    """Sends requests of random kinds to one server and tells `count` what came back."""

    address: tuple[str, int]
    routes: Sequence[Route]
    rng: np.random.Generator
    count: Count
    _kept: socket.socket | None = None
    _parked: deque[tuple[float, socket.socket, str, bytes]] = field(default_factory=deque)
    """What was incomplete: looked at again when its time has come, while others are sent."""

    def send(self, requests: int) -> None:
        """Send that many. Raises OSError where the server takes no connection."""
        host = f"{self.address[0]}:{self.address[1]}"
        for _ in range(requests):
            kind = KINDS[int(self.rng.integers(len(KINDS)))]
            sent = malformed(kind, self.routes, host, self.rng)
            client = self._kept or socket.create_connection(self.address, timeout=10)
            self._kept = None
            if kind in SILENT:
                self._park(client, kind, sent)
            else:
                status, stays = exchange(client, sent)
                self.count(kind, status, sent)
                self._kept = client if stays else None
                if not stays:
                    client.close()
            self._collect(time.monotonic())
        self._collect(None)
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    def _park(self, client: socket.socket, kind: str, sent: bytes) -> None:
        try:
            client.sendall(sent)
        except OSError:
            self.count(kind, None, sent)
            client.close()
        else:
            self._parked.append((time.monotonic() + PATIENCE, client, kind, sent))

    def _collect(self, now: float | None) -> None:
        """Of those that have waited until `now`; without it, of all, each when its time has come."""
        while self._parked and (now is None or self._parked[0][0] <= now):
            until, client, kind, sent = self._parked.popleft()
            if now is None:
                time.sleep(max(until - time.monotonic(), 0))
            try:
                client.settimeout(0)
                found = _STATUS.match(client.recv(65536))
            except OSError:
                found = None
            self.count(kind, None if found is None else int(found[1]), sent)
            client.close()


def exchange(client: socket.socket, sent: bytes) -> tuple[int | None, bool]:
    """(status of the answer or None, whether the connection can be used again)."""
    try:
        client.sendall(sent)
        head, _, body = _until(client, b"", b"\r\n\r\n").partition(b"\r\n\r\n")
        found, length = _STATUS.match(head), _LENGTH.search(head)
        if found is None:
            return None, False
        if length is None or _CLOSE.search(head):
            return int(found[1]), False
        left = int(length[1]) - len(body)
        while left > 0:
            part = client.recv(min(left, 1 << 16))
            if not part:
                return int(found[1]), False
            left -= len(part)
        # bytes beyond the answer would be taken for the next one
        return int(found[1]), left == 0
    except OSError:
        return None, False


def _until(client: socket.socket, found: bytes, end: bytes) -> bytes:
    while end not in found and (part := client.recv(65536)):
        found += part
    return found
