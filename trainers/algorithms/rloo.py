"""RLOO: policy gradients whose baseline is the mean reward of the other attempts at the same task.

Read next: trainers/group_advantage.py, trainers/token_losses.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from turngym.core.episode import Episode
from turngym.core.numbers import Group, NotNegative
from turngym.core.spec import Spec, Unread
from turngym.trainers.algorithm import Algorithm, FixedDepth, Scorers, Targets
from turngym.trainers.algorithm_spec import AlgorithmSpec, BuildContext
from turngym.trainers.batch import RolloutBatch
from turngym.trainers.group_advantage import ComparableGroups, episode_kl
from turngym.trainers.rewards import Reward, rewards
from turngym.trainers.run_config import near_initial, tables_of
from turngym.trainers.token_losses import PolicyGradient
from turngym.trainers.token_weights import WEIGHTS


def leave_one_out(reward_E: NDArray[np.float64], group_E: NDArray[np.int64]) -> NDArray[np.float64]:
    """How much more an episode is worth than the mean of the others of its group: float64 [E], in units of reward.

    A_j = R_j - (sum_{i != j} R_i) / (n - 1), the sum over the n episodes of its group; 0 in a group of one.
    Source: [rloo]; docs/algorithms.md#leave-one-out-advantage.
    """
    _, index_E, count_g = np.unique(group_E, return_inverse=True, return_counts=True)
    count_E = count_g[index_E]
    sum_E = np.bincount(index_E, reward_E)[index_E]
    # the divisor only guards a group of one
    others_E = (sum_E - reward_E) / np.maximum(count_E - 1, 1)
    return np.where(count_E > 1, reward_E - others_E, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveOneOut:
    """`leave_one_out` of what each episode is worth, less `kl_coef` times its KL to the initial policy (`episode_kl`),
    on all of its tokens."""

    reward: Reward = "return"
    kl_coef: float = 0.0

    def __call__(self, batch: RolloutBatch, episodes: Sequence[Episode], scorers: Scorers) -> Targets:
        reward_E = rewards(batch, episodes, self.reward)
        if self.kl_coef:
            reward_E = reward_E - self.kl_coef * episode_kl(batch, scorers)
        advantage_E = leave_one_out(reward_E, batch.group_E)
        return Targets(advantage_N=advantage_E[batch.episode_N].astype(np.float32), reward=reward_E)


class RlooConfig(Spec):
    """REINFORCE with a leave-one-out baseline: each attempt is compared with the mean of the others."""

    n: Group = 4
    """Episodes per task. They are one group."""
    reward: Reward = "return"
    """What an episode is worth. Its return, the environment's score, or 1 for success."""
    clip: tuple[NotNegative, NotNegative] = (0.2, 0.2)
    """Lower and upper clip of the surrogate. It acts from a batch's second update on."""
    kl_coef: NotNegative = 0.0
    """Weight of the KL to the initial policy. It is subtracted from the reward; 0 needs no copy of the policy."""
    weight: Literal["token_mean", "trajectory", "turn_mean"] = "token_mean"
    """What counts the same. Every token (the log-probability of an episode is the sum over its tokens), every episode
    or every response."""

    def unread(self) -> Unread:
        yield from near_initial(self.kl_coef)


def build(config: RlooConfig, context: BuildContext) -> Algorithm:
    """Policy gradient on leave-one-out advantages.

    R_j = r_j - kl_coef sum_i (log p_i - log pi_0i); A_j = R_j - mean of the group's other R; l_i = max(-A r_i, -A
    clip(r_i, 1 - eps_low, 1 + eps_high)), r_i the probability ratio to the behavior policy. At a batch's first update
    r_i is 1, and the gradient is REINFORCE's, -A grad log p_i.
    Source: [rloo]; docs/algorithms.md#rloo.
    Differs from the paper: several updates per batch are possible, which the clip of each token's ratio bounds. The sum
    over tokens and episodes is divided by the number of tokens, not of episodes. No KL unless asked for. A group of
    which failed episodes leave one is left out.
    """
    return Algorithm(
        name="rloo",
        depth=FixedDepth(h_max=context.run.full_depth),
        target_fn=LeaveOneOut(reward=config.reward, kl_coef=config.kl_coef),
        weight=WEIGHTS[config.weight],
        token_loss=PolicyGradient(clip=config.clip),
        group=config.n,
        select=ComparableGroups(spread=False),
        needs_teacher=False,
        needs_reference=bool(config.kl_coef),
        settings=tables_of(config),
    )


ALGORITHM = AlgorithmSpec(
    name="rloo", config=RlooConfig, build=build, uses=frozenset({"reward", "reference", "surrogate"})
)
