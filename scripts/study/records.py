"""What a finished cell leaves, evaluations task by task and what they cost; tables are made from nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from turngym.agents.evaluation.scores import Outcomes, task_means
from turngym.envs.core.errors import TurngymError
from turngym.envs.core.tables import write_json
from turngym.envs.core.trace import iter_episodes
from turngym.scripts.study.grid import RECORD, Cell
from turngym.trainers.diagnostics.depth import TurnSums, full_depth_rows, turn_sums
from turngym.trainers.metrics import read_metrics

SCHEMA = 1
PHASES = ("rollout", "teacher", "update")
DEPTH = ("depth/cap", "depth/probe", "depth/hbar", "depth/h_eff", "depth/h_cov", "weight/alpha")
SHARES = ("kl_deep_share", "loss_deep_share", "weight_deep_share")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What training had cost up to a point, evaluations excluded."""

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
    """One evaluation: where in training, and the mean success of every task."""

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


def make_record(cell: Cell) -> Record:
    """Read a cell's metrics and evaluation traces. Raises TurngymError where an evaluation is missing."""
    rows = read_metrics(cell.job.folder)
    costs, phases = _costs(rows)
    evaluations: list[Evaluation] = []
    categories: dict[str, str] = {}
    samples = 0
    for step in sorted(costs_of_evals(rows)):
        path = cell.job.folder / "eval" / f"step_{step:06d}.jsonl"
        counted = Outcomes.of(episode for episode in iter_episodes(path) if not episode.status.is_error)
        if not counted:
            raise TurngymError(f"{path}: no episode that counts")
        samples = int(counted.column("sample").max()) + 1
        categories |= {task.task_id: task.category for task in counted.tasks()}
        evaluations.append(Evaluation(step=step, cost=costs[step], tasks=task_means(counted)))
    train = [row for row in rows if row["kind"] == "train"]
    kept = ("step", "success", "turns_mean", *DEPTH, *SHARES)
    return Record(
        world=cell.world,
        method=cell.method.name,
        group=cell.method.group,
        about=cell.method.about,
        seed=cell.seed,
        command=cell.job.command,
        samples=samples,
        evaluations=tuple(evaluations),
        categories=categories,
        total=costs[max(costs)],
        phases=phases,
        steps=[{name: row.get(name) for name in kept if name in row} for row in train],
        regime=regime_windows(rows),
    )


def costs_of_evals(rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """Steps with an evaluation."""
    return [int(row["step"]) for row in rows if row["kind"] == "eval"]


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


def regime_windows(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """Sums by turn of the first and last third of the full-depth steps, and of all."""
    full = full_depth_rows(rows)
    if not full or "turn/kl_raw" not in full[0]:
        return {}
    part, depth = max(1, len(full) // 3), int(full[0]["depth/cap"])
    windows = {"early": full[:part], "late": full[-part:], "all": full}
    return {name: _as_lists(turn_sums(chosen, depth)) for name, chosen in windows.items()}


def _as_lists(sums: TurnSums) -> dict[str, list[float]]:
    return {item.name: getattr(sums, item.name).tolist() for item in fields(sums)}


def pooled_sums(parts: Sequence[Mapping[str, list[float]]]) -> TurnSums:
    """Sums over several runs of one depth."""
    total = {name: np.sum([part[name] for part in parts], axis=0) for name in parts[0]}
    return TurnSums(**{**total, "survivors_T": total["survivors_T"].astype(np.int64)})


def write_record(cell: Cell) -> None:
    """Write the cell's record; from then on the cell is done."""
    write_json(cell.record, to_json(make_record(cell)))


def to_json(record: Record) -> dict[str, Any]:
    return {"schema": SCHEMA, **asdict(record)}


def from_json(values: Mapping[str, Any], where: str) -> Record:
    """The record that `to_json` wrote. Raises TurngymError for something else."""
    if values.get("schema") != SCHEMA:
        raise TurngymError(f"{where}: schema {values.get('schema')!r} is not a study's record of schema {SCHEMA}")
    try:
        given = {item.name: values[item.name] for item in fields(Record)}
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
