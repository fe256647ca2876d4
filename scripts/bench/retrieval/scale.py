"""How retrieval grows with the corpus: build time, disk, memory and latency at several sizes, and a million vectors.

Every measurement runs in a process of its own (`retrieval_worker`), so that memory is its own, on files that index
building itself wrote. Seconds of builds and milliseconds of single queries are CPU time of one core, so that other work
on the machine does not decide; wall time of queries is given beside them. Indexes are in the page cache before they are
asked.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from turngym.envs.core.tables import Table

FULL_SCANS, SCANNED = ("Flat", "SQ8"), 30_000_000_000
"""Kinds whose queries read every vector, and how many coordinates all of them may read together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grown:
    """One kind of index at one size."""

    kind: str
    rows: int
    build_s: float
    """CPU seconds, encoding not included."""
    build_mb: float
    """Peak resident memory of the build, MB."""
    disk_mb: float
    cpu_ms: float
    """Median of single queries, CPU milliseconds on one core."""
    wall_ms: float
    wall_p99_ms: float
    resident_mb: float
    """Of the whole process after the queries, mapped pages and Python included."""
    recall: float | None
    """Recall@3 against the exact answer; None for BM25."""
    shared_mb: float = 0.0
    """Of the resident memory, what a second process on the same index shares."""


def measure_growth(
    folder: Path,
    *,
    sizes: Sequence[int] = (10_000, 100_000, 1_000_000),
    kinds: Sequence[str] = ("bm25", "Flat", "SQ8", "IVF,SQ8"),
    dim: int = 384,
    queries: int = 300,
    say: Callable[[str], None] = print,
) -> list[Grown]:
    """Build and ask every kind at every size under `folder`, which is left in place for the next call.

    `IVF` means a number of clusters that suits the size: a power of two near four times its root.
    """
    rows = []
    for size in sizes:
        for kind in kinds:
            row = measure_ann(folder, rows=size, dim=dim, kind=kind, queries=queries)
            say(f"  {size:>9,} {kind:<8} {row.build_s:7.1f} s  {row.disk_mb:7.0f} MB  {row.cpu_ms:7.2f} ms")
            rows.append(row)
    return rows


def measure_ann(
    folder: Path,
    *,
    rows: int = 1_000_000,
    dim: int = 384,
    kind: str = "IVF,SQ8",
    nprobe: int | None = None,
    queries: int = 300,
) -> Grown:
    """Build one index (unless `folder` has it), then ask it mapped in two processes at once.

    Raises:
        RuntimeError: a measuring process failed; its error text.
    """
    if kind in FULL_SCANS:
        queries = max(20, min(queries, SCANNED // (rows * dim)))
    job = {"folder": str(folder), "rows": rows, "dim": dim, "kind": factory(kind, rows), "queries": queries}
    build, truth = _worker("build", job), None
    if kind != "bm25":
        truth = _worker("truth", job)
    # Both are up before either asks, and neither leaves before both have measured.
    meeting = folder / "meeting"
    meeting.mkdir(exist_ok=True)
    for path in meeting.iterdir():
        path.unlink()
    asked = [_start("ask", {**job, "nprobe": nprobe, "meeting": str(meeting), "me": me}) for me in (0, 1)]
    found = [_finish(process) for process in asked]
    ask = found[0]
    recall = None
    if truth is not None:
        pairs = zip(ask["rows"], truth["rows"], strict=True)
        recall = float(np.mean([len(set(a[:3]) & set(b)) / len(b) for a, b in pairs]))
    timed = {name: float(np.median([one[name] for one in found])) for name in ("cpu_ms", "wall_ms", "wall_p99_ms")}
    memory = {name: max(one[name] for one in found) for name in ("resident_mb", "shared_mb")}
    return Grown(kind=kind, rows=rows, recall=recall, **build, **timed, **memory)


def factory(kind: str, rows: int) -> str:
    """`IVF` with its number of clusters filled in; other kinds as they are."""
    clusters = 1 << max(4, round(float(np.log2(4 * np.sqrt(rows)))))
    return kind.replace("IVF,", f"IVF{clusters},")


def growth_table(rows: Sequence[Grown]) -> Table:
    """One line per kind and size."""
    header = ["passages", "index", "build CPU s", "build MB", "disk MB", "query CPU ms", "wall p50 / p99 ms"]
    header += ["resident MB", "shared MB", "recall@3"]
    lines = [
        [
            *(f"{row.rows:,}", factory(row.kind, row.rows), f"{row.build_s:.1f}"),
            *(f"{row.build_mb:.0f}", f"{row.disk_mb:.0f}", f"{row.cpu_ms:.2f}"),
            *(f"{row.wall_ms:.2f} / {row.wall_p99_ms:.2f}", f"{row.resident_mb:.0f}", f"{row.shared_mb:.0f}"),
            "-" if row.recall is None else f"{row.recall:.3f}",
        ]
        for row in sorted(rows, key=lambda row: (row.kind, row.rows))
    ]
    return header, lines


def _start(task: str, job: dict[str, Any]) -> subprocess.Popen[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "turngym.scripts.bench.retrieval.worker", task, json.dumps(job)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, error = process.communicate()
    if process.returncode:
        raise RuntimeError(f"measuring failed: {error.strip()[-2000:]}")
    return dict(json.loads(out.strip().splitlines()[-1]))


def _worker(task: str, job: dict[str, Any]) -> dict[str, Any]:
    return _finish(_start(task, job))


def as_json(rows: Sequence[Grown]) -> list[dict[str, Any]]:
    """For a results file."""
    return [asdict(row) for row in rows]
