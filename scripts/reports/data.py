"""What `turngym report` reads: evaluations (traces) and training runs (metrics), by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turngym.agents.evaluation.statistics import CurvePoint
from turngym.envs.core import TurngymError
from turngym.envs.episode import Episode
from turngym.envs.trace import read_trace

TRACES = ("trace.jsonl", "eval/trace.jsonl", "eval/step_*.jsonl", "step_*.jsonl")
"""Where a run's evaluation is looked for; of a training run's evaluations the last one counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run as the report shows it: an evaluation, a training run, or both."""

    name: str
    episodes: tuple[Episode, ...] = ()
    points: tuple[CurvePoint, ...] = ()
    """Evaluations during training."""
    bands: tuple[tuple[float, float], ...] = ()
    """Their 95 % intervals."""
    depth: tuple[tuple[int, float, float], ...] = ()
    """(step, cap, smoothed horizon) where training chose a depth."""
    skipped: tuple[str, ...] = ()
    """Lines that could not be read."""


def load_run(spec: str) -> Run:
    """Read `PATH` or `NAME=PATH`: a trace file, or a folder with trace.jsonl and/or metrics.jsonl.

    Raises:
        TurngymError: nothing to report there.
    """
    name, _, rest = spec.rpartition("=")
    path = Path(rest).expanduser()
    name = name or (path.parent.name if path.name in ("trace.jsonl", "eval") else path.stem) or str(path)
    if path.is_file():
        return Run(name=name, **_evaluation(path))
    found = [sorted(path.glob(pattern))[-1:] for pattern in TRACES]
    traces = [trace for hits in found for trace in hits]
    values: dict[str, Any] = _evaluation(traces[0]) if traces else {}
    if (path / "metrics.jsonl").is_file():
        values |= _training(path)
    if not values:
        raise TurngymError(f"{path}: no trace.jsonl (an evaluation) and no metrics.jsonl (a training run) to report")
    return Run(name=name, **values)


def unique_names(runs: Sequence[Run]) -> None:
    """Raise TurngymError if two runs have one name."""
    names = [run.name for run in runs]
    for name in names:
        if names.count(name) > 1:
            raise TurngymError(f"two runs are called {name!r}; tell them apart with NAME=PATH")


def curves(runs: Sequence[Run]) -> Mapping[str, Sequence[CurvePoint]]:
    """Training curves by name, of the runs that have one."""
    return {run.name: run.points for run in runs if run.points}


def _evaluation(path: Path) -> dict[str, Any]:
    episodes, problems = read_trace(path)
    latest = {(episode.task.task_id, episode.sample): episode for episode in episodes if not episode.status.is_error}
    failed = {
        (episode.task.task_id, episode.sample): episode
        for episode in episodes
        if (episode.task.task_id, episode.sample) not in latest
    }
    skipped = tuple(f"{path}: {problem}" for problem in problems)
    return {"episodes": (*latest.values(), *failed.values()), "skipped": skipped}


def _training(path: Path) -> dict[str, Any]:
    from turngym.trainers.run.metrics import read_metrics

    rows = read_metrics(path)
    seconds, points, bands, depth = 0.0, [], [], []
    for row in rows:
        if row["kind"] == "train":
            seconds = row.get("time/train_s") or seconds
            if row.get("depth/cap") is not None:
                depth.append((row["step"], float(row["depth/cap"]), float(row.get("depth/hbar") or row["depth/cap"])))
        elif row.get("eval/avg") is not None:
            at = row.get("time/train_s")
            points.append(CurvePoint(step=row["step"], seconds=seconds if at is None else at, value=row["eval/avg"]))
            bands.append((row.get("eval/low") or 0.0, row.get("eval/high") or 0.0))
    return {"points": tuple(points), "bands": tuple(bands), "depth": tuple(depth)}
