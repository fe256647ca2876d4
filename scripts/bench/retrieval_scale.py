"""How retrieval grows with the corpus: build time, disk, memory and latency at several sizes, and a million vectors.

Every measurement runs in a process of its own, so that memory is its own, on files that index building itself wrote.
Seconds of builds and milliseconds of single queries are CPU time of one core, so that other work on the machine does
not decide; wall time of queries is given beside them. Indexes are in the page cache before they are asked.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turngym.agents.show import Table
from turngym.scripts.bench.retrieval_vectors import SHARD, Mixture, zipf_passages, zipf_queries

FULL_SCANS, SCANNED = ("Flat", "SQ8"), 30_000_000_000
"""Kinds whose queries read every vector, and how many coordinates all of them may read together."""
QUERY_STREAM = 1 << 20
"""Stream of the mixture that queries come from: no shard has it."""


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
    command = [sys.executable, "-m", "turngym.scripts.bench.retrieval_scale", task, json.dumps(job)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, error = process.communicate()
    if process.returncode:
        raise RuntimeError(f"measuring failed: {error.strip()[-2000:]}")
    return dict(json.loads(out.strip().splitlines()[-1]))


def _worker(task: str, job: dict[str, Any]) -> dict[str, Any]:
    return _finish(_start(task, job))


def _task_build(folder: Path, job: dict[str, Any]) -> dict[str, Any]:
    """Build once; what it cost is kept beside the index."""
    target = _target(folder, job)
    note = target.with_name(target.name + ".json")
    if note.is_file():
        return dict(json.loads(note.read_text()))
    target.parent.mkdir(parents=True, exist_ok=True)
    if job["kind"] == "bm25":
        cost = _build_words(target, job["rows"])
    else:
        cost = _build_vectors(target, _vectors(folder, job), job)
    note.write_text(json.dumps(cost))
    return cost


def _build_vectors(target: Path, vectors: Path, job: dict[str, Any]) -> dict[str, Any]:
    from turngym.retrieval.index_vectors import add_vectors

    begin = time.process_time()
    add_vectors(vectors, target, job["kind"], job["dim"], job["rows"], lambda *_: None)
    return {"build_s": time.process_time() - begin, "build_mb": _peak_mb(), "disk_mb": target.stat().st_size / 1e6}


def _build_words(target: Path, rows: int) -> dict[str, Any]:
    from turngym.retrieval.bm25 import indexed_documents
    from turngym.retrieval.lucene import LuceneIndex
    from turngym.retrieval.passages import PassageStore

    with PassageStore.build(zipf_passages(rows), target / "passages") as store:
        begin = time.process_time()
        LuceneIndex.build(indexed_documents(store), target / "lucene").close()
    size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    return {"build_s": time.process_time() - begin, "build_mb": _peak_mb(), "disk_mb": size / 1e6}


def _task_truth(folder: Path, job: dict[str, Any]) -> dict[str, Any]:
    """The exact three best rows of every query, by multiplying everything."""
    note = folder / f"truth-{job['rows']}-{job['dim']}-{job['queries']}.json"
    if not note.is_file():
        queries = _queries(job)
        scores, rows = np.zeros((len(queries), 0), np.float32), np.zeros((len(queries), 0), np.int64)
        for number, path in enumerate(sorted(_vectors(folder, job).glob("*.npy"))):
            every = queries @ np.load(path).T
            best = np.argpartition(-every, 2, axis=1)[:, :3]
            scores = np.concatenate([scores, np.take_along_axis(every, best, 1)], 1)
            rows = np.concatenate([rows, best + number * SHARD], 1)
        order = np.argsort(-scores, axis=1)[:, :3]
        note.write_text(json.dumps({"rows": np.take_along_axis(rows, order, 1).tolist()}))
    return dict(json.loads(note.read_text()))


def _task_ask(folder: Path, job: dict[str, Any]) -> dict[str, Any]:
    _read_through(_target(folder, job))
    ask = _asker(_target(folder, job), job)
    _meet(Path(job["meeting"]), "ready", job["me"])
    ask(0)
    cpu, wall, rows = [], [], []
    for number in range(job["queries"]):
        begin, clock = time.process_time(), time.perf_counter()
        rows.append(ask(number))
        cpu.append(time.process_time() - begin)
        wall.append(time.perf_counter() - clock)
    _meet(Path(job["meeting"]), "asked", job["me"])
    memory = _memory()
    _meet(Path(job["meeting"]), "measured", job["me"])
    times = {"cpu_ms": np.median(cpu), "wall_ms": np.median(wall), "wall_p99_ms": np.quantile(wall, 0.99)}
    return {**{name: float(value) * 1e3 for name, value in times.items()}, **memory, "rows": rows}


def _asker(target: Path, job: dict[str, Any]) -> Callable[[int], list[Any]]:
    """A function from the number of a query to the rows or ids found."""
    if job["kind"] == "bm25":
        from turngym.retrieval.bm25 import BM25Retriever
        from turngym.retrieval.passages import PassageStore

        words = zipf_queries(job["queries"])
        bm25 = BM25Retriever.open(target / "lucene", PassageStore(target / "passages"))
        return lambda number: [hit.passage.id for hit in bm25.search([words[number]], 3)[0]]
    from turngym.retrieval.faiss_io import read_index, set_parameters
    from turngym.retrieval.index_vectors import default_parameters

    index, queries = read_index(target), _queries(job)
    settings = default_parameters(job["kind"], job["rows"])
    if job["nprobe"] is not None and "nprobe" in settings:
        settings["nprobe"] = job["nprobe"]
    set_parameters(index, settings)
    return lambda number: [int(row) for row in index.search(queries[number : number + 1], 3)[1][0]]


def _read_through(target: Path) -> None:
    """Have the index in the page cache: how fast a disk brings it there is not what is measured."""
    for path in sorted(target.rglob("*")) if target.is_dir() else [target]:
        if path.is_file():
            with path.open("rb") as file:
                while file.read(1 << 24):
                    pass


def _meet(folder: Path, stage: str, me: int) -> None:
    """Go on when the other process has come this far too; alone after a minute."""
    (folder / f"{stage}-{me}").touch()
    for _ in range(6000):
        if (folder / f"{stage}-{1 - me}").exists():
            return
        time.sleep(0.01)


def _target(folder: Path, job: dict[str, Any]) -> Path:
    return folder / "indexes" / f"{job['kind'].replace(',', '-')}-{job['rows']}-{job['dim']}"


def _vectors(folder: Path, job: dict[str, Any]) -> Path:
    path = folder / f"vectors-{job['rows']}-{job['dim']}"
    if not path.is_dir():
        scratch = path.with_suffix(".tmp")
        Mixture.for_rows(job["rows"], job["dim"]).write(scratch, job["rows"])
        scratch.rename(path)
    return path


def _queries(job: dict[str, Any]) -> NDArray[np.float32]:
    return Mixture.for_rows(job["rows"], job["dim"]).draw(job["queries"], QUERY_STREAM)


def _peak_mb() -> float:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def _memory() -> dict[str, float]:
    """Resident and shared megabytes (10^6) of this process; zeros where /proc has no such figures."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    except OSError:
        return {"resident_mb": 0.0, "shared_mb": 0.0}
    kb = {line.split(":")[0]: int(line.split()[1]) for line in lines[1:] if line.endswith("kB")}
    return {"resident_mb": kb["Rss"] * 1.024e-3, "shared_mb": (kb["Shared_Clean"] + kb["Shared_Dirty"]) * 1.024e-3}


def as_json(rows: Sequence[Grown]) -> list[dict[str, Any]]:
    """For a results file."""
    return [asdict(row) for row in rows]


if __name__ == "__main__":
    tasks = {"build": _task_build, "truth": _task_truth, "ask": _task_ask}
    asked = json.loads(sys.argv[2])
    print(json.dumps(tasks[sys.argv[1]](Path(asked["folder"]), asked)))
