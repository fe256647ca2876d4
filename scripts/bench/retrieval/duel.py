"""The load test: our server and the peer under one client and under many, in turns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from turngym.envs.core.errors import TurngymError
from turngym.scripts.bench.retrieval.cpu import cpu_seconds
from turngym.scripts.bench.retrieval.load import Tally, load
from turngym.scripts.bench.retrieval.vectors import zipf_passages, zipf_queries

RATE_TARGET, P99_TARGET, SINGLE_TARGET = 5.0, 1000.0, 0.95
"""Ratio of queries per second; milliseconds; ratio of median latencies of a single client, a twentieth for noise."""
WORDS = 50_000
"""Vocabulary of made-up passages and queries."""
OURS = "turngym"
PEERS = {"Search-R1 per request": "0", "the same, 1 thread each": "1"}
"""The peer as it comes, and with one thread of faiss in each request: threads of 0 are faiss' own choice."""


class LoadOptions(Protocol):
    """What the load test reads of the options."""

    @property
    def passages(self) -> int: ...
    @property
    def dim(self) -> int: ...
    @property
    def clients(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    @property
    def rounds(self) -> int: ...
    @property
    def index(self) -> Path | None: ...
    @property
    def seed(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Server:
    """A server in a process of its own."""

    url: str
    pid: int


def load_test(config: LoadOptions, figures: dict[str, Any]) -> bool:
    """Both servers under one client and under many."""
    if not config.passages:
        return True
    print(f"load test: {config.passages:,} x {config.dim} Flat, {config.clients} clients, top 3")
    print(f"  {os.cpu_count()} cores, load average before {os.getloadavg()[0]:.1f}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = config.index or Path(scratch) / "index"
        build_load_index(config, folder, Path(scratch))
        peer = [sys.executable, "-m", "turngym.scripts.bench.retrieval.peer", str(folder)]
        verb = ["serve", "retrieval", "--index", str(folder), "--port", "0"]
        commands = {name: [*peer, threads] for name, threads in PEERS.items()}
        commands[OURS] = [sys.executable, "-m", "turngym.scripts.main", *verb]
        with ExitStack() as stack:
            sides = {name: stack.enter_context(process(command)) for name, command in commands.items()}
            one, many = measure(config, sides)
    return report(config, one, many, figures)


def build_load_index(config: LoadOptions, folder: Path, scratch: Path) -> None:
    """The index, unless it is there."""
    from turngym.retrieval.index import BuildPlan, build_index

    if folder.exists():
        return
    corpus = scratch / "corpus.jsonl"
    with corpus.open("w", encoding="utf-8") as file:
        for passage in zipf_passages(config.passages, vocabulary=WORDS, seed=config.seed):
            file.write(json.dumps({"id": passage.id, "contents": passage.contents}) + "\n")
    build_index(BuildPlan(corpus=corpus, out=folder, kind="dense", dim=config.dim, factory="Flat"))


def distinct_queries(seed: int, number: int) -> list[str]:
    """Made-up questions, none twice, so that no memory of answers helps; made before anything is measured."""
    return list(dict.fromkeys(zipf_queries(number, vocabulary=WORDS, seed=seed + 1)))


@contextmanager
def process(command: list[str]) -> Iterator[Server]:
    """A server, as soon as it has printed its address."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            line = server.stdout.readline() if server.stdout is not None else ""
            if not line.startswith("ready: "):
                raise TurngymError(f"{' '.join(command[1:4])} ended before it was ready: {line.strip()}")
            yield Server(line.split()[1].rstrip(","), server.pid)
        finally:
            server.terminate()


def measure(config: LoadOptions, sides: dict[str, Server]) -> tuple[dict[str, Tally], dict[str, Tally]]:
    """(one client, many clients) by side, measured in turns."""
    one, many = ({name: Tally() for name in sides} for _ in range(2))
    # more than any server of today answers in the time
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
    """`load`, with the CPU time that each query took of the server."""
    before = cpu_seconds(server.pid)
    tally = load(server.url, queries, clients=clients, warm=warm, **more)
    tally.cpu, tally.answered = cpu_seconds(server.pid) - before, len(tally.latencies) + clients * warm
    return tally


def report(config: LoadOptions, one: dict[str, Tally], many: dict[str, Tally], figures: dict[str, Any]) -> bool:
    """Print the table, and whether the targets are met; the peer is the one that answers more queries per second."""
    print(f"  {'':30} {'queries/s':>10} {'p50 ms':>9} {'p99 ms':>9} {'CPU ms':>9} {'errors':>7}")
    for clients, tallies in ((1, one), (config.clients, many)):
        for name, tally in tallies.items():
            row = (tally.rate, tally.milliseconds(50), tally.milliseconds(99), tally.cpu_ms, len(tally.errors))
            names = ("rate", "p50_ms", "p99_ms", "cpu_ms", "errors")
            figures[f"load/{clients}/{name}"] = dict(zip(names, row, strict=True))
            cells = f"{row[0]:10,.0f} {row[1]:9,.1f} {row[2]:9,.1f} {row[3]:9.2f} {row[4]:7}"
            print(f"  {clients:>3} x {name:<24} {cells}")
    best = max(PEERS, key=lambda name: many[name].rate)
    same = [one[OURS].found[query] == ids for query, ids in one[best].found.items() if query in one[OURS].found]
    print(f"  the peer is {best!r}, the faster of its settings under {config.clients} clients")
    print(f"  both found the same passages in {sum(same)} of {len(same)} queries asked of both")
    errors = [error for tally in (*one.values(), *many.values()) for error in tally.errors]
    for error in sorted(set(errors))[:3]:
        print(f"  error: {error}")
    ratio, p99 = many[OURS].rate / many[best].rate, many[OURS].milliseconds(99)
    cpu = many[best].cpu_ms / many[OURS].cpu_ms
    single = min(one[name].milliseconds(50) for name in PEERS) / one[OURS].milliseconds(50)
    figures |= {"load/peer": best, "load/ratio": ratio, "load/cpu_ratio": cpu, "load/single": single}
    figures |= {"load/average": os.getloadavg()[0]}
    print(f"  {config.clients} clients, CPU time of the servers for each query: {cpu:.2f}x")
    return all(
        [
            verdict(f"{config.clients} clients, queries/s", ratio, "x", ratio >= RATE_TARGET, f"{RATE_TARGET:g}x"),
            verdict("p99", p99, " ms", p99 < P99_TARGET, f"below {P99_TARGET:g} ms"),
            verdict("single client, speed", single, "x", single >= SINGLE_TARGET, "no slower; 0.95x for noise"),
            verdict("errors", len(errors), "", not errors, "none"),
            verdict("same passages", sum(same), f" of {len(same)}", all(same) and bool(same), "all"),
        ]
    )


def verdict(name: str, value: float, unit: str, met: bool, target: str) -> bool:
    shown = f"{value:,.2f}" if unit == "x" else f"{value:,.0f}"
    print(f"  {name}: {shown}{unit} (target {target}: {'met' if met else 'MISSED'})", flush=True)
    return met
