"""Skill-SD: GRPO, and beside it a divergence from the policy that is told a skill, weighted by who sampled the token.

Read next: trainers/privileged.py, trainers/contrib/sdar.py, trainers/algorithms/grpo.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from turngym.core import NotNegative
from turngym.trainers import Algorithm, BuildContext, TokenLoss, TokenLosses, Tokens, known_behavior
from turngym.trainers.contrib.privileged_group import (
    LOGP,
    PrivilegedGroupConfig,
    WithPrivileged,
    privileged_group,
    told_in_groups,
    with_told,
)

K3_MOST, RATIO_MOST = 20.0, 10.0
"""Log-ratios are cut from above to these before exp."""


def importance_k3(logp_N: Tensor, privileged_logp_N: Tensor, log_ratio_N: Tensor) -> Tensor:
    """l_i = rho (exp(-d) - 1 + d), d = log p - log q, rho = exp(log_ratio): [N], nats, at least 0 where nothing is cut.

    `logp_N` and `log_ratio_N` (new / old policy) have gradients, both of which count: on fresh tokens the gradient's
    mean is that of KL(p || q). -d is cut at 20, the log-ratio at 10.
    Source: [skill-sd]; docs/contrib_algorithms.md#importance-weighted-k3.
    """
    d_N = logp_N - privileged_logp_N.detach()
    return log_ratio_N.clamp(max=RATIO_MOST).exp() * ((-d_N).clamp(max=K3_MOST).exp() - 1.0 + d_N)


@dataclass(frozen=True, slots=True, kw_only=True)
class Distilled:
    """l_i = loss_i + coef `importance_k3`_i where the turn was told something.

    Source: [skill-sd]; docs/contrib_algorithms.md#importance-weighted-k3.
    Diagnostics: those of `loss`; `told_k3` and `told_gap` (nats), NaN where nothing was told.
    """

    loss: TokenLoss
    coef: float

    def __call__(self, tokens: Tokens) -> TokenLosses:
        # where it is unknown who sampled, the present policy stands in: a ratio of 1, with its gradient
        ratio_n = tokens.sampled_logp_n - known_behavior(tokens)
        own_n = importance_k3(tokens.logp_n, tokens.extra[LOGP], ratio_n)
        return with_told(self.loss(tokens), tokens, self.coef * own_n, told_k3=own_n.detach())


class SkillSdConfig(PrivilegedGroupConfig):
    """GRPO with a divergence from the policy that was told something."""

    coef: NotNegative = 0.001
    """Weight of the divergence."""


def build(config: SkillSdConfig, context: BuildContext) -> Algorithm:
    """Clipped policy gradient on group-relative advantages, plus coef rho_i (exp(-d_i) - 1 + d_i) on told turns.

    d_i = log p - log q, q the policy with the text in its prompt, before the update; rho_i = p / the behavior policy.
    Source: [skill-sd]; docs/contrib_algorithms.md#skill-sd.
    Differs from the paper: there skills are rewritten from finished episodes during training, here they are a folder's.
    Read in SDAR's code alone. Its functions' own default of coef is 0.1; 0.001 is what all its scripts run. There rho
    is relative to the policy before the update, scored anew; here to the one that sampled, which is the same on fresh
    rollouts. Turns without a text have no second term. What the harness of all five does otherwise:
    `PrivilegedGroupConfig`.
    """
    return privileged_group(
        config,
        context,
        name="skill-sd",
        target_fn=WithPrivileged(target_fn=config.compared(), privileged=config.privileged),
        token_loss=Distilled(loss=config.surrogate, coef=config.coef),
    )


ALGORITHM = told_in_groups("skill-sd", SkillSdConfig, build)
