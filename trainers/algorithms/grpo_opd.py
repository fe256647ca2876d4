"""GRPO and on-policy distillation in one advantage: the reward says whether, the teacher says which token.

Read next: trainers/targets/combined.py, trainers/targets/group_advantages.py, trainers/losses/policy_gradient.py,
trainers/losses/token_losses.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from turngym.trainers.algorithm import Algorithm
from turngym.trainers.algorithm_spec import AlgorithmSpec
from turngym.trainers.config import ConfigError, RunConfig, fingerprint
from turngym.trainers.losses.token_losses import PolicyGradient
from turngym.trainers.losses.token_weights import WEIGHTS
from turngym.trainers.rollout_plan.depth import FixedDepth
from turngym.trainers.rollout_plan.group_filter import ComparableGroups
from turngym.trainers.targets.combined import CombinedAdvantage
from turngym.trainers.targets.rewards import Reward


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
