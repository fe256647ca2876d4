"""LUFFY: GRPO whose groups hold demonstrations, shaped so that unlikely expert tokens keep their gradient.

Read next: trainers/losses/policy_shaping.py, trainers/rollout_plan/demonstration_prefix.py,
trainers/targets/group_advantages.py, trainers/targets/targets.py, trainers/losses/token_losses.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from turngym.trainers.algorithm import Algorithm
from turngym.trainers.algorithm_spec import AlgorithmSpec
from turngym.trainers.config import ConfigError, RunConfig, fingerprint
from turngym.trainers.losses.policy_shaping import Reshape, Shape
from turngym.trainers.losses.token_losses import MixedPolicyGradient
from turngym.trainers.losses.token_weights import WEIGHTS
from turngym.trainers.rollout_plan.demonstration_prefix import PrefixSchedule
from turngym.trainers.rollout_plan.depth import FixedDepth
from turngym.trainers.rollout_plan.group_filter import ComparableGroups
from turngym.trainers.targets.rewards import Reward
from turngym.trainers.targets.targets import SplitAdvantage, WithReference


@dataclass(frozen=True, slots=True, kw_only=True)
class LuffyConfig:
    """Learning to reason under off-policy guidance, in turns."""

    n: int = 8
    """Episodes per task, prefixed ones included."""
    prefix: PrefixSchedule = field(default_factory=PrefixSchedule)
    """Which of them begin with a demonstration, and how much of it."""
    reward: Reward = "return"
    """What an episode is worth: its return, the environment's score, or 1 for success."""
    advantage: Literal["grpo_split", "grpo"] = "grpo_split"
    """Baseline from the policy's own episodes, or from all of the group."""
    scale: Literal["std", "none"] = "std"
    """Divide the advantage by the standard deviation, or not."""
    alpha: float = 1.0
    """Factor of the advantage on demonstrated tokens."""
    beta: float = 1.0
    """Factor of the advantage on the policy's own tokens."""
    shape: Shape = "p_div_p_a"
    """Shaping f of demonstrated tokens' probabilities."""
    a: float = 0.1
    """Of p_div_p_a."""
    w: float = 1.0
    """Weight of the logarithm in logp and p_logp."""
    e: float = 0.5
    """Exponent of pow."""
    off_clamp: tuple[float | None, float | None] = (None, None)
    """Bounds of f; None for no bound."""
    on_shape: Shape = "no_reshape"
    """Shaping of the policy's own ratios, with the same a, w and e."""
    clip: tuple[float, float] | None = (0.2, 0.2)
    """Lower and upper clip of the policy's own ratios; None for no clip."""
    entropy_coef: float = 0.001
    """Weight of the entropy bonus."""
    kl_coef: float = 0.0
    """Weight of the KL (k3) to the initial policy in the loss; 0 needs no copy of it."""
    kl_reward_coef: float = 0.0
    """What an episode's KL (k1, summed over its tokens) to the initial policy costs in its reward, as in the published
    code, whose runs have 0. Groups are filtered by the reward without it."""
    filter_groups: bool = True
    """Leave out groups whose episodes are all worth the same by `reward`: nothing tells them apart."""
    weight: Literal["token_mean", "trajectory", "turn_mean"] = "token_mean"
    """Whether every token, every episode or every response counts the same."""

    def __post_init__(self) -> None:
        if self.n <= self.prefix.count:
            raise ConfigError(
                f"n is {self.n} with {self.prefix.count} prefixed episodes; a group needs at least 1 without a prefix"
            )
        if not self.a > 0 or not self.e > 0:
            raise ConfigError(f"a is {self.a} and e is {self.e}; both must be above 0")


def build(config: LuffyConfig, run: RunConfig) -> Algorithm:
    """Mixed-policy gradient over the policy's episodes and demonstrated prefixes that it continues.

    Own tokens: max(-A r, -A clip(r)), r = pi / pi_old. Demonstrated tokens: -A f(pi), f(pi) = pi / (pi + 0.1), their
    behavior probability taken as 1. One mean over the tokens of both kinds, as in the paper (or what `weight` says),
    minus entropy_coef H.
    Source: [luffy] eq. 4, eq. 5, eq. 6; docs/algorithms.md#luffy.
    Differs from the paper: the baseline comes from own episodes and is divided by their deviation (`advantage=grpo`,
    `scale=none`); a prefix is whole turns of the expert, replayed in the environment so that observations stay true;
    groups whose rewards do not differ are left out, which the published code computes but never applies.
    """
    split = config.advantage == "grpo_split"
    signal = SplitAdvantage(
        reward=config.reward,
        scale=config.scale,
        split=split,
        alpha=config.alpha,
        beta=config.beta,
        kl_coef=config.kl_reward_coef,
    )
    return Algorithm(
        name="luffy",
        depth=FixedDepth(h_max=run.full_depth),
        target_fn=WithReference(target_fn=signal) if config.kl_coef else signal,
        weight=WEIGHTS[config.weight],
        token_loss=MixedPolicyGradient(
            off=Reshape(shape=config.shape, a=config.a, w=config.w, e=config.e),
            on=Reshape(shape=config.on_shape, a=config.a, w=config.w, e=config.e),
            off_clamp=config.off_clamp,
            clip=config.clip,
            entropy_coef=config.entropy_coef,
            kl_coef=config.kl_coef,
        ),
        origins=("policy", "demonstration"),
        group=config.n,
        prefix=config.prefix,
        # the split baseline needs own episodes, whatever is filtered
        select=ComparableGroups(reward=config.reward, spread=config.filter_groups, own=split)
        if config.filter_groups or split
        else None,
        needs_teacher=False,
        needs_reference=bool(config.kl_coef or config.kl_reward_coef),
        entropy_gradient=bool(config.entropy_coef),
        settings=fingerprint(config),
    )


ALGORITHM = AlgorithmSpec(
    name="luffy",
    config=LuffyConfig,
    build=lambda config, given: build(config, given.run),
    uses=frozenset({"expert", "reward", "shown"}),
)
