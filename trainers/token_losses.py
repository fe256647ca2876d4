"""The token losses that algorithms are composed of: each gives one number per supervised token and never reduces.

At the end stands what wraps a loss where tokens may be stale: the dual clip and truncated importance sampling. The
formulas are in `trainers/losses.py`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import Field, dataclass, replace
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from turngym.core.errors import SettingsError
from turngym.trainers.algorithm import Algorithm, TokenLoss, TokenLosses, Tokens
from turngym.trainers.losses import (
    SEQUENCE,
    KLEstimator,
    Surrogate,
    TokenKL,
    bin_reverse_kl,
    check_clip,
    clipped_surrogate,
    importance_weight,
    kl_k3,
    raw_reverse_kl,
    sequence_logp,
    topk_entropy,
)


@dataclass(frozen=True, slots=True)
class NegativeLogLikelihood:
    """l_i = -log p(label_i), nats."""

    def __call__(self, tokens: Tokens) -> TokenLosses:
        return TokenLosses(loss_n=-tokens.logp_n, diagnostics={})


@dataclass(frozen=True, slots=True, kw_only=True)
class SupportKL:
    """l_i = w_i KL_S(p || q) on the support S, w_i the detached importance ratio (1 where the behavior is unknown).

    `kl` may also be another divergence, such as the forward KL, KL_S(q || p). 0 where the targets say that a token does
    not count.

    Source: [turnopd] Algorithm 1; docs/algorithms.md#reverse-kl-on-a-support.
    Diagnostics: `kl_bin`, `kl_raw`, `teacher_entropy`, `clipped`.
    """

    kl: TokenKL = bin_reverse_kl
    importance: tuple[float, float] | None = (0.1, 10.0)
    """Range of the ratio train / rollout probability; None, or a range of 1 alone, for no ratio."""

    def __call__(self, tokens: Tokens) -> TokenLosses:
        student, teacher = tokens.topk_logp_nK, tokens.teacher_logp_nK
        if student is None or teacher is None:
            raise ValueError("the support KL needs targets with topk_ids_NK and topk_logp_NK; use a top-K target")
        tails = tokens.tail_n, tokens.teacher_tail_n
        loss_n = self.kl(student, teacher, *tails)
        # logged only: no graph is kept for the two other forms
        with torch.no_grad():
            diagnostics = {
                "kl_bin": loss_n if self.kl is bin_reverse_kl else bin_reverse_kl(student, teacher, *tails),
                "kl_raw": loss_n if self.kl is raw_reverse_kl else raw_reverse_kl(student, teacher),
                "teacher_entropy": topk_entropy(teacher, tails[1]),
                "clipped": torch.zeros_like(loss_n),
            }
        if self.importance not in (None, (1.0, 1.0)):
            low, high = self.importance
            ratio_n = importance_weight(tokens.sampled_logp_n, tokens.behavior_logp_n, low=0.0, high=math.inf)
            weight_n = ratio_n.clamp(low, high)
            diagnostics["clipped"] = (weight_n != ratio_n).float()
            loss_n = loss_n * weight_n
        if tokens.kl_mask_n is not None:
            # masked by a product: both factors are finite, so that no NaN hides behind the zero
            loss_n = loss_n * tokens.kl_mask_n
        return TokenLosses(loss_n=loss_n, diagnostics={name: values.detach() for name, values in diagnostics.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyGradient:
    """l_i = clipped surrogate(A_i) + kl_coef KL_i(policy, reference) - entropy_coef H_i, nats.

    Where the behavior's log-probability is unknown, the present one stands in for it (ratio 1). Where the targets
    number sequences, the ratio is that of the sequence.
    Source: [ppo] eq. 7, [grpo] eq. 3; docs/algorithms.md#clipped-surrogate.
    Diagnostics: `clipped`, and `kl_reference` with a reference.
    """

    surrogate: Callable[..., Surrogate] = clipped_surrogate
    """Loss of a token from ratio and advantage: `clipped_surrogate` or `clipped_weight`."""
    clip: tuple[float, float] = (0.2, 0.2)
    """How far below and above 1 the ratio counts."""
    kl_coef: float = 0.0
    kl: KLEstimator = kl_k3
    entropy_coef: float = 0.0
    dual_clip: float | None = None
    """Greatest ratio that counts where the advantage is negative; None for no bound."""

    def __post_init__(self) -> None:
        check_clip(*self.clip)

    def __call__(self, tokens: Tokens) -> TokenLosses:
        if tokens.advantage_n is None:
            raise ValueError("a clipped surrogate needs targets with advantage_N")
        logp_n, behavior_n = tokens.sampled_logp_n, known_behavior(tokens)
        if SEQUENCE in tokens.extra:
            logp_n = sequence_logp(logp_n, behavior_n, tokens.extra[SEQUENCE])
        low, high = self.clip
        result = self.surrogate(
            logp_n, behavior_n, tokens.advantage_n, eps_low=low, eps_high=high, dual_clip=self.dual_clip
        )
        more_n, diagnostics = regularized(tokens, self.kl_coef, self.kl, self.entropy_coef)
        diagnostics["clipped"] = result.clipped_N.float()
        return TokenLosses(loss_n=result.loss_N + more_n, diagnostics=diagnostics)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClippedAdvantage:
    """The clipped surrogate on `advantage_N` as a distillation: adds `kl_bin` = `kl_raw` = -advantage.

    -A_i = log p - log q at the sampled id is an unbiased estimate of the reverse KL at the position; it stands in for
    both forms, so that depth control and tables work with it too.
    Source: [minillm] eq. 2; docs/algorithms.md#sampled-token-distillation.
    """

    loss: PolicyGradient = PolicyGradient(clip=(0.2, 0.28))

    def __call__(self, tokens: Tokens) -> TokenLosses:
        inner = self.loss(tokens)
        assert tokens.advantage_n is not None  # the surrogate needs it
        kl = dict.fromkeys(("kl_bin", "kl_raw"), -tokens.advantage_n)
        return TokenLosses(loss_n=inner.loss_n, diagnostics={**inner.diagnostics, **kl})


@dataclass(frozen=True, slots=True, kw_only=True)
class Regularized:
    """Another token loss plus kl_coef KL_i(policy, reference) - entropy_coef H_i, nats; adds `kl_reference`."""

    loss: TokenLoss
    kl_coef: float = 0.0
    kl: KLEstimator = kl_k3
    entropy_coef: float = 0.0

    def __call__(self, tokens: Tokens) -> TokenLosses:
        inner = self.loss(tokens)
        more_n, diagnostics = regularized(tokens, self.kl_coef, self.kl, self.entropy_coef)
        return TokenLosses(loss_n=inner.loss_n + more_n, diagnostics={**inner.diagnostics, **diagnostics})


def known_behavior(tokens: Tokens) -> Tensor:
    """Behavior log-probabilities [n]. Unknown ones are replaced by the present ones, detached (a ratio of 1)."""
    known_n = tokens.behavior_logp_n.isfinite()
    # replaced before any arithmetic: NaN in a masked token would still be NaN in the gradient
    return torch.where(known_n, tokens.behavior_logp_n, tokens.sampled_logp_n.detach())


def regularized(
    tokens: Tokens, kl_coef: float, kl: KLEstimator, entropy_coef: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """kl_coef KL_i(policy, reference) - entropy_coef H_i: [n], and the diagnostic `kl_reference` where there is one."""
    more_n, diagnostics = torch.zeros_like(tokens.logp_n), {}
    if tokens.reference_logp_n is not None:
        kl_n = kl(tokens.logp_n, tokens.reference_logp_n)
        diagnostics["kl_reference"] = kl_n.detach()
        more_n = more_n + kl_coef * kl_n
    # minus: a bonus; skipped at 0, for then the entropy has no graph
    if entropy_coef:
        more_n = more_n - entropy_coef * tokens.entropy_n
    return more_n, diagnostics


# Where tokens may be stale: an older student drew them, and the ratio new / old of a token may be anything.

DUAL_CLIP = 3.0
"""Bound of the ratio under a negative advantage, where episodes may be stale."""


def bounded(algorithm: Algorithm, setting: float | None, *, stale: bool) -> Algorithm:
    """`algorithm` with the dual clip that the `setting` names: 0 none, None 3 where episodes may be `stale`.

    Fresh episodes have ratios of 1, so nothing is bounded there. By default losses that have no dual clip stay as they
    are; a bound that is asked for raises SettingsError there.
    Source: [dual-clip]; docs/algorithms.md#clipped-surrogate.
    """
    name = algorithm.name
    if setting and not setting > 1:
        raise SettingsError(f"dual_clip is {setting}; valid: above 1, or 0 for no bound")
    if setting and not _has_ratio(algorithm.token_loss):
        raise SettingsError(f"dual_clip is {setting}; {name} as it is set has no probability ratio: leave it out")
    bound = (DUAL_CLIP if stale else None) if setting is None else setting or None
    return algorithm if bound is None else replace(algorithm, token_loss=with_dual_clip(algorithm.token_loss, bound))


@runtime_checkable
class RatioLoss(TokenLoss, Protocol):
    """A token loss with a probability ratio that can be bounded under negative advantages; a dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def dual_clip(self) -> float | None:
        """The bound; None for none."""


@runtime_checkable
class OuterLoss(TokenLoss, Protocol):
    """A token loss around another one; a dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def loss(self) -> TokenLoss:
        """The loss that this one wraps."""


def _has_ratio(loss: TokenLoss) -> bool:
    return isinstance(loss, RatioLoss) or (isinstance(loss, OuterLoss) and _has_ratio(loss.loss))


def with_dual_clip(loss: TokenLoss, bound: float) -> TokenLoss:
    """`loss` with a `dual_clip` of `bound` where it, or a loss inside of it, has a probability ratio."""
    if isinstance(loss, RatioLoss):
        return replace(loss, dual_clip=bound)
    return replace(loss, loss=with_dual_clip(loss.loss, bound)) if isinstance(loss, OuterLoss) else loss


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
        numbers = {
            "ratio": torch.where(known_n, (now_n - behavior_n).exp(), torch.nan),
            "truncated": torch.where(known_n, cut_n, torch.nan),
        }
        return TokenLosses(loss_n=inner.loss_n, diagnostics={**inner.diagnostics, **numbers})
