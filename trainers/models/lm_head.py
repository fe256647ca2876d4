"""From hidden states to log-probabilities, in chunks, so that [N, V] never exists."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from turngym.trainers.models.weight_head import MIN_LOGP, ByWeight, HeadWork, chunks, weight_of

Head = Callable[[Tensor], Tensor]
"""Hidden states [n, d] to logits [n, V]; a language model's output layer."""

HeadLike = Head | Tensor | tuple[Tensor, Tensor | None]
"""A head, its weight [V, d], or its (weight [V, d], bias [V] or None)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Projected:
    """Log-probabilities, nats, at N positions: fp32 (fp64 if the logits are).

    `logp_N` of the labels; `topk_logp_NK` of the K given ids, None if none were given; `entropy_N` of the whole
    distribution, detached unless its gradient was asked for, None unless asked for.
    """

    logp_N: Tensor
    topk_logp_NK: Tensor | None
    entropy_N: Tensor | None


def project(
    hidden_N: Tensor,
    head: HeadLike,
    label_N: Tensor,
    topk_ids_NK: Tensor | None = None,
    *,
    temperature: float = 1.0,
    chunk: int = 1024,
    entropy: bool = False,
    entropy_gradient: bool = False,
    vocab: int | None = None,
    into_grad: bool = False,
) -> Projected:
    """Log-probabilities of the labels and of K more ids under softmax(head(hidden) / temperature).

    `hidden_N` [N, d]; `head` a callable, a weight [V, d] or (weight, bias); `label_N` int [N]; `topk_ids_NK` int
    [N, K]. At most `chunk` rows of logits exist at a time: chunks are recomputed in backward, where a head that is one
    matrix has one gradient, to which all chunks add. `vocab` cuts the logits to their first ids, where teacher and
    student differ only in padding. `into_grad` lets the backward pass add to the `grad` that the head's weight has
    already, instead of making another: for callers of `backward()`, not of `torch.autograd.grad`.
    logp_i(v) = z_iv - logsumexp_u z_iu, z = logits / temperature, in fp32. Entropy: -sum_v p log p, nats.
    Source: docs/algorithms.md#log-probabilities. Errors: ValueError for shapes or settings that do not fit.
    """
    _check(hidden_N, label_N, topk_ids_NK, temperature, chunk)
    ids_N1 = label_N[:, None].long()
    # label and support in one gather, so that the logits of a chunk are computed once
    ids_NJ = ids_N1 if topk_ids_NK is None else torch.cat([ids_N1, topk_ids_NK.long()], dim=1)
    work = HeadWork(
        temperature=temperature,
        chunk=chunk,
        entropy=entropy or entropy_gradient,
        entropy_gradient=entropy_gradient,
        vocab=vocab,
        into_grad=into_grad,
    )
    logp_NJ, entropy_N = _project(hidden_N, head, ids_NJ, work)
    return Projected(
        logp_N=logp_NJ[:, 0],
        topk_logp_NK=None if topk_ids_NK is None else logp_NJ[:, 1:],
        entropy_N=entropy_N,
    )


@torch.no_grad()
def topk(
    hidden_N: Tensor,
    head: HeadLike,
    k: int,
    *,
    chunk: int = 1024,
    temperature: float = 1.0,
    vocab: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The K most likely ids of each position: ids int64 [N, K] and logp fp32 [N, K], most likely first, no gradient.

    The log-probabilities are those of the full softmax(head(hidden) / temperature), not renormalized over K. `k`
    larger than the vocabulary gives the whole vocabulary. Serves the teacher's support (default) and the student's.
    Source: docs/algorithms.md#log-probabilities. Errors: ValueError if `k`, `chunk` or `temperature` is not positive.
    """
    if k < 1:
        raise ValueError(f"k is {k}; a support needs at least 1 id")
    _check_settings(temperature, chunk)
    call = _callable(head)
    ids, logps = [], []
    for rows in chunks(len(hidden_N), chunk):
        logits = _logits(call, hidden_N[rows], temperature, vocab)
        best = logits.topk(min(k, logits.shape[-1]), dim=-1)
        ids.append(best.indices)
        logps.append(best.values - logits.logsumexp(-1, keepdim=True))
    return torch.cat(ids), torch.cat(logps)


def _project(hidden_N: Tensor, head: HeadLike, ids_NJ: Tensor, work: HeadWork) -> tuple[Tensor, Tensor | None]:
    """logp [N, J] of `ids_NJ`, and the entropy [N] if it is wanted."""
    matrix = weight_of(head)
    dtype = None if matrix is None else _precision(hidden_N, matrix[0])
    if matrix is not None and dtype is not None:
        _check_vocab(work.vocab, len(matrix[0]))
        found: tuple[Tensor, Tensor | None] = ByWeight.apply(hidden_N.to(dtype), *matrix, ids_NJ, work)
        return found
    step, parts = _Chunk(head=_callable(head), work=work), []
    for rows in chunks(len(hidden_N), work.chunk):
        if len(hidden_N) <= work.chunk or not torch.is_grad_enabled():
            parts.append(step(hidden_N[rows], ids_NJ[rows]))
        else:
            # a single chunk is what fits anyway; more of them are only affordable if none outlives its turn
            # a head draws nothing at random, so no random state is kept for each chunk
            parts.append(checkpoint(step, hidden_N[rows], ids_NJ[rows], use_reentrant=False, preserve_rng_state=False))
    entropy_N = torch.cat([value for _, value in parts if value is not None]) if work.entropy else None
    return torch.cat([logp for logp, _ in parts]), entropy_N


def _precision(hidden_N: Tensor, weight: Tensor) -> torch.dtype | None:
    """What both are multiplied in; None where they do not fit, which the product explains."""
    device = hidden_N.device.type
    if torch.is_autocast_enabled(device) and torch.float64 not in (hidden_N.dtype, weight.dtype):
        return torch.get_autocast_dtype(device)
    return hidden_N.dtype if hidden_N.dtype == weight.dtype else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunk:
    """One chunk's work under any head, as a value that `checkpoint` can call twice."""

    head: Head
    work: HeadWork

    def __call__(self, hidden_n: Tensor, ids_nJ: Tensor) -> tuple[Tensor, Tensor | None]:
        logits = _logits(self.head, hidden_n, self.work.temperature, self.work.vocab)
        # gather before the subtraction: [n, J] instead of a log-softmax of [n, V]
        logp_nJ = logits.gather(1, ids_nJ) - logits.logsumexp(-1, keepdim=True)
        if not self.work.entropy:
            return logp_nJ, None
        # last, so that the recomputation in backward stops before it where no gradient is wanted
        with torch.set_grad_enabled(self.work.entropy_gradient and torch.is_grad_enabled()):
            return logp_nJ, _entropy(logits)


def _entropy(logits: Tensor) -> Tensor:
    # p = 0 gives 0 * -inf, a NaN in the gradient too; its share of the entropy is 0
    logp = logits.log_softmax(-1).clamp(min=MIN_LOGP)
    return -(logp.exp() * logp).sum(-1)


def _logits(head: Head, hidden_n: Tensor, temperature: float, vocab: int | None) -> Tensor:
    logits = head(hidden_n)
    _check_vocab(vocab, logits.shape[-1])
    logits = logits[:, :vocab]
    # bfloat16 has 8 bits: a logsumexp over 10^5 ids, and a difference of two of them, need float32
    logits = logits if logits.dtype == torch.float64 else logits.float()
    # dividing by 1 would copy [n, V]
    return logits if temperature == 1.0 else logits / temperature


def _callable(head: HeadLike) -> Head:
    if isinstance(head, Tensor):
        head = (head, None)
    if isinstance(head, tuple):
        weight, bias = head
        return lambda hidden: linear(hidden, weight, bias)
    return head


def _check_vocab(vocab: int | None, width: int) -> None:
    if vocab is not None and vocab > width:
        raise ValueError(f"vocab is {vocab} but the head gives {width} logits; valid is at most that")


def _check(hidden_N: Tensor, label_N: Tensor, ids_NK: Tensor | None, temperature: float, chunk: int) -> None:
    _check_settings(temperature, chunk)
    if hidden_N.ndim != 2 or label_N.shape != hidden_N.shape[:1]:
        raise ValueError(f"hidden is {tuple(hidden_N.shape)} and label {tuple(label_N.shape)}; need [N, d] and [N]")
    if ids_NK is not None and (ids_NK.ndim != 2 or len(ids_NK) != len(label_N)):
        raise ValueError(f"topk ids are {tuple(ids_NK.shape)}; need [N, K] with N = {len(label_N)}")


def _check_settings(temperature: float, chunk: int) -> None:
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; valid is above 0")
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}; valid is at least 1 row")
