"""The grid of a study: cells of world, method and seed. Each is a training run of its own and leaves a record.

`run_cells` runs what is not done. A cell that is done is never run again, one that was killed goes on where it was, and
several processes and machines may share a folder (`turngym.scripts.jobs`). Tables are made from records alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from turngym.agents.evaluation.results import AVERAGE
from turngym.agents.evaluation.scores import EpisodeOutcome, task_means
from turngym.envs.core.errors import TurngymError
from turngym.envs.core.tables import write_json
from turngym.envs.core.trace import iter_episodes
from turngym.scripts.jobs import Job, Runner
from turngym.trainers.diagnostics.depth import TurnSums, full_depth_rows, turn_sums
from turngym.trainers.metrics import read_metrics

RECORD = "cell.json"
"""What a finished cell leaves for the tables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell(Job):
    """One run of a study: `seed` of `method` in `world`."""

    world: str
    method: str
    group: str = ""
    """Group of methods that it belongs to, if the study has any."""
    about: str = ""
    """What the method is, in a line."""
    seed: int

    @property
    def record(self) -> Path:
        return self.folder / RECORD

    @property
    def finished(self) -> bool:
        """The record is written last, so a cell that was killed before that goes on."""
        return self.record.exists()


def run_cells(
    jobs: Sequence[Job], parallel: int, poll: float = 0.5, ended: Callable[[Cell], None] | None = None
) -> None:
    """Run the cells, and the runs that they begin with, `parallel` at a time; each cell that ends writes its record,
    after `ended` was called with it."""

    def finish(job: Job) -> None:
        if isinstance(job, Cell):
            if ended is not None:
                ended(job)
            write_json(job.record, to_json(make_record(job)))

    Runner(jobs=jobs, finish=finish, parallel=parallel, poll=poll).run()


def in_turn(rows: Sequence[Sequence[Job]]) -> list[Job]:
    """All jobs, the first of every row before the second of any."""
    return [jobs[place] for place in range(max(map(len, rows))) for jobs in rows if place < len(jobs)]


# The record of a finished cell: evaluations task by task and what they cost.

SCHEMA = 1
PHASES = ("rollout", "teacher", "update")
DEPTH = ("depth/cap", "depth/probe", "depth/hbar", "depth/h_eff", "depth/h_cov", "weight/alpha")
SHARES = ("kl_deep_share", "loss_deep_share", "weight_deep_share")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Cost of training up to a point, without evaluations."""

    seconds: float
    """Wall clock."""
    cpu: float
    """CPU seconds of the training process."""
    turns: float
    """Turns played."""
    tokens: float
    """Tokens sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One evaluation: its step, the cost up to it, and the mean success of every task."""

    step: int
    cost: Cost
    tasks: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A finished cell."""

    world: str
    method: str
    group: str
    about: str
    seed: int
    command: str
    samples: int
    evaluations: tuple[Evaluation, ...]
    categories: Mapping[str, str]
    """Task -> category."""
    total: Cost
    phases: Mapping[str, tuple[float, float]]
    """Phase -> wall clock and CPU seconds."""
    steps: Sequence[Mapping[str, Any]]
    """Depth, alpha and shares of the deep third, step by step."""
    regime: Mapping[str, Mapping[str, list[float]]]
    """Window -> sums by turn of the full-depth steps (`TurnSums`); empty where there are none."""
    averaged: Mapping[str, float] | None = None
    """Task -> mean success with the averaged weights of the last checkpoints, where they were evaluated."""


def make_record(cell: Cell) -> Record:
    """Read a cell's metrics and evaluation traces. Raises TurngymError where an evaluation is missing."""
    rows = read_metrics(cell.folder)
    costs, phases = _costs(rows)
    evaluations: list[Evaluation] = []
    categories: dict[str, str] = {}
    samples = 0
    for step in sorted(int(row["step"]) for row in rows if row["kind"] == "eval"):
        path = cell.folder / "eval" / f"step_{step:06d}.jsonl"
        counted = [EpisodeOutcome.of(episode) for episode in iter_episodes(path) if not episode.status.is_error]
        if not counted:
            raise TurngymError(f"{path}: no episode that counts")
        samples = max(one.sample for one in counted) + 1
        categories |= {one.task.task_id: one.task.category for one in counted}
        evaluations.append(Evaluation(step=step, cost=costs[step], tasks=task_means(counted)))
    train = [row for row in rows if row["kind"] == "train"]
    kept = ("step", "success", "turns_mean", *DEPTH, *SHARES)
    return Record(
        world=cell.world,
        method=cell.method,
        group=cell.group,
        about=cell.about,
        seed=cell.seed,
        command=cell.command,
        samples=samples,
        evaluations=tuple(evaluations),
        categories=categories,
        total=costs[max(costs)],
        phases=phases,
        steps=[{name: row.get(name) for name in kept if name in row} for row in train],
        regime=regime_windows(rows),
        averaged=_averaged(cell.folder / AVERAGE / "trace.jsonl"),
    )


def _averaged(trace: Path) -> dict[str, float] | None:
    return task_means([EpisodeOutcome.of(one) for one in iter_episodes(trace)]) if trace.is_file() else None


def _costs(rows: Sequence[Mapping[str, Any]]) -> tuple[dict[int, Cost], dict[str, tuple[float, float]]]:
    """Cost after each step, from step 0 on, and in all by phase."""
    cost = Cost(seconds=0.0, cpu=0.0, turns=0.0, tokens=0.0)
    found, phases = {0: cost}, dict.fromkeys(PHASES, (0.0, 0.0))
    for row in rows:
        if row["kind"] != "train":
            continue
        spent = {name: (row.get(f"time/{name}_s") or 0.0, row.get(f"time/{name}_cpu_s") or 0.0) for name in PHASES}
        played = (row.get("episodes") or 0) + (row.get("episodes_dropped") or 0)
        cost = Cost(
            seconds=row["time/train_s"],
            cpu=cost.cpu + sum(cpu for _, cpu in spent.values()),
            turns=cost.turns + played * (row.get("turns_mean") or 0.0),
            tokens=cost.tokens + (row.get("tokens") or 0),
        )
        found[int(row["step"])] = cost
        phases = {name: (phases[name][0] + wall, phases[name][1] + cpu) for name, (wall, cpu) in spent.items()}
    return found, phases


WINDOWS = ("early", "late", "all")


def thirds(full: Sequence[Mapping[str, Any]]) -> dict[str, Sequence[Mapping[str, Any]]]:
    """The first and the last third of full-depth steps, and all of them."""
    part = max(1, len(full) // 3)
    return dict(zip(WINDOWS, (full[:part], full[-part:], full), strict=True))


def regime_windows(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """Sums by turn of the full-depth steps by window."""
    full = full_depth_rows(rows)
    if not full or "turn/kl_raw" not in full[0]:
        return {}
    depth = int(full[0]["depth/cap"])
    return {name: _as_lists(turn_sums(chosen, depth)) for name, chosen in thirds(full).items()}


def _as_lists(sums: TurnSums) -> dict[str, list[float]]:
    return {item.name: getattr(sums, item.name).tolist() for item in fields(sums)}


def pooled_sums(parts: Sequence[Mapping[str, list[float]]]) -> TurnSums:
    """Sums over several runs of one depth."""
    total = {name: np.sum([part[name] for part in parts], axis=0) for name in parts[0]}
    return TurnSums(**{**total, "survivors_T": total["survivors_T"].astype(np.int64)})


def to_json(record: Record) -> dict[str, Any]:
    return {"schema": SCHEMA, **asdict(record)}


def from_json(values: Mapping[str, Any], where: str) -> Record:
    """The record that `to_json` wrote. Raises TurngymError for something else."""
    if values.get("schema") != SCHEMA:
        raise TurngymError(f"{where}: schema {values.get('schema')!r} is not a study's record of schema {SCHEMA}")
    try:
        given = {item.name: values[item.name] for item in fields(Record) if item.name in values}
        given["evaluations"] = tuple(
            Evaluation(step=item["step"], cost=Cost(**item["cost"]), tasks=item["tasks"])
            for item in values["evaluations"]
        )
        given["total"] = Cost(**values["total"])
        given["phases"] = {name: (wall, cpu) for name, (wall, cpu) in values["phases"].items()}
        return Record(**given)
    except (KeyError, TypeError, ValueError) as error:
        raise TurngymError(f"{where}: not a study's record ({error})") from error


def read_record(path: Path) -> Record:
    """The record of a cell's folder."""
    return from_json(json.loads((path / RECORD).read_text(encoding="utf-8")), str(path / RECORD))
