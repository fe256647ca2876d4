"""Waitress on one socket, with what it does not have: JSON refusals, time for a whole request, room for who comes."""

from __future__ import annotations

import contextlib
import logging
import resource
import socket
import time
from typing import Any

from turngym.envs.core import TurngymError
from turngym.scripts.serve.web.front import Front, access_of
from turngym.scripts.serve.web.wsgi import guarded

SPARE_FILES = 256
"""Descriptors for everything but connections."""
BURST = 64
"""Connections that are accepted at a time."""
FRESH = 0.2
"""Seconds in which a new connection may send its request although the server is leaving."""


def listen(front: Front, host: str, port: int, names: tuple[str, ...]) -> Any:
    """A server that listens already. Raises TurngymError where it cannot, or without waitress."""
    try:
        from waitress.adjustments import Adjustments
    except ImportError as error:
        raise TurngymError("the server needs waitress: pip install 'turngym[serve]'") from error
    # waitress warns whenever a request waits for a thread, which is what a queue is for
    logging.getLogger("waitress.queue").setLevel(logging.ERROR)
    access = access_of(host, names)
    connections = room(front.connections)
    try:
        settings = Adjustments(
            host=host,
            port=port,
            threads=front.threads,
            # above ours, which makes room instead of waiting
            connection_limit=connections + 2 * BURST,
            max_request_header_size=front.max_headers,
            # waitress refuses bodies from its limit on, not only above it
            max_request_body_size=front.max_body + 1,
            channel_request_lookahead=1,  # without it a client that went away is not noticed
            channel_timeout=int(front.timeouts.idle),
            asyncore_use_poll=True,
            ident="turngym",
        )
        if len(settings.listen) != 1:
            raise TurngymError(f"host {host!r} stands for several addresses; name one, such as 127.0.0.1")
        made = _server_class()(guarded(front, access), map={}, adj=settings, sockinfo=settings.listen[0])
    except (OSError, ValueError, OverflowError) as error:
        raise TurngymError(f"cannot listen on {host}, port {port}: {error}; choose a free port") from error
    made.channel_class = _channel_class(front)
    made.front, made.most = front, connections
    return made


def room(connections: int) -> int:
    """Connections that this process may have: `connections`, where its limit of open files can be raised to that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + 2 * BURST + SPARE_FILES
    if resource.RLIM_INFINITY in (soft, hard) or soft >= wanted:
        return connections
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(min(connections, soft - 2 * BURST - SPARE_FILES), 16)


def _server_class() -> Any:
    from waitress.server import TcpWSGIServer

    class Server(TcpWSGIServer):
        leaving = False
        next_check = 0.0
        front: Front
        most: int

        def handle_accept(self) -> None:
            for _ in range(BURST):
                before = len(self.active_channels)
                super().handle_accept()
                if len(self.active_channels) <= before:
                    return

        def tend(self) -> None:
            """Close what is overdue, and what must make room. Only in the loop's own thread, outside of its poll."""
            now = time.monotonic()
            if now >= self.next_check:
                self.next_check = now + 1.0
                for channel in list(self.active_channels.values()):
                    if channel.overdue(now, self.front):
                        channel.handle_close()
            if len(self.active_channels) > self.most:
                self._make_room()

        def _make_room(self) -> None:
            waiting = [channel for channel in self.active_channels.values() if not channel.requests]
            # who has begun a request goes after who is silent
            waiting.sort(key=lambda channel: (channel.began is not None, channel.last_activity))
            for channel in waiting[: len(self.active_channels) - self.most]:
                channel.handle_close()

        def leave(self) -> None:
            """Accept what has connected, then no more; from now on each answer is the last of its connection."""
            self.leaving = True
            with contextlib.suppress(OSError):
                self.handle_accept()
            self.del_channel()
            self.socket.close()

        def close_idle(self) -> None:
            for channel in list(self.active_channels.values()):
                if channel.idle() and not channel.has_news():
                    channel.handle_close()

    return Server


def _channel_class(front: Front) -> Any:
    """Connections on which waitress's own refusals are worded as ours; they never reach the application."""
    from waitress.channel import ClientDisconnected, HTTPChannel
    from waitress.task import ErrorTask, WSGITask

    class Refusal(ErrorTask):
        def service(self) -> None:
            # waitress would name the path of what it could not parse, which has none
            try:
                super().service()
            except ClientDisconnected:
                self.close_on_finish = True

        def execute(self) -> None:
            error, limit = self.request.error, front.max_body
            text = f"the body is larger than {limit} bytes" if error.code == 413 else f"{error.reason}: {error.body}"
            body = front.refuse(error.code, text)
            self.status = f"{error.code} {error.reason}"
            self.response_headers.append(("Content-Type", front.media))
            self.set_close_on_finish()
            self.content_length = len(body)
            self.write(body)

    class Answer(WSGITask):
        def build_response_header(self) -> bytes:
            if self.channel.server.leaving:
                self.set_close_on_finish()
            return bytes(super().build_response_header())

    class Channel(HTTPChannel):
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
            return not (self.requests or self.request is not None or self.total_outbufs_len)

        def has_news(self) -> bool:
            """Whether a request is on its way: bytes that were not read yet, or a client that has just connected."""
            if time.time() - self.creation_time < FRESH and self.last_activity == self.creation_time:
                return True
            try:
                return bool(self.socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
            except OSError:
                return False

    return Channel
