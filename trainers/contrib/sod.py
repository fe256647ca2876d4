"""SOD: the reward says whether, the teacher says which token, and less so in turns where it has lost the thread.

Read next: trainers/contrib/grpo_opd.py, trainers/group_advantage.py, trainers/losses.py.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray

from turngym.core import NotNegative, Positive
from turngym.trainers import Algorithm, AlgorithmSpec, BuildContext, RolloutBatch
from turngym.trainers.contrib.grpo_opd import CombinedAdvantage, CombinedConfig, combination

FloatN = NDArray[np.float64]
DISTANCE_EPS = 1e-6
"""Added to both distances of a ratio, nats: a turn of no distance has a weight all the same."""


def step_weights(batch: RolloutBatch, student_logp_N: FloatN, teacher_logp_N: FloatN, delta: float) -> FloatN:
    """How much the teacher's log-ratio counts in the turn of each token: float64 [N], constant in a turn.

    d_k = mean_i |log p - log q| over turn k, nats per token; w_k = min((d_1 + 1e-6) / (d_k + 1e-6), 1 + delta), so that
    w_1 = 1. The first turn is the episode's first that has tokens to train on.
    Source: [sod]; docs/contrib_algorithms.md#distance-weights.
    """
    # response_N rises from turn to turn and from episode to episode: so do the numbers of its turns
    _, first_t, turn_N = np.unique(batch.response_N, return_index=True, return_inverse=True)
    distance_t = np.bincount(turn_N, np.abs(student_logp_N - teacher_logp_N)) / np.bincount(turn_N) + DISTANCE_EPS
    _, opening_e, episode_t = np.unique(batch.episode_N[first_t], return_index=True, return_inverse=True)
    weight_t: FloatN = np.minimum(distance_t[opening_e][episode_t] / distance_t, 1.0 + delta)
    return weight_t[turn_N]


class SodConfig(CombinedConfig):
    """A reward's group-relative advantage plus the teacher's log-ratio, weaker in turns where the two have parted."""

    coef: Positive = 1.0
    """Weight of the teacher's log-ratio. The ratio is log q - log p of the sampled token."""
    delta: NotNegative = 0.2
    """How much more than the first turn a later one may count. With 0 no turn counts more than the first."""


def build(config: SodConfig, context: BuildContext) -> Algorithm:
    """Clipped policy gradient on the reward's advantage plus the teacher's log-ratio, weighted turn by turn.

    A_i = (r_j - mean_g) / (std_g + 1e-6) + coef w_k (log q - log p), w_k = min(d_1 / d_k, 1 + delta), d_k the mean
    |log p - log q| of turn k; l_i = max(-A r_i, -A clip(r_i, 1 - eps_low, 1 + eps_high)), r_i the probability ratio to
    the behavior policy. p is the student before the update.
    Source: [sod]; docs/contrib_algorithms.md#sod.
    Differs from the paper: groups of 8 where its script has 16; no penalty for long responses in the reward. A turn is
    a response, as in its code a run of tokens that are not the tool's; a teacher's or an expert's turn before the
    first of the student's is none.
    """
    signal = CombinedAdvantage(
        reward=config.reward,
        scale=config.scale,
        w_teacher=config.coef,
        factor=partial(step_weights, delta=config.delta),
    )
    return combination(config, context, name="sod", signal=signal)


ALGORITHM = AlgorithmSpec(name="sod", config=SodConfig, build=build, uses=frozenset({"teacher", "reward", "surrogate"}))
