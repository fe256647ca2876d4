"""ATOD: on-policy distillation annealed into reinforcement learning, with turns weighted by what they can teach.

Read next: trainers/rollout_plan/annealing.py, trainers/targets/turn_reweighting.py, trainers/targets/combined.py,
trainers/losses/policy_gradient.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from turngym.trainers.algorithm import Algorithm
from turngym.trainers.algorithm_spec import AlgorithmSpec
from turngym.trainers.config import ConfigError, RunConfig, fingerprint
from turngym.trainers.losses.token_losses import PolicyGradient
from turngym.trainers.losses.token_weights import WEIGHTS
from turngym.trainers.rollout_plan.annealing import Annealing
from turngym.trainers.rollout_plan.depth import FixedDepth
from turngym.trainers.rollout_plan.group_filter import ComparableGroups
from turngym.trainers.targets.rewards import Reward
from turngym.trainers.targets.turn_reweighting import AnnealedAdvantage


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
