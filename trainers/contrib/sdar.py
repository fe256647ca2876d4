"""SDAR: GRPO, and beside it the likelihood of tokens that the policy finds better once it is told a skill.

Read next: trainers/privileged.py, trainers/algorithms/grpo.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from turngym.core import NotNegative
from turngym.trainers import Algorithm, BuildContext, TokenLoss, TokenLosses, Tokens
from turngym.trainers.contrib.privileged_group import (
    LOGP,
    PrivilegedGroupConfig,
    WithPrivileged,
    privileged_group,
    told_in_groups,
    with_told,
)


def gated_likelihood(logp_N: Tensor, privileged_logp_N: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """l_i = g_i (log q - log p), g_i = sigmoid(beta (log q - log p)) detached: loss [N], nats, and the gate [N].

    `logp_N` has the gradient, which is that of -g_i log p: likelier becomes what the told policy finds likelier, and a
    token that it finds less likely is left alone rather than pushed down.
    Source: [sdar]; docs/contrib_algorithms.md#gated-likelihood.
    """
    gap_N = privileged_logp_N.detach() - logp_N
    gate_N = torch.sigmoid(beta * gap_N.detach())
    return gate_N * gap_N, gate_N


@dataclass(frozen=True, slots=True, kw_only=True)
class Gated:
    """l_i = loss_i + coef `gated_likelihood`_i where the turn was told something.

    Source: [sdar]; docs/contrib_algorithms.md#gated-likelihood.
    Diagnostics: those of `loss`; `gate` and `told_gap` (nats), NaN where nothing was told.
    """

    loss: TokenLoss
    coef: float
    beta: float

    def __call__(self, tokens: Tokens) -> TokenLosses:
        own_n, gate_n = gated_likelihood(tokens.logp_n, tokens.extra[LOGP], self.beta)
        return with_told(self.loss(tokens), tokens, self.coef * own_n, gate=gate_n)


class SdarConfig(PrivilegedGroupConfig):
    """GRPO with gated self-distillation of a policy that was told something."""

    coef: NotNegative = 0.01
    """Weight of the gated likelihood."""
    beta: NotNegative = 5.0
    """How sharply the gate opens. It multiplies the told policy's log-ratio, nats."""


def build(config: SdarConfig, context: BuildContext) -> Algorithm:
    """Clipped policy gradient on group-relative advantages, plus coef g_i (log q - log p) on turns that were told.

    q is the policy with the text in its prompt, before the update; g_i = sigmoid(beta (log q - log p)), detached, p the
    student as it is in the update.
    Source: [sdar]; docs/contrib_algorithms.md#sdar.
    Differs from the paper: its code was read, not its text. Its functions' own default of coef is 0.1; 0.01 is what all
    its scripts run. An invalid action costs what the environment says, there 0.1. Turns without a text have no second
    term. What the harness of all five does otherwise: `PrivilegedGroupConfig`.
    """
    return privileged_group(
        config,
        context,
        name="sdar",
        target_fn=WithPrivileged(target_fn=config.compared(), privileged=config.privileged),
        token_loss=Gated(loss=config.surrogate, coef=config.coef, beta=config.beta),
    )


ALGORITHM = told_in_groups("sdar", SdarConfig, build)
