"""GRPO and on-policy distillation in one advantage: the reward says whether, the teacher says which token.

Read next: trainers/targets.py, trainers/losses.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from turngym.envs.core.episode import Episode
from turngym.trainers.algorithm import (
    Algorithm,
    AlgorithmSpec,
    FixedDepth,
    Scorers,
    Targets,
    TokenLoss,
    TokenLosses,
    Tokens,
)
from turngym.trainers.batch import RolloutBatch
from turngym.trainers.config import ConfigError, RunConfig, fingerprint
from turngym.trainers.losses import PolicyGradient, sampled_advantage
from turngym.trainers.targets import ComparableGroups, Reward, grpo_advantage, label_logprobs, rewards
from turngym.trainers.token_weights import WEIGHTS, blend_alpha

FloatN = NDArray[np.float32]


def combined_advantage(reward_N: FloatN, log_ratio_N: FloatN, *, w_reward: float, w_teacher: float) -> FloatN:
    """A_i = w_reward A^reward_i + w_teacher (log q - log p): float32 [N].

    `reward_N` is in whatever unit the reward's advantage has (standard deviations of its group), `log_ratio_N` in nats.
    Source: [openclaw-rl], [slime]; docs/algorithms.md#combined-advantage.
    """
    return (w_reward * reward_N + w_teacher * log_ratio_N).astype(np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class CombinedAdvantage:
    """`combined_advantage` of the group-relative advantage of the episode and the teacher's log-ratio at the label.

    The student is taken before the update.
    Source: [openclaw-rl], [slime]; docs/algorithms.md#combined-advantage.
    """

    reward: Reward = "return"
    scale: Literal["std", "none"] = "std"
    w_reward: float = 1.0
    w_teacher: float = 1.0

    def __call__(self, batch: RolloutBatch, episodes: Sequence[Episode], scorers: Scorers) -> Targets:
        reward_E = rewards(batch, episodes, self.reward)
        own_N = grpo_advantage(reward_E, batch.group_E, scale=self.scale)[batch.episode_N].astype(np.float32)
        teacher_logp_N = label_logprobs(scorers.teacher, batch, "teacher")
        ratio_N = sampled_advantage(label_logprobs(scorers.student, batch, "student"), teacher_logp_N)
        return Targets(
            advantage_N=combined_advantage(own_N, ratio_N, w_reward=self.w_reward, w_teacher=self.w_teacher),
            label_logp_N=teacher_logp_N,
            reward=reward_E,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpoOpdConfig:
    """A reward's group-relative advantage plus the teacher's log-ratio."""

    n: int = 8
    """Episodes per task: one group."""
    w_reward: float = 1.0
    """Weight of the group-relative advantage."""
    w_teacher: float = 1.0
    """Weight of the teacher's log-ratio, log q - log p of the sampled token."""
    reward: Reward = "return"
    """What an episode is worth: its return, the environment's score, or 1 for success."""
    scale: Literal["std", "none"] = "std"
    """Divide the group-relative advantage by the group's standard deviation, or not."""
    clip: tuple[float, float] = (0.2, 0.28)
    """Lower and upper clip of the surrogate."""
    weight: Literal["token_mean", "trajectory", "turn_mean"] = "token_mean"
    """Whether every token, every episode or every response counts the same."""

    def __post_init__(self) -> None:
        if self.n < 2:
            raise ConfigError(f"n is {self.n}; a group needs at least 2 episodes to compare")
        if min(self.w_reward, self.w_teacher) < 0 or not self.w_reward + self.w_teacher:
            raise ConfigError(
                f"w_reward is {self.w_reward} and w_teacher {self.w_teacher}; valid: at least 0, and not both 0"
            )


def build(config: GrpoOpdConfig, run: RunConfig) -> Algorithm:
    """Clipped policy gradient on the sum of both advantages.

    A_i = w_reward (r_j - mean_g) / (std_g + 1e-6) + w_teacher (log q - log p); l_i = max(-A r_i, -A clip(r_i, 1 -
    eps_low, 1 + eps_high)), r_i the probability ratio to the behavior policy. p is the student before the update.
    Groups whose rewards do not differ stay: the teacher's part still teaches there. Groups of which failed episodes
    leave less than two go.
    Source: [openclaw-rl], [slime]; docs/algorithms.md#grpo-opd.
    Differs from the paper: every token gets both parts. OpenClaw-RL's code gives a turn's judged score without a group
    and the log-ratio of a teacher that has read a hint, each mostly on samples of its own; slime subtracts the k1
    estimate of the KL, which is the same sum. No KL to the initial policy.
    """
    low, high = config.clip
    return Algorithm(
        name="grpo-opd",
        depth=FixedDepth(h_max=run.full_depth),
        target_fn=CombinedAdvantage(
            reward=config.reward, scale=config.scale, w_reward=config.w_reward, w_teacher=config.w_teacher
        ),
        weight=WEIGHTS[config.weight],
        token_loss=PolicyGradient(eps_low=low, eps_high=high),
        group=config.n,
        select=ComparableGroups(spread=False),
        settings=fingerprint(config),
    )


ALGORITHM = AlgorithmSpec(
    name="grpo-opd",
    config=GrpoOpdConfig,
    build=lambda config, given: build(config, given.run),
    uses=frozenset({"teacher", "reward"}),
)

# What other algorithms share with this one: the weighted sum as a token loss (prm-opd), and weights that move (atod).


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedSum:
    """l_i = w_reward (policy gradient)_i + w_hint (support KL)_i, the second where `kl_mask_N` counts the token.

    Source: [openclaw-rl]; docs/algorithms.md#score-and-hint.
    Diagnostics: those of both, `clipped` that of `loss`; those of `support` are 0 where it does not count.
    """

    loss: TokenLoss
    """The policy gradient."""
    support: TokenLoss
    w_reward: float = 1.0
    w_hint: float = 1.0

    def __call__(self, tokens: Tokens) -> TokenLosses:
        if tokens.kl_mask_n is None:
            raise ValueError("a weighted sum needs targets with kl_mask_N: where the support counts")
        reward, hint = self.loss(tokens), self.support(tokens)
        # placeholders stand where no hint was given
        own = {name: values * tokens.kl_mask_n for name, values in hint.diagnostics.items()}
        return TokenLosses(
            loss_n=self.w_reward * reward.loss_n + self.w_hint * hint.loss_n,
            diagnostics={**own, **reward.diagnostics},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Annealing:
    """w_reward = floor + (1 - floor) alpha_k and w_teacher = 1 - alpha_k; alpha_k runs from 0 to 1 over [start, end].

    Source: [atod]; docs/algorithms.md#annealed-combination.
    """

    total: int
    """Steps of the run, K."""
    start: float = 0.0
    """Share of training at which the reward begins to take over."""
    end: float = 1.0
    """Share of training at which the teacher has no say any more."""
    floor: float = 0.0
    """Weight of the reward before that."""

    def weights(self, step: int) -> tuple[float, float]:
        """(w_reward, w_teacher) at `step` (1-based), both in [0, 1]."""
        alpha = blend_alpha(step, self.total, self.start, self.end)
        return self.floor + (1.0 - self.floor) * alpha, 1.0 - alpha
