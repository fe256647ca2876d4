"""How the contract makes environments and plays them; what a subclass may override."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np

from turngym.envs.guard import ActionGuard, guard_of


class Played:
    """Makes and plays the environment `env_id`."""

    env_id: ClassVar[str]
    """Gymnasium id; with the module that registers it where nothing has imported that yet, `package:space/Name-v0`."""
    make_kwargs: ClassVar[Mapping[str, Any]] = {}
    tasks_checked: ClassVar[int] = 3
    """How many tasks the tests play; they are spread over the environment's list."""
    expert_turns: ClassVar[int] = 200
    """Turns within which the expert must win."""

    # --- what a subclass may override

    def make(self, **overrides: Any) -> gym.Env[str, str]:
        """One environment, as `gym.make` gives it."""
        return gym.make(self.env_id, **{"max_turns": None, **self.make_kwargs, **overrides})

    def choose(self, guard: ActionGuard, rng: np.random.Generator) -> str:
        """An action that may be played now: a random admissible one, else the expert's, else an example."""
        admissible = guard.admissible()
        if admissible:
            return admissible[int(rng.integers(len(admissible)))]
        return guard.expert_action() or guard.tool.examples[0]

    # --- helpers

    def guard(self, **overrides: Any) -> ActionGuard:
        return guard_of(self.make(**overrides))

    def some_tasks(self, guard: ActionGuard) -> list[str]:
        ids = guard.task_ids()
        places = np.linspace(0, len(ids) - 1, min(self.tasks_checked, len(ids))).astype(int)
        return [ids[int(place)] for place in places]

    def play(self, guard: ActionGuard, seed: int, turns: int) -> list[Any]:
        """What `turns` chosen actions bring, resets included where an episode ends."""
        rng = np.random.default_rng(seed)
        seen: list[Any] = []
        for _ in range(turns):
            step = guard.step(self.choose(guard, rng))
            seen.append(step)
            if step[2] or step[3]:
                seen.append(guard.reset())
        return seen
