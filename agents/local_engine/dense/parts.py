"""The parts of a Llama-like model without modules: products and norms on flat rows of numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Linear:
    """Products with the same input whose results lie side by side: one weight, or several where nothing is copied."""

    weights: tuple[Tensor, ...]
    """Each [in, out]. A copy has its rows so: few values times a matrix is up to twice as fast that way on a CPU."""
    biases: tuple[Tensor | None, ...]

    def __call__(self, values: Tensor) -> Tensor:
        """[T, in] to [T, out]."""
        parts = [_product(values, *pair) for pair in zip(self.weights, self.biases, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def onto(self, hidden: Tensor, values: Tensor) -> Tensor:
        """`hidden` [T, out] plus the product, in one operation."""
        total = torch.addmm(hidden, values, self.weights[0])
        return total if self.biases[0] is None else total.add_(self.biases[0])


def _product(values: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(values, weight) if bias is None else torch.addmm(bias, values, weight)


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm, x weight / sqrt(mean(x^2) + eps) over the last dimension.

    On a CPU in float32 as x / sqrt(|x|^2 + D eps), three operations where PyTorch's own takes six; `weight` is then
    sqrt(D) times the model's.
    """

    weight: Tensor | None
    """[D] or [heads, D]; None where it is part of the product that follows."""
    eps: float
    floor: Tensor | None
    """sqrt(D eps), on a CPU in float32."""

    def __call__(self, values: Tensor) -> Tensor:
        if self.floor is None:
            normed = functional.rms_norm(values, values.shape[-1:], None, self.eps)
        else:
            length = torch.linalg.vector_norm(values, dim=-1, keepdim=True)
            normed = values / torch.hypot(length, self.floor)
        return normed if self.weight is None else normed.mul_(self.weight)


def make_norm(weight: Tensor, eps: float) -> Norm:
    """A norm by the model's own weight [D] or [heads, D]."""
    if weight.dtype != torch.float32 or weight.device.type != "cpu":
        return Norm(weight, eps, None)
    width = weight.shape[-1]
    return Norm(weight * math.sqrt(width), eps, torch.tensor(math.sqrt(width * eps)))


def folded(norm: Norm, linear: Linear) -> tuple[Norm, Linear]:
    """The same, with the norm's weight multiplied into the product that follows; float32 alone is exact enough."""
    if norm.floor is None or norm.weight is None:
        return norm, linear
    scaled = tuple(weight * norm.weight[:, None] for weight in linear.weights)
    return Norm(None, norm.eps, norm.floor), Linear(scaled, linear.biases)
