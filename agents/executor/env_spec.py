"""An environment by name: what can be sent to another process, which makes it there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym

from turngym.envs.registration import require_env


@dataclass(frozen=True, slots=True)
class EnvSpec:
    """Makes an environment when called, without Gymnasium's slow per-step checker.

    `env_id` may name the module that registers it (`my_package.envs:my/Env-v0`); ids under `turngym/` need none.
    """

    env_id: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self) -> gym.Env[str, str]:
        return gym.make(self.env_id, disable_env_checker=True, **self.kwargs)

    def check(self) -> None:
        """Raises TurngymError for a module that cannot be imported, or an id that is not registered then."""
        require_env(self.env_id)
