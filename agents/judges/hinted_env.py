"""Observations with an expert's hint in them: how a model learns to read the hints that it is later taught by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.utils import RecordConstructorArgs

from turngym.agents.agent import AgentError, task_number
from turngym.agents.judges.expert import expert_hint
from turngym.agents.judges.hint_prompts import HINT_HEAD
from turngym.agents.scripted import MakeExpert, PrivilegedExpert
from turngym.envs.core import Verdict
from turngym.envs.guard import guard_of

HINT_STREAM = 4


@dataclass(frozen=True, slots=True)
class HintedEnv:
    """Makes hinted environments, here or in another process."""

    make_env: Callable[[], Any]
    share: float
    expert: MakeExpert = PrivilegedExpert

    def __call__(self) -> HintedObservations:
        return HintedObservations(self.make_env(), self.share, self.expert)


class HintedObservations(gym.Wrapper[str, str, str, str], RecordConstructorArgs):
    """Appends what `expert` would do next to a `share` of the observations, drawn turn by turn.

    The expert should be the one who demonstrates: hints that name other actions than those that are imitated teach to
    ignore hints. Which turns are hinted follows from the reset's seed, the task and the turn. An observation for which
    the expert knows nothing stays as it is.
    """

    def __init__(self, env: gym.Env[str, str], share: float, expert: MakeExpert = PrivilegedExpert) -> None:
        RecordConstructorArgs.__init__(self, share=share, expert=expert)
        gym.Wrapper.__init__(self, env)
        if not 0.0 <= share <= 1.0:
            raise AgentError(f"the share of hinted observations is {share}; valid: 0 to 1")
        self._guard = guard_of(env)
        self._share = share
        self._make_expert = expert
        self._expert: Any = None
        self._seed, self._turn = 0, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        self._seed, self._turn = seed or 0, 0
        self._expert = self._make_expert(self._guard)
        return self._hinted(observation), info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._turn += 1
        played = self._guard.read(action).action
        if played is not None and Verdict(info["verdict"]).valid:
            self._expert.observe(self._guard.base.canonical(played))
        over = terminated or truncated
        return (observation if over else self._hinted(observation)), float(reward), terminated, truncated, info

    def _hinted(self, observation: str) -> str:
        number = task_number(self._guard.task.task_id)
        if np.random.default_rng((self._seed, number, self._turn, HINT_STREAM)).random() >= self._share:
            return observation
        action = self._expert.act()
        if action is None:
            return observation
        return observation + HINT_HEAD + expert_hint(self._guard.base.canonical(action))
