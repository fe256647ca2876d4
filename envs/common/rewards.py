"""A verifiable reward: a function of the whole episode, by name, in the place of the environment's return."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real

import numpy as np

from turngym.envs.common.plugins import PluginError, find
from turngym.envs.core import TurngymError
from turngym.envs.episode import Episode

REWARDS = "turngym.rewards"
"""Entry points of reward functions that other packages bring."""

RewardFunction = Callable[[Episode], float]
"""What an episode is worth: a finite number, made of the episode alone."""


class RewardError(TurngymError):
    """A reward function that fails, or whose answer is no finite number."""


@dataclass(frozen=True, slots=True)
class NamedReward:
    """A reward function with the name under which it was found; every answer is checked."""

    name: str
    function: RewardFunction

    def __call__(self, episode: Episode) -> float:
        """What `episode` is worth. Raises RewardError that names the function, the episode and what it answered."""
        where = f"--reward {self.name}: episode {episode.task.task_id} sample {episode.sample}"
        try:
            value = self.function(episode)
        except Exception as error:
            raise RewardError(f"{where}: {type(error).__name__}: {error}") from error
        # NumPy's numbers are Real too; a tensor or a string is a mistake, not a number
        if not isinstance(value, Real | np.bool_) or not math.isfinite(float(value)):
            raise RewardError(f"{where}: the answer is {value!r}; valid: a finite number")
        return float(value)


def find_reward(name: str) -> NamedReward:
    """The reward function called `name`: `package.module:function`, or an entry point of `turngym.rewards`.

    Raises PluginError where there is none of that name, or it cannot be called.
    """
    function = find(REWARDS, name, {})
    if not callable(function):
        raise PluginError(f"reward {name!r} is {function!r}; valid: a function of an episode")
    return NamedReward(name, function)
