"""An environment by id and arguments: picklable, so that another process can make it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym

import turngym.envs  # noqa: F401  (registers the ids)
from turngym.envs.core import TurngymError
from turngym.envs.suggest import did_you_mean


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
        module, colon, name = self.env_id.rpartition(":")
        if colon:
            try:
                importlib.import_module(module)
            except ImportError as error:
                raise TurngymError(f"environment {self.env_id!r}: cannot import {module!r} ({error})") from error
        if name not in gym.registry:
            namespace = name.rpartition("/")[0]
            known = [other for other in gym.registry if other.startswith(("turngym/", f"{namespace or 'turngym'}/"))]
            raise TurngymError(
                f"unknown environment {self.env_id!r}; known: {', '.join(known)}.{did_you_mean(name, known)} An "
                "environment of another package is named with the module that registers it: package:namespace/Name-v0"
            )
