"""What the trace of an evaluation holds already, and the traces beside it of processes that play shares of it."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turngym.agents.evaluation.outcomes import Outcomes
from turngym.envs.core import Task, TurngymError
from turngym.envs.episode import Episode
from turngym.envs.trace import TraceEpisodes, TraceProblem, TraceWriter, iter_places, iter_trace

ELAPSED = "elapsed"
"""Among an episode's timings: seconds from the beginning of its evaluation, over all calls, to its end."""
UNSAID = {"dtype": "float32"}
"""What traces of older versions were played with where they do not say it."""
ADDED = ("make",)
"""What evaluations of training runs did not record in older versions; their traces are gone on with."""


class EvaluationError(TurngymError):
    """An evaluation that cannot start or go on: a trace of something else, tasks that are not the panel's."""


@dataclass(slots=True)
class Held:
    """What an evaluation has of its tasks and samples: how each episode ended, and the episode or where it stands."""

    tasks: Mapping[str, tuple[int, Task]]
    """Number and task by id."""
    samples: int
    trace: Path | None = None
    """Where episodes are found again; without one they are kept."""
    seconds: float = 0.0
    """Wall clock up to the last of all episodes."""
    problems: tuple[TraceProblem, ...] = ()
    every: Outcomes = field(default_factory=Outcomes)
    _rows: array[int] = field(init=False)
    """Of each sample and task the place in `every`; -1 for what is missing."""
    _places: array[int] = field(default_factory=lambda: array("q"))
    _kept: list[Episode] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rows = array("q", [-1]) * (self.samples * len(self.tasks))

    def add(self, episode: Episode, place: int | None) -> None:
        """Take `episode` in the place of what there was of its task and sample; `place`: its byte of the trace."""
        number, task = self.tasks[episode.task.task_id]
        # a task that failed before its first observation is known by its id alone
        row = self.every.add(episode, task if task == episode.task else None)
        self._rows[episode.sample * len(self.tasks) + number] = row
        self._places.append(-1 if place is None else place)
        if self.trace is None:
            self._kept.append(episode)

    def has(self, task_id: str, sample: int) -> bool:
        return self._rows[sample * len(self.tasks) + self.tasks[task_id][0]] >= 0

    def __len__(self) -> int:
        """Tasks and samples that are not missing."""
        return sum(row >= 0 for row in self._rows)

    def outcomes(self) -> Outcomes:
        """Sample by sample, tasks in their order; of what is not missing."""
        return self.every.take(self._order())

    def episodes(self) -> Sequence[Episode]:
        """The same, whole."""
        if self.trace is None:
            return tuple(self._kept[row] for row in self._order())
        return TraceEpisodes(self.trace, (self._places[row] for row in self._order()))

    def _order(self) -> Iterator[int]:
        return (row for row in self._rows if row >= 0)


def held_in(
    trace: Path | None, tasks: Sequence[Task], samples: int, settings: Mapping[str, Any], errors_again: bool
) -> Held:
    """What `trace` holds of these tasks. Raises EvaluationError where it does not belong here.

    With `errors_again`, episodes that ended in an error are not held: they are played again.
    """
    held = Held({task.task_id: (number, task) for number, task in enumerate(tasks)}, samples, trace)
    problems = list[TraceProblem]()
    for number, (place, episode) in enumerate(iter_places(trace) if trace is not None and trace.exists() else ()):
        if isinstance(episode, TraceProblem):
            problems.append(episode)
            continue
        where = f"{trace}, episode {number - len(problems)} ({episode.task.task_id} sample {episode.sample})"
        _check_settings(episode, settings, where)
        held.seconds = max(held.seconds, seconds_played((episode,)))
        failed, known = episode.status.is_error, held.tasks.get(episode.task.task_id)
        if known is None or episode.sample >= samples or (failed and errors_again):
            continue
        # a task that failed before its first observation is known by its id alone
        if not failed and episode.task.sha256 != known[1].sha256:
            raise EvaluationError(
                f"{where}: sha256 {episode.task.sha256}, the panel says {known[1].sha256}; "
                "the trace was played on other data: write to another folder"
            )
        if not failed or not held.has(episode.task.task_id, episode.sample):
            held.add(episode, place)
    held.problems = tuple(problems)
    return held


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
    held: dict[tuple[str, int], bool] = {}
    if trace.exists():
        held.update((_key(episode), episode.status.is_error) for episode in _episodes(trace))
    with TraceWriter(trace) as writer:
        for share in shares:
            for episode in _episodes(share):
                if held.get(_key(episode), True) and held.get(_key(episode)) != episode.status.is_error:
                    writer.write(episode)
                    held[_key(episode)] = episode.status.is_error
    for share in shares:
        share.unlink()


def _episodes(trace: Path) -> Iterator[Episode]:
    return (item for item in iter_trace(trace) if isinstance(item, Episode))


def _key(episode: Episode) -> tuple[str, int]:
    return episode.task.task_id, episode.sample
