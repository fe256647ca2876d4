"""What an algorithm is made of: a depth controller, a signal, a weight and a token loss.

The training loop knows these four protocols and no algorithm by name. Something new is a new piece, not a branch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from turngym.envs.episode import Origin
from turngym.envs.protocols import Scorer
from turngym.trainers.batch import RolloutBatch
from turngym.trainers.depth import DepthController
from turngym.trainers.weights import Weight


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What the signal says about each supervised token; None where the algorithm has no use for it."""

    topk_ids_NK: NDArray[np.int64] | None = None
    topk_logp_NK: NDArray[np.float32] | None = None
    """Teacher log-probabilities of `topk_ids_NK`, nats."""
    advantage_N: NDArray[np.float32] | None = None

    def take(self, tokens: NDArray[np.int64]) -> Targets:
        """The targets of some tokens."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return Targets(**{name: None if column is None else column[tokens] for name, column in values.items()})


class Signal(Protocol):
    """Turns a batch into targets, before any update. Scorers score at the distillation temperature."""

    def __call__(self, batch: RolloutBatch, *, teacher: Scorer | None, student: Scorer) -> Targets: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """n supervised tokens of a micro-batch, as tensors on the model's device; `logp` tensors carry gradients."""

    logp_n: Tensor
    """Student log-probability of the label at the distillation temperature."""
    sampled_logp_n: Tensor
    """The same at the temperature of the rollout: comparable with `behaviour_logp_n`."""
    behaviour_logp_n: Tensor
    """As sampled; NaN where unknown."""
    topk_logp_nK: Tensor | None = None
    """Student, at the ids of the targets."""
    teacher_logp_nK: Tensor | None = None
    advantage_n: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLosses:
    """Per-token losses [n], never reduced, and detached diagnostics [n] by name (`kl_bin`, `kl_raw`, `clipped`)."""

    loss_n: Tensor
    diagnostics: Mapping[str, Tensor]


class TokenLoss(Protocol):
    """A pure function of the tokens."""

    def __call__(self, tokens: Tokens) -> TokenLosses: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """A frozen composition of pieces."""

    name: str
    depth: DepthController
    signal: Signal
    weight: Weight
    token_loss: TokenLoss
    origins: tuple[Origin, ...] = ("policy",)
    """Whose turns are trained on."""
    needs_teacher: bool = True
    distill_temperature: float = 1.0
    settings: Mapping[str, Any]
    """Flat, JSON-able: what makes two runs of this algorithm the same, for checkpoints."""
