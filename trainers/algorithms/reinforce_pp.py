"""REINFORCE++: PPO without a critic, whose advantages are normalized over the whole batch.

Read next: trainers/returns.py, trainers/token_losses.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from turngym.core.episode import Episode
from turngym.core.numbers import Million, NotNegative
from turngym.core.spec import Spec, Unread
from turngym.trainers.algorithm import Algorithm, FixedDepth, Scorers, Targets
from turngym.trainers.algorithm_spec import AlgorithmSpec, BuildContext
from turngym.trainers.batch import RolloutBatch
from turngym.trainers.group_advantage import ComparableGroups, grpo_advantage
from turngym.trainers.returns import at_last_token, rewards_to_go, whiten
from turngym.trainers.rewards import Reward, rewards
from turngym.trainers.run_config import near_initial, tables_of
from turngym.trainers.targets import initial_kl
from turngym.trainers.token_losses import PolicyGradient
from turngym.trainers.token_weights import WEIGHTS


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchAdvantage:
    """The reward of an episode, less the KL to the initial policy from a token on, whitened over the batch's tokens.

    A'_i = R_j - kl_coef sum_{i' >= i} (log p - log pi_0), the student before the update; with `baseline` R_j less the
    mean of its group. A_i = (A'_i - mean A') / std A', unbiased, over all tokens of the batch.
    Source: [reinforce-pp]; docs/algorithms.md#batch-normalized-advantage.
    """

    reward: Reward = "return"
    baseline: bool = False
    kl_coef: float = 0.0

    def __call__(self, batch: RolloutBatch, episodes: Sequence[Episode], scorers: Scorers) -> Targets:
        reward_E = rewards(batch, episodes, self.reward)
        own_E = grpo_advantage(reward_E, batch.group_E, scale="none") if self.baseline else reward_E
        token_N = at_last_token(own_E, batch.episode_N)
        if self.kl_coef:
            token_N = token_N - self.kl_coef * initial_kl(batch, scorers)
        advantage_N = whiten(rewards_to_go(token_N, batch.episode_N))
        return Targets(advantage_N=advantage_N.astype(np.float32), reward=reward_E)


class ReinforcePpConfig(Spec):
    """REINFORCE++: PPO without a critic, whose advantages are normalized over the whole batch."""

    n: Million = 1
    """Episodes per task. Of several, each is compared with the mean of all (REINFORCE++ with baseline)."""
    reward: Reward = "return"
    """What an episode is worth. Its return, the environment's score, or 1 for success."""
    clip: tuple[NotNegative, NotNegative] = (0.2, 0.2)
    """Lower and upper clip of the surrogate."""
    kl_coef: NotNegative = 0.01
    """Weight of the KL to the initial policy. Each token's is subtracted from its reward; 0 needs no copy of the
    policy."""
    weight: Literal["token_mean", "trajectory", "turn_mean"] = "token_mean"
    """What counts the same. Every token, every episode or every response."""

    def unread(self) -> Unread:
        yield from near_initial(self.kl_coef)


def build(config: ReinforcePpConfig, context: BuildContext) -> Algorithm:
    """Clipped policy gradient on rewards that are normalized over the batch.

    A'_i = R_j - kl_coef sum_{i' >= i} (log p - log pi_0), with n above 1 R_j less the mean of its group; A is A' less
    its mean over its deviation, both over the batch's tokens; l_i = max(-A r_i, -A clip(r_i, 1 - eps_low, 1 +
    eps_high)), r_i the probability ratio to the behavior policy.
    Source: [reinforce-pp]; docs/algorithms.md#reinforce-pp.
    Differs from the paper: with a baseline the scripts of its published code have the KL in the loss (k2), here it is
    in the reward in either case. The deviation is the unbiased one, there the population's. With n above 1 a group of
    which failed episodes leave one is left out.
    """
    grouped = config.n > 1
    return Algorithm(
        name="reinforce++",
        depth=FixedDepth(h_max=context.run.full_depth),
        target_fn=BatchAdvantage(reward=config.reward, baseline=grouped, kl_coef=config.kl_coef),
        weight=WEIGHTS[config.weight],
        token_loss=PolicyGradient(clip=config.clip),
        group=config.n,
        select=ComparableGroups(spread=False) if grouped else None,
        needs_teacher=False,
        needs_reference=bool(config.kl_coef),
        settings=tables_of(config),
    )


ALGORITHM = AlgorithmSpec(
    name="reinforce++",
    config=ReinforcePpConfig,
    build=build,
    section="reinforce-pp",
    uses=frozenset({"reward", "reference", "surrogate"}),
)
