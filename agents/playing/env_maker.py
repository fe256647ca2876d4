"""How rollouts open an environment by its name and options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import gymnasium as gym

from turngym.agents.playing.timed_calls import STEP_TIMEOUT, lent
from turngym.core.errors import TurngymError
from turngym.core.numbers import Count
from turngym.core.redaction import brief
from turngym.core.spec import Spec
from turngym.core.strict_json import json_object
from turngym.envs.base import TextEnv
from turngym.envs.guard import guard_of
from turngym.envs.reading import Reading
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


class EnvOptions(Spec):
    """Which environment is played."""

    env: str = "turngym/ALFWorld-v0"
    """Gymnasium id; `package:namespace/Name-v0` imports `package` first, which registers it."""
    split: str | None = None
    """Split of the environment; by default the environment's own default."""
    data: str | None = None
    """Folder of the data; by default where the environment looks for it (for ALFWorld: $ALFWORLD_DATA)."""
    max_turns: Count | None = None
    """Turns before the episode is cut; by default the environment's own limit."""
    on_invalid: Literal["reject", "penalize", "noop", "terminate"] | None = None
    """What an invalid action does; by default: reject."""
    show_admissible: Literal["on", "off"] | None = None
    """Whether every observation ends with the list of admissible actions; by default not."""
    reading: Reading | None = None
    """How responses are read: `strict` as the channel says (default), `folded` whatever the letter case, `lenient` in
    any form that holds a possible action (a bare line, `Action: ...`, a fence). It is part of the result's identity."""
    env_kwargs: str = "{}"
    """Further arguments for gym.make as JSON, for example '{"engine": "textworld"}'."""

    def kwargs(self) -> dict[str, Any]:
        """Arguments for gym.make: only what was asked for."""
        named = {name: getattr(self, name) for name in ("split", "data", "max_turns", "on_invalid", "reading")}
        if self.show_admissible is not None:
            named["show_admissible"] = self.show_admissible == "on"
        return env_arguments(json_object("--env-kwargs", self.env_kwargs), named)


def env_arguments(env_kwargs: Mapping[str, Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of gym.make: `env_kwargs` and those that have settings of their own (`named`; None: not given).

    Raises TurngymError for one that is in both, and for a channel: it is the agent's, who is told how to write.
    """
    if "channel" in env_kwargs:
        said = f"channel is {brief(env_kwargs['channel'], 80)} among the environment's arguments"
        raise TurngymError(f"{said}; valid: as the agent's own setting, --channel or channel=")
    given = {name: value for name, value in named.items() if value is not None}
    for name in given:
        if name in env_kwargs:
            both = f"{name} is {brief(given[name], 80)}, and env_kwargs say {brief(env_kwargs[name], 80)}"
            raise TurngymError(f"{both}: give one of them")
    return {**env_kwargs, **given}


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
