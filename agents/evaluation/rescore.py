"""An evaluation's whole table again, from its trace alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from turngym.agents.evaluation.held import EvaluationError, seconds_played
from turngym.agents.evaluation.results import ABOUT, PER_EPISODE
from turngym.agents.evaluation.scores import score
from turngym.agents.evaluation.tasks import EvalResult
from turngym.envs.episode import Episode
from turngym.envs.trace import read_trace


def rescore(path: str | Path) -> EvalResult:
    """Score the trace at `path`, or in the folder `path`, as the evaluation that wrote it did: nothing is played.

    Of an episode that was played more than once (after an error) the last one counts. An evaluation that was
    interrupted is scored as far as it came; `EvalResult.missing` says how many episodes it lacks.

    Raises:
        EvaluationError: no trace there, no episodes in it, or episodes of more than one evaluation.
    """
    trace = trace_of(path)
    found, problems = read_trace(trace)
    if not found:
        raise EvaluationError(f"{trace} holds no episodes to score")
    episodes = latest(found)
    settings = _settings(trace, episodes)
    return EvalResult(
        episodes=episodes,
        scores=score(episodes),
        settings=settings,
        seconds=seconds_played(found),
        resumed=len(episodes),
        problems=tuple(problems),
    )


def trace_of(path: str | Path) -> Path:
    """The trace that `path` is, or that lies in the folder `path`. Raises EvaluationError where there is none."""
    path = Path(path).expanduser()
    trace = path / "trace.jsonl" if path.is_dir() else path
    if not trace.is_file():
        raise EvaluationError(f"there is no trace {trace}; name a trace, or an evaluation's folder with trace.jsonl")
    return trace


def latest(episodes: Sequence[Episode]) -> tuple[Episode, ...]:
    """One episode for each (task, sample), the last that ended without an error if one did; as evaluations order them:
    sample by sample, tasks in the panel's order."""
    chosen: dict[tuple[str, int], Episode] = {}
    for episode in episodes:
        key = (episode.task.task_id, episode.sample)
        if key not in chosen or not episode.status.is_error or chosen[key].status.is_error:
            chosen[key] = episode
    return tuple(sorted(chosen.values(), key=lambda episode: (episode.sample, episode.group)))


def _settings(trace: Path, episodes: Sequence[Episode]) -> dict[str, Any]:
    """The settings that the evaluation recorded, out of its episodes."""
    played = _same(trace, [{**_recorded(episode), "seed": episode.seed} for episode in episodes])
    # the task of an episode that failed before its first observation is known by its id alone
    known = [episode.task for episode in episodes if episode.task.sha256]
    panel: Mapping[str, Any] = next((note for episode in reversed(episodes) if (note := episode.meta.get("panel"))), {})
    tasks = len({episode.task.task_id for episode in episodes})
    return {
        "panel": panel.get("name"),
        "panel_sha256": panel.get("sha256"),
        "env_id": (known or [episodes[0].task])[0].env_id,
        "tasks": tasks,
        "limit": tasks if tasks < panel.get("tasks", tasks) else None,
        "agent": None,
        "temperature": None,
        **played,
        **{name: value for episode in episodes for name, value in episode.meta.items() if name in ABOUT},
        "samples": 1 + max(episode.sample for episode in episodes),
    }


def _recorded(episode: Episode) -> dict[str, Any]:
    return {name: value for name, value in episode.meta.items() if name not in PER_EPISODE}


def _same(trace: Path, tables: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """What all `tables` say. Raises EvaluationError where they differ: the trace holds more than one evaluation."""
    first = tables[0]
    for number, table in enumerate(tables):
        for name in {**first, **table}:
            if first.get(name) != table.get(name):
                raise EvaluationError(
                    f"{trace} holds more than one evaluation: {name} is {first.get(name)!r} in one episode and "
                    f"{table.get(name)!r} in another (number {number}); split it with `turngym trace filter`"
                )
    return first
