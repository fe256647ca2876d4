"""The HTTP base of the Flask servers (retrieval, shop, proxy, traces), in waitress: limits of connections, a good end.

    server = DrainingServer(retrieval_front(RetrievalApp(retriever)), host="127.0.0.1", port=8000)
    server.stop_on_signals()
    server.run()

`serving_asgi.py` has the same rules for ASGI applications in uvicorn. One base on uvicorn for all was measured: a
search costs as much CPU time, but while other processes keep all cores busy one event loop gets the share of one
thread, and with 64 clients it answered a third to a half of the searches that waitress's threads did.

1. What a server must know of its application: `Front`, `Timeouts`.
2. `DrainingServer`: room for new clients, time-outs of a whole request, draining.
3. Its connections, and the words in which they refuse.
4. The fronts of retrieval, shop and traces; that of the proxy is in scripts/serve_proxy.py.
"""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from turngym.agents.request_origin import Access
from turngym.core.background_threads import SupervisedThread
from turngym.core.errors import TurngymError
from turngym.core.numbers import NotNegative, Port
from turngym.core.plugins import need
from turngym.core.signals import on_signals
from turngym.core.spec import Spec
from turngym.retrieval.server import RetrievalApp

if TYPE_CHECKING:
    from flask import Flask

# part of an extra: where it is missing, the server says what to install
try:
    from waitress import wasyncore
    from waitress.adjustments import Adjustments
    from waitress.channel import ClientDisconnected, HTTPChannel
    from waitress.parser import HTTPRequestParser
    from waitress.server import TcpWSGIServer
    from waitress.task import ErrorTask, WSGITask
except ImportError:
    HTTPChannel = HTTPRequestParser = TcpWSGIServer = ErrorTask = WSGITask = object


class Listen(Spec):
    """Where the server listens."""

    # the names are those of the arguments of DrainingServer and AsgiServer
    host: str = "127.0.0.1"
    """Address to listen on. There is no password: any other address makes the server reachable from the network."""
    hosts: tuple[str, ...] = ()
    """Names under which clients may ask beside localhost and 127.0.0.1: those of a reverse proxy, for example."""
    port: Port = 8000
    """Port to listen on; 0 takes a free one."""
    drain: NotNegative = 10.0
    """Seconds that accepted requests get to finish when the server is stopped."""


# What a server must know of its application.

FRESH = 0.2
"""Seconds in which a new connection may send its request although the server is leaving."""
SPARE_FILES = 256
"""File descriptors for everything but connections."""
MAX_HEADERS = 64 * 2**10
"""Bytes of the headers of a request."""
BURST = 64
"""Connections that are accepted at a time."""
LINGER = 2.0
"""Seconds for which what a refused client still sends is read and thrown away. Closing earlier would reset the
connection, and most clients would then see the reset in place of the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Seconds that a connection gets."""

    receive: float = 60.0
    """Seconds from the first byte of a request to its last, however steadily bytes trickle in."""
    idle: float = 75.0
    """Seconds without a request."""
    send: float = 60.0
    """Seconds for which a client may take nothing of its answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """A WSGI application with its limits."""

    app: Flask | RetrievalApp
    path: str
    """What clients put behind the address, such as /v1."""
    threads: int
    """Requests in work at the same time; each that waits holds one."""
    max_body: int
    """Largest body of a request, bytes."""
    refuse: Callable[[int, str], bytes]
    """Makes the body of an answer to what never reaches the application, from its status and a text: malformed HTTP,
    bodies that are too large, other sites."""
    media: str = "application/json"
    """Content type of what `refuse` makes."""
    leave: Callable[[], None] = lambda: None
    """Called when the end begins, so that the health check can say so."""
    sweep: Callable[[], object] | None = None
    """Called every `sweep_every` seconds while the server runs."""
    sweep_every: float = 5.0
    connections: int = 1000
    """Most connections at the same time. A new one takes the place of the one idle longest."""
    timeouts: Timeouts = Timeouts()


def access_of(host: str, names: tuple[str, ...]) -> Access:
    """The access rule of a server on `host` that also answers to `names`. Raises TurngymError for invalid names."""
    try:
        return Access(host=host, names=names)
    except ValueError as error:
        raise TurngymError(str(error)) from None


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


def url_of(host: str, port: int, path: str = "") -> str:
    return f"http://[{host}]:{port}{path}" if ":" in host else f"http://{host}:{port}{path}"


# The server of Flask applications: waitress.

CROWD, GATHER = 8, 0.001
"""Connections from which events are gathered, and for how many seconds."""
STEP = 0.02
"""Seconds between two looks at what is left at the end."""


LAST_SECONDS = 5.0
"""Seconds that a second signal leaves for what is under way."""


def stop_on_signals(stop: Callable[[], None]) -> None:
    """SIGTERM, SIGINT and SIGHUP call `stop`; the second one ends this process and its children in any case.

    The second signal does not wait for anything, such as a stopped child or a disk that hangs.
    """
    asked = False

    def on_signal(number: int) -> None:
        nonlocal asked
        if asked:
            threading.Thread(target=_end_at_last, args=(number,), name="server-last", daemon=True).start()
        asked = True
        stop()

    on_signals(on_signal)


def _end_at_last(number: int) -> None:
    time.sleep(LAST_SECONDS)
    for child in multiprocessing.active_children():
        child.kill()
    os.write(2, f"ended by a second signal; {LAST_SECONDS:g} s later not all was done\n".encode())
    os._exit(128 + number)


class DrainingServer:
    """Listens from construction on (port 0: a free one); `run` answers until `stop`."""

    def __init__(
        self, front: Front, *, host: str = "127.0.0.1", port: int = 0, drain: float = 10.0, hosts: tuple[str, ...] = ()
    ) -> None:
        """Raises TurngymError if waitress is not installed, or the address cannot be listened on.

        Args:
            drain: seconds that accepted requests get to finish after `stop`.
            hosts: names under which clients may ask beside the loopback's own, those of a reverse proxy for example.
        """
        self._front, self._drain = front, drain
        need("waitress", "the server", "serve")
        self._server = _listen_waitress(front, host, port, hosts)
        self.host, self.port = host, int(self._server.effective_port)
        self._wishes: SimpleQueue[str] = SimpleQueue()
        self.drained = False
        """Whether every accepted request was answered, after `run`."""

    @property
    def url(self) -> str:
        """What clients take as their base URL."""
        return url_of(self.host, self.port, self._front.path)

    def run(self) -> None:
        """Answer requests until `stop`. What is behind the application stays open: its owner closes it."""
        over = threading.Event()
        sweeping = SupervisedThread(lambda: self._sweep(over), "server-sweep")
        threading.Thread(target=self._end, name="server-end", daemon=True).start()
        sweeping.start()
        try:
            self._loop()
        finally:
            # a loop that ended by itself or by an error must also release the thread that waits for the wish
            self.stop()
            over.set()
            # a disk that hangs keeps a daemon only
            sweeping.join(LAST_SECONDS)
            self._server.task_dispatcher.shutdown(timeout=5)

    def stop(self) -> None:
        """Stop listening, answer what was accepted, return from `run`; a second call does not wait any longer.

        Safe in a signal handler: putting into a SimpleQueue takes no lock that the interrupted code may hold.
        """
        self._wishes.put("stop")

    def stop_on_signals(self) -> None:
        """SIGTERM, SIGINT and SIGHUP stop this server; a second one at once. Call in the main thread."""
        stop_on_signals(self.stop)

    def _loop(self) -> None:
        """The loop of waitress, which looks at every connection each time it wakes.

        With many connections that takes more time than the answers do, so then it wakes for several events at once.
        """
        server = self._server
        while server._map:
            server.asyncore.loop(timeout=1, use_poll=True, map=server._map, count=1)
            server.tend()
            if len(server.active_channels) > CROWD:
                time.sleep(GATHER)

    def _sweep(self, over: threading.Event) -> None:
        while self._front.sweep is not None and not over.wait(self._front.sweep_every):
            self._front.sweep()

    def _end(self) -> None:
        """Wait for the wish to stop, then let the loop of waitress close what is idle until nothing is left."""
        self._wishes.get()  # ends: `run` itself wishes it at its end
        self._front.leave()
        self._in_loop(self._server.leave)
        until = time.monotonic() + self._drain
        while time.monotonic() < until and self._server.active_channels:
            self._in_loop(self._server.close_idle)
            try:
                self._wishes.get(timeout=STEP)
                break
            except Empty:
                continue
        self.drained = not self._server.active_channels
        self._in_loop(lambda: wasyncore.close_all(self._server._map))

    def _in_loop(self, step: Callable[[], None]) -> None:
        # when the loop is over, its pipe is closed
        with contextlib.suppress(OSError):
            self._server.trigger.pull_trigger(step)


def _listen_waitress(front: Front, host: str, port: int, names: tuple[str, ...]) -> Any:
    """A server that listens already. Raises TurngymError where it cannot."""
    # the system would take another number modulo 65,536
    if not 0 <= port <= 65535:
        raise TurngymError(f"cannot listen on {host}, port {port}: ports go from 0 to 65535")
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
            # waitress's own 8 KiB cost a look at every connection for each
            recv_bytes=2**16,
            max_request_header_size=MAX_HEADERS,
            # waitress refuses bodies from its limit on, not only above it
            max_request_body_size=front.max_body + 1,
            channel_request_lookahead=1,  # without it a client that went away is not noticed
            channel_timeout=int(front.timeouts.idle),
            asyncore_use_poll=True,
            ident="turngym",
        )
        if len(settings.listen) != 1:
            raise TurngymError(f"host {host!r} stands for several addresses; name one, such as 127.0.0.1")
        server = WaitressServer(_guarded(front, access), map={}, adj=settings, sockinfo=settings.listen[0])
    except (OSError, ValueError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise TurngymError(f"cannot listen on {host}, port {port}: {why}; choose a free port") from error
    server.channel_class = type(
        "TimedChannel", (TimedChannel,), {"error_task_class": type("Refusal", (Refusal,), {"front": front})}
    )
    server.front, server.most = front, connections
    return server


WsgiApp = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


def _guarded(front: Front, access: Access) -> WsgiApp:
    """The application of `front` behind the rule of `access`: 403 for what it refuses."""

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        refusal = access.refusal(environ.get("HTTP_HOST"), environ.get("HTTP_ORIGIN"))
        if refusal is None:
            return front.app(environ, start_response)
        body = front.refuse(403, refusal)
        start_response("403 Forbidden", [("Content-Type", front.media), ("Content-Length", str(len(body)))])
        return [body]

    return application


class WaitressServer(TcpWSGIServer):
    """waitress with a limit of connections, time-outs of whole requests and an end of our own."""

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

    def maintenance(self, now: float) -> None:
        """Does nothing: waitress would go by the time of day, which may step. `tend` closes idle connections."""

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


# Connections of waitress: how long each takes, and the words in which it refuses.


class Refusal(ErrorTask):
    """The answer to what waitress cannot parse or refuses; it never reaches the application."""

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
        self.channel.refused = True
        self.content_length = len(body)
        self.write(body)


class AnswerTask(WSGITask):
    """An answer of the application. Once the server is leaving, the connection ends after it."""

    def build_response_header(self) -> bytes:
        if self.channel.server.leaving:
            self.set_close_on_finish()
        return bytes(super().build_response_header())


class Parser(HTTPRequestParser):
    """Parses a request. If two headers state its length, a proxy in between may have obeyed the other one."""

    def parse_header(self, header_plus: bytes) -> None:
        super().parse_header(header_plus)
        two_lengths = self.chunked and "CONTENT_LENGTH" in self.headers
        # waitress takes the header out where it understands it, which HTTP/1.0 does not have
        if two_lengths or "TRANSFER_ENCODING" in self.headers:
            # answered, and then closed (RFC 9112, 6.1): what follows may be part of this body
            self.headers["CONNECTION"] = "close"
        if self.content_length >= self.adj.max_request_body_size:
            # the body is not asked for: it is refused by its length
            self.expect_continue = False


class TimedChannel(HTTPChannel):
    """One connection that knows how long everything takes."""

    task_class, error_task_class, parser_class = AnswerTask, Refusal, Parser
    began: float | None = None
    """When the first byte of the request came that is not complete yet."""
    refused = False
    """Whether the last request was answered before all of it had come."""
    lingers: float | None = None
    """Time until which the rest of a refused client's request is read and thrown away; None for others."""
    _opened = _active = 0.0

    @property
    def last_activity(self) -> float:
        """When something was last read or sent, by a clock that never steps, whatever time of day waitress sets."""
        return self._active

    @last_activity.setter
    def last_activity(self, _: float) -> None:
        self._active = time.monotonic()
        self._opened = self._opened or self._active

    def handle_close(self) -> None:
        if self.refused and self.connected and self.lingers is None and not self.total_outbufs_len:
            try:
                self.socket.shutdown(socket.SHUT_WR)
            except OSError:
                super().handle_close()
            else:
                self.lingers, self.will_close = time.monotonic() + LINGER, False
            return
        super().handle_close()

    def readable(self) -> bool:
        return self.lingers is not None or bool(super().readable())

    def writable(self) -> bool:
        return self.lingers is None and bool(super().writable())

    def received(self, data: bytes) -> bool:
        if self.lingers is not None:
            return False
        self.began = time.monotonic() if self.began is None else self.began
        complete = super().received(data)
        if self.request is None:
            self.began = None
        return bool(complete)

    def overdue(self, now: float, front: Front) -> bool:
        """Whether a request takes too long to arrive, none comes, or nothing of the answer is taken."""
        if self.lingers is not None:
            return now > self.lingers
        if self.began is not None and now - self.began > front.timeouts.receive:
            return True
        if self.idle() and now - self.last_activity > front.timeouts.idle:
            return True
        # who holds the lock is writing, and has not tried to send yet
        if not self.total_outbufs_len or not self.outbuf_lock.acquire(blocking=False):
            return False
        stalled = self.total_outbufs_len and now - self.last_activity > front.timeouts.send
        self.outbuf_lock.release()
        return bool(stalled)

    def idle(self) -> bool:
        """Whether the connection is between two requests: nothing is read, answered or still to be sent."""
        return not (self.requests or self.request is not None or self.total_outbufs_len)

    def has_news(self) -> bool:
        """Whether a request is on its way: bytes that were not read yet, or a client that has just connected."""
        if time.monotonic() - self._opened < FRESH and self._active == self._opened:
            return True
        try:
            return bool(self.socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except OSError:
            return False


# The fronts of the Flask applications.

RETRIEVAL_THREADS = 96
"""Each waiting request holds a thread, so this bounds how many queries of single-query clients can share a batch.
Threads that wait cost little; the retriever itself runs in the service's own few."""


def retrieval_front(app: RetrievalApp, *, threads: int = RETRIEVAL_THREADS) -> Front:
    """The front of the retrieval server; its refusals count among the answers of /stats."""
    service = app.service

    def refuse(status: int, text: str) -> bytes:
        service.stats.answered(status)
        return json.dumps({"error": text}).encode()

    return Front(
        app=app,
        path="/retrieve",
        threads=threads,
        max_body=service.settings.max_body,
        refuse=refuse,
        leave=service.leave,
    )


def page_front(app: Flask, *, threads: int) -> Front:
    """The front of an application that answers with pages: the shop and the traces."""
    # an application explains forms that are too large, up to a point; one without a limit takes none
    max_body = 4 * (app.config["MAX_CONTENT_LENGTH"] or 0)
    return Front(
        app=app,
        path="/",
        threads=threads,
        max_body=max_body,
        refuse=lambda status, text: f"{status}: {text}\n".encode(),
        media="text/plain; charset=utf-8",
    )
