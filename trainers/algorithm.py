"""What an algorithm is made of: a depth controller, a signal, a weight and a token loss.

The training loop knows these four protocols and no algorithm by name. Something new is a new piece, not a branch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from turngym.envs.episode import Episode, Origin
from turngym.envs.protocols import Scorer
from turngym.trainers.batch import RolloutBatch
from turngym.trainers.distributed.world import World
from turngym.trainers.losses.token_weights import Weight
from turngym.trainers.rollout_plan.depth import DepthController
from turngym.trainers.targets.critic import Critic, CriticConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What the signal says about each supervised token; None where the algorithm has no use for it."""

    topk_ids_NK: NDArray[np.int64] | None = None
    topk_logp_NK: NDArray[np.float32] | None = None
    """Teacher log-probabilities of `topk_ids_NK`, nats."""
    advantage_N: NDArray[np.float32] | None = None
    reference_logp_N: NDArray[np.float32] | None = None
    """Log-probability of the labels under the frozen initial policy, nats."""
    return_N: NDArray[np.float32] | None = None
    """What a critic should have predicted."""
    value_N: NDArray[np.float32] | None = None
    """What it did predict, before any update."""
    kl_mask_N: NDArray[np.bool_] | None = None
    """Whether the support KL counts the token; None: it counts all."""

    def select(self, tokens: NDArray[np.int64]) -> Targets:
        """The targets of some tokens."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return Targets(**{name: None if column is None else column[tokens] for name, column in values.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Scorers:
    """Who can score ids during a step, all at the distillation temperature; None where the run has no such model."""

    student: Scorer
    """The student before this step's updates."""
    teacher: Scorer | None = None
    reference: Scorer | None = None
    """The frozen initial policy."""
    critic: Critic | None = None


class TargetFn(Protocol):
    """Turns a batch into targets, before any update; `episodes[batch.source_E[e]]` is the batch's episode e."""

    def __call__(self, batch: RolloutBatch, episodes: Sequence[Episode], scorers: Scorers) -> Targets: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """n supervised tokens of a micro-batch, as tensors on the model's device; `logp` tensors carry gradients."""

    logp_n: Tensor
    """Student log-probability of the label at the distillation temperature."""
    sampled_logp_n: Tensor
    """The same at the temperature of the rollout: comparable with `behavior_logp_n`."""
    behavior_logp_n: Tensor
    """As sampled; NaN where unknown."""
    topk_logp_nK: Tensor | None = None
    """Student, at the ids of the targets."""
    teacher_logp_nK: Tensor | None = None
    advantage_n: Tensor | None = None
    reference_logp_n: Tensor | None = None
    kl_mask_n: Tensor | None = None
    """bool, as in the targets."""
    off_policy_n: Tensor
    """bool: the label was chosen by a demonstrator."""
    entropy_n: Tensor
    """Of the student's whole distribution, nats; carries gradients where the algorithm asks for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLosses:
    """Per-token losses [n], never reduced, and detached diagnostics [n] by name (`kl_bin`, `kl_raw`, `clipped`)."""

    loss_n: Tensor
    diagnostics: Mapping[str, Tensor]


class TokenLoss(Protocol):
    """A pure function of the tokens."""

    def __call__(self, tokens: Tokens) -> TokenLosses: ...


class EpisodeFilter(Protocol):
    """Which collected episodes are trained on; what it leaves out is counted, never lost from the traces."""

    def __call__(self, episodes: Sequence[Episode]) -> list[Episode]: ...


class DemonstrationPrefix(Protocol):
    """How much of a demonstration the first episodes of each group begin with."""

    def ratios(self, step: int, groups: int) -> tuple[tuple[float, ...], ...]:
        """[groups][prefixed episodes per group]: shares of the demonstration's turns, in [0, 1]; `step` is 1-based."""


class Term(Protocol):
    """A loss beside the batch's, such as language modeling on pre-training text."""

    name: str

    def backward(self, model: Any, step: int, world: World) -> float:
        """Add the term's gradient to the model's parameters (this process's share of it, times `world.size`, for
        sharded models average); returns the value of the whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """A frozen composition of pieces."""

    name: str
    depth: DepthController
    signal: TargetFn
    weight: Weight
    token_loss: TokenLoss
    origins: tuple[Origin, ...] = ("policy",)
    """Whose turns are trained on."""
    group: int = 1
    """Episodes per task: they are compared with each other."""
    prefix: DemonstrationPrefix | None = None
    select: EpisodeFilter | None = None
    terms: tuple[Term, ...] = ()
    teacher_mix: float = 0.0
    """Share of the tokens that the teacher chooses while the student plays."""
    needs_teacher: bool = True
    needs_reference: bool = False
    critic: CriticConfig | None = None
    """The critic that this algorithm learns beside the policy."""
    entropy_gradient: bool = False
    """Whether the token loss uses the entropy of the distribution."""
    distill_temperature: float = 1.0
    settings: Mapping[str, Any]
    """Flat, JSON-able: what makes two runs of this algorithm the same, for checkpoints."""
