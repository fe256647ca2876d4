"""GRPO: policy gradients whose baseline is the mean reward of other attempts at the same task.

Read next: trainers/targets.py, trainers/losses.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from turngym.trainers.algorithm import Algorithm, AlgorithmSpec, FixedDepth
from turngym.trainers.config import ConfigError, RunConfig, fingerprint
from turngym.trainers.losses import KL_ESTIMATORS, PolicyGradient
from turngym.trainers.targets import ComparableGroups, GroupAdvantage, Reward, WithReference
from turngym.trainers.token_weights import WEIGHTS


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpoConfig:
    """Group-relative policy optimization with verifiable rewards."""

    n: int = 8
    """Episodes per task: one group."""
    reward: Reward = "return"
    """What an episode is worth: its return, the environment's score, or 1 for success."""
    scale: Literal["std", "none"] = "std"
    """Divide the advantage by the group's standard deviation, or not."""
    clip: tuple[float, float] = (0.2, 0.28)
    """Lower and upper clip of the surrogate."""
    kl_coef: float = 0.0
    """Weight of the KL to the initial policy; 0 needs no copy of it."""
    kl: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of that KL; k1 in the loss has no gradient in expectation on fresh rollouts."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    filter_groups: bool = True
    """Leave out groups whose episodes are all worth the same by `reward`: nothing tells them apart."""
    weight: Literal["trajectory", "token_mean", "turn_mean"] = "token_mean"
    """Whether every episode, every token or every response counts the same."""

    def __post_init__(self) -> None:
        if self.n < 2:
            raise ConfigError(f"n is {self.n}; a group needs at least 2 episodes to compare")


def build(config: GrpoConfig, run: RunConfig) -> Algorithm:
    """Clipped policy gradient on group-relative advantages.

    A_j = (r_j - mean_g) / (std_g + 1e-6); l_i = max(-A r_i, -A clip(r_i, 1 - eps_low, 1 + eps_high)) + kl_coef KL_i
    - entropy_coef H_i, r_i the probability ratio to the behavior policy.
    Source: [grpo] eq. 3, [dapo] section 3.1; docs/algorithms.md#grpo.
    Differs from the paper: the upper clip is 0.28 and every token counts the same (as in DAPO; `clip` 0.2 0.2 and
    `weight=trajectory` are the paper's), groups whose rewards do not differ are left out, no KL unless asked for.
    """
    low, high = config.clip
    signal = GroupAdvantage(reward=config.reward, scale=config.scale)
    return Algorithm(
        name="grpo",
        depth=FixedDepth(h_max=run.full_depth),
        target_fn=WithReference(target_fn=signal) if config.kl_coef else signal,
        weight=WEIGHTS[config.weight],
        token_loss=PolicyGradient(
            eps_low=low,
            eps_high=high,
            kl_coef=config.kl_coef,
            kl=KL_ESTIMATORS[config.kl],
            entropy_coef=config.entropy_coef,
        ),
        group=config.n,
        select=ComparableGroups(reward=config.reward) if config.filter_groups else None,
        needs_teacher=False,
        needs_reference=bool(config.kl_coef),
        entropy_gradient=bool(config.entropy_coef),
        settings=fingerprint(config),
    )


ALGORITHM = AlgorithmSpec(
    name="grpo",
    config=GrpoConfig,
    build=lambda config, given: build(config, given.run),
    uses=frozenset({"reward"}),
)
