"""Malformed requests to a server in its own process: its parser, its limits, its application, but no socket or thread.

The verb starts the server as always, and where it would wait for clients, requests are put into its connections. That
takes a fraction of the time that sockets take, so that many more can be tried; what sockets add is tried over sockets.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from turngym.scripts.bench.faults.malformed import KINDS, Route, malformed
from turngym.scripts.bench.faults.rows import WARM, ServerRow, Usage

_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")
CLIENT = ("127.0.0.1", 50_000)
PATIENCE = 60.0
"""Seconds for an answer."""


def main(argv: Sequence[str]) -> int:
    """`inside SERVER REQUESTS SEED FOLDER`: write what came of it to FOLDER/inside.json."""
    from turngym.scripts.bench.faults.served import TARGETS
    from turngym.scripts.main import main as turngym

    name, requests, seed, folder = argv[0], int(argv[1]), int(argv[2]), Path(argv[3])
    one = TARGETS[name](folder)
    row = ServerRow(what=name)
    rng = np.random.default_rng((seed, list(TARGETS).index(name), 1))
    _instead_of_clients(one.routes, requests, rng, row)
    status = turngym(one.command[3:])
    (folder / "inside.json").write_text(json.dumps(row.as_json()))
    return status


def _instead_of_clients(routes: Sequence[Route], requests: int, rng: np.random.Generator, row: ServerRow) -> None:
    """Servers of this process get `requests` when they are told to run, and then return."""
    from turngym.agents.serving import AsgiServer, DrainingServer

    def drawn(host: str, count: int) -> list[tuple[str, bytes]]:
        kinds = (KINDS[int(rng.integers(len(KINDS)))] for _ in range(count))
        return [(kind, malformed(kind, routes, host, rng)) for kind in kinds]

    def run(server: DrainingServer) -> None:
        connection = WaitressConnection(server._server)
        host = f"{server.host}:{server.port}"
        for start in range(0, requests, 100):
            for kind, sent in drawn(host, min(100, requests - start)):
                row.answered(kind, connection.exchange(sent), sent)
            _measure(row, start, requests)
        server.drained = True

    async def run_asgi(server: AsgiServer) -> None:
        inner, host = server._server, f"{server.host}:{server.port}"
        inner.config.load()
        inner.lifespan = inner.config.lifespan_class(inner.config)
        await inner.lifespan.startup()
        connection = UvicornConnection(inner, (server.host, server.port))
        for start in range(0, requests, 100):
            for kind, sent in drawn(host, min(100, requests - start)):
                row.answered(kind, await connection.exchange(sent), sent)
            _measure(row, start, requests)
        connection.drop()
        await inner.lifespan.shutdown()

    setattr(DrainingServer, "run", run)  # noqa: B010 - a type checker sees no assignment to a method
    setattr(AsgiServer, "run", lambda server: asyncio.run(run_asgi(server)))  # noqa: B010


def _measure(row: ServerRow, done: int, requests: int) -> None:
    usage = Usage.of(os.getpid(), less=sys.getsizeof(row.distinct) + 36 * len(row.distinct))
    if row.before is None and done >= WARM * requests:
        row.before = usage
    row.after = usage


class Wire:
    """What a connection of waitress takes for its socket: it keeps what is sent."""

    def __init__(self) -> None:
        self.sent = b""

    def setblocking(self, flag: int) -> None: ...

    def fileno(self) -> int:
        return -1

    def getsockopt(self, level: int, name: int) -> int:
        return 1 << 16

    def send(self, data: bytes) -> int:
        self.sent += bytes(data)
        return len(data)

    def close(self) -> None: ...


class WaitressConnection:
    """A connection to a server of waitress that does not run; another one whenever the server closes it."""

    def __init__(self, server: Any) -> None:
        self.server = server
        self.tasks: list[Any] = []
        # its threads never get a task, and nobody listens to its trigger
        server.add_task, server.pull_trigger = self.tasks.append, lambda *_: None
        self.channel: Any = None
        self.wire = Wire()

    def exchange(self, sent: bytes) -> int | None:
        """Status of the answer; None for a request that the server still waits for the rest of, or that it drops."""
        if self.channel is None:
            self.wire = Wire()
            self.channel = self.server.channel_class(self.server, self.wire, CLIENT, self.server.adj, map={})
        channel, self.wire.sent = self.channel, b""
        while sent and channel.connected and channel.readable():
            channel.received(sent[: channel.adj.recv_bytes])
            sent = sent[channel.adj.recv_bytes :]
            while self.tasks:
                self.tasks.pop().service()
            channel.handle_write()
        if channel.request is not None and channel.connected:
            channel.handle_close()
        if not channel.connected:
            self.channel = None
        return _status(self.wire.sent)


class MemoryTransport(asyncio.Transport):
    """A connection of uvicorn whose other end is this program."""

    def __init__(self, address: tuple[str, int]) -> None:
        super().__init__({"sockname": address, "peername": CLIENT})
        self.sent, self.closing = b"", False
        self.protocol: Any = None

    def write(self, data: Any) -> None:
        self.sent += bytes(data)

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        if not self.closing:
            self.closing = True
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)

    abort = close

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def get_protocol(self) -> Any:
        return self.protocol

    def set_protocol(self, protocol: Any) -> None:
        self.protocol = protocol


class UvicornConnection:
    """A connection to a server of uvicorn that does not listen; another one whenever the server closes it."""

    def __init__(self, server: Any, address: tuple[str, int]) -> None:
        self.server, self.address = server, address
        self.wire: MemoryTransport | None = None

    async def exchange(self, sent: bytes) -> int | None:
        """As `WaitressConnection.exchange`."""
        wire = self.wire or self._connect()
        protocol, wire.sent = wire.protocol, b""
        protocol.data_received(sent)
        until, turns = time.monotonic() + PATIENCE, 0
        while not self._over(wire, protocol, turns) and time.monotonic() < until:
            turns += 1
            # what works in another thread is not helped by asking all the time
            await asyncio.sleep(0 if turns < 200 else 0.001)
        whole = wire.sent and wire.protocol is protocol and protocol.silent() and not wire.closing
        self.wire = wire if whole else None
        if not whole:
            wire.close()
        await asyncio.sleep(0)
        return _status(wire.sent)

    def drop(self) -> None:
        if self.wire is not None:
            self.wire.close()

    def _connect(self) -> MemoryTransport:
        config = self.server.config
        wire = MemoryTransport(self.address)
        wire.protocol = config.http_protocol_class(
            config=config, server_state=self.server.server_state, app_state=self.server.lifespan.state
        )
        wire.protocol.connection_made(wire)
        return wire

    @staticmethod
    def _over(wire: MemoryTransport, protocol: Any, turns: int) -> bool:
        """Whether it was answered, closed, or is not complete."""
        import h11

        if wire.closing or wire.protocol is not protocol:
            return wire.closing or turns > 20
        if protocol.silent() and wire.sent:
            return True
        return protocol.conn.their_state in (h11.IDLE, h11.SEND_BODY) and turns > 20


def _status(answer: bytes) -> int | None:
    found = _STATUS.match(answer)
    return None if found is None else int(found[1])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
