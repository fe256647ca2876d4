"""Importance correction for tokens that an older student drew."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from turngym.trainers.algorithm import TokenLoss, TokenLosses, Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class TruncatedImportance:
    """Another token loss whose probability ratio new / old counts for at most `cap`: truncated importance sampling.

    With r_i = p(label_i) / mu(label_i), mu as sampled, the inner loss sees mu'_i = max(mu_i, p_i / cap) with p_i
    detached, so its ratio is min(r_i, cap) and, where it is linear in the ratio, its gradient
    min(r_i, cap) A_i grad log p_i: bounded for negative advantages too, where clipping alone bounds nothing. Tokens
    whose behavior is unknown (NaN) stay so. On fresh rollouts r_i is 1 and nothing changes.
    Source: [impala] section 4.1, [tis]; docs/algorithms.md#truncated-importance-sampling.
    Diagnostics: `ratio`, min(r_i, cap), and `truncated`, 1 where it was cut; NaN where the behavior is unknown.
    """

    loss: TokenLoss
    cap: float = 2.0

    def __call__(self, tokens: Tokens) -> TokenLosses:
        # detached: else the gradient through mu' would cancel that of the ratio where it is cut
        now_n = tokens.sampled_logp_n.detach()
        least_n = now_n - math.log(self.cap)
        # maximum passes NaN on, so that unknown behavior stays unknown to the inner loss
        behavior_n = torch.maximum(tokens.behavior_logp_n, least_n)
        inner = self.loss(replace(tokens, behavior_logp_n=behavior_n))
        known_n = tokens.behavior_logp_n.isfinite()
        cut_n = (tokens.behavior_logp_n < least_n).float()
        own = {
            "ratio": torch.where(known_n, (now_n - behavior_n).exp(), torch.nan),
            "truncated": torch.where(known_n, cut_n, torch.nan),
        }
        return TokenLosses(loss_n=inner.loss_n, diagnostics={**inner.diagnostics, **own})
