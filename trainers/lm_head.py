"""From hidden states to log-probabilities, in chunks, so that [N, V] never exists.

`project` gives the log-probabilities of labels and of K more ids, `topk` the K most likely ids; both can say how likely
all other ids are together (the tail). A head that is one
matrix has a backward pass of its own: left to autograd, every chunk of positions makes a gradient of the weight,
[V, d], beside the sum of those before it. Here chunks add their products into one array, and of each softmax only the
logarithm of its sum is kept, [N].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

MIN_LOGP = -1e4
"""Stands for the logarithm of 0 (a masked logit): its probability is exactly 0 too, but 0 times it is no NaN."""
MIN_TAIL_LOGP = -80.0
"""Least logarithm of a tail: float32 has no numbers below e^-103, and exp(80) can still be multiplied."""
SLICE = 8192
"""Rows of the weight whose gradient is made at a time where it is summed in another precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadWork:
    """What is computed and in what pieces: the arguments of `project`."""

    temperature: float
    chunk: int
    entropy: bool
    entropy_gradient: bool
    vocab: int | None
    into_grad: bool
    tail: bool


def weight_of(head: Any) -> tuple[Tensor, Tensor | None] | None:
    """(weight [V, d], bias [V] or None) of a head that does nothing but multiply by it; None of any other."""
    if isinstance(head, nn.Module):
        # adapters and parametrizations are classes of their own; hooks and a replaced forward() might do anything
        hooks = (head._forward_hooks, head._forward_pre_hooks, head._backward_hooks, head._backward_pre_hooks)
        if type(head) is not nn.Linear or any(hooks) or "forward" in vars(head):
            return None
        head = (head.weight, head.bias)
    pair = (head, None) if isinstance(head, Tensor) else head
    if not isinstance(pair, tuple):
        return None
    # subclasses (sharded, quantized) multiply in ways of their own
    return pair if all(type(part) in (Tensor, nn.Parameter) for part in pair if part is not None) else None


def own_gradient(weight: Tensor) -> Tensor | None:
    """`weight.grad`, where adding to it is all that autograd would do with another gradient."""
    watched = weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None)
    grad = weight.grad if weight.is_leaf and not watched else None
    return grad if type(grad) is Tensor and grad.dtype == weight.dtype else None


def chunks(length: int, chunk: int) -> Iterator[slice]:
    """Slices of at most `chunk` rows; one empty slice if there are no rows."""
    # cat needs a tensor, and a process without work a graph for its backward pass
    for start in range(0, max(length, 1), chunk):
        yield slice(start, start + chunk)


class ByWeight(torch.autograd.Function):
    """apply(hidden [N, d], weight, bias, ids [N, J], HeadWork) -> logp [N, J], entropy [N] or None, tail [N] or None.

    The tail is of all ids but those behind the first of `ids`, which is the label. Multiplies in the precision of
    `hidden`, whatever autocast says; differentiable once, in its first three arguments.
    """

    @staticmethod
    def forward(ctx: Any, hidden_N: Tensor, weight: Tensor, bias: Tensor | None, ids_NJ: Tensor, work: HeadWork) -> Any:
        """Called by `apply`, whose arguments the class lists; the signature is that of torch.autograd.Function."""
        # a single chunk is what fits anyway: its logits stay, and need not be computed twice
        keep, parts = len(hidden_N) <= work.chunk and any(ctx.needs_input_grad), []
        with torch.autocast(hidden_N.device.type, enabled=False):
            matrix = _as_used(weight, bias, hidden_N.dtype, work)
            for rows in chunks(len(hidden_N), work.chunk):
                logits = _logits_of(hidden_N[rows], matrix, work)
                parts.append(_softmax(logits, ids_NJ[rows], work))
        logp_NJ, logsum_N1 = torch.cat([part[0] for part in parts]), torch.cat([part[2] for part in parts])
        entropy_N = torch.cat([part[3] for part in parts if part[3] is not None]) if work.entropy else None
        tail_N = torch.cat([part[4] for part in parts if part[4] is not None]) if work.tail else None
        if not keep:
            logsum_N1 += torch.cat([part[1] for part in parts])  # computed again, the logits will have their largest
        ctx.save_for_backward(hidden_N, weight, bias, ids_NJ, logsum_N1, entropy_N, tail_N, logits if keep else None)
        ctx.work = work
        ctx.set_materialize_grads(False)
        if entropy_N is not None and not work.entropy_gradient:
            ctx.mark_non_differentiable(entropy_N)
        return logp_NJ, entropy_N, tail_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope_NJ: Tensor | None, entropy_slope_N: Tensor | None, tail_slope_N: Tensor | None) -> Any:
        """The signature is that of autograd: a gradient for each output of `forward`, None for one that nothing depends
        on."""
        hidden_N, weight, bias, ids_NJ, logsum_N1, entropy_N, tail_N, kept_logits = ctx.saved_tensors
        columns = slope_NJ, entropy_N, entropy_slope_N, tail_N, tail_slope_N
        work, (needs_hidden, needs_weight, needs_bias, *_) = ctx.work, ctx.needs_input_grad
        in_place = own_gradient(weight) if needs_weight and work.into_grad else None
        hidden_slope = torch.empty_like(hidden_N) if needs_hidden else None
        weight_slope = torch.zeros_like(weight) if needs_weight and in_place is None else in_place
        bias_slope = torch.zeros_like(bias) if needs_bias else None
        with torch.autocast(hidden_N.device.type, enabled=False):
            matrix = _as_used(weight, bias, hidden_N.dtype, work)
            for rows in chunks(len(hidden_N), work.chunk):
                logits = _logits_of(hidden_N[rows], matrix, work) if kept_logits is None else kept_logits.clone()
                parts = [None if part is None else part[rows] for part in columns]
                slope = _slope(logits.sub_(logsum_N1[rows]), ids_NJ[rows], *parts)
                slope = (slope if work.temperature == 1.0 else slope.div_(work.temperature)).to(hidden_N.dtype)
                if hidden_slope is not None:
                    torch.mm(slope, matrix[0], out=hidden_slope[rows])
                if weight_slope is not None:
                    _add_product(weight_slope, slope, hidden_N[rows])
                if bias_slope is not None:
                    bias_slope[: slope.shape[1]] += slope.sum(0)
                del logits, slope  # or they would lie beside those of the next chunk
        return hidden_slope, weight_slope if in_place is None else None, bias_slope, None, None


def _as_used(weight: Tensor, bias: Tensor | None, dtype: torch.dtype, work: HeadWork) -> tuple[Tensor, Tensor | None]:
    """The rows that are not cut off, in the precision of the products."""
    return weight[: work.vocab].to(dtype), None if bias is None else bias[: work.vocab].to(dtype)


def _logits_of(hidden_n: Tensor, matrix: tuple[Tensor, Tensor | None], work: HeadWork) -> Tensor:
    """Logits in a new array, in float32 or float64, divided by the temperature: [n, V]."""
    logits = linear(hidden_n, *matrix)
    # bfloat16 has 8 bits: a logsumexp over 10^5 ids, and a difference of two of them, need float32
    logits = logits if logits.dtype == torch.float64 else logits.float()
    # dividing by 1 would read and write [n, V]
    return logits if work.temperature == 1.0 else logits.div_(work.temperature)


def _softmax(
    logits: Tensor, ids_nJ: Tensor, work: HeadWork
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """logp [n, J], the largest logit [n, 1], the logarithm of the sum without it [n, 1], entropy [n], tail [n].

    The largest logit is taken off `logits` in place.
    """
    top_n1 = logits.amax(-1, keepdim=True)
    picked_nJ = logits.sub_(top_n1).gather(1, ids_nJ)
    if work.entropy:
        logits.clamp_(min=MIN_LOGP)
    powers = logits.exp()
    sum_n1 = powers.sum(-1, keepdim=True)
    logsum_n1 = sum_n1.log()
    tail_n = None
    if work.tail:
        # the others summed by themselves: 1 less the sum over K ids would be rounding where these hold nearly all
        ids_nK = ids_nJ[:, 1:]
        powers_nK = powers.gather(1, ids_nK)
        others_n = powers.scatter_(1, ids_nK, 0.0).sum(-1)
        powers.scatter_(1, ids_nK, powers_nK)
        tail_n = (others_n.log() - logsum_n1[:, 0]).clamp_(min=MIN_TAIL_LOGP)
    # H = log sum - mean of the exponents under p
    entropy_n = (logsum_n1 - powers.mul_(logits).sum(-1, keepdim=True) / sum_n1)[:, 0] if work.entropy else None
    return picked_nJ - logsum_n1, top_n1, logsum_n1, entropy_n, tail_n


def _slope(
    logp_nV: Tensor,
    ids_nJ: Tensor,
    slope_nJ: Tensor | None,
    entropy_n: Tensor | None,
    entropy_slope_n: Tensor | None,
    tail_n: Tensor | None,
    tail_slope_n: Tensor | None,
) -> Tensor:
    """Gradient of the logits [n, V], in the place of their `logp_nV`.

    d log p_j / d z_v = [v = j] - p_v, dH / d z_v = -p_v (log p_v + H), and of the tail's logarithm over ids outside S
    [v not in S] p_v / p_tail - p_v.
    """
    sum_n1: Any = 0.0 if slope_nJ is None else slope_nJ.sum(-1, keepdim=True)
    factor_n1 = None
    if tail_n is not None and tail_slope_n is not None:
        # a tail at its least value is a constant
        slope_n1 = torch.where(tail_n > MIN_TAIL_LOGP, tail_slope_n, 0.0)[:, None]
        sum_n1, factor_n1 = sum_n1 + slope_n1, slope_n1 * (-tail_n[:, None]).exp()
    ids_nK = ids_nJ[:, 1:]
    if entropy_n is None or entropy_slope_n is None:
        slope = logp_nV.exp_()
        # taken before, and put back: a difference would lose what is small beside the factor
        inside_nK = None if factor_n1 is None else slope.gather(1, ids_nK) * -sum_n1
        slope.mul_(-sum_n1 if factor_n1 is None else factor_n1 - sum_n1)
    else:
        powers = logp_nV.exp()
        slope = logp_nV.clamp_(min=MIN_LOGP).add_(entropy_n[:, None]).mul_(-entropy_slope_n[:, None]).sub_(sum_n1)
        inside_nK = None if factor_n1 is None else slope.gather(1, ids_nK) * powers.gather(1, ids_nK)
        slope = (slope if factor_n1 is None else slope.add_(factor_n1)).mul_(powers)
    if inside_nK is not None:
        slope.scatter_(1, ids_nK, inside_nK)
    if slope_nJ is not None:
        # the label may be in the support too; one after the other, for a GPU adds two to one place in any order
        for part in (slice(0, 1), slice(1, None)):
            slope.scatter_add_(1, ids_nJ[:, part], slope_nJ[:, part].to(slope.dtype))
    return slope


def _add_product(total_Vd: Tensor, slope_nV: Tensor, hidden_nd: Tensor) -> None:
    """total += slope^T hidden, without a second [V, d]."""
    width = slope_nV.shape[1]
    if total_Vd.dtype == hidden_nd.dtype:
        total_Vd[:width].addmm_(slope_nV.T, hidden_nd)
        return
    for start in range(0, width, SLICE):
        part = slice(start, min(start + SLICE, width))
        total_Vd[part] += slope_nV[:, part].T @ hidden_nd


Head = Callable[[Tensor], Tensor]
"""Hidden states [n, d] to logits [n, V]; a language model's output layer."""
HeadLike = Head | Tensor | tuple[Tensor, Tensor | None]
"""A head, its weight [V, d], or its (weight [V, d], bias [V] or None)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Projected:
    """Log-probabilities, nats, at N positions: fp32 (fp64 if the logits are).

    `logp_N` of the labels; `topk_logp_NK` of the K given ids, None if none were given; `entropy_N` of the whole
    distribution, detached unless its gradient was asked for, None unless asked for; `tail_N` of all ids but the K given
    ones together, at least -80, None unless asked for.
    """

    logp_N: Tensor
    topk_logp_NK: Tensor | None
    entropy_N: Tensor | None
    tail_N: Tensor | None = None


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
    tail: bool = False,
) -> Projected:
    """Log-probabilities of the labels and of K more ids under softmax(head(hidden) / temperature).

    `hidden_N` [N, d]; `head` a callable, a weight [V, d] or (weight, bias); `label_N` int [N]; `topk_ids_NK` int
    [N, K]. At most `chunk` rows of logits exist at a time: chunks are recomputed in backward, where a head that is one
    matrix has one gradient, to which all chunks add. `vocab` cuts the logits to their first ids, where teacher and
    student differ only in padding. `into_grad` lets the backward pass add to the `grad` that the head's weight has
    already, instead of making another: for callers of `backward()`, not of `torch.autograd.grad`.
    logp_i(v) = z_iv - logsumexp_u z_iu, z = logits / temperature, in fp32. Entropy: -sum_v p log p, nats. Tail:
    logsumexp_{u not in K} z_iu - logsumexp_u z_iu.
    Source: docs/algorithms.md#log-probabilities.
    """
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
        tail=tail,
    )
    logp_NJ, entropy_N, tail_N = _project(hidden_N, head, ids_NJ, work)
    return Projected(
        logp_N=logp_NJ[:, 0],
        topk_logp_NK=None if topk_ids_NK is None else logp_NJ[:, 1:],
        entropy_N=entropy_N,
        tail_N=tail_N,
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
) -> tuple[Tensor, Tensor, Tensor]:
    """The K most likely ids of each position: ids int64 [N, K] and logp fp32 [N, K], most likely first, and the logp
    fp32 [N] of all other ids together, at least -80; no gradient.

    The log-probabilities are those of the full softmax(head(hidden) / temperature), not renormalized over K. `k`
    larger than the vocabulary gives the whole vocabulary. Serves the teacher's support (default) and the student's.
    Source: docs/algorithms.md#log-probabilities.
    Arguments as `project`.
    """
    call = _callable(head)
    ids, logps, tails = [], [], []
    for rows in chunks(len(hidden_N), chunk):
        logits = _shifted(_logits(call, hidden_N[rows], temperature, vocab))
        best = logits.topk(min(k, logits.shape[-1]), dim=-1)
        logsum_n1 = logits.logsumexp(-1, keepdim=True)
        ids.append(best.indices)
        logps.append(best.values - logsum_n1)
        tails.append(_tail(logits, best.indices, logsum_n1))
    return torch.cat(ids), torch.cat(logps), torch.cat(tails)


def _project(
    hidden_N: Tensor, head: HeadLike, ids_NJ: Tensor, work: HeadWork
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """logp [N, J] of `ids_NJ`, and entropy [N] and tail [N] if they are wanted."""
    matrix = weight_of(head)
    dtype = None if matrix is None else _precision(hidden_N, matrix[0])
    if matrix is not None and dtype is not None:
        projected: tuple[Tensor, Tensor | None, Tensor | None] = ByWeight.apply(
            hidden_N.to(dtype), *matrix, ids_NJ, work
        )
        return projected
    step, parts = partial(_chunk, _callable(head), work), []
    for rows in chunks(len(hidden_N), work.chunk):
        if len(hidden_N) <= work.chunk or not torch.is_grad_enabled():
            parts.append(step(hidden_N[rows], ids_NJ[rows]))
        else:
            # a single chunk is what fits anyway; more of them are only affordable if none outlives its turn
            # a head draws nothing at random, so no random state is kept for each chunk
            parts.append(checkpoint(step, hidden_N[rows], ids_NJ[rows], use_reentrant=False, preserve_rng_state=False))
    logp, entropy, tail = zip(*parts, strict=True)
    return torch.cat(logp), torch.cat(entropy) if work.entropy else None, torch.cat(tail) if work.tail else None


def _chunk(head: Head, work: HeadWork, hidden_n: Tensor, ids_nJ: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """One chunk's work under any head."""
    logits = _shifted(_logits(head, hidden_n, work.temperature, work.vocab))
    # gather before the subtraction: [n, J] instead of a log-softmax of [n, V]
    logsum_n1 = logits.logsumexp(-1, keepdim=True)
    logp_nJ = logits.gather(1, ids_nJ) - logsum_n1
    tail_n = _tail(logits, ids_nJ[:, 1:], logsum_n1) if work.tail else None
    if not work.entropy:
        return logp_nJ, None, tail_n
    # last, so that the recomputation in backward stops before it where no gradient is wanted
    with torch.set_grad_enabled(work.entropy_gradient and torch.is_grad_enabled()):
        # p = 0 gives 0 * -inf, a NaN in the gradient too; its share of the entropy is 0
        every_nV = logits.log_softmax(-1).clamp(min=MIN_LOGP)
        return logp_nJ, -(every_nV.exp() * every_nV).sum(-1), tail_n


def _precision(hidden_N: Tensor, weight: Tensor) -> torch.dtype | None:
    """The dtype in which states and weight are multiplied; None if they do not fit, which the product's own error
    explains."""
    device = hidden_N.device.type
    if torch.is_autocast_enabled(device) and torch.float64 not in (hidden_N.dtype, weight.dtype):
        return torch.get_autocast_dtype(device)
    return hidden_N.dtype if hidden_N.dtype == weight.dtype else None


def _shifted(logits: Tensor) -> Tensor:
    """`logits` less the largest of each row, so that digits of a probability near 1 are not lost beside it."""
    # a constant: what is taken off all of them has no gradient
    return logits - logits.detach().amax(-1, keepdim=True)


def _tail(logits: Tensor, ids_nK: Tensor, logsum_n1: Tensor) -> Tensor:
    """The logp [n] of all ids but `ids_nK` together: their own sum, no difference of two that are nearly equal."""
    # not -inf: where no id is left its logarithm would have NaN as gradient
    outside = logits.scatter(1, ids_nK, MIN_LOGP)
    return (outside.logsumexp(-1) - logsum_n1[:, 0]).clamp(min=MIN_TAIL_LOGP)


def _logits(head: Head, hidden_n: Tensor, temperature: float, vocab: int | None) -> Tensor:
    logits = head(hidden_n)[:, :vocab]
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
