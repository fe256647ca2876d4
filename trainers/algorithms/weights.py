"""The token weights by the names that settings use; `token_weights` and `turnopd` compute them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from turngym.trainers.algorithm import Weight
from turngym.trainers.algorithms.turnopd import Blend
from turngym.trainers.token_weights import Static, TurnLevel, episode_mean, token_mean, trajectory_weights, turn_mean

WEIGHTS: Mapping[str, Weight] = MappingProxyType(
    {
        "trajectory": Static(trajectory_weights),
        "turn": TurnLevel(),
        "blend": Blend(),
        "token_mean": Static(token_mean),
        "episode_mean": Static(episode_mean),
        "turn_mean": Static(turn_mean),
    }
)
"""Each gives weights over a whole optimizer batch that sum to 1."""
