"""How rollouts open an environment by its name and options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym

from turngym.agents.playing.timed_calls import STEP_TIMEOUT, lent
from turngym.envs.base import TextEnv
from turngym.envs.guard import guard_of
from turngym.envs.registration import make, registered_class, require_env


@dataclass(frozen=True, slots=True)
class EnvSpec:
    """Makes an environment when called, without Gymnasium's slow per-step checker. Can be sent to other processes.

    `env_id` may name the module that registers it (`my_package.envs:my/Env-v0`); ids under `turngym/` need none.
    """

    env_id: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self) -> gym.Env[str, str]:
        return make(self.env_id, self.kwargs)

    def check(self) -> None:
        """Raises TurngymError if the module cannot be imported or the id is not registered."""
        require_env(self.env_id)


def env_maker(env_id: str, /, **kwargs: Any) -> EnvSpec:
    """The `EnvSpec` of an id that is registered. Raises TurngymError for another id."""
    spec = EnvSpec(env_id, kwargs)
    spec.check()
    return spec


def probe(env_id: str, kwargs: Mapping[str, Any], step_timeout: float = STEP_TIMEOUT) -> TextEnv:
    """An environment that is already closed, to read its tool and players from."""
    with lent(env_maker(env_id, **kwargs), step_timeout) as env:
        return guard_of(env).base


def env_class(env_id: str) -> type[TextEnv]:
    """The class of a registered environment; it is imported, not made. Raises TurngymError for an unknown id."""
    require_env(env_id)
    return registered_class(env_id)
