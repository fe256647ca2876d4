"""SDAR: GRPO, and beside it the likelihood of tokens that the policy finds better once it is told a skill.

Read next: trainers/told.py, trainers/algorithms/grpo.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from turngym.envs.core.protocols import Position
from turngym.envs.core.settings import IN_FILE
from turngym.trainers.algorithm import (
    Algorithm,
    AlgorithmSpec,
    BuildContext,
    Reader,
    TokenLoss,
    TokenLosses,
    Tokens,
    Told,
)
from turngym.trainers.losses import PolicyGradient
from turngym.trainers.targets import GroupAdvantage, Reward
from turngym.trainers.told import LOGP, WHERE, WithTold, check_group, told_group


def gated_likelihood(logp_N: Tensor, told_logp_N: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """l_i = g_i (log q - log p), g_i = sigmoid(beta (log q - log p)) detached: loss [N], nats, and the gate [N].

    `logp_N` has the gradient, which is that of -g_i log p: likelier becomes what the told policy finds likelier, and a
    token that it finds less likely is left alone rather than pushed down.
    Source: [sdar]; docs/algorithms.md#gated-likelihood.
    """
    gap_N = told_logp_N.detach() - logp_N
    gate_N = torch.sigmoid(beta * gap_N.detach())
    return gate_N * gap_N, gate_N


@dataclass(frozen=True, slots=True, kw_only=True)
class Gated:
    """l_i = loss_i + coef `gated_likelihood`_i where the turn was told something.

    Source: [sdar]; docs/algorithms.md#gated-likelihood.
    Diagnostics: those of `loss`; `gate` and `told_gap` (nats), NaN where nothing was told.
    """

    loss: TokenLoss
    coef: float
    beta: float

    def __call__(self, tokens: Tokens) -> TokenLosses:
        inner, told_n = self.loss(tokens), tokens.extra[WHERE]
        own_n, gate_n = gated_likelihood(tokens.logp_n, tokens.extra[LOGP], self.beta)
        gap_n = tokens.extra[LOGP] - tokens.logp_n.detach()
        shown = {
            name: torch.where(told_n > 0, value, torch.nan) for name, value in (("gate", gate_n), ("told_gap", gap_n))
        }
        return TokenLosses(loss_n=inner.loss_n + self.coef * told_n * own_n, diagnostics={**inner.diagnostics, **shown})


@dataclass(frozen=True, slots=True, kw_only=True)
class SdarConfig:
    """GRPO with gated self-distillation of a policy that was told something."""

    n: int = 8
    """Episodes per task. They are one group."""
    coef: float = 0.01
    """Weight of the gated likelihood."""
    beta: float = 5.0
    """How sharply the gate opens. It multiplies the told policy's log-ratio, nats."""
    reward: Reward = field(default="return", metadata=IN_FILE)
    """What an episode is worth. Its return, the environment's score, or 1 for success."""
    clip: tuple[float, float] = field(default=(0.2, 0.2), metadata=IN_FILE)
    """Lower and upper clip of the surrogate."""
    kl_coef: float = field(default=0.01, metadata=IN_FILE)
    """Weight of the KL to the initial policy. It is k3; in Search 0.001 was published."""
    weight: Literal["token_mean", "trajectory", "turn_mean"] = field(default="token_mean", metadata=IN_FILE)
    """What counts the same. Every token, every episode or every response."""
    position: Position = field(default="opening", metadata=IN_FILE)
    """Which message gets what the student is not told: the first observation, the last of role user, the last."""
    reader: Reader = "live"
    """Who is told. The student as it is before the update, or the initial policy (with --reference-every K the student
    of up to K steps before, with --reference-rate a moving average)."""

    def __post_init__(self) -> None:
        check_group(self.n, coef=self.coef, beta=self.beta, kl_coef=self.kl_coef)


def build(config: SdarConfig, context: BuildContext) -> Algorithm:
    """Clipped policy gradient on group-relative advantages, plus coef g_i (log q - log p) on turns that were told.

    q is the policy with the text in its prompt, before the update; g_i = sigmoid(beta (log q - log p)), detached, p the
    student as it is in the update.
    Source: [sdar]; docs/algorithms.md#sdar.
    Differs from the paper: its code was read, not its text. Its functions' own default of coef is 0.1; 0.01 is what all
    its scripts run. An invalid action costs what the environment says, there 0.1. Turns without a text have no second
    term.
    """
    low, high = config.clip
    told = Told(position=config.position, reader=config.reader)
    loss = PolicyGradient(eps_low=low, eps_high=high, kl_coef=config.kl_coef)
    return told_group(
        config,
        context,
        name="sdar",
        target_fn=WithTold(target_fn=GroupAdvantage(reward=config.reward), told=told),
        token_loss=Gated(loss=loss, coef=config.coef, beta=config.beta),
        told=told,
    )


ALGORITHM = AlgorithmSpec(
    name="sdar",
    config=SdarConfig,
    build=build,
    uses=frozenset({"judge", "expert", "reward", "reference", "surrogate"}),
)
