"""Waitress on one socket, with what it does not have: JSON refusals, time for a whole request, room for who comes."""

from __future__ import annotations

import contextlib
import logging
import resource
import time
from typing import Any

from turngym.envs.core import TurngymError
from turngym.scripts.serve.web.front import Front, access_of
from turngym.scripts.serve.web.wsgi import guarded

SPARE_FILES = 256
"""Descriptors for everything but connections."""
BURST = 64
"""Connections that are accepted at a time."""


def listen(front: Front, host: str, port: int, names: tuple[str, ...]) -> Any:
    """A server that listens already. Raises TurngymError where it cannot, or without waitress."""
    try:
        from waitress.adjustments import Adjustments

        from turngym.scripts.serve.web.waitress_channel import channel_of
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
    made.channel_class = channel_of(front)
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
