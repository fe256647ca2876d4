"""Retrieval server against an endpoint that does per request what Search-R1's does; ranking quality; growth.

The load test (always run) builds an index of made-up passages with the hashing encoder, serves it twice, by
`turngym serve retrieval` and by the peer that scripts/bench/retrieval/peer.py describes, each in a process of its own,
and asks both the same kind of queries in turns: one client, then many at once. No query comes twice, so memory of
answers does not help; encoding is part of every request on both sides. Clients, both servers and whatever else runs
share the machine's cores, so only the ratio means much.

Examples:
    turngym bench retrieval
    turngym bench retrieval --quality ../data/search --scale scale
    turngym bench retrieval --passages 0 --quality embedded
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from turngym.agents.evaluation.tables import print_table
from turngym.envs.core import TurngymError
from turngym.retrieval.core import RetrievalError
from turngym.scripts.bench.retrieval.load import Tally, load
from turngym.scripts.bench.retrieval.vectors import zipf_passages, zipf_queries

if TYPE_CHECKING:
    from turngym.scripts.bench.retrieval.scale import Grown

RATE_TARGET, P99_TARGET, SINGLE_TARGET = 5.0, 1000.0, 0.95
"""Ratio of queries per second; milliseconds; ratio of median latencies of a single client, a twentieth for noise."""

WORDS = 50_000
"""Vocabulary of made-up passages and queries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrievalBench:
    """What to measure."""

    passages: int = 50_000
    """Passages of the load test; 0 leaves it out."""
    dim: int = 384
    """Dimensions of its vectors."""
    clients: int = 64
    """Concurrent clients."""
    seconds: float = 8.0
    """Of each measurement with many clients; a single client gets a third."""
    rounds: int = 2
    """Turns that each server gets."""
    index: Path | None = None
    """Folder to keep the load test's index in, and to take it from if it is there; by default a temporary one."""
    quality: str | None = None
    """Folder with {hotpotqa,2wiki}_{corpus,questions}.jsonl, or `embedded`, the fictional world that needs no data:
    recall of BM25, hashing, hybrid and reranking on them."""
    scale: Path | None = None
    """Folder to build indexes of 10,000 to a million passages in (kept: minutes, and gigabytes of disk)."""
    json: Path | None = None
    """Also write all figures here."""
    seed: int = 0


def main(argv: Sequence[str]) -> int:
    """Run the parts asked for; status 1 if a target is missed."""
    config = tyro.cli(RetrievalBench, args=list(argv), prog="turngym bench retrieval", description=__doc__)
    figures: dict[str, Any] = {}
    try:
        met = [part(config, figures) for part in (load_test, quality, scale)]
    except RetrievalError as error:
        raise TurngymError(str(error)) from error
    if config.json is not None:
        config.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0 if all(met) else 1


def load_test(config: RetrievalBench, figures: dict[str, Any]) -> bool:
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
        ours = [sys.executable, "-m", "turngym.scripts.main", *verb]
        with process(peer) as peer_url, process(ours) as our_url:
            sides = {"Search-R1 per request": peer_url, "turngym": our_url}
            one, many = measure(config, sides)
    return report(config, one, many, figures)


def build_load_index(config: RetrievalBench, folder: Path, scratch: Path) -> None:
    """The index, unless it is there."""
    from turngym.retrieval.index.build import BuildPlan, build_index

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
def process(command: list[str]) -> Iterator[str]:
    """A server in a process of its own; the address it prints when it is ready."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            line = server.stdout.readline() if server.stdout is not None else ""
            if not line.startswith("ready: "):
                raise TurngymError(f"{' '.join(command[1:4])} ended before it was ready: {line.strip()}")
            yield line.split()[1].rstrip(",")
        finally:
            server.terminate()


def measure(config: RetrievalBench, sides: dict[str, str]) -> tuple[dict[str, Tally], dict[str, Tally]]:
    """(one client, many clients) by side, measured in turns."""
    one, many = ({name: Tally() for name in sides} for _ in range(2))
    # more than any server of today answers in the time
    queries = distinct_queries(config.seed, 1000 + int(5000 * config.seconds * config.rounds))
    streams = {name: iter(queries) for name in sides}
    for turn in range(config.rounds):
        for name, url in sides.items():
            asked = streams[name]
            one[name].add(load(url, asked, clients=1, seconds=config.seconds / 3, keep=50, warm=5))
            many[name].add(load(url, asked, clients=config.clients, seconds=config.seconds, warm=1))
            rates = f"{one[name].rate:,.0f} and {many[name].rate:,.0f} queries/s"
            print(f"  turn {turn + 1} of {config.rounds}, {name}: {rates}", flush=True)
    return one, many


def report(config: RetrievalBench, one: dict[str, Tally], many: dict[str, Tally], figures: dict[str, Any]) -> bool:
    """Print the table, and whether the targets are met."""
    peer, ours = one
    print(f"  {'':24} {'queries/s':>10} {'p50 ms':>9} {'p99 ms':>9} {'errors':>7}")
    for clients, tallies in ((1, one), (config.clients, many)):
        for name, tally in tallies.items():
            row = (tally.rate, tally.milliseconds(50), tally.milliseconds(99), len(tally.errors))
            figures[f"load/{clients}/{name}"] = dict(zip(("rate", "p50_ms", "p99_ms", "errors"), row, strict=True))
            print(f"  {clients:>3} x {name:<22} {row[0]:10,.0f} {row[1]:9,.1f} {row[2]:9,.1f} {row[3]:7}")
    same = [one[ours].found[query] == ids for query, ids in one[peer].found.items() if query in one[ours].found]
    print(f"  both found the same passages in {sum(same)} of {len(same)} queries asked of both")
    errors = [error for tally in (*one.values(), *many.values()) for error in tally.errors]
    for error in sorted(set(errors))[:3]:
        print(f"  error: {error}")
    ratio = many[ours].rate / many[peer].rate
    p99 = many[ours].milliseconds(99)
    single = one[peer].milliseconds(50) / one[ours].milliseconds(50)
    figures |= {"load/ratio": ratio, "load/single": single, "load/average": os.getloadavg()[0]}
    return all(
        [
            _verdict(f"{config.clients} clients, queries/s", ratio, "x", ratio >= RATE_TARGET, f"{RATE_TARGET:g}x"),
            _verdict("p99", p99, " ms", p99 < P99_TARGET, f"below {P99_TARGET:g} ms"),
            _verdict("single client, speed", single, "x", single >= SINGLE_TARGET, "no slower; 0.95x for noise"),
            _verdict("errors", len(errors), "", not errors, "none"),
            _verdict("same passages", sum(same), f" of {len(same)}", all(same) and bool(same), "all"),
        ]
    )


def quality(config: RetrievalBench, figures: dict[str, Any]) -> bool:
    """Recall on real questions."""
    if config.quality is None:
        return True
    from turngym.scripts.bench.retrieval.quality import below_reference, measure_quality, quality_table

    rows = measure_quality(config.quality)
    figures["quality"] = [asdict(row) for row in rows]
    print_table(quality_table(rows), "Three passages per query")
    for line in (short := below_reference(rows)):
        print(f"  {line}: MISSED")
    return not short


def scale(config: RetrievalBench, figures: dict[str, Any]) -> bool:
    """Cost as the corpus grows."""
    if config.scale is None:
        return True
    from turngym.scripts.bench.retrieval.scale import as_json, growth_table, measure_growth

    config.scale.mkdir(parents=True, exist_ok=True)
    print("growth:", flush=True)
    rows = measure_growth(config.scale, dim=config.dim)
    figures["growth"] = as_json(rows)
    print_table(growth_table(rows), "Cost as the corpus grows")
    largest = max(row.rows for row in rows)
    found = [row for row in rows if row.rows == largest and row.recall is not None]
    good = [row for row in found if _within(row)]
    for row in good or found:
        share = row.shared_mb / row.resident_mb
        line = f"recall@3 {row.recall:.3f}, {row.cpu_ms:.1f} ms, {row.resident_mb:.0f} MB, {share:.0%} of it shared"
        print(f"  {largest:,} x {config.dim}, {row.kind}: {line}{'' if good else ': MISSED'}")
    print("  (target: recall@3 0.97, 10 ms of one core, 700 MB, half of it shared by two processes)")
    return bool(good)


def _within(row: Grown) -> bool:
    """An index as the largest corpus needs one: accurate, quick, small, shared."""
    accurate = row.recall is not None and row.recall >= 0.97
    return accurate and row.cpu_ms <= 10 and row.resident_mb <= 700 and row.shared_mb >= row.resident_mb / 2


def _verdict(name: str, value: float, unit: str, met: bool, target: str) -> bool:
    shown = f"{value:,.2f}" if unit == "x" else f"{value:,.0f}"
    print(f"  {name}: {shown}{unit} (target {target}: {'met' if met else 'MISSED'})", flush=True)
    return met
