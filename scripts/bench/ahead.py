"""Playing ahead of training against playing in turn: seconds per step and what the student learns, in one run.

On-policy distillation of the embedded household, once for each way of playing, one after the other: by the training
process itself, by worker processes in turn with it (staleness 0), and by workers while it learns. Seconds per step are
medians of all but the first steps, in which workers start; `waited` is how long a step waited for its episodes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import tyro

from turngym.agents.worlds.alfworld import WORLD
from turngym.agents.worlds.worlds import CHECKPOINTS
from turngym.envs.core.tables import print_table


@dataclass(frozen=True, slots=True, kw_only=True)
class AheadBench:
    """Size of the runs."""

    steps: int = 40
    """Training steps of each run."""
    episodes: int = 32
    """Episodes per step."""
    staleness: tuple[int, ...] = (1,)
    """Each is a run of its own, besides those without."""
    workers: int = 1
    """Processes that play."""
    threads: int = 1
    """Threads of torch in the training process."""
    eval_limit: int = 50
    """Tasks of the panel on which the student is evaluated before and after; 0 for none."""
    lr: float = 1e-3
    seed: int = 0
    out: Path | None = None
    """Where the runs are kept; by default they are not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way of playing."""

    name: str
    workers: int
    staleness: int


def ways(bench: AheadBench) -> list[Way]:
    """The runs, the reference first."""
    return [
        Way(name="the training process", workers=0, staleness=0),
        Way(name=f"{bench.workers} workers, in turn", workers=bench.workers, staleness=0),
        *(
            Way(name=f"{bench.workers} workers, {ahead} ahead", workers=bench.workers, staleness=ahead)
            for ahead in bench.staleness
        ),
    ]


def command(bench: AheadBench, way: Way, out: Path) -> list[str]:
    """Arguments of `turngym train`."""
    import json

    models = CHECKPOINTS / "alfworld"
    words: dict[str, Any] = {
        "--algorithm": "opd",
        "--student": models / "student",
        "--teacher": models / "teacher",
        "--out": out,
        "--env": WORLD.env_id,
        "--split": WORLD.split,
        "--env-kwargs": json.dumps(dict(WORLD.make)),
        "--max-turns": WORLD.max_turns,
        "--steps": bench.steps,
        "--episodes": bench.episodes,
        "--threads": bench.threads,
        "--seed": bench.seed,
        "--optimizer.lr": bench.lr,
        "--optimizer.lr-warmup": min(5, bench.steps),
        "--workers": way.workers,
        "--staleness": way.staleness,
        "--eval-every": bench.steps if bench.eval_limit else 0,
        "--device": "cpu",
    }
    if bench.eval_limit:
        words |= {"--panel": WORLD.panel, "--eval-limit": bench.eval_limit, "--eval-samples": 1}
    return [str(word) for pair in words.items() for word in pair] + ["--no-tensorboard"]


def cells(way: Way, rows: Sequence[dict[str, Any]], reference: float | None) -> tuple[list[str], float]:
    """One line of the table, and its seconds per step; `reference` None: the line is the reference."""
    train = [row for row in rows if row["kind"] == "train"]
    late = train[min(way.staleness + 2, len(train) - 1) :]
    seconds, waited = (median(row[f"time/{name}_s"] for row in late) for name in ("step", "rollout"))
    scores = [f"{100 * row['eval/avg']:.0f}" for row in rows if row["kind"] == "eval"]
    share = max(1, len(train) // 4)
    success = [f"{100 * mean(row['success'] for row in part):.0f}" for part in (train[:share], train[-share:])]
    ratio = (seconds if reference is None else reference) / seconds
    line = [way.name, f"{seconds:.2f}", f"{waited:.2f}", f"{ratio:.2f}x", f"{train[-1]['staleness_mean']:.0f}"]
    line += [f"{max(row['gap_mean'] for row in late):.1e}", " -> ".join(success), " -> ".join(scores) or "-"]
    return line, seconds


HEADER = ["who plays", "s/step", "waited", "steps/s ratio", "staleness", "gap", "success % (quarters)", "Avg@1 %"]


def main(argv: Sequence[str]) -> int:
    bench = tyro.cli(AheadBench, args=list(argv), prog="turngym bench ahead", description=__doc__)
    from turngym.scripts import train
    from turngym.trainers.metrics import read_metrics

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) if bench.out is None else bench.out
        table: list[list[str]] = []
        reference = None
        for number, way in enumerate(ways(bench)):
            train.main(command(bench, way, folder / f"run_{number}"))
            line, seconds = cells(way, read_metrics(folder / f"run_{number}"), reference)
            reference = seconds if reference is None else reference
            table.append(line)
        print_table((HEADER, table))
    return 0
