"""An evaluation's whole table again, from its trace alone."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turngym.agents.evaluation.held import EvaluationError, seconds_played
from turngym.agents.evaluation.outcomes import Outcomes
from turngym.agents.evaluation.results import ABOUT, PER_EPISODE
from turngym.agents.evaluation.scores import score
from turngym.agents.evaluation.tasks import EvalResult
from turngym.envs.trace import TraceEpisodes, TraceProblem, iter_places


def rescore(path: str | Path) -> EvalResult:
    """Score the trace at `path`, or in the folder `path`, as the evaluation that wrote it did: nothing is played.

    Of an episode that was played more than once (after an error) the last one counts. An evaluation that was
    interrupted is scored as far as it came; `EvalResult.missing` says how many episodes it lacks.

    Raises:
        EvaluationError: no trace there, no episodes in it, or episodes of more than one evaluation.
    """
    trace = trace_of(path)
    every, places, elapsed, problems = Outcomes(), array("q"), 0.0, list[TraceProblem]()
    for place, item in iter_places(trace):
        if isinstance(item, TraceProblem):
            problems.append(item)
            continue
        every.add(item)
        places.append(place)
        elapsed = max(elapsed, seconds_played((item,)))
    if not len(every):
        raise EvaluationError(f"{trace} holds no episodes to score")
    chosen = latest(every)
    outcomes = every.take(chosen)
    del every
    settings = _settings(trace, outcomes)
    return EvalResult(
        episodes=TraceEpisodes(trace, (places[number] for number in chosen.tolist())),
        outcomes=outcomes,
        scores=score(outcomes),
        settings=settings,
        seconds=elapsed,
        resumed=len(outcomes),
        problems=tuple(problems),
    )


def trace_of(path: str | Path) -> Path:
    """The trace that `path` is, or that lies in the folder `path`. Raises EvaluationError where there is none."""
    path = Path(path).expanduser()
    trace = path / "trace.jsonl" if path.is_dir() else path
    if not trace.is_file():
        raise EvaluationError(f"there is no trace {trace}; name a trace, or an evaluation's folder with trace.jsonl")
    return trace


def latest(every: Outcomes) -> NDArray[np.int64]:
    """Places of one of each (task, sample), the last that ended without an error if one did; as evaluations order them:
    sample by sample, tasks in the panel's order."""
    chosen = every.latest()
    return np.asarray(chosen[np.lexsort((every.column("group")[chosen], every.column("sample")[chosen]))], np.int64)


def _settings(trace: Path, outcomes: Outcomes) -> dict[str, Any]:
    """The settings that the evaluation recorded, out of its episodes."""
    noted = outcomes.played()
    played = _same(trace, [(place, {**_recorded(meta), "seed": seed}) for place, seed, meta in noted])
    # the task of an episode that failed before its first observation is known by its id alone
    tasks = outcomes.tasks()
    known = [task for task in tasks if task.sha256] or tasks
    panel: Mapping[str, Any] = next((note for *_, meta in reversed(noted) if (note := meta.get("panel"))), {})
    count = len({task.task_id for task in tasks})
    return {
        "panel": panel.get("name"),
        "panel_sha256": panel.get("sha256"),
        "env_id": known[0].env_id,
        "tasks": count,
        "limit": count if count < panel.get("tasks", count) else None,
        "agent": None,
        "temperature": None,
        **played,
        **{name: value for *_, meta in noted for name, value in meta.items() if name in ABOUT},
        "samples": 1 + int(outcomes.column("sample").max()),
    }


def _recorded(meta: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in meta.items() if name not in PER_EPISODE}


def _same(trace: Path, tables: Sequence[tuple[int, Mapping[str, Any]]]) -> Mapping[str, Any]:
    """What all `tables`, each with the number of an episode, say. Raises EvaluationError where they differ: the trace
    holds more than one evaluation."""
    first = tables[0][1]
    for number, table in tables:
        for name in {**first, **table}:
            if first.get(name) != table.get(name):
                raise EvaluationError(
                    f"{trace} holds more than one evaluation: {name} is {first.get(name)!r} in one episode and "
                    f"{table.get(name)!r} in another (number {number}); split it with `turngym trace filter`"
                )
    return first
