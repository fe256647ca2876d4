"""PPO with a critic, whose reward is the teacher's log-likelihood of what the student said; with or without L_PT.

Read next: trainers/algorithms/kd_reward.py, trainers/returns.py, trainers/critic.py, trainers/optimizer_step.py,
trainers/lm_loss.py.
"""

from __future__ import annotations

import warnings
from typing import Literal

from turngym.core.errors import SettingsError
from turngym.core.numbers import BelowOne, NotNegative, Share
from turngym.core.spec import Spec, Unread, needing
from turngym.trainers.algorithm import Algorithm, FixedDepth, TargetFn, Term, TokenLoss
from turngym.trainers.algorithm_spec import AlgorithmSpec, BuildContext
from turngym.trainers.algorithms.kd_reward import (
    CriticAdvantage,
    MiniLlmAdvantage,
    SingleStep,
    TeacherReward,
    mixed,
)
from turngym.trainers.lm_loss import LmLoss
from turngym.trainers.losses import kl_k3
from turngym.trainers.returns import Whitening
from turngym.trainers.run_config import CriticConfig, tables_of
from turngym.trainers.targets import WithReference
from turngym.trainers.token_losses import PolicyGradient
from turngym.trainers.token_weights import WEIGHTS


class PpoKdConfig(Spec):
    """PPO with knowledge-distillation rewards. Epochs and minibatches are `optimizer.ppo_epochs` and `minibatches`."""

    teacher_coef: NotNegative = 1.0
    """Weight of the teacher's log-likelihood. It is per token; 0 is plain PPO on the environment's reward."""
    student_entropy: bool = False
    """Subtract the student's log-likelihood. Rewards then sum to minus the sampled reverse KL."""
    env_coef: NotNegative = 0.0
    """Weight of the environment's return. It is paid at the episode's last token."""
    advantage: Literal["gae", "minillm"] = "gae"
    """How advantages are estimated. GAE against a critic, or MiniLLM's: discounted returns divided by the number of
    tokens left, without a critic (its paper takes them with `student_entropy` and `gamma` 0.95)."""
    single_step: NotNegative = 0.0
    """Weight of MiniLLM's single-step term. The reverse KL on the teacher's 50 likeliest ids and a bin, the exact mean
    of a token's own reward, is then in the loss, and returns begin with the next token; 1 in its paper, 0: none."""
    gamma: Share = 1.0
    """Discount per token."""
    lam: Share = 0.95
    """Lambda of GAE."""
    bootstrap: bool = True
    """Go on with the critic's last value where a limit of turns, tokens or depth cut an episode that had not ended;
    else it counts as ended there."""
    whiten: Whitening = "unbiased"
    """Advantages are centered and divided by their deviation over the batch's tokens: the unbiased one, the
    population's, or none of it."""
    clip: tuple[NotNegative, NotNegative] = (0.2, 0.2)
    """Lower and upper clip of the surrogate."""
    kl_coef: NotNegative = 0.0
    """Weight of the KL to the initial policy. It is k3; 0 needs no copy of the policy."""
    entropy_coef: NotNegative = 0.01
    """Weight of the entropy bonus (c_ent)."""
    teacher_mix: BelowOne = 0.0
    """Share of tokens that the teacher chooses. Sampled ones, corrected for by the importance weight; MiniLLM's is 0.2.
    It needs rollouts and a teacher in this process, and --temperature 1."""
    critic: CriticConfig = CriticConfig()

    def __post_init__(self) -> None:
        if not self.teacher_coef and not self.env_coef:
            raise SettingsError("teacher_coef and env_coef are both 0; one of them must reward something")
        if self.advantage == "minillm" and not self.teacher_coef:
            raise SettingsError("teacher_coef is 0; MiniLLM's returns are of the teacher's log-likelihood")

    def unread(self) -> Unread:
        if self.advantage != "gae":
            yield from needing("advantage gae", "lam", "bootstrap", "critic")
        if self.advantage != "minillm" or not self.student_entropy:
            yield from needing("advantage minillm and student_entropy, whose mean it is", "single_step")
        if not self.teacher_coef:
            yield from needing("teacher_coef above 0", "student_entropy")
        if not self.kl_coef:
            yield from needing("kl_coef above 0", "../reference")


def build(
    config: PpoKdConfig,
    context: BuildContext,
    terms: tuple[Term, ...] = (),
    in_reward: tuple[LmLoss, float] | None = None,
) -> Algorithm:
    """Clipped policy gradient on advantages that a critic estimates from the teacher's token rewards.

    r_t = teacher_coef (log q - [log p]) + env_coef R at the last token; A = whitened GAE(gamma, lam) over supervised
    tokens; l_i = surrogate(A) + kl_coef KL_i - entropy_coef H_i; the critic has its own loss and optimizer. MiniLLM's
    returns have no critic, and may have its single-step term. With `terms` (ppo-minillm) lambda * L_PT is added;
    `in_reward` is the literal form of that term: lambda L_PT (the text, lambda) is subtracted from every rollout's
    reward, at its last token.
    Source: [kd-rewards] Algorithm 3; docs/algorithms.md#ppo-kd.
    Source: [kd-rewards] Algorithm 4; docs/algorithms.md#ppo-minillm.
    Differs from the paper: rewards by token, not one for the whole output; L_PT is a loss, since no gradient
    reaches it in the reward.

    Args:
        config: coefficients, clip and critic.
        context: what the run offers, its depth and its teacher among it.
        terms: further terms of the loss.
        in_reward: text whose loss is subtracted from every reward, and its weight lambda; None: nothing is subtracted.
    """
    reward = TeacherReward(student_entropy=config.student_entropy, coef=config.teacher_coef)
    signal: TargetFn = CriticAdvantage(
        reward=reward if config.teacher_coef else None,
        env_coef=config.env_coef,
        gamma=config.gamma,
        lam=config.lam,
        bootstrap=config.bootstrap,
        whiten=config.whiten,
        text=None if in_reward is None else in_reward[0].value,
        text_coef=0.0 if in_reward is None else in_reward[1],
    )
    minillm = config.advantage == "minillm"
    single_step = config.single_step if minillm and config.student_entropy else 0.0
    if minillm:
        signal = MiniLlmAdvantage(
            reward=reward,
            env_coef=config.env_coef,
            gamma=config.gamma,
            whiten=config.whiten,
            support=context.distill.top_k if single_step else None,
        )
    loss: TokenLoss = PolicyGradient(
        clip=config.clip, kl_coef=config.kl_coef, kl=kl_k3, entropy_coef=config.entropy_coef
    )
    if single_step:
        loss = SingleStep(loss=loss, coef=single_step)
    signal = mixed(signal, config.teacher_mix, context.run)
    return Algorithm(
        name="ppo-minillm" if terms or in_reward else "ppo-kd",
        depth=FixedDepth(h_max=context.run.full_depth),
        target_fn=WithReference(target_fn=signal) if config.kl_coef else signal,
        weight=WEIGHTS["token_mean"],
        token_loss=loss,
        terms=terms,
        needs_teacher=bool(config.teacher_coef or config.teacher_mix),
        teacher_mix=config.teacher_mix,
        needs_reference=bool(config.kl_coef),
        critic=None if minillm else config.critic,
        entropy_gradient=bool(config.entropy_coef),
        settings=tables_of(config),
    )


def _with_text(config: PpoKdConfig, context: BuildContext) -> Algorithm:
    coef = context.lm_loss.in_reward
    if coef and config.advantage == "minillm":
        raise SettingsError(f"lm_loss.in_reward is {coef}; it needs advantage=gae, whose critic learns the offset")
    if not coef:
        return build(config, context, (LmLoss.of(context),))
    warnings.warn(
        "lm_loss.in_reward: L_PT is only subtracted from each rollout's reward; no gradient reaches the text, so "
        "nothing keeps the student from forgetting it (leave the setting out for a loss term)",
        stacklevel=2,
    )
    return build(config, context, in_reward=(LmLoss.of(context), coef))


ALGORITHM = AlgorithmSpec(
    name="ppo-kd", config=PpoKdConfig, build=build, uses=frozenset({"teacher", "reward", "reference", "surrogate"})
)
WITH_TEXT = AlgorithmSpec(
    name="ppo-minillm",
    config=PpoKdConfig,
    build=_with_text,
    section="ppo-kd",
    uses=frozenset({"teacher", "text", "reward", "reference", "surrogate"}),
    about="PPO with knowledge-distillation rewards, and a loss on pre-training text (L_PT).",
)
