"""How much each supervised token counts: weights over a whole optimizer batch that sum to 1."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from turngym.trainers.algorithm import Weight, WeightArray
from turngym.trainers.batch import RolloutBatch


def token_mean(batch: RolloutBatch) -> WeightArray:
    """Every token counts the same: float64 [N], w_i = 1 / N. Long episodes count more."""
    return np.full(batch.tokens, 1.0 / batch.tokens)


def trajectory_weights(batch: RolloutBatch) -> WeightArray:
    """Every episode counts the same, and its tokens share alike: float64 [N], sum 1.

    w_i = 1 / (E * n_tok(episode of i)), E counting the episodes with at least one supervised token.
    Source: [turnopd] Algorithm 1, [grpo] eq. 3; docs/algorithms.md#trajectory-weights.
    """
    return _bucket_mean(batch.episode_N)


def turn_mean(batch: RolloutBatch) -> WeightArray:
    """Every response counts the same, and its tokens share alike: float64 [N], sum 1.

    w_i = 1 / (number of responses * n_tok(response of i)). Unlike `turn_weights` there is no bucket over episodes:
    a turn that more episodes reach counts more.
    """
    return _bucket_mean(batch.response_N)


def reliable_turns(batch: RolloutBatch, *, n_min: int = 8, min_share: float = 0.15) -> NDArray[np.bool_]:
    """Which turns enough episodes supervise: bool [T], T = last supervised turn + 1.

    n_t = episodes with at least one supervised token at turn t; reliable where n_t >= n_min,
    n_min = min(max(n_min, ceil(min_share * n_traj)), n_traj).
    Source: [turnopd] Table 7; docs/algorithms.md#turn-weights.
    """
    pairs = np.unique(np.stack([batch.turn_N, batch.episode_N]), axis=1)
    n_traj = len(np.unique(batch.episode_N))
    n_T = np.bincount(pairs[0])
    # 0.07 * 100 is 7.000000000000001 in binary; the share is meant in decimal
    share = math.ceil(min_share * n_traj - 1e-9)
    return n_T >= min(max(n_min, share), n_traj)


def turn_weights(batch: RolloutBatch, *, n_min: int = 8, min_share: float = 0.15) -> WeightArray:
    """Every reliable turn counts the same, pooled over episodes: float64 [N], sum 1.

    w_i = 1 / (T * n_tok(turn of i)) where the turn of i is one of the T reliable turns (`reliable_turns`), else 0.
    Source: [turnopd] Algorithm 1, Table 6; docs/algorithms.md#turn-weights.
    Differs from the paper: if no turn is reliable (demonstrations of different lengths come first, so that episodes
    supervise different turns) these are the trajectory weights.
    """
    reliable_N = reliable_turns(batch, n_min=n_min, min_share=min_share)[batch.turn_N]
    if not reliable_N.any():
        return trajectory_weights(batch)
    weight_N = np.zeros(batch.tokens)
    weight_N[reliable_N] = _bucket_mean(batch.turn_N[reliable_N])
    return weight_N


def blend_alpha(step: int, total: int, start: float = 0.0, end: float = 1.0) -> float:
    """How far training has moved from trajectory to turn weights, in [0, 1]; `step` is 1-based.

    alpha = clip((step / total - start) / (end - start), 0, 1); with end == start, 0 before it and 1 from it on.
    Source: [turnopd] Algorithm 1, Table 7; docs/algorithms.md#blended-weights.
    """
    progress = step / total
    if end == start:
        return 1.0 if progress >= start else 0.0
    return min(max((progress - start) / (end - start), 0.0), 1.0)


def blend_weights(batch: RolloutBatch, alpha: float, *, n_min: int = 8, min_share: float = 0.15) -> WeightArray:
    """Between trajectory and turn weights: float64 [N], sum 1 for every `alpha`.

    w = (1 - alpha) w_traj + alpha w_turn. A token of an unreliable turn has w_turn = 0, so it keeps
    (1 - alpha) w_traj: its trajectory share fades with alpha and is gone at alpha = 1. Both terms sum to 1.
    Source: [turnopd] Algorithm 1; docs/algorithms.md#blended-weights.
    """
    turn_N = turn_weights(batch, n_min=n_min, min_share=min_share)
    return (1.0 - alpha) * trajectory_weights(batch) + alpha * turn_N


def _bucket_mean(bucket_N: NDArray[np.int64]) -> WeightArray:
    """Buckets count the same and their members share alike: float64 [N], sum 1."""
    _, inverse, counts = np.unique(bucket_N, return_inverse=True, return_counts=True)
    # float64: the weights of 10^5 tokens are to sum to 1 to the last digits, however they are split later
    return 1.0 / (len(counts) * counts[inverse].astype(np.float64))


@dataclass(frozen=True, slots=True)
class Static:
    """A weighting that does not change during training: `weigh(batch)` float64 [N]."""

    to_the_end: ClassVar[bool] = False
    weigh: Callable[[RolloutBatch], WeightArray]

    def __call__(self, batch: RolloutBatch, *, step: int, total_steps: int) -> WeightArray:
        """Weights float64 [N]; the step does not matter."""
        return self.weigh(batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnLevel:
    """`turn_weights` from the first step (TurnOPD's hard turn-level ablation)."""

    to_the_end: ClassVar[bool] = False
    n_min: int = 8
    """A turn is reliable from this many episodes on."""
    min_share: float = 0.15
    """... or this share of the episodes, whichever is more."""

    def __call__(self, batch: RolloutBatch, *, step: int, total_steps: int) -> WeightArray:
        """Weights float64 [N]; the step does not matter."""
        return turn_weights(batch, n_min=self.n_min, min_share=self.min_share)

    def alpha(self, *, step: int, total_steps: int) -> float:
        """1: all of the weight is by turns."""
        return 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Blend:
    """`blend_weights` with alpha moving from 0 to 1 between two shares of training (TurnOPD's default: 0 and 1)."""

    to_the_end: ClassVar[bool] = True
    """Every step depends on how many there will be, so that a run cannot get another end."""
    start: float = 0.0
    """Share of training at which alpha leaves 0."""
    end: float = 1.0
    """Share of training at which alpha reaches 1."""
    turn: TurnLevel = field(default_factory=TurnLevel)

    def __call__(self, batch: RolloutBatch, *, step: int, total_steps: int) -> WeightArray:
        """Weights float64 [N] at `step` (1-based) of `total_steps`."""
        alpha = self.alpha(step=step, total_steps=total_steps)
        return blend_weights(batch, alpha, n_min=self.turn.n_min, min_share=self.turn.min_share)

    def alpha(self, *, step: int, total_steps: int) -> float:
        """Share of the turn weights at `step` (1-based)."""
        return blend_alpha(step, total_steps, self.start, self.end)


WEIGHTS: Mapping[str, Weight] = MappingProxyType(
    {
        "trajectory": Static(trajectory_weights),
        "turn": TurnLevel(),
        "blend": Blend(),
        "token_mean": Static(token_mean),
        "episode_mean": Static(trajectory_weights),  # the name that other libraries give it
        "turn_mean": Static(turn_mean),
    }
)
"""The weights by the names that settings use."""
