"""Measures the retrieval server against an endpoint that does per request what Search-R1's does.

The bench builds an index of made-up passages with the hashing encoder and serves it by `turngym serve retrieval` and by
the peer below, each in a process of its own. It asks all servers the same kind of queries in turns: one client, then
many at once. The peer runs with faiss' default threads and with one thread in each request; the faster of the two is
what ours is compared with. No query comes twice, so caches do not help; encoding is part of every request on all
sides. CPU time is the servers'. Clients, servers and whatever else runs share the machine's cores, so only ratios mean
much.

The peer models Search-R1's retrieval_server.py: a synchronous endpoint, which FastAPI runs in a pool of 40 threads.
Each request encodes its own queries, calls `index.search` on them alone, looks the passages up one by one in a list and
pairs them with scores. Not modeled are uvicorn and pydantic (both sides run in waitress and Flask, so that the ratio is
about batching and threads, not about web frameworks), the `datasets` library, whose rows cost more than a list's, and a
neural encoder.

Examples:
    python tests/bench/bench_retrieval.py
    python tests/bench/bench_retrieval.py --passages 200000 --clients 128 --json retrieval.json
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import numpy as np
from bench_server import Server, started
from msgspec import Meta

from turngym.core.numbers import Count, Million, Positive, Seed
from turngym.core.redaction import excerpt
from turngym.core.spec import Spec
from turngym.core.tables import print_table
from turngym.scripts.options import read_options

# --- Made-up passages and queries

WORDS = 50_000
"""Vocabulary of passages and queries."""


def made_up_texts(count: int, words: int, seed: int) -> list[str]:
    """Texts of the given numbers of random words; two are hardly ever equal."""
    drawn = np.random.default_rng(seed).integers(0, WORDS, (count, words))
    return [" ".join(f"word{number}" for number in row) for row in drawn.tolist()]


# --- Clients

TIMEOUT = 60.0


@dataclass(slots=True)
class Tally:
    """The answers of one measurement."""

    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    """Seconds, in order of arrival."""
    errors: list[str] = field(default_factory=list)
    found: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Query to the ids found, for the first queries."""
    cpu: float = 0.0
    """Seconds of CPU time of the server."""
    answered: int = 0
    """Queries that the CPU time was spent on, including those that warm the server."""

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
        """Adds another measurement of the same server."""
        self.seconds += other.seconds
        self.latencies += other.latencies
        self.errors += other.errors
        self.found |= other.found
        self.cpu += other.cpu
        self.answered += other.answered


async def load(
    url: str, queries: Iterator[str], *, clients: int, seconds: float, topk: int = 3, keep: int = 0, warm: int = 0
) -> Tally:
    """Lets clients ask one query after the other, each on its own connection.

    Args:
        url: where queries are sent, path included.
        queries: shared by all clients; none comes twice, so that no cache of answers helps.
        clients: connections at a time.
        seconds: how long they ask, from when all of them are warm. Queries under way at the end are waited for.
        topk: hits for each query.
        keep: number of queries whose hits are kept in `Tally.found`, for a comparison.
        warm: queries of each client before the clock starts.
    """
    # the clock starts when every client is connected and warm
    tally, begin = Tally(), asyncio.Barrier(clients + 1)
    until = [float("inf")]

    async def one() -> None:
        ask = _Connection(url, topk)
        try:
            for _ in range(warm):
                await asyncio.wait_for(ask(next(queries)), TIMEOUT)
        except BaseException:
            # the others would wait for this one
            await begin.abort()
            raise
        await begin.wait()  # ends: the last one comes, or breaks it
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
        try:
            await begin.wait()  # ends: the last one comes, or breaks it
        except asyncio.BrokenBarrierError:
            # raises why
            await asyncio.gather(*workers)
            raise
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

    def __init__(self, url: str, topk: int) -> None:
        parts = urlsplit(url)
        self._address = (parts.hostname or "", parts.port or 80)
        self._head = f"POST {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
        self._topk = topk
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def __call__(self, query: str) -> tuple[str, ...]:
        """Asks one query and returns the ids found.

        Raises:
            ValueError: the status is not 200, or the number of documents is not `topk`.
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
            raise ValueError(excerpt(answer, 200))
        ids = tuple(entry["document"]["id"] for entry in json.loads(answer)["result"][0])
        if len(ids) != self._topk:
            raise ValueError(f"{len(ids)} documents instead of {self._topk}")
        return ids

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()


# --- The peer

THREADS = 40
"""Size of FastAPI's thread pool for endpoints that are plain functions."""


def make_peer(folder: Path, threads: int = 0) -> Any:
    """Makes the peer's endpoint over an index folder of ours: the same faiss file, passages and encoder.

    `threads` is the number of faiss threads in each request; 0 leaves faiss' default, all cores.
    """
    import faiss
    from flask import Flask, Response, request

    from turngym.retrieval.corpus import PassageStore
    from turngym.retrieval.encoders import HashingEncoder
    from turngym.retrieval.index import ENCODER, FAISS, PASSAGES

    store = PassageStore(folder / PASSAGES)
    corpus = [{"id": passage.id, "contents": passage.contents} for passage in store]
    encoder = HashingEncoder.load(folder / ENCODER)
    index = faiss.read_index(str(folder / FAISS))
    app = Flask("peer", root_path=str(folder), instance_path=str(folder.resolve()), static_folder=None)

    @app.post("/retrieve")
    def retrieve() -> Response:
        if threads:
            # the setting belongs to the calling thread, and the pool has many
            faiss.omp_set_num_threads(threads)
        asked = json.loads(request.get_data())
        vectors = encoder.encode_queries(asked["queries"])
        scores, rows = index.search(vectors, asked["topk"] or 3)
        result = [
            [{"document": corpus[row], "score": score} for row, score in zip(*found, strict=True)]
            for found in zip(rows.tolist(), scores.tolist(), strict=True)
        ]
        return Response(json.dumps({"result": result}), mimetype="application/json")

    return app


def serve_peer(folder: Path, threads: int) -> int:
    from waitress import create_server

    logging.getLogger("waitress.queue").setLevel(logging.ERROR)
    app = make_peer(folder, threads)
    server = create_server(
        app, host="127.0.0.1", port=0, threads=THREADS, connection_limit=1000, asyncore_use_poll=True
    )
    print(f"ready: http://127.0.0.1:{server.effective_port}/retrieve", flush=True)
    server.run()
    return 0


# --- The load test

OURS, PEER = "turngym", "peer"
"""Ours, and the word with which this file starts as the peer, in a process of its own."""
PEERS = {"Search-R1 per request": "0", "the same, 1 thread each": "1"}
"""Number of faiss threads in each request of the peer; 0 is faiss' default."""


def load_test(config: RetrievalBench, figures: dict[str, Any]) -> bool:
    """Measures all servers with one client and with many. Returns whether nothing failed."""
    print(f"load test: {config.passages:,} x {config.dim} Flat, {config.clients} clients, top 3")
    print(f"  {os.cpu_count()} cores, load average before {os.getloadavg()[0]:.1f}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = config.index or Path(scratch) / "index"
        build_load_index(config, folder, Path(scratch))
        peer = [__file__, PEER, str(folder)]
        verb = ["serve", "retrieval", "--index", str(folder), "--port", "0"]
        commands = {name: [*peer, threads] for name, threads in PEERS.items()}
        commands[OURS] = ["-m", "turngym.scripts", *verb]
        with ExitStack() as stack:
            sides = {name: stack.enter_context(started(command)) for name, command in commands.items()}
            one, many = measure(config, sides)
    return report(config, one, many, figures)


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


def distinct_queries(seed: int, number: int) -> list[str]:
    """Makes up to `number` questions, none twice, so that no cache of answers helps."""
    return list(dict.fromkeys(made_up_texts(number, 8, seed + 1)))


def measure(config: RetrievalBench, sides: dict[str, Server]) -> tuple[dict[str, Tally], dict[str, Tally]]:
    """Measures all servers in turns. Returns (one client, many clients), each by the name of the server."""
    one, many = ({name: Tally() for name in sides} for _ in range(2))
    # more than any server answers in the time
    queries = distinct_queries(config.seed, 1000 + int(5000 * config.seconds * config.rounds))
    streams = {name: iter(queries) for name in sides}
    for turn in range(config.rounds):
        for name, server in sides.items():
            asked = streams[name]
            one[name].add(asking(server, asked, clients=1, seconds=config.seconds / 3, keep=50, warm=5))
            many[name].add(asking(server, asked, clients=config.clients, seconds=config.seconds, warm=1))
            rates = f"{one[name].rate:,.0f} and {many[name].rate:,.0f} queries/s"
            print(f"  turn {turn + 1} of {config.rounds}, {name}: {rates}", flush=True)
    return one, many


def asking(server: Server, queries: Iterator[str], *, clients: int, warm: int, **more: Any) -> Tally:
    """Calls `load` and adds the server's CPU time.

    Args:
        server: is asked, and says its CPU time.
        queries: as in `load`.
        clients: as in `load`.
        warm: as in `load`; the CPU time of these queries counts, too.
        more: further arguments of `load`.
    """
    before = server.cpu_seconds
    tally = asyncio.run(load(server.url, queries, clients=clients, warm=warm, **more))
    tally.cpu, tally.answered = server.cpu_seconds - before, len(tally.latencies) + clients * warm
    return tally


def report(config: RetrievalBench, one: dict[str, Tally], many: dict[str, Tally], figures: dict[str, Any]) -> bool:
    """Prints the table and compares with the faster peer. Returns whether nothing failed and all found the same.

    Args:
        config: its `clients` is the number of clients in `many`.
        one: by server, the answers to one client.
        many: by server, the answers to many clients.
        figures: gets every number of the table and of the comparison, under names that begin with `load/`.
    """
    header = ["clients", "server", "queries/s", "p50 ms", "p99 ms", "CPU ms", "errors"]
    rows = []
    for clients, tallies in ((1, one), (config.clients, many)):
        for name, tally in tallies.items():
            row = (tally.rate, tally.milliseconds(50), tally.milliseconds(99), tally.cpu_ms, len(tally.errors))
            names = ("rate", "p50_ms", "p99_ms", "cpu_ms", "errors")
            figures[f"load/{clients}/{name}"] = dict(zip(names, row, strict=True))
            cells = [f"{row[0]:,.0f}", f"{row[1]:,.1f}", f"{row[2]:,.1f}", f"{row[3]:.2f}", str(row[4])]
            rows.append([str(clients), name, *cells])
    print_table((header, rows))
    best = max(PEERS, key=lambda name: many[name].rate)
    same = [one[OURS].found[query] == ids for query, ids in one[best].found.items() if query in one[OURS].found]
    errors = [error for tally in (*one.values(), *many.values()) for error in tally.errors]
    ratio, cpu = many[OURS].rate / many[best].rate, many[best].cpu_ms / many[OURS].cpu_ms
    single = min(one[name].milliseconds(50) for name in PEERS) / one[OURS].milliseconds(50)
    figures |= {"load/peer": best, "load/ratio": ratio, "load/cpu_ratio": cpu, "load/single": single}
    figures |= {"load/average": os.getloadavg()[0]}
    print(f"the peer is {best!r}, the faster of its settings under {config.clients} clients; against it:")
    print(f"  {config.clients} clients: {ratio:.2f}x the queries, {cpu:.2f}x less CPU time for each")
    print(f"  one client: {single:.2f}x as fast")
    print(f"  both found the same passages in {sum(same)} of {len(same)} queries; {len(errors)} errors", flush=True)
    print("".join(f"  error: {error}\n" for error in sorted(set(errors))[:3]), end="")
    return not errors and bool(same) and all(same)


# --- The command


class RetrievalBench(Spec):
    """What to measure."""

    passages: Annotated[int, Meta(ge=3, le=10**9)] = 50_000
    """Passages in the index."""
    dim: Count = 384
    """Dimensions of the vectors."""
    clients: Million = 64
    """Clients that ask at the same time."""
    seconds: Positive = 8.0
    """Length of each measurement with many clients; a single client gets a third of it."""
    rounds: Million = 2
    """How often each server is measured; servers take turns."""
    index: Path | None = None
    """Folder that keeps the index for the next call; a temporary one by default."""
    json: Path | None = None
    """Also write all figures here."""
    seed: Seed = 0


def main(argv: Sequence[str]) -> int:
    """The exit status is 1 if a request failed or other passages were found."""
    config = read_options(RetrievalBench, argv, prog="bench_retrieval.py", about=__doc__)
    figures: dict[str, Any] = {}
    met = load_test(config, figures)
    if config.json is not None:
        config.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0 if met else 1


if __name__ == "__main__":
    if sys.argv[1:2] == [PEER]:
        sys.exit(serve_peer(Path(sys.argv[2]), int(sys.argv[3])))
    sys.exit(main(sys.argv[1:]))
