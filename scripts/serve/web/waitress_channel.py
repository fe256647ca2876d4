"""Connections of waitress on which its own refusals are worded as ours; those never reach the application."""

from __future__ import annotations

import socket
import time

from waitress.channel import ClientDisconnected, HTTPChannel
from waitress.task import ErrorTask, WSGITask

from turngym.scripts.serve.web.front import FRESH, Front


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
