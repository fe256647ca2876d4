"""Measures over the steps of a training run: what reads or cuts its metrics."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from turngym.scripts.bench.growth.measure import Measure, Work

TURNS = 30
KEPT = "kept.jsonl"
"""The rows, for a measure that rewrites metrics.jsonl."""


def rows(size: int) -> Iterator[dict[str, Any]]:
    """A row for each of `size` steps, of a run whose episodes have up to `TURNS` turns."""
    names = ("kl", "kl_raw", "teacher_entropy", "entropy", "weight", "kl_raw_success", "kl_raw_failure")
    for step in range(1, size + 1):
        shift = step % 17 / 100
        by_turn = {f"turn/{name}": [round(0.5 + shift / (t + 1), 6) for t in range(TURNS)] for name in names}
        by_turn["turn/survivors"] = [64.0 - t for t in range(TURNS)]
        by_turn["turn/tokens"] = [640.0 - 10 * t for t in range(TURNS)]
        by_turn["turn/ended_success"] = [1.0] * TURNS
        by_turn["turn/ended_cut"] = [0.0] * TURNS
        times = {f"time/{name}_s": 1.0 + shift for name in ("rollout", "teacher", "update")}
        plain = {"loss": shift, "gap_mean": 1e-6, "gap_max": 1e-5, "turns_mean": 15.0, "episodes": 64, "tokens": 15_000}
        depth = {"depth/cap": TURNS, "depth/probe": 0, "depth/hbar": 15.0, "depth/h_eff": 0, "depth/h_cov": 0}
        times |= {"time/step_s": 3.5, "time/train_s": 3.5 * step}
        yield {"step": step, "kind": "train", **times, **plain, **depth, **by_turn}


def make_run(folder: Path, size: int) -> None:
    with (folder / "metrics.jsonl").open("w", encoding="ascii") as file:
        for row in rows(size):
            file.write(json.dumps(row) + "\n")
    shutil.copy(folder / "metrics.jsonl", folder / KEPT)


def open_report(folder: Path, size: int) -> Work:
    from turngym.scripts import report

    def work(run: Path) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            assert report.main([str(run)]) == 0

    warm = folder / "warm"
    warm.mkdir(exist_ok=True)
    make_run(warm, 8)
    work(warm)
    return lambda: work(folder)


def open_table(folder: Path, size: int) -> Work:
    """Two columns of a run."""
    from turngym.trainers.metrics import table

    def work() -> None:
        assert len(table(folder, "train", ("step", "loss"))) == size

    return work


def open_truncate(folder: Path, size: int) -> Work:
    """What a resumed run does to what was written after its checkpoint."""
    from turngym.trainers.metrics import MetricsLog

    shutil.copy(folder / KEPT, folder / "metrics.jsonl")
    return lambda: MetricsLog(folder).truncate(size - 1, size)


STEPS: dict[str, Any] = {
    "per": "steps",
    "sizes": (300, 1000, 3000),
    "full": (1000, 10_000, 100_000),
    "make": make_run,
    "needs": "torch",
}
MEASURES = (
    Measure(name="report of a run", open=open_report, shared="run", **STEPS),
    Measure(name="metrics columns", open=open_table, shared="run", holds="the two columns", **STEPS),
    Measure(name="metrics cut on resume", open=open_truncate, shared="run-cut", **STEPS),
)
