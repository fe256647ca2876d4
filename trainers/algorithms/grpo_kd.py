"""GRPO whose reward is the teacher's log-likelihood of what the student said; with or without L_PT.

Read next: trainers/algorithms/kd_reward.py, trainers/returns.py, trainers/losses.py, trainers/lm_loss.py.
"""

from __future__ import annotations

from typing import Literal

from turngym.core.errors import SettingsError
from turngym.core.numbers import BelowOne, Group, NotNegative
from turngym.core.spec import Spec, Unread, needing
from turngym.trainers.algorithm import Algorithm, FixedDepth, TargetFn, Term
from turngym.trainers.algorithm_spec import AlgorithmSpec, BuildContext
from turngym.trainers.algorithms.kd_reward import GroupTeacherAdvantage, TeacherReward, mixed
from turngym.trainers.group_advantage import ComparableGroups
from turngym.trainers.lm_loss import LmLoss
from turngym.trainers.losses import KL_ESTIMATORS
from turngym.trainers.run_config import tables_of
from turngym.trainers.targets import WithReference
from turngym.trainers.token_losses import PolicyGradient
from turngym.trainers.token_weights import WEIGHTS


class GrpoKdConfig(Spec):
    """GRPO with knowledge-distillation rewards."""

    n: Group = 8
    """Episodes per task. They are one group."""
    reward: Literal["mean", "sum"] = "mean"
    """How the teacher's log-likelihood is pooled. Per token, or of the whole episode (literal; favors saying
    little)."""
    student_entropy: bool = False
    """Subtract the student's log-likelihood. The reward is then minus the sampled reverse KL."""
    env_coef: NotNegative = 0.0
    """Weight of the environment's return. It stands beside the teacher's reward."""
    scale: Literal["std", "none"] = "std"
    """What the advantage is divided by. The group's standard deviation, or nothing."""
    clip: tuple[NotNegative, NotNegative] = (0.2, 0.2)
    """Lower and upper clip of the surrogate."""
    kl_coef: NotNegative = 0.02
    """Weight of the KL to the initial policy. 0 needs no copy of it."""
    kl: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of that KL; k1 is literal and has no gradient in expectation on fresh rollouts."""
    teacher_mix: BelowOne = 0.0
    """Share of tokens that the teacher chooses. Sampled ones, corrected for by the importance weight; MiniLLM's is 0.2.
    It needs rollouts and a teacher in this process, and --temperature 1."""
    weight: Literal["trajectory", "token_mean", "turn_mean"] = "trajectory"
    """What counts the same. Every episode, every token or every response."""

    def unread(self) -> Unread:
        if not self.kl_coef:
            yield from needing("kl_coef above 0", "kl", "../reference")


def build(config: GrpoKdConfig, context: BuildContext, terms: tuple[Term, ...] = ()) -> Algorithm:
    """Clipped policy gradient on group-relative teacher log-likelihood.

    r_j = mean_i log q(o_ji) [- log p(o_ji)] + env_coef R_j; A_j = (r_j - mean_g) / (std_g + 1e-6); l_i = surrogate(A)
    + kl_coef KL_i(policy, initial). With `terms` (grpo-minillm) lambda * L_PT is added; with `teacher_mix` A_i is
    multiplied by the importance weight of teacher-mixed sampling.
    Source: [kd-rewards] Algorithm 1; docs/algorithms.md#grpo-kd.
    Source: [kd-rewards] Algorithm 2; docs/algorithms.md#grpo-minillm.
    Groups of which failed episodes leave less than two are left out, and counted: a single one is its own mean.
    Differs from the paper: the reward is a mean over tokens (`reward=sum` is literal); k3 instead of k1; the ratio is
    clipped.
    """
    signal: TargetFn = GroupTeacherAdvantage(
        reward=TeacherReward(student_entropy=config.student_entropy),
        pool=config.reward,
        env_coef=config.env_coef,
        scale=config.scale,
    )
    signal = mixed(signal, config.teacher_mix, context.run)
    return Algorithm(
        name="grpo-minillm" if terms else "grpo-kd",
        depth=FixedDepth(h_max=context.run.full_depth),
        target_fn=WithReference(target_fn=signal) if config.kl_coef else signal,
        weight=WEIGHTS[config.weight],
        token_loss=PolicyGradient(clip=config.clip, kl_coef=config.kl_coef, kl=KL_ESTIMATORS[config.kl]),
        group=config.n,
        # every reward is below 0: what cannot be compared has no baseline, not one of 0
        select=ComparableGroups(spread=False, tokens=True),
        terms=terms,
        needs_reference=bool(config.kl_coef),
        teacher_mix=config.teacher_mix,
        settings=tables_of(config),
    )


def _with_text(config: GrpoKdConfig, context: BuildContext) -> Algorithm:
    if context.lm_loss.in_reward:
        raise SettingsError(
            f"lm_loss.in_reward is {context.lm_loss.in_reward}; it is ppo-minillm's: what a whole group gets alike "
            "cancels in a group-relative advantage"
        )
    return build(config, context, (LmLoss.of(context),))


ALGORITHM = AlgorithmSpec(
    name="grpo-kd", config=GrpoKdConfig, build=build, uses=frozenset({"teacher", "reward", "reference", "surrogate"})
)
WITH_TEXT = AlgorithmSpec(
    name="grpo-minillm",
    config=GrpoKdConfig,
    build=_with_text,
    section="grpo-kd",
    uses=frozenset({"teacher", "text", "reward", "reference", "surrogate"}),
    about="GRPO with knowledge-distillation rewards, and a loss on pre-training text (L_PT).",
)
