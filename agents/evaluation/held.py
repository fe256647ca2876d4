"""What the trace of an evaluation holds already, and the traces beside it of processes that play shares of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turngym.envs.core import Task, TurngymError
from turngym.envs.episode import Episode
from turngym.envs.trace import TraceProblem, TraceWriter, read_trace

ELAPSED = "elapsed"
"""Among an episode's timings: seconds from the beginning of its evaluation, over all calls, to its end."""
UNSAID = {"dtype": "float32"}
"""What traces of older versions were played with where they do not say it."""
ADDED = ("make",)
"""What evaluations of training runs did not record in older versions; their traces are gone on with."""


class EvaluationError(TurngymError):
    """An evaluation that cannot start or go on: a trace of something else, tasks that are not the panel's."""


@dataclass(frozen=True, slots=True)
class Held:
    """What a trace holds already."""

    episodes: dict[tuple[str, int], Episode] = field(default_factory=dict)
    """Of the tasks and samples asked for, by (task id, sample)."""
    seconds: float = 0.0
    """Wall clock up to the last of all episodes."""
    problems: tuple[TraceProblem, ...] = ()


def held_in(
    trace: Path | None, tasks: Iterable[Task], samples: int, settings: Mapping[str, Any], errors_again: bool
) -> Held:
    """What `trace` holds of these tasks. Raises EvaluationError where it does not belong here.

    With `errors_again`, episodes that ended in an error are not held: they are played again.
    """
    if trace is None or not trace.exists():
        return Held()
    episodes, problems = read_trace(trace)
    wanted = {task.task_id: task.sha256 for task in tasks}
    done: dict[tuple[str, int], Episode] = {}
    for number, episode in enumerate(episodes):
        key, where = _key(episode), f"{trace}, episode {number} ({episode.task.task_id} sample {episode.sample})"
        _check_settings(episode, settings, where)
        failed = episode.status.is_error
        if episode.task.task_id not in wanted or episode.sample >= samples or (failed and errors_again):
            continue
        # a task that failed before its first observation is known by its id alone
        if not failed and episode.task.sha256 != wanted[episode.task.task_id]:
            raise EvaluationError(
                f"{where}: sha256 {episode.task.sha256}, the panel says {wanted[episode.task.task_id]}; "
                "the trace was played on other data: write to another folder"
            )
        if not failed or key not in done:
            done[key] = episode
    return Held(done, seconds_played(episodes), tuple(problems))


def _check_settings(episode: Episode, settings: Mapping[str, Any], where: str) -> None:
    found = {**episode.meta, "seed": episode.seed}
    for name, value in settings.items():
        if found.get(name, UNSAID.get(name, value if name in ADDED else None)) != value:
            raise EvaluationError(
                f"{where}: played with {name} {found.get(name)!r}, this evaluation has {value!r}; continue "
                "with the old setting or write to another folder"
            )


def seconds_played(episodes: Iterable[Episode]) -> float:
    """Wall clock from the beginning of an evaluation to the last of its episodes; traces of older versions: 0."""
    return max((episode.timings.get(ELAPSED, 0.0) for episode in episodes), default=0.0)


def share_trace(trace: Path, rank: int) -> Path:
    """Where process number `rank` writes its share of the evaluation whose trace is `trace`."""
    return trace.with_name(f"{trace.stem}.share{rank}{trace.suffix}")


def gather_shares(trace: Path | None) -> None:
    """Move what processes have left beside `trace` into it. Killed on the way, nothing is lost, nor there twice."""
    shares = [] if trace is None else sorted(trace.parent.glob(f"{trace.stem}.share*{trace.suffix}"))
    if trace is None or not shares:
        return
    held = {_key(e): e.status.is_error for e in (read_trace(trace)[0] if trace.exists() else ())}
    with TraceWriter(trace) as writer:
        for share in shares:
            for episode in read_trace(share)[0]:
                if held.get(_key(episode), True) and held.get(_key(episode)) != episode.status.is_error:
                    writer.write(episode)
                    held[_key(episode)] = episode.status.is_error
    for share in shares:
        share.unlink()


def _key(episode: Episode) -> tuple[str, int]:
    return episode.task.task_id, episode.sample
