"""Retrieval server against an endpoint that does per request what Search-R1's does; ranking quality; growth.

The load test (always run) builds an index of made-up passages with the hashing encoder, serves it by `turngym serve
retrieval` and by the peer that scripts/bench/retrieval/peer.py describes, each in a process of its own, and asks all
the same kind of queries in turns: one client, then many at once. The peer runs as it comes and with one thread of faiss
in each request; the better of the two is what ours is compared with. No query comes twice, so memory of answers does
not help; encoding is part of every request on both sides. CPU time is the servers'. Clients, servers and whatever else
runs share the machine's cores, so only the ratio means much.

Examples:
    turngym bench retrieval
    turngym bench retrieval --quality ../data/search --scale scale
    turngym bench retrieval --passages 0 --quality embedded
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from turngym.envs.core.errors import TurngymError
from turngym.envs.core.tables import print_table
from turngym.retrieval.core import RetrievalError
from turngym.scripts.bench.retrieval.duel import load_test

if TYPE_CHECKING:
    from turngym.scripts.bench.retrieval.scale import Grown


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
