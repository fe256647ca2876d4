"""An environment by id and arguments: picklable, so that another process can make it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
from gymnasium.envs.registration import load_env_creator

from turngym.envs.core import TurngymError
from turngym.envs.registration import require_env
from turngym.envs.suggest import did_you_mean


@dataclass(frozen=True, slots=True)
class EnvSpec:
    """Makes an environment when called, without Gymnasium's slow per-step checker.

    `env_id` may name the module that registers it (`my_package.envs:my/Env-v0`); ids under `turngym/` need none.
    """

    env_id: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self) -> gym.Env[str, str]:
        try:
            return gym.make(self.env_id, disable_env_checker=True, **self.kwargs)
        except TypeError as error:
            known = _arguments(self.env_id)
            wrong = sorted(self.kwargs.keys() - known) if known else []
            if not wrong or f"'{wrong[0]}'" not in str(error):
                raise
            raise TurngymError(
                f"{self.env_id} takes no argument {wrong[0]!r}.{did_you_mean(wrong[0], known)} It takes: "
                f"{', '.join(sorted(known))}"
            ) from error

    def check(self) -> None:
        """Raises TurngymError for a module that cannot be imported, or an id that is not registered then."""
        require_env(self.env_id)


def _arguments(env_id: str) -> set[str]:
    """Arguments of the environment's class by name; empty where it takes any, or cannot be asked."""
    spec = gym.registry.get(env_id.rpartition(":")[2])
    named = None if spec is None else spec.kwargs.get("env_class", spec.entry_point)
    env_class = load_env_creator(named) if isinstance(named, str) else named
    if not isinstance(env_class, type):
        return set()
    found: set[str] = set()
    for base in env_class.__mro__[:-1]:
        if "__init__" not in vars(base):
            continue
        parameters = inspect.signature(vars(base)["__init__"]).parameters.values()
        found |= {one.name for one in parameters if one.kind in (one.KEYWORD_ONLY, one.POSITIONAL_OR_KEYWORD)}
        if not any(one.kind is one.VAR_KEYWORD for one in parameters):
            break
    return found - {"self"}
