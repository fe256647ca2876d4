"""Log-probabilities under a head that is one matrix, with a backward pass that holds one gradient of it.

Left to autograd, every chunk of positions makes a gradient of the weight, [V, d], beside the sum of those before it.
Here chunks add their products into one array, and of each softmax only the logarithm of its sum is kept, [N].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

MIN_LOGP = -1e4
"""Stands for the logarithm of 0 (a masked logit): its probability is exactly 0 too, but 0 times it is no NaN."""
SLICE = 8192
"""Rows of the weight whose gradient is made at a time where it is summed in another precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadWork:
    """What is computed and in what pieces: the arguments of `lm_head.project`."""

    temperature: float
    chunk: int
    entropy: bool
    entropy_gradient: bool
    vocab: int | None
    into_grad: bool


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
    """Slices of at most `chunk` rows; of no rows one empty slice."""
    # cat needs a tensor, and a process without work a graph for its backward pass
    for start in range(0, max(length, 1), chunk):
        yield slice(start, start + chunk)


class ByWeight(torch.autograd.Function):
    """apply(hidden [N, d], weight, bias, ids [N, J], HeadWork) -> logp [N, J], entropy [N] or None.

    Multiplies in the precision of `hidden`, whatever autocast says; differentiable once, in its first three arguments.
    """

    @staticmethod
    def forward(ctx: Any, hidden_N: Tensor, weight: Tensor, bias: Tensor | None, ids_NJ: Tensor, work: HeadWork) -> Any:
        # a single chunk is what fits anyway: its logits stay, and need not be computed twice
        keep, parts = len(hidden_N) <= work.chunk and any(ctx.needs_input_grad), []
        with torch.autocast(hidden_N.device.type, enabled=False):
            matrix = _as_used(weight, bias, hidden_N.dtype, work)
            for rows in chunks(len(hidden_N), work.chunk):
                logits = _logits(hidden_N[rows], matrix, work)
                parts.append(_softmax(logits, ids_NJ[rows], work.entropy))
        logp_NJ, top_N1, logsum_N1 = (torch.cat([part[place] for part in parts]) for place in range(3))
        entropy_N = torch.cat([part[3] for part in parts]) if work.entropy else None
        if not keep:
            logsum_N1 += top_N1  # computed again, the logits will have their largest one
        ctx.save_for_backward(hidden_N, weight, bias, ids_NJ, logsum_N1, entropy_N, logits if keep else None)
        ctx.work = work
        ctx.set_materialize_grads(False)
        if entropy_N is not None and not work.entropy_gradient:
            ctx.mark_non_differentiable(entropy_N)
        return logp_NJ, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope_NJ: Tensor | None, entropy_slope_N: Tensor | None) -> Any:
        hidden_N, weight, bias, ids_NJ, logsum_N1, entropy_N, kept = ctx.saved_tensors
        work, (needs_hidden, needs_weight, needs_bias, *_) = ctx.work, ctx.needs_input_grad
        own = own_gradient(weight) if needs_weight and work.into_grad else None
        hidden_slope = torch.empty_like(hidden_N) if needs_hidden else None
        weight_slope = torch.zeros_like(weight) if needs_weight and own is None else own
        bias_slope = torch.zeros_like(bias) if needs_bias else None
        with torch.autocast(hidden_N.device.type, enabled=False):
            matrix = _as_used(weight, bias, hidden_N.dtype, work)
            for rows in chunks(len(hidden_N), work.chunk):
                logits = _logits(hidden_N[rows], matrix, work) if kept is None else kept.clone()
                parts = [None if part is None else part[rows] for part in (slope_NJ, entropy_N, entropy_slope_N)]
                slope = _slope(logits.sub_(logsum_N1[rows]), ids_NJ[rows], *parts)
                slope = (slope if work.temperature == 1.0 else slope.div_(work.temperature)).to(hidden_N.dtype)
                if hidden_slope is not None:
                    torch.mm(slope, matrix[0], out=hidden_slope[rows])
                if weight_slope is not None:
                    _add_product(weight_slope, slope, hidden_N[rows])
                if bias_slope is not None:
                    bias_slope[: slope.shape[1]] += slope.sum(0)
                del logits, slope  # or they would lie beside those of the next chunk
        return hidden_slope, weight_slope if own is None else None, bias_slope, None, None


def _as_used(weight: Tensor, bias: Tensor | None, dtype: torch.dtype, work: HeadWork) -> tuple[Tensor, Tensor | None]:
    """The rows that are not cut off, in the precision of the products."""
    return weight[: work.vocab].to(dtype), None if bias is None else bias[: work.vocab].to(dtype)


def _logits(hidden_n: Tensor, matrix: tuple[Tensor, Tensor | None], work: HeadWork) -> Tensor:
    """Of a new array, in float32 or float64, divided by the temperature: [n, V]."""
    logits = linear(hidden_n, *matrix)
    # bfloat16 has 8 bits: a logsumexp over 10^5 ids, and a difference of two of them, need float32
    logits = logits if logits.dtype == torch.float64 else logits.float()
    # dividing by 1 would read and write [n, V]
    return logits if work.temperature == 1.0 else logits.div_(work.temperature)


def _softmax(logits: Tensor, ids_nJ: Tensor, entropy: bool) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """logp [n, J], the largest logit [n, 1], the logarithm of the sum without it [n, 1], entropy [n].

    The largest logit is taken off `logits` in place.
    """
    top_n1 = logits.amax(-1, keepdim=True)
    picked_nJ = logits.sub_(top_n1).gather(1, ids_nJ)
    if entropy:
        logits.clamp_(min=MIN_LOGP)
    powers = logits.exp()
    sum_n1 = powers.sum(-1, keepdim=True)
    logsum_n1 = sum_n1.log()
    # H = log sum - mean of the exponents under p
    entropy_n = (logsum_n1 - powers.mul_(logits).sum(-1, keepdim=True) / sum_n1)[:, 0] if entropy else None
    return picked_nJ - logsum_n1, top_n1, logsum_n1, entropy_n


def _slope(
    logp_nV: Tensor,
    ids_nJ: Tensor,
    slope_nJ: Tensor | None,
    entropy_n: Tensor | None,
    entropy_slope_n: Tensor | None,
) -> Tensor:
    """Gradient of the logits [n, V], in the place of their `logp_nV`.

    d log p_j / d z_v = [v = j] - p_v and dH / d z_v = -p_v (log p_v + H).
    """
    sum_n1 = 0.0 if slope_nJ is None else slope_nJ.sum(-1, keepdim=True)
    if entropy_n is None or entropy_slope_n is None:
        slope = logp_nV.exp_().mul_(-sum_n1)
    else:
        powers = logp_nV.exp()
        by_entropy = logp_nV.clamp_(min=MIN_LOGP).add_(entropy_n[:, None]).mul_(entropy_slope_n[:, None])
        slope = by_entropy.add_(sum_n1).mul_(powers).neg_()
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
