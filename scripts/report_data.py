"""What `turngym report` reads: evaluations (traces) and training runs (metrics), streamed line by line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turngym.agents.evaluation.compare import note_settings, recorded
from turngym.agents.evaluation.original import departs_line
from turngym.agents.evaluation.results import AVERAGE, DEPARTS
from turngym.agents.evaluation.scores import EpisodeOutcome, latest, score
from turngym.agents.evaluation.statistics import CurvePoint
from turngym.envs.core.episode import Episode
from turngym.envs.core.errors import TurngymError
from turngym.envs.core.settings import FILE, read_toml
from turngym.envs.core.task import Task
from turngym.envs.core.trace import iter_episodes, iter_trace
from turngym.retrieval.user_files import named_path

if TYPE_CHECKING:
    from turngym.trainers.diagnostics.diagnose import Diagnosis
    from turngym.trainers.diagnostics.trace_curves import TraceCurves
TRACES = ("trace.jsonl", "eval/trace.jsonl", "eval/step_*.jsonl", "step_*.jsonl")
"""Where a run's evaluation is looked for; of a training run's evaluations the last one counts."""
CATEGORY = "eval/category/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run as the report shows it: an evaluation, a training run, or both."""

    name: str
    place: int = 0
    """Position among the runs of the report; it fixes the color."""
    episodes: Sequence[EpisodeOutcome] = ()
    """Return, success and status of every episode."""
    points: tuple[CurvePoint, ...] = ()
    """Evaluations during training."""
    bands: tuple[tuple[float, float], ...] = ()
    """95 % intervals of these evaluations."""
    categories: tuple[Mapping[str, float], ...] = ()
    """Success by category in these evaluations."""
    depth: tuple[tuple[int, float, float], ...] = ()
    """(step, cap, smoothed horizon) where training chose a depth; of a long run every other, fourth, ... step."""
    training: Path | None = None
    """Folder with metrics.jsonl."""
    trace: Path | None = None
    """File with the episodes."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """How the episodes were played, as `recorded` gives it."""
    skipped: tuple[str, ...] = ()
    """Lines that could not be read."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """What the run was asked for: its config.toml; empty without one."""
    departs: str = ""
    """In what the last evaluation was not the original's, in a line; empty if it is not known."""
    panel: str | None = None
    """What the episodes were played on; None for a bare trace."""
    averaged: float | None = None
    """Success of the averaged weights, where `turngym model average` has let them play."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosed:
    """The diagnostics of a training run."""

    name: str
    place: int
    diagnosis: Diagnosis
    controlled: bool
    """Whether it had a depth controller."""
    note: str = ""
    """Settings of the run that are not known."""


def load_run(spec: str, place: int = 0) -> Run:
    """Read `PATH` or `NAME=PATH`: a trace file, or a folder with trace.jsonl and/or metrics.jsonl.

    Raises:
        TurngymError: nothing to report there.
    """
    name, path = named_path(spec)
    # shown in tables and figures, which know no bytes that are no text
    name = (name or name_of_run(path)).encode("utf-8", "backslashreplace").decode("utf-8")
    if path.is_file():
        return Run(name=name, place=place, config=_config(path.parent), **_nonempty(path, _evaluation(path)))
    found = [sorted(path.glob(pattern))[-1:] for pattern in TRACES]
    traces = [trace for hits in found for trace in hits]
    values: dict[str, Any] = _evaluation(traces[0]) if traces else {}
    if (path / "metrics.jsonl").is_file():
        values |= _training(path)
    elif traces:
        _nonempty(traces[0], values)
    if not values:
        raise TurngymError(f"{path}: no trace.jsonl (an evaluation) and no metrics.jsonl (a training run) to report")
    return Run(name=name, place=place, config=_config(path), **values)


def name_of_run(path: Path) -> str:
    """What a run in a folder, or a trace, is called where nobody named it."""
    place = path.absolute()
    if place.name in ("trace.jsonl", "eval"):
        return place.parent.name or str(place)
    return place.name.removesuffix(".jsonl") or str(place)


def _config(folder: Path) -> dict[str, Any]:
    return read_toml(folder / FILE, provenance=True) if (folder / FILE).is_file() else {}


def _nonempty(path: Path, values: dict[str, Any]) -> dict[str, Any]:
    """`values` of a trace; TurngymError where it holds no episode."""
    if values["episodes"]:
        return values
    lines = values["skipped"]
    why = f"none of its {len(lines)} lines is an episode ({lines[0]})" if lines else "it is empty"
    raise TurngymError(f"{path}: no episode to report: {why}")


def unique_names(runs: Sequence[Run]) -> None:
    """Raise TurngymError if two runs have one name."""
    names = [run.name for run in runs]
    for name in names:
        if names.count(name) > 1:
            raise TurngymError(f"two runs are called {name!r}; tell them apart with NAME=PATH")


def curves(runs: Sequence[Run]) -> Mapping[str, Sequence[CurvePoint]]:
    """Training curves by name, of the runs that have one."""
    return {run.name: run.points for run in runs if run.points}


def diagnosed(runs: Sequence[Run]) -> list[Diagnosed]:
    """The diagnostics of those runs that trained by turn; empty without torch, which the controller's code needs."""
    try:
        import torch  # noqa: F401
    except ImportError:
        return []
    from turngym.trainers.diagnostics.depth import run_controls
    from turngym.trainers.diagnostics.diagnose import diagnose
    from turngym.trainers.metrics import iter_metrics

    found = []
    for run in runs:
        folder = run.training
        if folder is None or not run.depth:
            continue
        known = run_controls(folder)
        diagnosis = diagnose(
            lambda folder=folder: iter_metrics(folder),  # type: ignore[misc]
            depth=known.depth,
            controlled=known.depth is not None,
            alpha=known.alpha,
        )
        if diagnosis.shape.turns:
            found.append(
                Diagnosed(
                    name=run.name,
                    place=run.place,
                    diagnosis=diagnosis,
                    controlled=known.depth is not None,
                    note=known.note,
                )
            )
    return found


def trace_curves_of(run: Run) -> TraceCurves | None:
    """What the episodes of a run say by turn, read once more; None without a trace."""
    from turngym.trainers.diagnostics.trace_curves import trace_curves

    if run.trace is None:
        return None
    return trace_curves(item for item in iter_trace(run.trace) if isinstance(item, Episode))


def _thinned(points: list[tuple[int, float, float]]) -> tuple[tuple[int, float, float], ...]:
    """At most 2,000 points of a curve, evenly spread, and its last one."""
    stride = 1
    while len(points) > 2000 * stride:
        stride *= 2
    kept = points[::stride]
    return tuple(kept) if kept[-1:] == points[-1:] else (*kept, points[-1])


def _evaluation(path: Path) -> dict[str, Any]:
    every, skipped = list[EpisodeOutcome](), []
    noted: dict[str, tuple[int, Mapping[str, Any]]] = {}
    tasks: dict[Task, Task] = {}
    for item in iter_trace(path):
        if isinstance(item, Episode):
            note_settings(noted, item, len(every))
            every.append(EpisodeOutcome.of(item, tasks.setdefault(item.task, item.task)))
        else:
            skipped.append(f"{path}: {item}")
    metas = [meta for _, meta in noted.values()]
    panels = [meta["panel"] for meta in metas if "panel" in meta]
    return {
        "episodes": [every[place] for place in latest(every)],
        "settings": recorded(metas),
        "panel": str(panels[-1]["name"]) if panels else None,
        "departs": departs_line(metas[-1].get(DEPARTS), metas[-1].get("preset")) if metas else "",
        "skipped": tuple(skipped),
        "trace": path,
    }


def _training(path: Path) -> dict[str, Any]:
    from turngym.trainers.metrics import iter_metrics

    seconds, points, bands, categories = 0.0, [], [], []
    depth: list[tuple[int, float, float]] = []
    for row in iter_metrics(path):
        if row["kind"] == "train":
            seconds = row.get("time/train_s") or seconds
            if row.get("depth/cap") is not None:
                depth.append((row["step"], float(row["depth/cap"]), float(row.get("depth/hbar") or row["depth/cap"])))
        elif row.get("eval/avg") is not None:
            at = row.get("time/train_s")
            points.append(CurvePoint(step=row["step"], seconds=seconds if at is None else at, value=row["eval/avg"]))
            bands.append((row.get("eval/low") or 0.0, row.get("eval/high") or 0.0))
            found = {name.removeprefix(CATEGORY): value for name, value in row.items() if name.startswith(CATEGORY)}
            categories.append({name: value for name, value in found.items() if value is not None})
    values: dict[str, Any] = {"points": tuple(points), "bands": tuple(bands), "categories": tuple(categories)}
    played = path / AVERAGE / "trace.jsonl"
    if played.is_file():
        values["averaged"] = score([EpisodeOutcome.of(one) for one in iter_episodes(played)]).overall.avg.mean
    return {**values, "depth": _thinned(depth), "training": path}
