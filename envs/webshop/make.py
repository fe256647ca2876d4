"""Entry points of `gym.make` and `gym.make_vec`."""

from __future__ import annotations

from typing import Any

from turngym.envs.channels import Channel
from turngym.envs.guard import ActionGuard, OnInvalid
from turngym.envs.vector import TextVectorEnv, vector_of
from turngym.envs.webshop.env import WebShopEnv


def make(
    *,
    max_turns: int | None = 50,
    on_invalid: OnInvalid = "reject",
    channel: Channel | str | None = None,
    penalty: float = -0.1,
    list_admissible: bool = True,
    **options: Any,
) -> ActionGuard:
    """`gym.make("turngym/WebShop-v0", ...)`: the guard's settings, and those of `WebShopEnv`."""
    return ActionGuard(
        WebShopEnv(**options),
        on_invalid=on_invalid,
        channel=channel,
        max_turns=max_turns,
        penalty=penalty,
        list_admissible=list_admissible,
    )


def make_vec(num_envs: int = 1, **options: Any) -> TextVectorEnv:
    """`gym.make_vec("turngym/WebShop-v0", num_envs, ...)`."""
    return vector_of(make, num_envs, **options)
