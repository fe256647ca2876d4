"""How a panel is played: every task n times, resumed where it stopped, refused if the tasks are not the panel's.

`TaskEvaluation` plays tasks into a trace, alone or in shares by several processes, and scores them. `read_recorded`
finds out what a trace already holds, so that only the rest is played.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any

from turngym.agents.endpoint.usage import PROFILE, Usage, usage_table
from turngym.agents.evaluation.original import departs_line
from turngym.agents.evaluation.results import BESIDE, DEPARTS, PER_EPISODE, episode_row, results_json, write_results
from turngym.agents.evaluation.scores import (
    APPROXIMATE,
    SAMPLING,
    EpisodeOutcome,
    EvaluationError,
    Scores,
    behavior_table,
    hints,
    score,
    success_table,
)
from turngym.agents.playing.agent import Agent
from turngym.agents.playing.rollout import FailureWatch, Job, MakeEnv, PlayJobs, rollout
from turngym.core.episode import Episode
from turngym.core.files import locked_file
from turngym.core.progress import progress_bar
from turngym.core.tables import Table, columns, table_text
from turngym.core.task import Task
from turngym.core.trace import TraceEpisodes, TraceProblem, TraceWriter, iter_places, iter_trace
from turngym.envs.panels import Panel

DRAWS = "draws"
"""Setting: number of drawn tasks, those that were drawn again included; missing where nothing was drawn."""
ELAPSED = "elapsed"
"""Name of a timing of each episode: seconds from the start of its evaluation, summed over all calls, to its end."""


@dataclass(slots=True)
class RecordedEpisodes:
    """The episodes of an evaluation so far: how each ended, and the episode itself or its place in the trace."""

    tasks: Mapping[str, tuple[int, Task]]
    """Number and task by id."""
    trace: Path | None = None
    """The trace from which episodes can be read again; without one they are kept in memory."""
    seconds: float = 0.0
    """Wall clock up to the last episode."""
    problems: tuple[TraceProblem, ...] = ()
    used: Usage | None = None
    """What all episodes used at an endpoint, those that were played again included; None for other agents."""
    profile: Mapping[str, Any] | None = None
    """The profile of the endpoint that played last."""
    _rows: dict[tuple[int, int], tuple[EpisodeOutcome, Episode | int]] = field(default_factory=dict)
    """Rows by sample and number of the task."""

    def add(self, episode: Episode, place: int | None) -> None:
        """Add `episode`, replacing an earlier one of the same task and sample; `place` is its offset in the trace."""
        number, task = self.tasks[episode.task.task_id]
        # an episode that failed before its first observation knows only the id of its task
        outcome = EpisodeOutcome.of(episode, task if task == episode.task else None)
        self.pay(episode)
        self._rows[episode.sample, number] = outcome, episode if place is None else place

    def pay(self, episode: Episode) -> None:
        """Count what `episode` used, and note the endpoint's profile."""
        if (used := Usage.noted(episode)) is not None:
            self.used = used + (self.used or Usage())
        self.profile = episode.meta.get(PROFILE, self.profile)

    def has(self, task_id: str, sample: int) -> bool:
        return (sample, self.tasks[task_id][0]) in self._rows

    def __len__(self) -> int:
        """Number of tasks and samples that are not missing."""
        return len(self._rows)

    def outcomes(self) -> list[EpisodeOutcome]:
        """How the episodes ended, sample by sample, tasks in their order."""
        return [self._rows[key][0] for key in sorted(self._rows)]

    def episodes(self) -> Sequence[Episode]:
        """The episodes in the same order."""
        kept = [self._rows[key][1] for key in sorted(self._rows)]
        if self.trace is None:
            return tuple(one for one in kept if isinstance(one, Episode))
        return TraceEpisodes(self.trace, (one for one in kept if isinstance(one, int)))


def read_recorded(
    trace: Path | None,
    tasks: Sequence[Task],
    samples: Mapping[str, int],
    settings: Mapping[str, Any],
    errors_again: bool,
) -> RecordedEpisodes:
    """The episodes of these tasks in `trace`. Raises EvaluationError if the trace is of another evaluation.

    Args:
        trace: the file; None or missing: nothing is recorded.
        tasks: those of this evaluation.
        samples: how many episodes of each task, by its id.
        settings: of this evaluation, which the trace must share.
        errors_again: whether episodes that ended in an error are played again.
    """
    recorded = RecordedEpisodes({task.task_id: (number, task) for number, task in enumerate(tasks)}, trace)
    problems = list[TraceProblem]()
    for number, (place, episode) in enumerate(iter_places(trace) if trace is not None and trace.exists() else ()):
        if isinstance(episode, TraceProblem):
            problems.append(episode)
            continue
        where = f"{trace}, episode {number - len(problems)} ({episode.task.task_id} sample {episode.sample})"
        said = {name: value for name, value in episode.meta.items() if name not in PER_EPISODE} | {"seed": episode.seed}
        # both ways: what only the trace has is another evaluation's, too
        for name in {**settings, **said}:
            if said.get(name) != (value := settings.get(name)):
                raise EvaluationError(
                    f"{where}: played with {name} {said.get(name)!r}, this evaluation has {value!r}; continue "
                    "with the old setting or write to another folder"
                )
        recorded.seconds = max(recorded.seconds, seconds_played(episode))
        failed, known = episode.status.is_error, recorded.tasks.get(episode.task.task_id)
        if known is None or episode.sample >= samples[episode.task.task_id]:
            continue
        if failed and errors_again:
            recorded.pay(episode)
            continue
        # an episode that failed before its first observation has no hash of its task
        if not failed and episode.task.sha256 != known[1].sha256:
            raise EvaluationError(
                f"{where}: sha256 {episode.task.sha256}, the panel says {known[1].sha256}; "
                "the trace was played on other data: write to another folder"
            )
        if not failed or not recorded.has(episode.task.task_id, episode.sample):
            recorded.add(episode, place)
        else:
            recorded.pay(episode)
    recorded.problems = tuple(problems)
    return recorded


def seconds_played(episode: Episode) -> float:
    """Wall clock from the start of the evaluation to the end of `episode`; 0 if it was played without one."""
    return episode.timings.get(ELAPSED, 0.0)


def share_trace(trace: Path, rank: int) -> Path:
    """Where process number `rank` writes its share of the evaluation whose trace is `trace`."""
    return trace.with_name(f"{trace.stem}.share{rank}{trace.suffix}")


def gather_shares(trace: Path | None) -> None:
    """Move the shares beside `trace` into it. If it is killed halfway, nothing is lost or written twice."""
    shares = [] if trace is None else sorted(trace.parent.glob(f"{trace.stem}.share*{trace.suffix}"))
    if trace is None or not shares:
        return
    # (task, sample) to whether it ended in an error; a good episode replaces a failed one, never the other way round
    failed: dict[tuple[str, int], bool] = {}
    with TraceWriter(trace) as writer:
        for source in (trace, *shares):
            for episode in iter_trace(source) if source.exists() else ():
                if isinstance(episode, TraceProblem):
                    continue
                key, is_error = (episode.task.task_id, episode.sample), episode.status.is_error
                if source == trace:
                    failed[key] = is_error
                elif failed.get(key, True) and failed.get(key) != is_error:
                    writer.write(episode)
                    failed[key] = is_error
    for share in shares:
        share.unlink()


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """A finished evaluation."""

    episodes: Sequence[Episode]
    """Episodes sample by sample, tasks in panel order. With a trace they are read from it when they are accessed."""
    outcomes: Sequence[EpisodeOutcome]
    """How the episodes ended."""
    scores: Scores
    settings: Mapping[str, Any]
    seconds: float
    """Wall clock of all calls that played into the trace; a call that was killed counts up to its last episode."""
    resumed: int = 0
    """Number of episodes that were in the trace already."""
    problems: tuple[TraceProblem, ...] = field(default=())
    """Lines of the trace that could not be read."""
    used: Usage | None = None
    """What was used at an endpoint, by episodes that failed and were played again, too; None for other agents."""

    @property
    def missing(self) -> int:
        """Number of episodes that a trace of an interrupted evaluation lacks."""
        return self.settings.get(DRAWS, self.settings["tasks"] * self.settings["samples"]) - len(self.outcomes)

    def table(self) -> Table:
        """Success by category and behavior, one column."""
        runs = {str(self.settings["agent"]): self.scores}
        return columns(success_table(runs), behavior_table(runs), *usage_table(runs, self.used))

    @property
    def title(self) -> str:
        """What was measured, in one line."""
        named, limit, heat = self.settings.get("panel"), self.settings.get("limit"), self.settings["temperature"]
        if heat is not None and (self.settings.get(PROFILE) or {}).get("temperature") is False:
            heat = None  # the server takes none
        what = f"{named or self.settings['tasks']}" + ("" if named else " tasks")
        what += "" if limit is None else f", first {limit} tasks" if limit > 1 else ", first task"
        what += f", preset {self.settings['preset']}" if "preset" in self.settings else ""
        what += f" but {', '.join(beside)}" if (beside := self.settings.get(BESIDE)) else ""
        own, made = self.settings.get("panel_max_turns"), self.settings.get("make", {})
        what += "" if own is None else f", max_turns {made.get('max_turns')} instead of the panel's {own}"
        what += f", reading {made['reading']}" if "reading" in made else ""
        what += ", admissible actions shown" if made.get("show_admissible") and "preset" not in self.settings else ""
        what += f", examples {self.settings['examples']}" if "examples" in self.settings else ""
        what += f", scores approximate ({why})" if (why := self.settings.get(APPROXIMATE)) else ""
        samples = self.settings["samples"]
        if sampling := self.settings.get(SAMPLING):
            drawn, tasks = self.settings.get(DRAWS), self.settings["tasks"]
            return f"{what}: {drawn} draws of {tasks} tasks, {sampling}" + (
                "" if heat is None else f", temperature {heat:g}"
            )
        return f"{what}: {samples} sample{'s' if samples > 1 else ''}" + (
            "" if heat is None else f", temperature {heat:g}"
        )

    @property
    def departs(self) -> str:
        """One line that says in what this is not the original's protocol; "" where no original is known."""
        return departs_line(self.settings.get(DEPARTS), self.settings.get("preset"))

    def hints(self) -> list[str]:
        """What may help where answers were cut or could not be read."""
        ended = (item for item in self.episodes if not item.status.is_error)
        return hints(self.scores, ended, self.settings.get("channel"), self.settings.get("make"))

    def __str__(self) -> str:
        said = [*([self.departs] if self.departs else []), *self.hints()]
        return table_text(self.table(), self.title) + "".join(f"{text}\n" for text in said)

    def to_json(self) -> dict[str, Any]:
        """The content of results.json, as docs/results.schema.json describes it."""
        return {**self._head(), "episodes": [episode_row(one) for one in self.outcomes]}

    def write(self, path: str | Path) -> None:
        """Write results.json row by row, without holding all of it in memory."""
        write_results(path, self._head(), self.outcomes)

    def _head(self) -> dict[str, Any]:
        head = results_json(self.settings, self.scores, self.seconds, self.outcomes)
        return head if self.used is None else {**head, "usage": self.used.to_json()}


@dataclass(frozen=True, slots=True)
class TaskEvaluation:
    """An evaluation that is played by one process (`run`), or in shares by several (`run_share`, then `run`).

    Raises EvaluationError for `samples` below 1, or no tasks.
    """

    tasks: Panel | Sequence[Task]
    make_env: MakeEnv
    agent: Agent
    _: KW_ONLY
    samples: int = 4
    limit: int | None = None
    """Play only the first `limit` tasks."""
    draws: Sequence[Task] = ()
    """Tasks to be played instead of each task `samples` times; one that is there twice is played twice."""
    temperature: float | None = 0.85
    """Recorded only: the agent samples."""
    seed: int = 0
    slots: int = 64
    trace: Path | None = None
    """Every episode is appended to it as it finishes."""
    system: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Recorded in every episode: environment arguments, the model's fingerprint, ... A trace with other values is
    refused."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """Recorded in every episode too, but may differ."""
    progress: bool = False
    play: PlayJobs = rollout
    """Plays the episodes, in this process or in others."""

    def __post_init__(self) -> None:
        if self.samples < 1 or not self.chosen:
            raise EvaluationError(f"{len(self.chosen)} tasks with {self.samples} samples each: both must be at least 1")

    @property
    def chosen(self) -> tuple[Task, ...]:
        """The tasks that are played, each once."""
        if self.draws:
            return tuple({task.task_id: task for task in self.draws}.values())
        return tuple(self.tasks.tasks if isinstance(self.tasks, Panel) else self.tasks)[: self.limit]

    @property
    def times(self) -> Mapping[str, int]:
        """How often each task is played, by its id."""
        return Counter(task.task_id for task in self.draws) or {task.task_id: self.samples for task in self.chosen}

    @property
    def played(self) -> dict[str, Any]:
        """Settings recorded in every episode; a trace with other values is of another evaluation."""
        return {"agent": self.agent.name, "temperature": self.temperature, **self.settings}

    def run(self, *, errors_again: bool = True) -> EvalResult:
        """Play what is missing in the trace and the shares beside it, and score everything.

        Episodes that ended in an error are played again, unless `errors_again` is False.

        Raises:
            EvaluationError: the trace holds other tasks, settings or seeds.
            FolderInUseError: another process plays into the trace.
            TaskError: the environment's task has another sha256 than the panel's.
        """
        # locked before it is read, or what another process is about to add would be played twice
        with locked_file(self.trace):
            gather_shares(self.trace)
            recorded = self._recorded(errors_again)
            resumed, seconds = len(recorded), self._play(self._jobs(recorded), recorded, self.trace)
        outcomes = recorded.outcomes()
        settings = {**panel_settings(self.tasks, self.chosen, self.limit), **self.played, **self.about}
        settings |= {} if recorded.profile is None else {PROFILE: recorded.profile}
        return EvalResult(
            episodes=recorded.episodes(),
            outcomes=outcomes,
            scores=score(outcomes),
            settings={**settings, "samples": self.samples, "seed": self.seed},
            seconds=seconds,
            resumed=resumed,
            problems=recorded.problems,
            used=recorded.used,
        )

    def run_share(self, share: tuple[int, int]) -> None:
        """Play the episodes of process number `share[0]` of `share[1]` into a trace of its own beside the trace.

        All processes must see the same trace: one of them calls `gather_shares` before, and `run` afterwards.
        """
        assert self.trace is not None, "shares meet in a trace"
        recorded = self._recorded(errors_again=True)
        rank, size = share
        self._play(self._jobs(recorded)[rank::size], recorded, share_trace(self.trace, rank))

    def _recorded(self, errors_again: bool) -> RecordedEpisodes:
        return read_recorded(self.trace, self.chosen, self.times, {**self.played, "seed": self.seed}, errors_again)

    def _jobs(self, recorded: RecordedEpisodes) -> list[Job]:
        times = self.times
        return [
            Job(task_id=task.task_id, sample=sample, group=place, seed=self.seed, sha256=task.sha256)
            for sample in range(max(times.values()))
            for place, task in enumerate(self.chosen)
            if sample < times[task.task_id] and not recorded.has(task.task_id, sample)
        ]

    def _play(self, jobs: Sequence[Job], recorded: RecordedEpisodes, into: Path | None) -> float:
        """Play `jobs` into the trace `into` and `recorded`; returns the evaluation's wall clock so far."""
        start = time.perf_counter()
        with ExitStack() as stack:
            writer = None if into is None else stack.enter_context(TraceWriter(into))
            report = stack.enter_context(progress_bar("evaluate", len(jobs), enabled=self.progress))

            def keep(episode: Episode) -> None:
                spent = {ELAPSED: recorded.seconds + time.perf_counter() - start}
                episode = replace(episode, timings={**episode.timings, **spent})
                recorded.add(episode, None if writer is None else writer.write(episode))
                report(episode)

            # for readers of the trace alone; it is not compared, so another panel with the same tasks can resume it
            panel = {"panel": panel_note(self.tasks)} if isinstance(self.tasks, Panel) else {}
            meta = {**self.played, **self.about, **panel}
            watch = FailureWatch(keep, succeeded=len(recorded) > 0)
            self.play(
                jobs, self.make_env, self.agent, slots=self.slots, on_episode=watch, system=self.system, meta=meta
            )
            watch.check()
        return recorded.seconds + time.perf_counter() - start


def panel_settings(tasks: Panel | Sequence[Task], chosen: Sequence[Task], limit: int | None) -> dict[str, Any]:
    """The tasks of an evaluation as its settings name them."""
    name, sha256 = (tasks.full_name, tasks.sha256) if isinstance(tasks, Panel) else (None, None)
    return {
        "panel": name,
        "panel_sha256": sha256,
        "env_id": chosen[0].env_id,
        "tasks": len(chosen),
        "limit": None if limit is None or limit >= len(tasks.tasks if isinstance(tasks, Panel) else tasks) else limit,
    }


def panel_note(panel: Panel) -> dict[str, Any]:
    """The panel, as episodes name it in their `meta`."""
    return {"name": panel.full_name, "sha256": panel.sha256, "tasks": len(panel.tasks)}
