"""HTTP connections of uvicorn with a time for each request, with room for who comes, and an end that loses nothing."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from turngym.scripts.serve.web.front import FRESH, Timeouts

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
