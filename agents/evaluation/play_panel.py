"""How a panel is played: every task n times, resumed where it stopped, refused if the tasks are not the panel's.

`TaskEvaluation` plays tasks into a trace, alone or in shares by several processes, and scores them: only what the trace
does not hold yet is played. `PanelEvaluation` does so at steps of a training.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from turngym.agents.endpoint.usage import PROFILE, Usage, usage_table
from turngym.agents.evaluation.departures import Departures, departures
from turngym.agents.evaluation.open_play import record_of
from turngym.agents.evaluation.results import FORMAT, VERSION, episode_row, token_counts, write_results
from turngym.agents.evaluation.scores import (
    EpisodeOutcome,
    EvaluationError,
    Scores,
    behavior_table,
    hints,
    score,
    success_table,
)
from turngym.agents.meaning import meaning
from turngym.agents.play_spec import EvalSpec, OnPanel, PartOfPanel, Published, drawn, episodes_of
from turngym.agents.playing.agent import Agent
from turngym.agents.playing.rollout import FailureWatch, Job, MakeEnv, PlayJobs, rollout
from turngym.core.episode import Episode
from turngym.core.files import locked_file
from turngym.core.nested import differing
from turngym.core.progress import progress_bar
from turngym.core.protocols import EvalPoint
from turngym.core.provenance import loaded_versions
from turngym.core.redaction import brief
from turngym.core.tables import Table, columns, table_text
from turngym.core.task import Task
from turngym.core.trace import TraceEpisodes, TraceProblem, TraceWriter, iter_places, iter_trace, read_specs

ELAPSED = "elapsed"
"""Name of a timing of each episode: seconds from the start of its evaluation, summed over all calls, to its end."""


def repeated(twice: int) -> list[str]:
    """Says below a table that its trace holds `twice` episodes more than once, as joined traces do; [] for none."""
    said = f"{twice} episodes are in the trace more than once, none of them after an error: the last ones count"
    return [said] if twice else []


def unplayed(asked: int, played: int) -> list[str]:
    """Says below a table that fewer episodes were played than were asked for; [] where all were."""
    said = f"{asked - played} of {asked} episodes are missing: the evaluation was interrupted"
    return [said] if played < asked else []


@dataclass(slots=True)
class RecordedEpisodes:
    """The episodes of an evaluation so far: how each ended, and the episode itself or its place in the trace."""

    trace: Path | None = None
    """The trace from which episodes can be read again; without one they are kept in memory."""
    agent: str = ""
    """Who played them, for people."""
    seconds: float = 0.0
    """Wall clock up to the last episode."""
    problems: list[TraceProblem] = field(default_factory=list)
    """Lines of the trace that could not be read."""
    twice: int = 0
    """Episodes that were added although there was one that had not ended in an error."""
    used: Usage | None = None
    """What all episodes used at an endpoint, those that were played again included; None for other agents."""
    profile: Mapping[str, Any] | None = None
    """The profile of the endpoint that played last."""
    _tasks: dict[Task, Task] = field(default_factory=dict)
    """Equal tasks are one object in memory."""
    _rows: dict[tuple[str, int], tuple[EpisodeOutcome, Episode | int]] = field(default_factory=dict)
    """Rows by task id and sample."""

    @classmethod
    def of(cls, trace: Path) -> RecordedEpisodes:
        recorded = cls(trace)
        for offset, item in iter_places(trace):
            if isinstance(item, TraceProblem):
                recorded.problems.append(item)
            else:
                recorded.seconds = max(recorded.seconds, seconds_played(item))
                recorded.agent = recorded.agent or str(item.meta.get("agent", ""))
                recorded.add(item, offset)
        return recorded

    def add(self, episode: Episode, place: int | None) -> None:
        """Add `episode`, whose offset in the trace is `place`. Of each task and sample the last episode without an
        error counts, else the last one."""
        self.pay(episode)
        key = episode.task.task_id, episode.sample
        if key in self._rows and not self._rows[key][0].status.is_error:
            if episode.status.is_error:
                return
            self.twice += 1
        outcome = EpisodeOutcome.of(episode, self._tasks.setdefault(episode.task, episode.task))
        self._rows[key] = outcome, episode if place is None else place

    def pay(self, episode: Episode) -> None:
        """Count what `episode` used, and note the endpoint's profile."""
        if (used := Usage.noted(episode)) is not None:
            self.used = used + (self.used or Usage())
        profile = episode.meta.get(PROFILE, self.profile)
        if self.profile is not None and profile != self.profile:
            from turngym.agents.endpoint.profile import changed

            if changes := changed(self.profile, profile):
                warnings.warn(
                    f"the endpoint is not as it was for earlier episodes ({'; '.join(changes)})", stacklevel=3
                )
        self.profile = profile

    def has(self, task_id: str, sample: int) -> bool:
        return (task_id, sample) in self._rows

    def __len__(self) -> int:
        """Number of tasks and samples that are not missing."""
        return len(self._rows)

    def _sorted(self) -> list[tuple[EpisodeOutcome, Episode | int]]:
        """Sample by sample, tasks in the order in which they were asked for."""
        return sorted(self._rows.values(), key=lambda row: (row[0].sample, row[0].group))

    def outcomes(self) -> list[EpisodeOutcome]:
        """How the episodes ended, in order."""
        return [outcome for outcome, _ in self._sorted()]

    def result(self, spec: EvalSpec, agent: str, *, seconds: float, resumed: int, chat: str = "") -> EvalResult:
        """Scores these episodes. Raises ScoreError if none of them counts."""
        outcomes, sources = self.outcomes(), [source for _, source in self._sorted()]
        in_memory = tuple(source for source in sources if isinstance(source, Episode))
        places = (source for source in sources if isinstance(source, int))
        return EvalResult(
            spec=spec,
            agent=agent,
            episodes=in_memory if self.trace is None else TraceEpisodes(self.trace, places),
            outcomes=outcomes,
            scores=score(outcomes, spec.play),
            seconds=seconds,
            resumed=resumed,
            chat=chat,
            problems=tuple(self.problems),
            twice=self.twice,
            used=self.used,
            profile=self.profile,
        )


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
    specs = {digits: spec for source in (trace, *shares) for digits, spec in read_specs(source).items()}
    with ExitStack() as opened:
        writers = {digits: opened.enter_context(TraceWriter(trace, spec)) for digits, spec in specs.items()}
        for source in (trace, *shares):
            for episode in iter_trace(source) if source.exists() else ():
                if isinstance(episode, TraceProblem):
                    continue
                key, is_error = (episode.task.task_id, episode.sample), episode.status.is_error
                if source == trace:
                    failed[key] = is_error
                elif failed.get(key, True) and failed.get(key) != is_error:
                    writers[episode.spec].write(episode)
                    failed[key] = is_error
    for share in shares:
        share.unlink()


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """An evaluation, finished or not."""

    spec: EvalSpec
    """What was asked for."""
    agent: str
    """Name of who played, for people."""
    episodes: Sequence[Episode]
    """Episodes sample by sample, tasks in panel order. With a trace they are read from it when they are accessed."""
    outcomes: Sequence[EpisodeOutcome]
    """How the episodes ended."""
    scores: Scores
    seconds: float
    """Wall clock of all calls that played into the trace; a call that was killed counts up to its last episode."""
    resumed: int = 0
    """Number of episodes that were in the trace already."""
    chat: str = ""
    """How a model was spoken to, in a line for people."""
    problems: tuple[TraceProblem, ...] = field(default=())
    """Lines of the trace that could not be read."""
    twice: int = 0
    """Episodes that the trace holds more than once although none ended in an error; the last one counts."""

    used: Usage | None = None
    """What was used at an endpoint, by episodes that failed and were played again, too; None for other agents."""
    profile: Mapping[str, Any] | None = None
    """What a handshake found out about an endpoint that played last (`agents.endpoint.profile`)."""

    @property
    def asked(self) -> int:
        """Number of episodes that were asked for."""
        return episodes_of(self.spec.play)

    @property
    def missing(self) -> int:
        """Number of them that were not played."""
        # evaluators of other packages may ask for more
        return max(0, self.asked - len(self.outcomes))

    @property
    def lost(self) -> str:
        """The episodes that its numbers leave out, in a line; "" if none."""
        errors, missing, bounds = self.scores.errors, self.missing, self.scores.bounds
        reasons = [f"{errors} ended in errors"] if errors else []
        reasons += [f"{missing} are missing"] if missing else []
        ends = ""
        if bounds is not None:
            ends = f" (success {100 * bounds[0]:.1f} to {100 * bounds[1]:.1f} % with those lost or won)"
        return f"of {self.asked} episodes {' and '.join(reasons)}, which no number counts{ends}" if reasons else ""

    def table(self) -> Table:
        """Success by category and behavior, one column."""
        runs = {self.agent: self.scores}
        return columns(success_table(runs), behavior_table(runs), *usage_table(dict.fromkeys(runs, self.used)))

    @property
    def departs(self) -> Departures | None:
        """Deviations from the original's protocol; None if no original is known."""
        return departures(self.spec)

    @property
    def title(self) -> str:
        """What was measured, in one line."""
        play, agent, departs = self.spec.play, self.spec.agent, self.departs
        text, sampling = f"tasks of {play.env.id}", None
        if isinstance(play.tasks, OnPanel):
            text, sampling = play.tasks.panel, play.tasks.sampling
        if isinstance(sampling, PartOfPanel):
            text += f", {sampling.said}"
        if self.spec.preset is not None:
            text += f", preset {self.spec.preset}"
            text += f" but {', '.join(departs.beside)}" if departs is not None and departs.beside else ""
        elif departs is not None and departs.rules:
            text += f", {', '.join(departs.rules)}"
        examples = getattr(agent.chat, "examples", None)
        text += f", examples {examples.content}" if examples is not None else ""
        text += f", scores approximate ({self.scores.approximate})" if self.scores.approximate else ""
        if isinstance(sampling, Published):
            text += f": {self.asked} draws, published:{sampling.harness}"
        else:
            text += f": {play.samples} sample{'s' if play.samples > 1 else ''}"
        temperature = getattr(agent, "temperature", None)
        obeyed = self.profile is None or self.profile.get("temperature", True)
        if temperature is not None:
            text += f", temperature {temperature:g}" if obeyed else ", the server's own temperature"
        return text + (f"; {self.missing} of {self.asked} episodes are missing" if self.missing else "")

    def notes(self) -> list[str]:
        """Lines below the table: how it was played, what may help if answers were cut or could not be read, and what
        the numbers leave out."""
        departs, errors = self.departs, self.scores.errors
        lines = [] if departs is None else [departs.line]
        lines += [self.chat] if self.chat else []
        lines += hints(self.scores, self.episodes, self.spec)
        if errors:
            lines.append(f"{errors} episodes ended in errors and are not counted; run again to play them again")
        return lines + repeated(self.twice) + unplayed(self.asked, len(self.outcomes))

    def __str__(self) -> str:
        return table_text(self.table(), self.title) + "".join(f"{text}\n" for text in self.notes())

    def to_json(self) -> dict[str, Any]:
        """The content of results.json, as docs/results.schema.json describes it."""
        return {**self._head(), "episodes": [episode_row(outcome) for outcome in self.outcomes]}

    def write(self, path: str | Path) -> None:
        """Write results.json row by row, without holding all of it in memory."""
        write_results(path, self._head(), self.outcomes)

    def _head(self) -> dict[str, Any]:
        """The content of results.json without the rows of the episodes."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "agent": self.agent,
            "spec": record_of(self.spec),
            "versions": loaded_versions(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": round(self.seconds, 3),
            "tokens": token_counts(self.outcomes),
            "scores": self.scores.to_json(),
            **({} if self.profile is None else {PROFILE: dict(self.profile)}),
            **({} if self.used is None else {"usage": self.used.to_json()}),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskEvaluation:
    """An evaluation that is played by one process (`run`), or in shares by several (`run_share`, then `run`)."""

    spec: EvalSpec
    """What is played and by whom, with nothing left open. A trace with other settings is refused."""
    tasks: Sequence[Task]
    """The tasks that are played; one that is drawn twice is there twice."""
    make_env: MakeEnv
    agent: Agent
    trace: Path | None = None
    """Every episode is appended to it as it finishes."""
    system: str | None = None
    chat: str = ""
    """How a model is spoken to, in a line for people."""
    progress: bool = False
    play: PlayJobs = rollout
    """Plays the episodes, in this process or in others."""

    @property
    def chosen(self) -> tuple[Task, ...]:
        """The tasks that are played, each once."""
        return tuple({task.task_id: task for task in self.tasks}.values())

    @property
    def times(self) -> Mapping[str, int]:
        """How often each task is played, by its id."""
        if drawn(self.spec.play):
            return Counter(task.task_id for task in self.tasks)
        return {task.task_id: self.spec.play.samples for task in self.tasks}

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
        return recorded.result(self.spec, self.agent.name, seconds=seconds, resumed=resumed, chat=self.chat)

    def run_share(self, share: tuple[int, int]) -> None:
        """Play the episodes of process number `share[0]` of `share[1]` into a trace of its own beside the trace.

        All processes must see the same trace: one of them calls `gather_shares` before, and `run` afterwards.
        """
        assert self.trace is not None, "shares meet in a trace"
        recorded = self._recorded(errors_again=True)
        rank, size = share
        self._play(self._jobs(recorded)[rank::size], recorded, share_trace(self.trace, rank))

    def _recorded(self, errors_again: bool) -> RecordedEpisodes:
        """The episodes that the trace holds already. Raises EvaluationError if it is of another evaluation."""
        trace, times = self.trace, self.times
        recorded, hashes = RecordedEpisodes(trace), {task.task_id: task.sha256 for task in self.chosen}
        if trace is None or not trace.exists():
            return recorded
        mine, specs = record_of(self.spec), read_specs(trace)
        for theirs in specs.values():
            for path, (was, new) in differing(theirs, mine).items():
                if meaning(path) != "cost":
                    raise EvaluationError(
                        f"{trace} was played with {path} {brief(was, 60)}, this evaluation has {brief(new, 60)}; "
                        "continue with the old setting or write to another folder"
                    )
        for number, (offset, episode) in enumerate(iter_places(trace)):
            if isinstance(episode, TraceProblem):
                recorded.problems.append(episode)
                continue
            task_id, sample, failed = episode.task.task_id, episode.sample, episode.status.is_error
            where = f"{trace}, episode {number - len(recorded.problems)} ({task_id} sample {sample})"
            if episode.spec not in specs or task_id not in hashes or sample >= times[task_id]:
                raise EvaluationError(f"{where}: it is no episode of this evaluation; write to another folder")
            # an episode that failed before its first observation has no hash of its task
            if not failed and episode.task.sha256 != hashes[task_id]:
                raise EvaluationError(
                    f"{where}: sha256 {episode.task.sha256}, the panel says {hashes[task_id]}; "
                    "the trace was played on other data: write to another folder"
                )
            recorded.seconds = max(recorded.seconds, seconds_played(episode))
            if failed and errors_again:
                recorded.pay(episode)
            else:
                recorded.add(episode, offset)
        return recorded

    def _jobs(self, recorded: RecordedEpisodes) -> list[Job]:
        times, seed = self.times, self.spec.play.seed
        return [
            Job(task_id=task.task_id, sample=sample, group=index, seed=seed, sha256=task.sha256)
            for sample in range(max(times.values()))
            for index, task in enumerate(self.chosen)
            if sample < times[task.task_id] and not recorded.has(task.task_id, sample)
        ]

    def _play(self, jobs: Sequence[Job], recorded: RecordedEpisodes, into: Path | None) -> float:
        """Play `jobs` into the trace `into` and `recorded`; returns the evaluation's wall clock so far."""
        start = time.perf_counter()
        with ExitStack() as stack:
            writer = None if into is None else stack.enter_context(TraceWriter(into, record_of(self.spec)))
            report = stack.enter_context(progress_bar("evaluate", len(jobs), enabled=self.progress))

            def keep(episode: Episode) -> None:
                spent = {ELAPSED: recorded.seconds + time.perf_counter() - start}
                episode = replace(episode, timings={**episode.timings, **spent})
                recorded.add(episode, None if writer is None else writer.write(episode))
                report(episode)

            watch = FailureWatch(keep, succeeded=len(recorded) > 0)
            self.play(
                jobs,
                self.make_env,
                self.agent,
                slots=self.spec.compute.slots,
                on_episode=watch,
                system=self.system,
                meta={"agent": self.agent.name, "temperature": getattr(self.spec.agent, "temperature", None)},
            )
            watch.check()
        return recorded.seconds + time.perf_counter() - start


@dataclass(frozen=True, slots=True)
class PanelEvaluation:
    """An evaluation at a step of training; its episodes are kept in a trace of that step in `folder`."""

    evaluation: TaskEvaluation
    folder: Path

    def __call__(self, step: int) -> EvalPoint:
        return _point(self._of(step).run())

    def gather(self, step: int) -> None:
        """Moves the episodes that processes of a stopped run left in files of their own into the trace of `step`."""
        gather_shares(self._of(step).trace)

    def play_share(self, step: int, share: tuple[int, int]) -> None:
        """Play the episodes of process number `share[0]` of `share[1]`."""
        self._of(step).run_share(share)

    def finish(self, step: int) -> EvalPoint:
        """Score what all shares have played."""
        # as in an undivided evaluation, episodes that ended in an error are not played again
        return _point(self._of(step).run(errors_again=False))

    def _of(self, step: int) -> TaskEvaluation:
        self.folder.mkdir(parents=True, exist_ok=True)
        return replace(self.evaluation, trace=self.folder / f"step_{step:06d}.jsonl")


def _point(result: EvalResult) -> EvalPoint:
    scores = result.scores
    extra = {f"pass@{k}": value for k, value in scores.overall.pass_at.items()}
    extra |= {"turns": scores.turns, "invalid_rate": scores.invalid_rate, "errors": float(scores.errors)}
    extra |= {f"category/{row.name}": row.avg.mean for row in scores.categories}
    average = scores.overall.avg
    return EvalPoint(avg=average.mean, low=average.low, high=average.high, extra=extra)
