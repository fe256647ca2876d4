"""Jobs on generated ALFWorld houses, for rollouts in several processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from turngym.agents.playing.env_maker import EnvSpec
from turngym.agents.playing.rollout import Job
from turngym.agents.playing.scripted import ExpertAgent
from turngym.core.episode import Episode

SPEC = EnvSpec("turngym/ALFWorld-v0", {"split": "generated"})
EXPERT = ExpertAgent(noise=0.4)


@cache
def jobs(count: int = 10) -> list[Job]:
    env: Any = SPEC()
    ids = env.unwrapped.task_ids()
    env.close()
    return [Job(task_id=ids[n % 4], sample=n // 4, group=n % 4, seed=3) for n in range(count)]


def untimed(episodes: Sequence[Episode]) -> list[Episode]:
    return [replace(episode, timings={}) for episode in episodes]
