"""Concurrent clients on one event loop: as many requests as a server answers, and how long each took."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import numpy as np

TIMEOUT = 60.0


@dataclass(slots=True)
class Tally:
    """What came back. Latencies in seconds, in order of arrival."""

    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    found: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Query to the ids found, for the first queries."""
    cpu: float = 0.0
    """Seconds of CPU time of the server."""
    answered: int = 0
    """Queries that it took them for: those of the warming, too."""

    @property
    def rate(self) -> float:
        """Queries per second."""
        return len(self.latencies) / self.seconds if self.seconds else 0.0

    @property
    def cpu_ms(self) -> float:
        """The server's milliseconds of CPU time for each query."""
        return 1000 * self.cpu / self.answered if self.answered else float("nan")

    def milliseconds(self, percent: float) -> float:
        """A percentile of the latencies."""
        return float(np.percentile(self.latencies, percent)) * 1000 if self.latencies else float("nan")

    def add(self, other: Tally) -> None:
        """Put two runs together."""
        self.seconds += other.seconds
        self.latencies += other.latencies
        self.errors += other.errors
        self.found |= other.found
        self.cpu += other.cpu
        self.answered += other.answered


def load(
    url: str, queries: Iterator[str], *, clients: int, seconds: float, topk: int = 3, keep: int = 0, warm: int = 0
) -> Tally:
    """`clients` ask one query after the other on connections of their own, for `seconds` after `warm` answers each."""
    return asyncio.run(_load(url, queries, clients, seconds, topk, keep, warm))


async def _load(
    url: str, queries: Iterator[str], clients: int, seconds: float, topk: int, keep: int, warm: int
) -> Tally:
    # the clock starts when every client is connected and warm
    tally, begin = Tally(), asyncio.Barrier(clients + 1)
    until = [float("inf")]

    async def one() -> None:
        ask = _Connection(url, topk)
        for _ in range(warm):
            await ask(next(queries))
        await begin.wait()
        while time.perf_counter() < until[0]:
            query, began = next(queries), time.perf_counter()
            try:
                ids = await asyncio.wait_for(ask(query), TIMEOUT)
            except Exception as error:
                tally.errors.append(f"{type(error).__name__}: {error}")
                ask = _Connection(url, topk)
                continue
            tally.latencies.append(time.perf_counter() - began)
            if len(tally.found) < keep:
                tally.found[query] = ids
        ask.close()

    workers = [asyncio.create_task(one()) for _ in range(clients)]
    try:
        await begin.wait()
        began = time.perf_counter()
        until[0] = began + seconds
        await asyncio.gather(*workers)
        # until the last answer: what was under way at the end counts, with the time that it took
        tally.seconds = time.perf_counter() - began
    finally:
        for worker in workers:
            worker.cancel()
    return tally


class _Connection:
    """One keep-alive connection; hand-written because a client library would take the cores that are measured."""

    def __init__(self, url: str, topk: int) -> None:
        parts = urlsplit(url)
        self._address = (parts.hostname or "", parts.port or 80)
        self._head = f"POST {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
        self._topk = topk
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def __call__(self, query: str) -> tuple[str, ...]:
        """The ids found.

        Raises:
            ValueError: not a 200 with as many documents as asked for.
        """
        if self._streams is None:
            self._streams = await asyncio.open_connection(*self._address)
        reader, writer = self._streams
        body = json.dumps({"queries": [query], "topk": self._topk, "return_scores": True}).encode()
        writer.write(f"{self._head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        length = int(head.split("content-length:", 1)[1].split("\r\n", 1)[0])
        answer = await reader.readexactly(length)
        if not head.startswith("http/1.1 200"):
            raise ValueError(answer[:200].decode("utf-8", "replace"))
        ids = tuple(entry["document"]["id"] for entry in json.loads(answer)["result"][0])
        if len(ids) != self._topk:
            raise ValueError(f"{len(ids)} documents instead of {self._topk}")
        return ids

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
