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
    """Says why a demonstration is left out. The first of: failed, unsolved, low_reward, too_long."""

    success: bool = False
    """Whether only demonstrations that succeeded count."""
    least: float | None = None
    """Least worth of a demonstration that counts."""
    reward: Callable[[Episode], float] | None = None
    """What one is worth; None: its return."""
    fits: Callable[[Episode], bool] | None = None
    """Whether one fits the student's context; None: not asked."""

    def reason(self, episode: Episode) -> str:
        """One of `REASONS`, or `USED`."""
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
    """Implements `Demonstrator`: an agent plays the jobs' tasks from their own start."""

    agent: Agent
    make_env: MakeEnv
    """Makes environments in the channel that the agent writes."""
    slots: int = SLOTS
    system: str | None = None
    apart: int = 0
    """Added to the sample numbers of demonstrations, so that they draw apart from the student's episodes."""
    play: PlayJobs = rollout

    def __call__(self, jobs: Sequence[Job]) -> list[Episode | None]:
        asked = [replace(job, sample=job.sample + self.apart, max_turns=None) for job in jobs]
        return list(self.play(asked, self.make_env, self.agent, slots=self.slots, system=self.system))


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedDemonstrator:
    """Implements `Demonstrator` by recorded episodes of the same task; which of several, the job's own stream says."""

    by_task: dict[str, list[Episode]] = field(default_factory=dict)
    """The episodes that count, by task id."""
    counts: Counter[str] = field(default_factory=Counter)
    """How many of the recorded ones count, and why the others do not."""

    @classmethod
    def of(cls, episodes: Sequence[Episode], keep: DemonstrationFilter) -> RecordedDemonstrator:
        found = cls()
        for episode in episodes:
            reason = keep.reason(episode)
            found.counts[reason] += 1
            if reason == USED:
                found.by_task.setdefault(episode.task.task_id, []).append(episode)
        return found

    def __call__(self, jobs: Sequence[Job]) -> list[Episode | None]:
        return [self._one(job) for job in jobs]

    def _one(self, job: Job) -> Episode | None:
        known = self.by_task.get(job.task_id, [])
        if len(known) < 2:
            return known[0] if known else None
        drawn = np.random.default_rng((job.seed, task_number(job.task_id), job.sample, CHOICE))
        return known[int(drawn.integers(len(known)))]


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
    """Demonstrations of a step's jobs: asked for, filtered, and written as the student would have said them."""

    source: Demonstrator
    keep: DemonstrationFilter = field(default_factory=DemonstrationFilter)
    writer: TextEpisodes | None = None
    """Writes responses as the student's ids; None: actions are replayed."""
    name: str = ""
    """Who demonstrates, for the line that says what was left out."""
    _said: bool = False

    def tasks(self, known: Sequence[str]) -> list[str]:
        """The tasks of `known` that the file demonstrates. Raises AgentError where somebody demonstrates live."""
        if not isinstance(self.source, RecordedDemonstrator):
            raise AgentError("--demonstrated-tasks plays the tasks of a trace file: name one with --demonstrations")
        return [task for task in known if task in self.source.by_task]

    def episodes(self, jobs: Sequence[Job]) -> list[tuple[Episode | None, str]]:
        """The demonstration of each job, and why it is left out or that it is `used`."""
        if not jobs:
            return []
        shown = self.source(jobs)
        found = [(one, "missing" if one is None else self.keep.reason(one)) for one in shown]
        counts = Counter(reason for _, reason in found)
        if self.name and not self._said and counts[USED] < len(found):
            # once: what later steps leave out is in their metrics
            self._said = True
            print(f"{self.name}, first step: {left_out(counts)}", file=sys.stderr)
        return found

    def plans(self, jobs: Sequence[Job]) -> list[DemonstrationPlan]:
        """A plan for each job; an empty one says why."""
        return [self._plan(episode, reason) for episode, reason in self.episodes(jobs)]

    def _plan(self, episode: Episode | None, reason: str) -> DemonstrationPlan:
        if episode is None or reason != USED:
            return DemonstrationPlan(reason=reason)
        if self.writer is None:
            return DemonstrationPlan(turns=tuple(turn.action for turn in episode.turns if turn.action is not None))
        turns = tuple(self.writer.shown(episode, turn) for turn in episode.turns)
        return DemonstrationPlan(turns=turns, sha256=episode.task.sha256)

    def begun(self, job: Job, plan: DemonstrationPlan, ratio: float, unit: Literal["turns", "tokens"] = "turns") -> Job:
        """`job` with the first `ratio` of the plan before it; of turns at least one, of tokens int(ratio L)."""
        if not plan.turns or ratio <= 0:
            return job
        if unit == "turns":
            return replace(job, demonstration=plan.turns[: max(1, int(len(plan.turns) * ratio))], sha256=plan.sha256)
        turns, begun = self._cut(plan.turns, ratio)
        return replace(job, demonstration=turns, begun=begun, sha256=plan.sha256)

    def _cut(self, turns: Sequence[str | Shown], ratio: float) -> tuple[tuple[Shown, ...], Ids]:
        """Whole turns, and the ids of the next one that are left of the first `ratio` of all responses' ids."""
        writer, shown = self.writer, [turn for turn in turns if isinstance(turn, Shown)]
        if writer is None:
            raise AgentError("a prefix in tokens needs the student's tokens; this student plays in text")
        left = int(ratio * sum(len(turn.ids) for turn in shown))
        whole: list[Shown] = []
        for turn in shown:
            if left < len(turn.ids):
                ids, over = begun_response(writer.renderer, turn, left, writer.channel.stop_text)
                # the action stands there: the policy would only have to end
                return ((*whole, replace(turn, ids=ids)), ()) if over else (tuple(whole), ids)
            whole.append(turn)
            left -= len(turn.ids)
        return tuple(whole), ()


def noted(episode: Episode, reason: str, *, exact: bool = False) -> Episode:
    """`episode` with what became of its demonstration in `meta`, for the metrics."""
    more = {"demonstration": reason, "demonstration_exact": exact}
    return replace(episode, meta={**episode.meta, **more})
