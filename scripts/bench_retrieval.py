"""Measures the retrieval server with many clients at once: queries per second, latencies, CPU time.

The bench builds an index of made-up passages with the hashing encoder, serves it by `turngym serve retrieval` in a
process of its own, and asks: one client, then many at once. No query comes twice, so caches do not help; encoding is
part of every request. CPU time is the server's. Clients, the server and whatever else runs share the machine's cores.

Examples:
    turngym bench retrieval
    turngym bench retrieval --passages 200000 --clients 128 --json retrieval.json
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import tyro

from turngym.envs.core.errors import TurngymError, checked_int
from turngym.envs.core.tables import print_table
from turngym.retrieval.core import RetrievalError
from turngym.scripts.bench_server import Server, started

# --- Made-up passages and queries

WORDS = 50_000
"""Vocabulary of passages and queries."""


def made_up_texts(count: int, words: int, seed: int) -> list[str]:
    """Texts of so many random words; equal ones are hardly to be expected."""
    drawn = np.random.default_rng(seed).integers(0, WORDS, (count, words))
    return [" ".join(f"word{number}" for number in row) for row in drawn.tolist()]


def distinct_queries(seed: int, number: int) -> list[str]:
    """Makes up to `number` questions, none twice, so that no cache of answers helps."""
    return list(dict.fromkeys(made_up_texts(number, 8, seed + 1)))


# --- Clients

TIMEOUT = 60.0
TOPK = 3


@dataclass(slots=True)
class Tally:
    """The answers of one measurement."""

    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    """Seconds, in order of arrival."""
    errors: list[str] = field(default_factory=list)
    cpu_ms: float = float("nan")
    """The server's milliseconds of CPU time for each query, those that warm it included."""

    @property
    def rate(self) -> float:
        """Queries per second."""
        return len(self.latencies) / self.seconds if self.seconds else 0.0

    def milliseconds(self, percent: float) -> float:
        """A percentile of the latencies."""
        return float(np.percentile(self.latencies, percent)) * 1000 if self.latencies else float("nan")


async def load(url: str, queries: Iterator[str], *, clients: int, seconds: float, warm: int) -> Tally:
    """Lets `clients` ask one query after the other, each on its own connection, for `seconds` after `warm` answers."""
    # the clock starts when every client is connected and warm
    tally, begin = Tally(), asyncio.Barrier(clients + 1)
    until = [float("inf")]

    async def one() -> None:
        ask = _Connection(url)
        for _ in range(warm):
            await ask(next(queries))
        await begin.wait()
        while time.perf_counter() < until[0]:
            query, began = next(queries), time.perf_counter()
            try:
                await asyncio.wait_for(ask(query), TIMEOUT)
            except Exception as error:
                tally.errors.append(f"{type(error).__name__}: {error}")
                ask = _Connection(url)
                continue
            tally.latencies.append(time.perf_counter() - began)
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
    """One keep-alive connection, written by hand: a client library would use up the cores that are measured."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._address = (parts.hostname or "", parts.port or 80)
        self._head = f"POST {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def __call__(self, query: str) -> None:
        """Asks one query.

        Raises:
            ValueError: the status is not 200, or the number of documents is not `TOPK`.
        """
        if self._streams is None:
            self._streams = await asyncio.open_connection(*self._address)
        reader, writer = self._streams
        body = json.dumps({"queries": [query], "topk": TOPK, "return_scores": True}).encode()
        writer.write(f"{self._head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        length = int(head.split("content-length:", 1)[1].split("\r\n", 1)[0])
        answer = await reader.readexactly(length)
        if not head.startswith("http/1.1 200"):
            raise ValueError(answer[:200].decode("utf-8", "replace"))
        if (found := len(json.loads(answer)["result"][0])) != TOPK:
            raise ValueError(f"{found} documents instead of {TOPK}")

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()


# --- The load test


def load_test(config: RetrievalBench) -> dict[int, Tally]:
    """Measures the server; the number of clients -> what they were answered."""
    print(f"load test: {config.passages:,} x {config.dim} Flat, {config.clients} clients, top {TOPK}")
    print(f"  {os.cpu_count()} cores, load average before {os.getloadavg()[0]:.1f}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = config.index or Path(scratch) / "index"
        build_load_index(config, folder, Path(scratch))
        # more than any server answers in the time
        queries = iter(distinct_queries(config.seed, 1000 + int(10_000 * config.seconds)))
        verb = ["serve", "retrieval", "--index", str(folder), "--port", "0"]
        with started(["-m", "turngym.scripts.main", *verb]) as server:
            return {
                1: asking(server, queries, clients=1, seconds=config.seconds / 3, warm=5),
                config.clients: asking(server, queries, clients=config.clients, seconds=config.seconds, warm=1),
            }


def build_load_index(config: RetrievalBench, folder: Path, scratch: Path) -> None:
    """Builds the index unless `folder` has it."""
    from turngym.retrieval.index import BuildPlan, build_index

    if folder.exists():
        return
    corpus = scratch / "corpus.jsonl"
    with corpus.open("w", encoding="utf-8") as file:
        for number, text in enumerate(made_up_texts(config.passages, 100, config.seed)):
            file.write(json.dumps({"id": str(number), "contents": text}) + "\n")
    build_index(BuildPlan(corpus=corpus, out=folder, kind="dense", dim=config.dim, factory="Flat"))


def asking(server: Server, queries: Iterator[str], *, clients: int, seconds: float, warm: int) -> Tally:
    """Calls `load` and adds the server's CPU time."""
    before = server.cpu_seconds
    tally = asyncio.run(load(server.url, queries, clients=clients, seconds=seconds, warm=warm))
    tally.cpu_ms = 1000 * (server.cpu_seconds - before) / (len(tally.latencies) + clients * warm)
    return tally


# --- The command


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrievalBench:
    """What to measure."""

    passages: int = 50_000
    """Passages in the index."""
    dim: int = 384
    """Dimensions of the vectors."""
    clients: int = 64
    """Clients that ask at the same time."""
    seconds: float = 8.0
    """Length of the measurement with many clients; a single client gets a third of it."""
    index: Path | None = None
    """Folder that keeps the index for the next call; a temporary one by default."""
    json: Path | None = None
    """Also write all figures here."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("passages", TOPK), ("dim", 1), ("clients", 1), ("seed", 0)):
            checked_int(f"--{name}", getattr(self, name), least)


def main(argv: Sequence[str]) -> int:
    """Runs `turngym bench retrieval`; the exit status is 1 if a request failed."""
    config = tyro.cli(RetrievalBench, args=list(argv), prog="turngym bench retrieval", description=__doc__)
    try:
        found = load_test(config)
    except RetrievalError as error:
        raise TurngymError(str(error)) from error
    figures: dict[str, dict[str, float]] = {}
    rows = []
    for clients, tally in found.items():
        row = (tally.rate, tally.milliseconds(50), tally.milliseconds(99), tally.cpu_ms, len(tally.errors))
        figures[str(clients)] = dict(zip(("rate", "p50_ms", "p99_ms", "cpu_ms", "errors"), row, strict=True))
        rows.append([f"{clients}", f"{row[0]:,.0f}", f"{row[1]:,.1f}", f"{row[2]:,.1f}", f"{row[3]:.2f}", f"{row[4]}"])
    print_table((["clients", "queries/s", "p50 ms", "p99 ms", "CPU ms", "errors"], rows))
    errors = {error for tally in found.values() for error in tally.errors}
    print("".join(f"error: {error}\n" for error in sorted(errors)[:3]), end="")
    if config.json is not None:
        config.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 1 if errors else 0
