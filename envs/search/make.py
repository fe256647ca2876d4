"""Entry points of `gym.make` and `gym.make_vec`."""

from __future__ import annotations

from typing import Any

from turngym.envs.channels import Channel
from turngym.envs.guard import ActionGuard, OnInvalid
from turngym.envs.search.env import SearchEnv
from turngym.envs.vector import TextVectorEnv, vector_of


def make(
    *,
    max_turns: int | None = 50,
    max_searches: int | None = None,
    on_invalid: OnInvalid = "noop",
    channel: Channel | str | None = None,
    penalty: float = -0.1,
    list_admissible: bool = True,
    **options: Any,
) -> ActionGuard:
    """`gym.make("turngym/Search-v0", ...)`: the guard's settings, and those of `SearchEnv`.

    Of `max_turns` turns the last cannot search (`max_searches` is one less unless it is given), which is Search-R1's
    "max_turns" plus its final generation. Invalid actions get the published text by default (`on_invalid="noop"`).
    """
    if max_searches is None and max_turns is not None:
        max_searches = max(max_turns - 1, 0)
    return ActionGuard(
        SearchEnv(max_searches=max_searches, **options),
        on_invalid=on_invalid,
        channel=channel,
        max_turns=max_turns,
        penalty=penalty,
        list_admissible=list_admissible,
    )


def make_vec(num_envs: int = 1, **options: Any) -> TextVectorEnv:
    """`gym.make_vec("turngym/Search-v0", num_envs, ...)`."""
    return vector_of(make, num_envs, **options)
