"""RLSD: GRPO whose advantage is larger on tokens that the policy, told a skill, finds in line with the outcome.

Read next: trainers/privileged.py, trainers/algorithms/grpo.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from turngym.core import Number, Share, Within
from turngym.trainers import LOG_RATIO_LIMIT, Algorithm, BuildContext, PrivilegedLogprobs, RolloutBatch
from turngym.trainers.contrib.privileged_group import (
    PrivilegedAdvantage,
    PrivilegedGroupConfig,
    privileged_group,
    told_in_groups,
)

Float64N = NDArray[np.float64]


def directed_advantage(advantage_N: Float64N, gap_N: Float64N, *, lam: float, eps: float) -> Float64N:
    """A_i = A ((1 - lam) + lam clip(exp(sign(A) gap_i), 1 - eps, 1 + eps)): float64 [N], in the unit of `advantage_N`.

    `gap_N` = log q - log p of the label, nats. After a success tokens that the told policy finds likelier count more,
    after a failure those that it finds less likely. The sign stays, and no token changes by more than lam eps.
    Source: [rlsd]; docs/contrib_algorithms.md#directed-advantage.
    """
    factor_N = np.exp(np.clip(np.sign(advantage_N) * gap_N, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    return advantage_N * ((1.0 - lam) + lam * np.clip(factor_N, 1.0 - eps, 1.0 + eps))


@dataclass(frozen=True, slots=True, kw_only=True)
class Directed:
    """`directed_advantage` with lam falling linearly to 0: lam max(1 - step / fade, 0); always lam where `fade` is 0.

    Source: [rlsd]; docs/contrib_algorithms.md#directed-advantage.
    """

    lam: float
    eps: float
    fade: int

    def __call__(self, advantage_N: Float64N, logp: PrivilegedLogprobs, batch: RolloutBatch, step: int) -> Float64N:
        lam = self.lam * max(1.0 - step / self.fade, 0.0) if self.fade else self.lam
        return directed_advantage(advantage_N, logp.gap_N.astype(np.float64), lam=lam, eps=self.eps)


class RlsdConfig(PrivilegedGroupConfig):
    """GRPO whose advantage is directed to tokens by a policy that was told something."""

    lam: Share = 0.5
    """Share of the advantage that is directed (lambda)."""
    eps: Share = 0.2
    """Most that a token's factor differs from 1."""
    fade: Within[Number] = 100
    """Steps after which `lam` is 0. It falls linearly; 0: it stays."""


def build(config: RlsdConfig, context: BuildContext) -> Algorithm:
    """Clipped policy gradient on A_i = A_j ((1 - lam) + lam clip(exp(sign(A_j) gap_i), 1 - eps, 1 + eps)).

    A_j is the group-relative advantage, gap_i = log q - log p of the label, q the policy with the text in its prompt;
    where nothing was told the gap is 0 and A_i = A_j.
    Source: [rlsd]; docs/contrib_algorithms.md#rlsd.
    Differs from the paper: read in SDAR's code and in a reimplementation by others, which agree on lam and eps. Both
    let lam fall to 0 over 50 steps by default, SDAR's scripts over 100, the default here; `fade` 0 is a constant lam.
    What the harness of all five does otherwise: `PrivilegedGroupConfig`.
    """
    change = Directed(lam=config.lam, eps=config.eps, fade=config.fade)
    return privileged_group(
        config,
        context,
        name="rlsd",
        target_fn=PrivilegedAdvantage(target_fn=config.compared(), privileged=config.privileged, change=change),
        token_loss=config.surrogate,
    )


ALGORITHM = told_in_groups("rlsd", RlsdConfig, build)
