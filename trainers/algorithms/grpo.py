"""GRPO: policy gradients whose baseline is the mean reward of other attempts at the same task.

Read next: trainers/group_advantage.py, trainers/token_losses.py.
"""

from __future__ import annotations

from typing import Literal

from turngym.core.numbers import Group, NotNegative, Number
from turngym.core.spec import Spec, Unread
from turngym.trainers.algorithm import Algorithm, FixedDepth, TargetFn
from turngym.trainers.algorithm_spec import AlgorithmSpec, BuildContext
from turngym.trainers.group_advantage import ComparableGroups, GroupAdvantage, GroupOver
from turngym.trainers.losses import KL_ESTIMATORS, clipped_surrogate, clipped_weight
from turngym.trainers.rewards import Reward
from turngym.trainers.run_config import near_initial, tables_of
from turngym.trainers.targets import WithReference, WithSequences
from turngym.trainers.token_losses import PolicyGradient
from turngym.trainers.token_weights import WEIGHTS


class GrpoConfig(Spec):
    """Group-relative policy optimization with verifiable rewards."""

    n: Group = 8
    """Episodes per task. They are one group."""
    reward: Reward = "return"
    """What an episode is worth. Its return, the environment's score, or 1 for success."""
    scale: Literal["std", "none"] = "std"
    """What the advantage is divided by. The group's standard deviation, or nothing."""
    group_over: GroupOver = "episodes"
    """What a group's mean and deviation are over. Episodes, or their turns, so that long episodes count more (as where
    every turn is a row: verl-agent and what builds on it)."""
    clip: tuple[NotNegative, NotNegative] = (0.2, 0.28)
    """Lower and upper clip of the importance ratio."""
    objective: Literal["surrogate", "weight"] = "surrogate"
    """What is clipped. PPO's surrogate, whose clipped tokens have no gradient, or (CISPO) the weight of log p alone, so
    that every token keeps one; its lower bound is usually none, `clip` 1 0.28."""
    ratio: Literal["token", "turn", "episode"] = "token"
    """What has one importance ratio. Each token, or (GSPO) all tokens of a response or of an episode together. The mean
    over many tokens hardly moves: GSPO's `clip` is 0.0003 0.0004."""
    kl_coef: NotNegative = 0.0
    """Weight of the KL to the initial policy. 0 needs no copy of it."""
    kl: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of that KL; k1 in the loss has no gradient in expectation on fresh rollouts."""
    entropy_coef: NotNegative = 0.0
    """Weight of the entropy bonus."""
    filter_groups: bool = True
    """Leave out groups of equal reward. Nothing tells episodes apart that are all worth the same by `reward`."""
    refill: Number = 0
    """Rounds that replace groups left out. So often may further tasks be played for a step (DAPO's dynamic sampling);
    each round is a batch as large as the step's, and as many groups as that are trained on."""
    weight: Literal["trajectory", "token_mean", "turn_mean"] = "token_mean"
    """What counts the same. Every episode, every token or every response."""

    def unread(self) -> Unread:
        yield from near_initial(self.kl_coef, "kl")


def build(config: GrpoConfig, context: BuildContext) -> Algorithm:
    """Clipped policy gradient on group-relative advantages.

    A_j = (r_j - mean_g) / (std_g + 1e-6); l_i = max(-A r_i, -A clip(r_i, 1 - eps_low, 1 + eps_high)) + kl_coef KL_i
    - entropy_coef H_i, r_i the probability ratio to the behavior policy. With `ratio` it is that of a whole response or
    episode (GSPO), with `objective=weight` the loss is -sg(clip(r_i)) A log p_i (CISPO); `scale=none` is Dr. GRPO's.
    Source: [grpo] eq. 3, [dapo] section 3.1; docs/algorithms.md#grpo.
    Differs from the paper: the upper clip is 0.28 and every token counts the same (as in DAPO; `clip` 0.2 0.2 and
    `weight=trajectory` are the paper's), groups whose rewards do not differ are left out, no KL unless asked for. A
    group of which failed episodes leave one is left out in any case: it has no contrast.
    """
    signal: TargetFn = GroupAdvantage(reward=config.reward, scale=config.scale, over=config.group_over)
    if config.ratio != "token":
        signal = WithSequences(target_fn=signal, unit=config.ratio)
    return Algorithm(
        name="grpo",
        depth=FixedDepth(h_max=context.run.full_depth),
        target_fn=WithReference(target_fn=signal) if config.kl_coef else signal,
        weight=WEIGHTS[config.weight],
        token_loss=PolicyGradient(
            surrogate=clipped_weight if config.objective == "weight" else clipped_surrogate,
            clip=config.clip,
            kl_coef=config.kl_coef,
            kl=KL_ESTIMATORS[config.kl],
            entropy_coef=config.entropy_coef,
        ),
        group=config.n,
        select=ComparableGroups(
            reward=config.reward,
            spread=config.filter_groups,
            most=context.run.episodes // config.n if config.refill else None,
        ),
        refill=config.refill,
        needs_teacher=False,
        needs_reference=bool(config.kl_coef),
        entropy_gradient=bool(config.entropy_coef),
        settings=tables_of(config),
    )


ALGORITHM = AlgorithmSpec(
    name="grpo", config=GrpoConfig, build=build, uses=frozenset({"reward", "reference", "surrogate"})
)
