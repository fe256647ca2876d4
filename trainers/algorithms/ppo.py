"""PPO: a clipped policy gradient on the environment's reward, against a critic that is learned beside the policy.

Read next: trainers/returns.py, trainers/critic.py, trainers/optimizer_step.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from turngym.core.episode import Episode
from turngym.core.numbers import NotNegative, Share
from turngym.core.spec import Spec, Unread
from turngym.trainers.algorithm import Algorithm, FixedDepth, Scorers, TargetFn, Targets
from turngym.trainers.algorithm_spec import AlgorithmSpec, BuildContext
from turngym.trainers.batch import RolloutBatch
from turngym.trainers.losses import kl_k3
from turngym.trainers.returns import against_critic, at_last_token
from turngym.trainers.rewards import Reward, rewards, turn_rewards
from turngym.trainers.run_config import CriticConfig, near_initial, tables_of
from turngym.trainers.targets import WithReference
from turngym.trainers.token_losses import PolicyGradient
from turngym.trainers.token_weights import WEIGHTS


def at_last_tokens(paid: Sequence[NDArray[np.float64]], batch: RolloutBatch) -> NDArray[np.float64]:
    """The rewards of turns, placed on their last tokens: float64 [N].

    A turn pays the last token that the policy had chosen by its end, in this turn or an earlier one. What was paid
    before the policy chose anything is left out.
    Source: docs/algorithms.md#paid-turns.

    Args:
        paid: for each episode of the batch, what each of its turns was paid [T].
        batch: what is trained on.
    """
    depth_E = np.array([len(paid_T) for paid_T in paid])
    episode_T = np.repeat(np.arange(len(paid)), depth_E)
    turn_T = np.arange(len(episode_T)) - np.repeat(np.cumsum(depth_E) - depth_E, depth_E)
    # tokens are in the order of episodes and turns: one number says which turn of which episode
    most = int(depth_E.max())
    order_N, order_T = batch.episode_N * most + batch.turn_N, episode_T * most + turn_T
    last_T = np.searchsorted(order_N, order_T, side="right") - 1
    # without a token of its own episode before it a turn finds the episode before, or -1: the last one of all
    own_T = (last_T >= 0) & (batch.episode_N[last_T] == episode_T)
    # the last token of all is that of its own turn, so that there are N
    return np.bincount(last_T[own_T], np.concatenate(paid)[own_T]).astype(np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticBaseline:
    """GAE of the environment's reward against the critic, whitened over the batch's tokens.

    The reward comes at an episode's last token, or turn by turn as it was paid (`at_last_tokens`).
    Source: [gae] eq. 16, [ppo] eq. 11; docs/algorithms.md#generalized-advantage-estimation.
    """

    reward: Reward = "return"
    paid: Literal["end", "turn"] = "end"
    gamma: float = 1.0
    lam: float = 0.95
    bootstrap: bool = False

    def __call__(self, batch: RolloutBatch, episodes: Sequence[Episode], scorers: Scorers) -> Targets:
        if self.paid == "turn":
            played = [episodes[source] for source in batch.source_E]
            reward_N = at_last_tokens([turn_rewards(episode, self.reward) for episode in played], batch)
        else:
            reward_N = at_last_token(rewards(batch, episodes, self.reward), batch.episode_N)
        return against_critic(
            reward_N,
            batch,
            episodes,
            scorers,
            gamma=self.gamma,
            lam=self.lam,
            bootstrap=self.bootstrap,
            whitening="unbiased",
        )


class PpoConfig(Spec):
    """PPO with a critic. Epochs and minibatches are `optimizer.ppo_epochs` and `minibatches`."""

    reward: Reward = "return"
    """What an episode is worth. Its return, the environment's score, or 1 for success."""
    paid: Literal["end", "turn"] = "end"
    """Where the reward comes. At the episode's last token, or turn by turn as the environment paid it (a score, a
    success and the run's own reward: at the last turn)."""
    gamma: Share = 1.0
    """Discount per token."""
    lam: Share = 0.95
    """Lambda of GAE. 0 trusts the critic alone, 1 the rewards."""
    bootstrap: bool = False
    """Go on with the critic's last value where a limit of turns, tokens or depth cut an episode. By default such an
    episode has failed, and nothing follows its last token."""
    clip: tuple[NotNegative, NotNegative] = (0.2, 0.2)
    """Lower and upper clip of the surrogate."""
    kl_coef: NotNegative = 0.0
    """Weight of the KL to the initial policy. It is k3; 0 needs no copy of the policy."""
    entropy_coef: NotNegative = 0.0
    """Weight of the entropy bonus."""
    weight: Literal["token_mean", "trajectory", "turn_mean"] = "token_mean"
    """What counts the same. Every token, every episode or every response."""
    critic: CriticConfig = CriticConfig()

    def unread(self) -> Unread:
        yield from near_initial(self.kl_coef)


def build(config: PpoConfig, context: BuildContext) -> Algorithm:
    """Clipped policy gradient on advantages that a critic estimates from the environment's reward.

    A = whitened GAE(gamma, lam) over supervised tokens; l_i = max(-A r_i, -A clip(r_i, 1 - eps_low, 1 + eps_high)) +
    kl_coef KL_i - entropy_coef H_i, r_i the probability ratio to the behavior policy. The critic has its own loss and
    optimizer.
    Source: [ppo] Algorithm 1, eq. 7, eq. 9; docs/algorithms.md#ppo.
    Differs from the paper: advantages are whitened, actions are tokens, and policy and critic share no weights (with
    `critic.kind` head the critic reads the policy's hidden states, which its gradient does not reach).
    """
    signal: TargetFn = CriticBaseline(
        reward=config.reward, paid=config.paid, gamma=config.gamma, lam=config.lam, bootstrap=config.bootstrap
    )
    return Algorithm(
        name="ppo",
        depth=FixedDepth(h_max=context.run.full_depth),
        target_fn=WithReference(target_fn=signal) if config.kl_coef else signal,
        weight=WEIGHTS[config.weight],
        token_loss=PolicyGradient(clip=config.clip, kl_coef=config.kl_coef, kl=kl_k3, entropy_coef=config.entropy_coef),
        needs_teacher=False,
        needs_reference=bool(config.kl_coef),
        critic=config.critic,
        entropy_gradient=bool(config.entropy_coef),
        settings=tables_of(config),
    )


ALGORITHM = AlgorithmSpec(
    name="ppo", config=PpoConfig, build=build, uses=frozenset({"reward", "reference", "surrogate"})
)
