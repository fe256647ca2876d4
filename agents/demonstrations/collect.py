"""A rollout source for imitation: somebody demonstrates the tasks of a step, and the student learns what was said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from turngym.agents.collect import SharedEnv, step_jobs
from turngym.agents.demonstrations.filters import USED
from turngym.agents.demonstrations.plans import Demonstrations, noted
from turngym.agents.rollout import Job
from turngym.envs.core import Task, TurngymError
from turngym.envs.episode import Episode, Turn
from turngym.envs.panels import assert_disjoint
from turngym.envs.protocols import CollectRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class DemonstrationCollect:
    """Implements `Collect`: demonstrations of a step's tasks, written as the student's ids, origin `demonstration`.

    What a filter leaves out stays in the step's numbers, and no turn of it is trained on. Raises TurngymError where a
    step has no demonstration at all.
    """

    demonstrations: Demonstrations
    task_ids: Sequence[str]
    seed: int = 0
    held_out: Sequence[Task] = ()
    shared: SharedEnv | None = None

    def __call__(self, request: CollectRequest) -> list[Episode]:
        jobs = request.own(step_jobs(self.task_ids, self.seed, request))
        found = self.demonstrations.episodes(jobs)
        episodes = [
            self._written(job, episode, reason)
            for job, (episode, reason) in zip(jobs, found, strict=True)
            if episode is not None
        ]
        assert_disjoint([episode.task for episode in episodes], self.held_out)
        if not any(episode.meta["demonstration"] == USED for episode in episodes):
            raise TurngymError(
                f"step {request.step}: none of its {len(jobs)} tasks has a demonstration that counts; filter less "
                "(--demonstration-success, --demonstration-reward), or name who knows more of the tasks"
            )
        return episodes

    def _written(self, job: Job, episode: Episode, reason: str) -> Episode:
        named = replace(episode, seed=job.seed, sample=job.sample, group=job.group)
        if reason != USED or self.demonstrations.writer is None:
            turns = tuple(replace(turn, excluded=f"demonstration: {reason}") for turn in named.turns)
            return noted(replace(named, turns=turns), reason)
        plan = [self.demonstrations.writer.shown(episode, turn).exact for turn in episode.turns]
        written = self.demonstrations.writer.rewrite(named)
        turns = tuple(_shown(turn) for turn in written.turns)
        return noted(replace(written, turns=turns), reason, exact=all(plan))


def _shown(turn: Turn) -> Turn:
    """The turn as a demonstrator's; noise stays noise."""
    return turn if turn.origin == "noise" else replace(turn, origin="demonstration")
