"""What one measuring process of `scale.py` does: build, find the true answers, or ask and be timed."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turngym.scripts.bench.retrieval.vectors import SHARD, Mixture, zipf_passages, zipf_queries

QUERY_STREAM = 1 << 20
"""Stream of the mixture that queries come from: no shard has it."""


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
    from turngym.retrieval.bm25 import LuceneIndex, indexed_documents
    from turngym.retrieval.corpus import PassageStore

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
        from turngym.retrieval.corpus import PassageStore

        words = zipf_queries(job["queries"])
        bm25 = BM25Retriever.open(target / "lucene", PassageStore(target / "passages"))
        return lambda number: [hit.passage.id for hit in bm25.search([words[number]], 3)[0]]
    from turngym.retrieval.dense import read_index, set_parameters
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

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1.024e-3  # KiB on Linux


def _memory() -> dict[str, float]:
    """Resident and shared megabytes (10^6) of this process; zeros where /proc has no such figures."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    except OSError:
        return {"resident_mb": 0.0, "shared_mb": 0.0}
    kb = {line.split(":")[0]: int(line.split()[1]) for line in lines[1:] if line.endswith("kB")}
    return {"resident_mb": kb["Rss"] * 1.024e-3, "shared_mb": (kb["Shared_Clean"] + kb["Shared_Dirty"]) * 1.024e-3}


if __name__ == "__main__":
    tasks = {"build": _task_build, "truth": _task_truth, "ask": _task_ask}
    asked = json.loads(sys.argv[2])
    print(json.dumps(tasks[sys.argv[1]](Path(asked["folder"]), asked)))
