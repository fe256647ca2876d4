"""What the trace of an evaluation holds already, and the traces beside it of processes that play shares of it."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from turngym.agents.endpoint.messages import usage_of, usage_table
from turngym.agents.evaluation.results import episode_rows, results_json, write_results
from turngym.agents.evaluation.scores import EvaluationError, Outcomes, Scores, behavior_table, score, success_table
from turngym.agents.playing.agent import Agent
from turngym.agents.playing.rollout import Job, MakeEnv, PlayJobs, rollout
from turngym.envs.core.episode import Episode
from turngym.envs.core.files import locked_file
from turngym.envs.core.tables import Table, columns, progress_bar, table_text
from turngym.envs.core.task import Task
from turngym.envs.core.trace import TraceEpisodes, TraceProblem, TraceWriter, iter_places, iter_trace
from turngym.envs.panels import Panel

ELAPSED = "elapsed"
"""Among an episode's timings: seconds from the beginning of its evaluation, over all calls, to its end."""
UNSAID = {"dtype": "float32"}
"""What traces of older versions were played with where they do not say it."""
ADDED = ("make",)
"""What evaluations of training runs did not record in older versions; their traces are gone on with."""


@dataclass(slots=True)
class RecordedEpisodes:
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


def read_recorded(
    trace: Path | None, tasks: Sequence[Task], samples: int, settings: Mapping[str, Any], errors_again: bool
) -> RecordedEpisodes:
    """What `trace` holds of these tasks. Raises EvaluationError where it does not belong here.

    With `errors_again`, episodes that ended in an error are not recorded: they are played again.
    """
    recorded = RecordedEpisodes({task.task_id: (number, task) for number, task in enumerate(tasks)}, samples, trace)
    problems = list[TraceProblem]()
    for number, (place, episode) in enumerate(iter_places(trace) if trace is not None and trace.exists() else ()):
        if isinstance(episode, TraceProblem):
            problems.append(episode)
            continue
        where = f"{trace}, episode {number - len(problems)} ({episode.task.task_id} sample {episode.sample})"
        _check_settings(episode, settings, where)
        recorded.seconds = max(recorded.seconds, seconds_played((episode,)))
        failed, known = episode.status.is_error, recorded.tasks.get(episode.task.task_id)
        if known is None or episode.sample >= samples or (failed and errors_again):
            continue
        # a task that failed before its first observation is known by its id alone
        if not failed and episode.task.sha256 != known[1].sha256:
            raise EvaluationError(
                f"{where}: sha256 {episode.task.sha256}, the panel says {known[1].sha256}; "
                "the trace was played on other data: write to another folder"
            )
        if not failed or not recorded.has(episode.task.task_id, episode.sample):
            recorded.add(episode, place)
    recorded.problems = tuple(problems)
    return recorded


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
    recorded: dict[tuple[str, int], bool] = {}
    if trace.exists():
        recorded.update((_key(episode), episode.status.is_error) for episode in _episodes(trace))
    with TraceWriter(trace) as writer:
        for share in shares:
            for episode in _episodes(share):
                if recorded.get(_key(episode), True) and recorded.get(_key(episode)) != episode.status.is_error:
                    writer.write(episode)
                    recorded[_key(episode)] = episode.status.is_error
    for share in shares:
        share.unlink()


def _episodes(trace: Path) -> Iterator[Episode]:
    return (item for item in iter_trace(trace) if isinstance(item, Episode))


def _key(episode: Episode) -> tuple[str, int]:
    return episode.task.task_id, episode.sample


# Evaluation on a panel: every task n times, resumed where it stopped, refused where the tasks are not the panel's.


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """A finished evaluation."""

    episodes: Sequence[Episode]
    """Sample by sample, tasks in panel order. Those of a trace are read from it when they are asked for."""
    outcomes: Outcomes
    """How they ended."""
    scores: Scores
    settings: Mapping[str, Any]
    seconds: float
    """Wall clock of all calls that played into the trace; of one that was killed, up to its last finished episode."""
    resumed: int = 0
    """Episodes that were found in the trace."""
    problems: tuple[TraceProblem, ...] = field(default=())
    """Lines of the trace that could not be read."""

    @property
    def missing(self) -> int:
        """Episodes that were neither played nor found; only of a trace that was interrupted there are any."""
        return self.settings["tasks"] * self.settings["samples"] - len(self.outcomes)

    def table(self) -> Table:
        """Success by category and behavior, one column."""
        runs = {str(self.settings["agent"]): self.scores}
        return columns(success_table(runs), behavior_table(runs), *usage_table(runs, self._users))

    @property
    def _users(self) -> Sequence[Episode]:
        """The episodes, where one of them says what it used."""
        return self.episodes if self.outcomes.noted_usage else ()

    @property
    def title(self) -> str:
        """What was measured, in one line."""
        named, limit, heat = self.settings.get("panel"), self.settings.get("limit"), self.settings["temperature"]
        what = f"{named or self.settings['tasks']}" + ("" if named else " tasks")
        what += "" if limit is None else f", first {limit} tasks"
        what += f", preset {self.settings['preset']}" if "preset" in self.settings else ""
        what += self._turns
        return f"{what}: {self.settings['samples']} samples" + ("" if heat is None else f", temperature {heat:g}")

    @property
    def _turns(self) -> str:
        """Says where another limit of turns than the panel's own was played."""
        own, made = self.settings.get("panel_max_turns"), self.settings.get("make", {})
        return "" if own is None else f", max_turns {made.get('max_turns')} instead of the panel's {own}"

    def __str__(self) -> str:
        return table_text(self.table(), self.title)

    def to_json(self) -> dict[str, Any]:
        """The content of results.json; docs/results.schema.json says what is in it."""
        return {**self._head(), "episodes": list(episode_rows(self.outcomes))}

    def write(self, path: str | Path) -> None:
        """Write results.json, without having all of it in memory."""
        write_results(path, self._head(), self.outcomes)

    def _head(self) -> dict[str, Any]:
        used = usage_of(self._users)
        found = results_json(self.settings, self.scores, self.seconds, self.outcomes)
        return found if used is None else {**found, "usage": used.to_json()}


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskEvaluation:
    """Tasks, who plays them, and where: an evaluation that is played at once, or in shares by several processes."""

    tasks: Panel | Sequence[Task]
    make_env: MakeEnv
    agent: Agent
    samples: int = 4
    limit: int | None = None
    temperature: float | None = 0.85
    seed: int = 0
    slots: int = 64
    trace: Path | None = None
    system: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)
    progress: bool = False
    play: PlayJobs = rollout

    def __post_init__(self) -> None:
        if self.samples < 1 or not self.chosen:
            raise EvaluationError(f"{len(self.chosen)} tasks with {self.samples} samples each: both must be at least 1")

    @property
    def chosen(self) -> tuple[Task, ...]:
        """The tasks that are played."""
        return tuple(self.tasks.tasks if isinstance(self.tasks, Panel) else self.tasks)[: self.limit]

    @property
    def played(self) -> dict[str, Any]:
        """What every episode says of how it was played: a trace that says otherwise is of another evaluation."""
        return {"agent": self.agent.name, "temperature": self.temperature, **self.settings}

    def run(self, *, errors_again: bool = True) -> EvalResult:
        """Play what the trace, and what shares have left beside it, do not hold, and score everything.

        Without `errors_again`, episodes that ended in an error count as played.
        """
        with locked_file(self.trace):  # before it is read: what another process is about to add would be played twice
            gather_shares(self.trace)
            recorded = self._recorded(errors_again)
            resumed, seconds = len(recorded), self._play(self._jobs(recorded), recorded, self.trace)
        outcomes = recorded.outcomes()
        settings = {**panel_settings(self.tasks, self.chosen, self.limit), **self.played, **self.about}
        return EvalResult(
            episodes=recorded.episodes(),
            outcomes=outcomes,
            scores=score(outcomes),
            settings={**settings, "samples": self.samples, "seed": self.seed},
            seconds=seconds,
            resumed=resumed,
            problems=recorded.problems,
        )

    def run_share(self, share: tuple[int, int]) -> None:
        """Play the episodes of process number `share[0]` of `share[1]` into a trace of its own beside the trace.

        Every process must find the same trace: `gather_shares` comes before, in one of them, and `run` afterwards.
        """
        assert self.trace is not None, "shares meet in a trace"
        recorded = self._recorded(errors_again=True)
        rank, size = share
        self._play(self._jobs(recorded)[rank::size], recorded, share_trace(self.trace, rank))

    def _recorded(self, errors_again: bool) -> RecordedEpisodes:
        return read_recorded(self.trace, self.chosen, self.samples, {**self.played, "seed": self.seed}, errors_again)

    def _jobs(self, recorded: RecordedEpisodes) -> list[Job]:
        return [
            Job(task_id=task.task_id, sample=sample, group=place, seed=self.seed, sha256=task.sha256)
            for sample in range(self.samples)
            for place, task in enumerate(self.chosen)
            if not recorded.has(task.task_id, sample)
        ]

    def _play(self, jobs: Sequence[Job], recorded: RecordedEpisodes, into: Path | None) -> float:
        """Play `jobs` into the trace `into` and `recorded`; wall clock of the evaluation until now."""
        start = time.perf_counter()
        with ExitStack() as stack:
            writer = None if into is None else stack.enter_context(TraceWriter(into))
            report = stack.enter_context(progress_bar("evaluate", len(jobs), enabled=self.progress))

            def keep(episode: Episode) -> None:
                spent = {ELAPSED: recorded.seconds + time.perf_counter() - start}
                episode = replace(episode, timings={**episode.timings, **spent})
                recorded.add(episode, None if writer is None else writer.write(episode))
                report(episode)

            # for whoever reads the trace alone; another panel with these very tasks may go on with it
            panel = {"panel": panel_note(self.tasks)} if isinstance(self.tasks, Panel) else {}
            meta = {**self.played, **self.about, **panel}
            how: dict[str, Any] = {"slots": self.slots, "on_episode": keep, "system": self.system, "meta": meta}
            self.play(jobs, self.make_env, self.agent, **how)
        return recorded.seconds + time.perf_counter() - start


def evaluate_tasks(
    tasks: Panel | Sequence[Task],
    make_env: MakeEnv,
    agent: Agent,
    *,
    samples: int = 4,
    limit: int | None = None,
    temperature: float | None = 0.85,
    seed: int = 0,
    slots: int = 64,
    trace: str | Path | None = None,
    system: str | None = None,
    settings: Mapping[str, Any] | None = None,
    about: Mapping[str, Any] | None = None,
    progress: bool = False,
    play: PlayJobs = rollout,
) -> EvalResult:
    """Play every task, or the first `limit`, `samples` times and score it (by default Avg@4 at temperature 0.85).

    With `trace`, every episode is appended as it finishes, and a later call plays only what is missing; episodes that
    ended in an error are played again. `temperature` is a note for the record: the agent's own sampling decides. So are
    `settings` (JSON-able: environment arguments, the model's fingerprint, ...): a trace with others is refused.
    `about` is recorded with them and may differ. `play` plays the episodes, in this process or in others.

    Raises:
        EvaluationError: `samples` below 1, no tasks, or a trace that holds other tasks, settings or seeds.
        FolderInUseError: another process plays into `trace`.
        TaskError: the environment's task has another sha256 than the panel's.
    """
    return TaskEvaluation(
        tasks=tasks,
        make_env=make_env,
        agent=agent,
        samples=samples,
        limit=limit,
        temperature=temperature,
        seed=seed,
        slots=slots,
        trace=None if trace is None else Path(trace),
        system=system,
        settings=settings or {},
        about=about or {},
        progress=progress,
        play=play,
    ).run()


def panel_settings(tasks: Panel | Sequence[Task], chosen: Sequence[Task], limit: int | None) -> dict[str, Any]:
    """What an evaluation's settings say about its tasks."""
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
