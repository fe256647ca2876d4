"""Where demonstrations come from: an agent that plays the tasks of a step now, or episodes that were recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from turngym.agents.agent import Agent, task_number
from turngym.agents.demonstrations.filters import USED, DemonstrationFilter
from turngym.agents.rollout import SLOTS, Job, MakeEnv, PlayJobs, rollout
from turngym.envs.episode import Episode

APART = 1 << 20
"""Added to the sample number of a demonstration, so that a model that demonstrates and a student draw apart."""
CHOICE = 3
"""The stream that chooses among recorded demonstrations of one task."""


class Demonstrator(Protocol):
    """Gives a demonstration for each job, as an episode of the job's task."""

    def __call__(self, jobs: Sequence[Job]) -> list[Episode | None]:
        """None where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveDemonstrator:
    """Implements `Demonstrator`: an agent plays the jobs' tasks from their own start."""

    agent: Agent
    make_env: MakeEnv
    """In the channel that the agent writes."""
    slots: int = SLOTS
    system: str | None = None
    apart: int = 0
    """Added to the sample numbers."""
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
