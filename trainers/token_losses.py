"""Token losses as pieces of an algorithm: each gives one number per supervised token and never reduces."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from turngym.trainers.pieces import TokenLosses, Tokens
from turngym.trainers.reverse_kl import (
    TokenKL,
    bin_reverse_kl,
    importance_weight,
    raw_reverse_kl,
    topk_entropy,
    topk_reverse_kl,
)
from turngym.trainers.surrogate import clipped_surrogate


@dataclass(frozen=True, slots=True)
class NegativeLogLikelihood:
    """l_i = -log p(label_i), nats."""

    def __call__(self, tokens: Tokens) -> TokenLosses:
        return TokenLosses(loss_n=-tokens.logp_n, diagnostics={})


@dataclass(frozen=True, slots=True, kw_only=True)
class SupportKL:
    """l_i = w_i KL_S(p || q) on the support S, w_i the detached importance ratio (1 where the behaviour is unknown).

    Source: algorithms specification section 1. Diagnostics: `kl_bin`, `kl_raw`, `teacher_entropy`, `clipped`.
    """

    tail: TokenKL = bin_reverse_kl
    importance: tuple[float, float] | None = (0.1, 10.0)
    """Range of the ratio train / rollout probability; None for no ratio."""

    def __call__(self, tokens: Tokens) -> TokenLosses:
        student, teacher = tokens.topk_logp_nK, tokens.teacher_logp_nK
        if student is None or teacher is None:
            raise ValueError("the support KL needs targets with topk_ids_NK and topk_logp_NK; use a top-K signal")
        loss_n = topk_reverse_kl(student, teacher, self.tail)
        with torch.no_grad():
            diagnostics = {
                "kl_bin": loss_n if self.tail is bin_reverse_kl else bin_reverse_kl(student, teacher),
                "kl_raw": loss_n if self.tail is raw_reverse_kl else raw_reverse_kl(student, teacher),
                "teacher_entropy": topk_entropy(teacher),
                "clipped": torch.zeros_like(loss_n),
            }
        if self.importance is not None:
            low, high = self.importance
            ratio_n = importance_weight(tokens.sampled_logp_n, tokens.behaviour_logp_n, low=low, high=high)
            diagnostics["clipped"] = ((ratio_n <= low) | (ratio_n >= high)).float()
            loss_n = loss_n * ratio_n
        return TokenLosses(loss_n=loss_n, diagnostics={name: values.detach() for name, values in diagnostics.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class ClippedAdvantage:
    """The clipped surrogate on `advantage_N`; diagnostics: `clipped`, and `kl_bin` = `kl_raw` = -advantage.

    -A_i = log p - log q at the sampled id is an unbiased estimate of the reverse KL at the position.
    Source: algorithms specification section 1 (the sampled-token form of the loss).
    """

    eps_low: float = 0.2
    eps_high: float = 0.28

    def __call__(self, tokens: Tokens) -> TokenLosses:
        if tokens.advantage_n is None:
            raise ValueError("the clipped surrogate needs targets with advantage_N; use an advantage signal")
        known_n = tokens.behaviour_logp_n.isfinite()
        behaviour_n = torch.where(known_n, tokens.behaviour_logp_n, tokens.sampled_logp_n.detach())
        result = clipped_surrogate(
            tokens.sampled_logp_n, behaviour_n, tokens.advantage_n, eps_low=self.eps_low, eps_high=self.eps_high
        )
        kl_n = -tokens.advantage_n
        return TokenLosses(
            loss_n=result.loss_N,
            diagnostics={"kl_bin": kl_n, "kl_raw": kl_n, "clipped": result.clipped_N.float()},
        )
