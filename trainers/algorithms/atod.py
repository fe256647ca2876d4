"""ATOD: on-policy distillation annealed into reinforcement learning, with turns weighted by what they can teach.

Read next: trainers/algorithms/grpo_opd.py, trainers/targets.py, trainers/losses.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from turngym.envs.core.episode import Episode
from turngym.trainers.algorithm import Algorithm, AlgorithmSpec, FixedDepth, Scorers, Targets
from turngym.trainers.algorithms.grpo_opd import Annealing, combined_advantage
from turngym.trainers.batch import RolloutBatch
from turngym.trainers.config import ConfigError, RunConfig, fingerprint
from turngym.trainers.losses import PolicyGradient
from turngym.trainers.targets import ComparableGroups, Reward, grpo_advantage, label_logprobs, rewards
from turngym.trainers.token_weights import WEIGHTS

FloatN = NDArray[np.float64]


def turn_factors(batch: RolloutBatch, student_logp_N: FloatN, teacher_logp_N: FloatN, strength: float) -> FloatN:
    """How much more the turn of each token counts: float64 [N], constant in a turn, mean 1 over tokens.

    For each turn of each episode: D = max(0, mean_i (log p - log q)), the sampled reverse KL, and U = mean_i -log p,
    the student's sampled entropy, both nats per token. u = 1 + strength (D / max D + U / max U) / 2, divided by its
    mean over the batch's tokens, so that the loss keeps its scale. A maximum of 0 leaves its term out.
    Source: [atod]; docs/algorithms.md#turn-reweighting.
    """
    keys_N = batch.episode_N * (int(batch.turn_N.max()) + 1) + batch.turn_N
    _, turn_N = np.unique(keys_N, return_inverse=True)
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
class AnnealedAdvantage:
    """A_i = w_reward A^reward_i + w_teacher u_i (log q - log p), the weights those of the step, u from `turn_factors`.

    The turn's factor is on the teacher's part alone: the reward's is the same for all of an episode.
    The student is taken before the update. Source: [atod]; docs/algorithms.md#annealed-combination.
    """

    annealing: Annealing
    strength: float = 1.0
    reward: Reward = "return"
    scale: Literal["std", "none"] = "std"

    def __call__(self, batch: RolloutBatch, episodes: Sequence[Episode], scorers: Scorers) -> Targets:
        reward_E = rewards(batch, episodes, self.reward)
        own_N = grpo_advantage(reward_E, batch.group_E, scale=self.scale)[batch.episode_N].astype(np.float32)
        teacher_logp_N = label_logprobs(scorers.teacher, batch, "teacher")
        theirs_N, mine_N = teacher_logp_N.astype(np.float64), label_logprobs(scorers.student, batch, "student")
        factor_N = turn_factors(batch, mine_N.astype(np.float64), theirs_N, self.strength)
        ratio_N = (factor_N * (theirs_N - mine_N)).astype(np.float32)
        w_reward, w_teacher = self.annealing.weights(scorers.step)
        return Targets(
            advantage_N=combined_advantage(own_N, ratio_N, w_reward=w_reward, w_teacher=w_teacher),
            label_logp_N=teacher_logp_N,
            reward=reward_E,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AtodConfig:
    """Distillation annealed into reinforcement learning, turn by turn."""

    n: int = 8
    """Episodes per task: one group."""
    start: float = 0.0
    """Share of training at which the reward begins to take over from the teacher."""
    end: float = 1.0
    """Share of training at which the teacher has no say any more."""
    floor: float = 0.0
    """Weight of the reward before it takes over."""
    strength: float = 1.0
    """How much more a turn of most disagreement and uncertainty counts than one of none; 0: turns count alike."""
    reward: Reward = "return"
    """What an episode is worth: its return, the environment's score, or 1 for success."""
    scale: Literal["std", "none"] = "std"
    """Divide the group-relative advantage by the group's standard deviation, or not."""
    clip: tuple[float, float] = (0.2, 0.28)
    """Lower and upper clip of the surrogate."""
    weight: Literal["token_mean", "trajectory", "turn_mean"] = "token_mean"
    """Whether every token, every episode or every response counts the same, before turns are weighted."""

    def __post_init__(self) -> None:
        if self.n < 2:
            raise ConfigError(f"n is {self.n}; a group needs at least 2 episodes to compare")
        if not 0.0 <= self.start <= self.end <= 1.0:
            raise ConfigError(f"start is {self.start} and end {self.end}; valid: 0 <= start <= end <= 1")
        if not 0.0 <= self.floor <= 1.0 or self.strength < 0:
            raise ConfigError(
                f"floor is {self.floor} and strength {self.strength}; valid: floor from 0 to 1, strength at least 0"
            )


def build(config: AtodConfig, run: RunConfig) -> Algorithm:
    """Clipped policy gradient on an advantage that is the teacher's at first and the reward's at last.

    A_i = w_reward A^reward_j + w_teacher u_t (log q - log p), w_teacher = 1 - alpha_k, w_reward = floor + (1 - floor)
    alpha_k, alpha_k = clip((k / K - start) / (end - start), 0, 1); u_t grows with the turn's disagreement (sampled
    reverse KL) and the student's uncertainty there (sampled entropy), with mean 1.
    Source: [atod]; docs/algorithms.md#atod.
    Differs from the paper: only its abstract could be had. That distillation dominates at first and reinforcement is
    strengthened, and that turns are softly weighted by disagreement and uncertainty, is the paper's; the linear
    schedule, the formula of the weights, whose uncertainty it is and all defaults are our reading.
    """
    low, high = config.clip
    annealing = Annealing(total=run.steps, start=config.start, end=config.end, floor=config.floor)
    return Algorithm(
        name="atod",
        depth=FixedDepth(h_max=run.full_depth),
        target_fn=AnnealedAdvantage(
            annealing=annealing, strength=config.strength, reward=config.reward, scale=config.scale
        ),
        weight=WEIGHTS[config.weight],
        token_loss=PolicyGradient(eps_low=low, eps_high=high),
        group=config.n,
        select=ComparableGroups(spread=False),
        to_the_end=True,
        settings=fingerprint(config),
    )


ALGORITHM = AlgorithmSpec(
    name="atod",
    config=AtodConfig,
    build=lambda config, given: build(config, given.run),
    uses=frozenset({"teacher", "reward"}),
)
