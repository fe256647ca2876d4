"""Formulas of token losses: pure functions that give one number per supervised token and never reduce.

First the reverse KL on a support of K ids (distillation), then the clipped surrogate with its KL estimators (policy
gradients). Algorithms are composed of the losses in `token_losses.py`. The log-probabilities of a support come from
`lm_head`, which never holds [B, T, V].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from turngym.core.errors import SettingsError
from turngym.trainers.lm_head import MIN_LOGP

FloatArray = NDArray[np.float32]
MIN_TAIL = {torch.float32: 1e-7, torch.float64: 1e-15}
"""Least probability that 1 less the sum over K ids can have: rounding cannot tell less from none."""
ROUNDED = 1.0 + 1e-6
"""A ratio lies beyond a bound if it does by more than this factor, which is more than float32 rounds."""
LOG_RATIO_LIMIT = 20.0
"""A log-ratio is cut to +- this before exp."""
TokenKL = Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor]
"""(student_topk_logp_NK, teacher_topk_logp_NK, student_tail_N, teacher_tail_N) to a loss per token [N], nats."""


def bin_reverse_kl(
    student_topk_logp_NK: Tensor,
    teacher_topk_logp_NK: Tensor,
    student_tail_N: Tensor | None = None,
    teacher_tail_N: Tensor | None = None,
) -> Tensor:
    """Reverse KL over the K ids and one bin for all others: [N], nats.

    l_i = sum_{K+1} p (log p - log q); the bin holds the mass of all other ids, as `lm_head` sums it (`student_tail_N`,
    `teacher_tail_N`, logarithms), or else what the K ids leave of 1.
    Merging ids never adds divergence: 0 <= l <= full KL for any choice of the K ids, exact as K reaches the vocabulary.
    An id that is impossible for the student (-inf) adds 0 and has no gradient.
    Source: [openclaw-rl] Option B, [gkd] Algorithm 1; docs/algorithms.md#reverse-kl-on-a-support (tail="bin", the
    default).
    Differs from the paper: TurnOPD has no bin, see `raw_reverse_kl`.

    Args:
        student_topk_logp_NK: the student's log-probabilities [N, K] at the ids of the support, nats, with gradient.
        teacher_topk_logp_NK: the teacher's at the same ids, nats; detached.
        student_tail_N: the student's log-probability [N] of all other ids together; None: what the K ids leave of 1.
        teacher_tail_N: the same of the teacher.
    """
    # a constant, even where teacher and student are one model in two roles (hints): only the student moves
    teacher = with_tail(teacher_topk_logp_NK, teacher_tail_N).detach()
    return _divergence(with_tail(student_topk_logp_NK, student_tail_N), teacher)


def raw_reverse_kl(student_topk_logp_NK: Tensor, teacher_topk_logp_NK: Tensor, *tails: Tensor | None) -> Tensor:
    """Reverse KL's terms of the K ids alone: [N], nats; may be slightly negative.

    l_i = sum_K p (log p - log q), nothing renormalized. Its gradient is not zero where p = q: there it is that of
    sum_K p, so descent moves mass out of the K ids, which the bin prevents.
    Source: [turnopd] Algorithm 1; docs/algorithms.md#reverse-kl-on-a-support (tail="raw").
    """
    return _divergence(student_topk_logp_NK, teacher_topk_logp_NK.detach())


def renorm_reverse_kl(student_topk_logp_NK: Tensor, teacher_topk_logp_NK: Tensor, *tails: Tensor | None) -> Tensor:
    """Reverse KL of both distributions renormalized over the K ids: [N], nats, at least 0.

    l_i = sum_K p' (log p' - log q'), p' = p / sum_K p, q' alike. Blind to how much mass the student leaves outside.
    Source: docs/algorithms.md#reverse-kl-on-a-support (tail="renorm").
    """
    return _divergence(_finite(student_topk_logp_NK).log_softmax(-1), teacher_topk_logp_NK.detach().log_softmax(-1))


def bin_forward_kl(
    student_topk_logp_NK: Tensor,
    teacher_topk_logp_NK: Tensor,
    student_tail_N: Tensor | None = None,
    teacher_tail_N: Tensor | None = None,
) -> Tensor:
    """Forward KL over the K ids and one bin for all others: [N], nats, at least 0.

    l_i = sum_{K+1} q (log q - log p), p student, q teacher (detached): the cross entropy that imitation of the teacher
    has on average, less the teacher's own entropy. An id that is impossible for the teacher adds 0. Its gradient at an
    id's logit is p - q however unlikely the student finds the id, where the reverse KL's is weighed by p.
    Arguments as `bin_reverse_kl`. Source: [guided-opd]; docs/algorithms.md#forward-kl.
    """
    teacher = _finite(with_tail(teacher_topk_logp_NK, teacher_tail_N).detach())
    student = _finite(with_tail(student_topk_logp_NK, student_tail_N))
    return (teacher.exp() * (teacher - student)).sum(-1)


@dataclass(frozen=True, slots=True)
class JensenShannon:
    """Generalized Jensen-Shannon divergence over the K ids and one bin for all others: [N], nats, at least 0.

    l_i = beta KL(q || m) + (1 - beta) KL(p || m), m = beta q + (1 - beta) p, p student, q teacher (detached). However
    far apart p and q are, it stays below log 2, where both KLs grow without bound. A beta of 0 or 1 would make it 0 for
    all p and q; they stand for what l_i / beta and l_i / (1 - beta) tend to: the forward KL and the reverse KL.
    Source: [gkd] section 2; docs/algorithms.md#between-forward-and-reverse.
    """

    beta: float

    def __call__(
        self,
        student_topk_logp_NK: Tensor,
        teacher_topk_logp_NK: Tensor,
        student_tail_N: Tensor | None = None,
        teacher_tail_N: Tensor | None = None,
    ) -> Tensor:
        if self.beta in (0.0, 1.0):
            kl = bin_forward_kl if self.beta == 0.0 else bin_reverse_kl
            return kl(student_topk_logp_NK, teacher_topk_logp_NK, student_tail_N, teacher_tail_N)
        teacher = _finite(with_tail(teacher_topk_logp_NK, teacher_tail_N).detach())
        student = _finite(with_tail(student_topk_logp_NK, student_tail_N))
        mixture = torch.logaddexp(student + math.log1p(-self.beta), teacher + math.log(self.beta))
        of_teacher, of_student = teacher.exp() * (teacher - mixture), student.exp() * (student - mixture)
        return (self.beta * of_teacher + (1.0 - self.beta) * of_student).sum(-1)


@dataclass(frozen=True, slots=True)
class MixedKL:
    """Weighted sum of both directions over the K ids and one bin for all others: [N], nats, at least 0.

    l_i = (1 - beta) KL(q || p) + beta KL(p || q), p student, q teacher (detached).
    Source: docs/algorithms.md#between-forward-and-reverse.
    """

    beta: float

    def __call__(self, student_topk_logp_NK: Tensor, teacher_topk_logp_NK: Tensor, *tails: Tensor | None) -> Tensor:
        forward = bin_forward_kl(student_topk_logp_NK, teacher_topk_logp_NK, *tails)
        reverse = bin_reverse_kl(student_topk_logp_NK, teacher_topk_logp_NK, *tails)
        return (1.0 - self.beta) * forward + self.beta * reverse


TAILS: Mapping[str, TokenKL] = MappingProxyType(
    {"bin": bin_reverse_kl, "raw": raw_reverse_kl, "renorm": renorm_reverse_kl}
)
"""What becomes of the mass outside the K ids, by the name that settings use."""


def importance_weight(logp_N: Tensor, behavior_logp_N: Tensor, *, low: float = 0.1, high: float = 10.0) -> Tensor:
    """How much more likely the student is to sample a token than the policy that did: [N], detached.

    w_i = clamp(exp(clamp(logp_i - behavior_logp_i, -20, 20)), low, high); 1 where the behavior is unknown (NaN).
    Multiply the token loss by it.
    Source: [turnopd] Table 7; docs/algorithms.md#importance-weight (clip ratio 0.9 / 9: from 0.1 to 10).
    """
    # detached: a weight corrects the loss for who sampled, it is not to be minimized itself; unknown: log 1
    log_ratio = (logp_N - behavior_logp_N).detach().nan_to_num(nan=0.0)
    # cut before exp, which overflows float32 beyond 88, and inf * 0 would be NaN
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().clamp(low, high)


def with_tail(topk_logp_NK: Tensor, tail_N: Tensor | None) -> Tensor:
    """Log-probabilities of K ids and, last, of all others together: [N, K + 1], nats.

    `tail_N` is the sum over the others; if it is None their mass is what the K ids leave of 1 (`tail_logp`).
    """
    tail = tail_logp(topk_logp_NK) if tail_N is None else tail_N[:, None].to(topk_logp_NK)
    return torch.cat([topk_logp_NK, tail], dim=-1)


def tail_logp(topk_logp_NK: Tensor) -> Tensor:
    """Log of the mass outside K ids, from these alone: [N, 1], nats, in float32 at least log(1e-7).

    log(1 - sum_K p). Log-probabilities in float32 are known to about 1e-7, and so is this mass, however small it is:
    `lm_head` sums it over the other ids.
    """
    # rounding may carry the sum of K probabilities to 1 or above, where the tail has no logarithm
    least = MIN_TAIL.get(topk_logp_NK.dtype, MIN_TAIL[torch.float32])
    covered = _finite(topk_logp_NK).logsumexp(-1, keepdim=True).clamp(max=-least)
    # 1 - exp(x) loses all digits where the K ids hold nearly everything; -expm1(x) keeps them
    return (-covered.expm1()).log()


def topk_entropy(topk_logp_NK: Tensor, tail_N: Tensor | None = None) -> Tensor:
    """Entropy over the K ids and the bin of all others: [N], nats, detached; at most the full entropy.

    -sum_{K+1} q log q: what a teacher's top-K says about its uncertainty.
    """
    bins = _finite(with_tail(topk_logp_NK, tail_N).detach())
    return -(bins.exp() * bins).sum(-1)


def _finite(logp: Tensor) -> Tensor:
    """0 log 0 is 0, and so is its gradient: the limit that both go to as an id becomes impossible for the student."""
    return logp.clamp(min=MIN_LOGP)


def _divergence(student_logp: Tensor, teacher_logp: Tensor) -> Tensor:
    student_logp = _finite(student_logp)
    # the weight p is not detached: the exact KL has its gradient through both factors
    return (student_logp.exp() * (student_logp - teacher_logp)).sum(-1)


# The clipped policy-gradient surrogate and estimators of a KL from sampled tokens.

KL_LIMIT = 10.0
"""KL estimates are cut to +- this, nats."""
K2_LIMIT = (2.0 * KL_LIMIT) ** 0.5
"""The log-ratio d at which d^2 / 2 is 10."""
K3_LIMITS = (-10.999983298020256, 2.610868638149876)
"""The log-ratios d at which exp(d) - 1 - d is 10."""
SEQUENCE = "sequence"
"""The column of `Targets.extra` that numbers the sequences whose tokens share one importance ratio."""
KLEstimator = Callable[[Tensor, Tensor], Tensor]
"""(logp_N, reference_logp_N) at the sampled ids to an estimate per token [N], nats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surrogate:
    """`loss_N` per token, with gradient; `ratio_N` detached; `clipped_N` bool, where the clip stops the gradient."""

    loss_N: Tensor
    ratio_N: Tensor
    clipped_N: Tensor


def clipped_surrogate(
    logp_N: Tensor,
    behavior_logp_N: Tensor,
    advantage_N: Tensor,
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.28,
    dual_clip: float | None = None,
) -> Surrogate:
    """PPO's clipped surrogate with separate bounds, per token and not reduced.

    `logp_N` (with gradient) and `behavior_logp_N` are log-probabilities, nats, of the sampled ids; `advantage_N` any
    unit. r = exp(clamp(logp - behavior, -20, 20)); l = max(-A r, -A clip(r, 1 - eps_low, 1 + eps_high)), and with
    `dual_clip` c at most -A c where A < 0: a token that has become much likelier than when it was drawn would otherwise
    be pushed down with its whole ratio, e^20 times the others.
    Source: [ppo] eq. 7, [dapo] section 3.1, [dual-clip]; docs/algorithms.md#clipped-surrogate (eps 0.2 / 0.28).
    """
    # only the ratio's numerator is learned
    advantage_N, behavior_logp_N = advantage_N.detach(), behavior_logp_N.detach()
    # cut before exp: one token gone astray must not make the batch's loss infinite
    ratio_N = (logp_N - behavior_logp_N).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    loss_N, clipped_N = clipped_objective(ratio_N, advantage_N, eps_low, eps_high, dual_clip)
    return Surrogate(loss_N=loss_N, ratio_N=ratio_N.detach(), clipped_N=clipped_N)


def check_clip(low: float, high: float) -> None:
    """Raises SettingsError unless 0 <= low <= 1 and 0 <= high."""
    if not 0.0 <= low <= 1.0 or not high >= 0.0:
        raise SettingsError(f"clip is {low} and {high}; valid: 0 <= lower <= 1 and 0 <= upper")


def clipped_weight(
    logp_N: Tensor,
    behavior_logp_N: Tensor,
    advantage_N: Tensor,
    *,
    eps_low: float = 1.0,
    eps_high: float = 0.28,
    dual_clip: float | None = None,
) -> Surrogate:
    """CISPO's loss: REINFORCE with a clipped importance weight, per token and not reduced.

    l = -sg(clip(r, 1 - eps_low, 1 + eps_high)) A logp, sg without gradient: where the weight is clipped a token keeps
    its gradient, which `clipped_surrogate` takes away. `eps_low` 1 is no lower bound. `dual_clip` c: r at most c where
    A < 0. Arguments as `clipped_surrogate`.
    Source: [cispo] eq. 4, eq. 5; docs/algorithms.md#clipped-weight.
    """
    plain = clipped_surrogate(logp_N, behavior_logp_N, advantage_N)
    weight_N = plain.ratio_N.clamp(1.0 - eps_low, 1.0 + eps_high)
    if dual_clip is not None:
        weight_N = torch.where(advantage_N < 0, weight_N.clamp(max=dual_clip), weight_N)
    loss_N = -weight_N * advantage_N.detach() * logp_N
    return Surrogate(loss_N=loss_N, ratio_N=plain.ratio_N, clipped_N=weight_N != plain.ratio_N)


def sequence_logp(logp_N: Tensor, behavior_logp_N: Tensor, sequence_N: Tensor) -> Tensor:
    """Log-probabilities whose ratio to the behavior is that of the whole sequence: [N], with gradient.

    behavior + mean over the sequence of (logp - behavior): its ratio is GSPO's s = (p(y) / mu(y))^(1 / |y|), the same
    for all tokens of the sequence y. `sequence_N` int64 [N] numbers the sequences; all tokens of one must be here.
    Source: [gspo] eq. 5, eq. 7; docs/algorithms.md#sequence-ratio.
    """
    _, index_N = sequence_N.unique(return_inverse=True)
    gap_N = logp_N - behavior_logp_N.detach()
    count_s = torch.bincount(index_N)
    total_s = torch.zeros(len(count_s), dtype=gap_N.dtype, device=gap_N.device).index_add(0, index_N, gap_N)
    return behavior_logp_N.detach() + (total_s / count_s)[index_N]


def clipped_objective(
    ratio_N: Tensor, advantage_N: Tensor, eps_low: float, eps_high: float, dual_clip: float | None = None
) -> tuple[Tensor, Tensor]:
    """l = max(-A r, -A clip(r, 1 - eps_low, 1 + eps_high)) of any ratio r: loss [N], and bool [N] where it is clipped.

    With `dual_clip` c: min(l, -A c) where A < 0. `advantage_N` must be detached. A ratio at a bound is within it, also
    where it is rounded: one that was truncated there (`TruncatedImportance`) keeps its gradient.
    """
    # the clip may only take a gain away, never hide a loss
    above = (advantage_N > 0) & (ratio_N > (1.0 + eps_high) * ROUNDED)
    below = (advantage_N < 0) & (ratio_N < (1.0 - eps_low) / ROUNDED)
    bound_N = torch.where(above, 1.0 + eps_high, 1.0 - eps_low)
    loss_N = -advantage_N * torch.where(above | below, bound_N, ratio_N)
    if dual_clip is None:
        return loss_N, above | below
    beyond = (advantage_N < 0) & (ratio_N > dual_clip * ROUNDED)
    # a constant: no gradient pushes harder than c times the advantage
    return torch.where(beyond, -advantage_N * dual_clip, loss_N), above | below | beyond


def kl_k1(logp_N: Tensor, reference_logp_N: Tensor) -> Tensor:
    """KL estimate logp - reference: [N], nats; unbiased, either sign. Cut to +-10, its gradient (1) is not.

    As a loss on the policy's own samples its gradient is zero in expectation.
    Source: [kl-approx]; docs/algorithms.md#kl-estimators.
    """
    return _cut(logp_N - reference_logp_N.detach(), -KL_LIMIT, KL_LIMIT)


def kl_k2(logp_N: Tensor, reference_logp_N: Tensor) -> Tensor:
    """KL estimate (logp - reference)^2 / 2: [N], nats; at least 0, biased, with the exact gradient.

    Cut to 10; beyond, the gradient stays what it is at the cut, +-4.5.
    Source: [kl-approx]; docs/algorithms.md#kl-estimators.
    """
    return 0.5 * _cut(logp_N - reference_logp_N.detach(), -K2_LIMIT, K2_LIMIT).square()


def kl_k3(logp_N: Tensor, reference_logp_N: Tensor) -> Tensor:
    """KL estimate exp(d) - 1 - d with d = reference - logp: [N], nats; at least 0, unbiased.

    Cut to 10; beyond, the gradient stays what it is at the cut: -12.6 where the policy gives the token far less than
    the reference did, 1 where far more.
    Source: [kl-approx], [grpo] eq. 4; docs/algorithms.md#kl-estimators.
    """
    d_N = _cut(reference_logp_N.detach() - logp_N, *K3_LIMITS)
    # near 0 both terms nearly cancel: expm1 keeps the digits that exp(d) - 1 would lose
    return d_N.expm1() - d_N


def _cut(d_N: Tensor, low: float, high: float) -> Tensor:
    """`d_N` clamped to [low, high], with the gradient of `d_N`: straight through.

    A clamp's own gradient is 0 beyond its bounds, just where a policy has run away and must be pulled back.
    """
    # the difference is 0, or NaN for an infinite d, and carries the gradient
    return d_N.detach().clamp(low, high) + (d_N - d_N.detach()).nan_to_num(0.0)


KL_ESTIMATORS: Mapping[str, KLEstimator] = MappingProxyType({"k1": kl_k1, "k2": kl_k2, "k3": kl_k3})
"""The estimators by the name that settings use."""
