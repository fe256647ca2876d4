"""ATOD: on-policy distillation annealed into reinforcement learning, with turns weighted by what they can teach.

Read next: trainers/contrib/grpo_opd.py, trainers/group_advantage.py, trainers/losses.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from turngym.core import NotNegative, SettingsError, Share
from turngym.trainers import Algorithm, AlgorithmSpec, BuildContext, RolloutBatch, blend_alpha
from turngym.trainers.contrib.grpo_opd import CombinedAdvantage, CombinedConfig, combination

FloatN = NDArray[np.float64]


def turn_factors(batch: RolloutBatch, student_logp_N: FloatN, teacher_logp_N: FloatN, strength: float) -> FloatN:
    """How much more the turn of each token counts: float64 [N], constant in a turn, mean 1 over tokens.

    For each turn of each episode: D = max(0, mean_i (log p - log q)), the sampled reverse KL, and U = mean_i -log p,
    the student's sampled entropy, both nats per token. u = 1 + strength (D / max D + U / max U) / 2, divided by its
    mean over the batch's tokens, so that the loss keeps its scale. A maximum of 0 leaves its term out.
    Source: [atod]; docs/contrib_algorithms.md#turn-reweighting.
    """
    _, turn_N = np.unique(batch.response_N, return_inverse=True)
    count_t = np.bincount(turn_N)
    disagreement_t = np.maximum(np.bincount(turn_N, student_logp_N - teacher_logp_N) / count_t, 0.0)
    uncertainty_t = np.bincount(turn_N, -student_logp_N) / count_t
    utility_t = (_of_largest(disagreement_t) + _of_largest(uncertainty_t)) / 2.0
    factor_N: FloatN = (1.0 + strength * utility_t)[turn_N]
    return factor_N / factor_N.mean()


def _of_largest(values_t: FloatN) -> FloatN:
    largest = float(values_t.max())
    return values_t / largest if largest else values_t


@dataclass(frozen=True, slots=True, kw_only=True)
class Annealing:
    """w_reward = floor + (1 - floor) alpha_k and w_teacher = 1 - alpha_k; alpha_k runs from 0 to 1 over [start, end].

    Source: [atod]; docs/contrib_algorithms.md#annealed-combination.
    """

    total: int
    """Steps of the run, K."""
    start: float = 0.0
    """Share of training at which the reward begins to take over."""
    end: float = 1.0
    """Share of training at which the teacher has no say any more."""
    floor: float = 0.0
    """Weight of the reward before that."""

    def __call__(self, step: int) -> tuple[float, float]:
        """(w_reward, w_teacher) at `step` (1-based), both in [0, 1]."""
        alpha = blend_alpha(step, self.total, self.start, self.end)
        return self.floor + (1.0 - self.floor) * alpha, 1.0 - alpha


class AtodConfig(CombinedConfig):
    """Distillation annealed into reinforcement learning, turn by turn."""

    start: Share = 0.0
    """Share of training with the teacher alone. Then the reward begins to take over."""
    end: Share = 1.0
    """Share of training until the reward is alone. The teacher then has no say any more."""
    floor: Share = 0.0
    """Weight of the reward before it takes over."""
    strength: NotNegative = 1.0
    """How much more a turn of most disagreement and uncertainty counts than one of none; 0: turns count alike."""

    def __post_init__(self) -> None:
        if self.start > self.end:
            raise SettingsError(f"start is {self.start} and end {self.end}; valid: start <= end")


def build(config: AtodConfig, context: BuildContext) -> Algorithm:
    """Clipped policy gradient on an advantage that is the teacher's at first and the reward's at last.

    A_i = w_reward A^reward_j + w_teacher u_t (log q - log p), w_teacher = 1 - alpha_k, w_reward = floor + (1 - floor)
    alpha_k, alpha_k = clip((k / K - start) / (end - start), 0, 1); u_t grows with the turn's disagreement (sampled
    reverse KL) and the student's uncertainty there (sampled entropy), with mean 1.
    Source: [atod]; docs/contrib_algorithms.md#atod.
    Differs from the paper: only its abstract could be had. That distillation dominates at first and reinforcement is
    strengthened, and that turns are softly weighted by disagreement and uncertainty, is the paper's; the linear
    schedule, the formula of the weights, whose uncertainty it is and all defaults are our reading.
    """
    signal = CombinedAdvantage(
        reward=config.reward,
        scale=config.scale,
        annealing=Annealing(total=context.run.steps, start=config.start, end=config.end, floor=config.floor),
        # on the teacher's part alone: the reward's advantage is the same for all of an episode
        factor=partial(turn_factors, strength=config.strength),
    )
    return combination(config, context, name="atod", signal=signal, to_the_end=True)


ALGORITHM = AlgorithmSpec(
    name="atod", config=AtodConfig, build=build, uses=frozenset({"teacher", "reward", "surrogate"})
)
