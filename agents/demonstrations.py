"""Which demonstrations count, and how many are left out for which reason."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from turngym.agents.playing.agent import Agent
from turngym.agents.playing.rollout import SLOTS, Job, MakeEnv, PlayJobs, rollout
from turngym.agents.rendering.renderer import Ids, Shown, TextEpisodes, begun_response
from turngym.core.episode import Episode
from turngym.core.errors import AgentError
from turngym.core.task import task_number

USED = "used"
REASONS: Mapping[str, str] = {
    "missing": "without a demonstration",
    "failed": "failed (environment or engine)",
    "unsolved": "not solved",
    "low_reward": "worth too little",
    "too_long": "longer than the context",
}
"""Why a task has no demonstration: name in metrics -> words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemonstrationFilter:
    """Decides which demonstrations are used. The first reason counts: failed, unsolved, low_reward, too_long."""

    success: bool = False
    """Whether only demonstrations that succeeded count."""
    least: float | None = None
    """Least worth of a demonstration that counts."""
    reward: Callable[[Episode], float] | None = None
    """What one is worth; None: its return."""
    fits: Callable[[Episode], bool] | None = None
    """Whether one fits the student's context; None: not asked."""

    def reason(self, episode: Episode) -> str:
        """Returns a key of `REASONS`, or `USED`."""
        if episode.status.is_error or not episode.turns:
            return "failed"
        if self.success and not episode.success:
            return "unsolved"
        worth = episode.episode_return if self.least is None or self.reward is None else self.reward(episode)
        if self.least is not None and worth < self.least:
            return "low_reward"
        return USED if self.fits is None or self.fits(episode) else "too_long"


def left_out(counts: Mapping[str, int]) -> str:
    """`12 of 20 demonstrations are used; left out: 5 not solved, 3 longer than the context`."""
    why = ", ".join(f"{counts[name]} {words}" for name, words in REASONS.items() if counts.get(name))
    used = f"{counts.get(USED, 0)} of {sum(counts.values())} demonstrations are used"
    return f"{used}; left out: {why}" if why else used


# Where demonstrations come from: an agent that plays the tasks of a step now, or episodes that were recorded.

APART = 1 << 20
"""Added to the sample number of a demonstration, so that a model that demonstrates and a student draw apart."""
CHOICE = 3
"""The stream that chooses among recorded demonstrations of one task."""


Demonstrator = Callable[[Sequence[Job]], list[Episode | None]]
"""Gives a demonstration for each job, as an episode of the job's task; None where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveDemonstrator:
    """Implements `Demonstrator`: an agent plays the task of each job from its start."""

    agent: Agent
    make_env: MakeEnv
    """Makes environments in the channel that the agent writes."""
    slots: int = SLOTS
    system: str | None = None
    apart: int = 0
    """Added to the sample numbers of demonstrations, so that they draw apart from the student's episodes."""
    play: PlayJobs = rollout

    def __call__(self, jobs: Sequence[Job]) -> list[Episode | None]:
        own_jobs = [replace(job, sample=job.sample + self.apart, max_turns=None) for job in jobs]
        return list(self.play(own_jobs, self.make_env, self.agent, slots=self.slots, system=self.system))


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedDemonstrator:
    """Implements `Demonstrator` with recorded episodes. The job's random stream chooses among several of its task."""

    by_task: dict[str, list[Episode]] = field(default_factory=dict)
    """The episodes that count, by task id."""
    counts: Counter[str] = field(default_factory=Counter)
    """How many of the recorded ones count, and why the others do not."""

    @classmethod
    def of(cls, episodes: Sequence[Episode], keep: DemonstrationFilter) -> RecordedDemonstrator:
        demonstrator = cls()
        for episode in episodes:
            reason = keep.reason(episode)
            demonstrator.counts[reason] += 1
            if reason == USED:
                demonstrator.by_task.setdefault(episode.task.task_id, []).append(episode)
        return demonstrator

    def __call__(self, jobs: Sequence[Job]) -> list[Episode | None]:
        return [self._one(job) for job in jobs]

    def _one(self, job: Job) -> Episode | None:
        episodes = self.by_task.get(job.task_id, [])
        if len(episodes) < 2:
            return episodes[0] if episodes else None
        drawn = np.random.default_rng((job.seed, task_number(job.task_id), job.sample, CHOICE))
        return episodes[int(drawn.integers(len(episodes)))]


# From demonstrations to jobs: what is replayed before a student plays, and where a response is cut.


@dataclass(frozen=True, slots=True, kw_only=True)
class DemonstrationPlan:
    """A demonstration of one job, as the student can replay it."""

    turns: tuple[str | Shown, ...] = ()
    """Actions where the student has no tokens."""
    reason: str = USED
    """Why a job has no demonstration; `used` where it has one."""
    sha256: str = ""
    """Hash of the task that was demonstrated."""

    @property
    def exact(self) -> bool:
        """Whether every response is replayed as the ids that the demonstrator drew."""
        return bool(self.turns) and all(isinstance(turn, Shown) and turn.exact for turn in self.turns)


@dataclass(slots=True, kw_only=True)
class Demonstrations:
    """Gets demonstrations of a step's jobs, filters them, and writes them as responses of the student."""

    source: Demonstrator
    keep: DemonstrationFilter = field(default_factory=DemonstrationFilter)
    writer: TextEpisodes | None = None
    """Writes responses as the student's ids; None: actions are replayed."""
    name: str = ""
    """Who demonstrates, for the line that says what was left out."""
    _said: bool = False

    def tasks(self, known: Sequence[str]) -> list[str]:
        """Returns the tasks of `known` that the file demonstrates. Raises AgentError if the demonstrator is live."""
        if not isinstance(self.source, RecordedDemonstrator):
            raise AgentError("--demonstrated-tasks plays the tasks of a trace file: name one with --demonstrations")
        return [task for task in known if task in self.source.by_task]

    def episodes(self, jobs: Sequence[Job]) -> list[tuple[Episode | None, str]]:
        """Returns the demonstration of each job, with `used` or the reason why it is left out."""
        if not jobs:
            return []
        episodes = self.source(jobs)
        judged = [(episode, "missing" if episode is None else self.keep.reason(episode)) for episode in episodes]
        counts = Counter(reason for _, reason in judged)
        if self.name and not self._said and counts[USED] < len(judged):
            # once: what later steps leave out is in their metrics
            self._said = True
            print(f"{self.name}, first step: {left_out(counts)}", file=sys.stderr)
        return judged

    def plans(self, jobs: Sequence[Job]) -> list[DemonstrationPlan]:
        """Returns a plan for each job. A plan without turns holds the reason."""
        return [self._plan(episode, reason) for episode, reason in self.episodes(jobs)]

    def _plan(self, episode: Episode | None, reason: str) -> DemonstrationPlan:
        if episode is None or reason != USED:
            return DemonstrationPlan(reason=reason)
        if self.writer is None:
            return DemonstrationPlan(turns=tuple(turn.action for turn in episode.turns if turn.action is not None))
        turns = tuple(self.writer.shown(episode, turn) for turn in episode.turns)
        return DemonstrationPlan(turns=turns, sha256=episode.task.sha256)

    def begun(self, job: Job, plan: DemonstrationPlan, ratio: float, unit: Literal["turns", "tokens"] = "turns") -> Job:
        """Returns `job` begun with the first `ratio` of the plan: at least one turn, or int(ratio L) tokens."""
        if not plan.turns or ratio <= 0:
            return job
        if unit == "turns":
            return replace(job, demonstration=plan.turns[: max(1, int(len(plan.turns) * ratio))], sha256=plan.sha256)
        turns, begun = self._cut(plan.turns, ratio)
        return replace(job, demonstration=turns, begun=begun, sha256=plan.sha256)

    def _cut(self, turns: Sequence[str | Shown], ratio: float) -> tuple[tuple[Shown, ...], Ids]:
        """Returns the first `ratio` of all responses' ids: complete turns, and the first ids of the next one."""
        writer, shown_turns = self.writer, [turn for turn in turns if isinstance(turn, Shown)]
        if writer is None:
            raise AgentError("a prefix in tokens needs the student's tokens; this student plays in text")
        left = int(ratio * sum(len(turn.ids) for turn in shown_turns))
        complete: list[Shown] = []
        for turn in shown_turns:
            if left < len(turn.ids):
                ids, over = begun_response(writer.renderer, turn, left, writer.channel.stop_text)
                # the action is complete: only the end of the response would be left to the policy
                return ((*complete, replace(turn, ids=ids)), ()) if over else (tuple(complete), ids)
            complete.append(turn)
            left -= len(turn.ids)
        return tuple(complete), ()


def noted(episode: Episode, reason: str, *, exact: bool = False) -> Episode:
    """Returns `episode` with the outcome of its demonstration in `meta`, for the metrics."""
    note = {"demonstration": reason, "demonstration_exact": exact}
    return replace(episode, meta={**episode.meta, **note})
