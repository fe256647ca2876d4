"""One optimizer update: weights on the whole batch, gradients accumulated over micro-batches."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from turngym.core.episode import Episode
from turngym.core.errors import SettingsError
from turngym.core.plugin_values import failures_of
from turngym.trainers.algorithm import Algorithm, Targets, Term, TokenLoss, TokenLosses, Tokens
from turngym.trainers.batch import RolloutBatch, pack
from turngym.trainers.checked_parts import calling, checked_losses, checked_weights
from turngym.trainers.critic import ValueCritic, explained_variance
from turngym.trainers.learning_rate import learning_rate
from turngym.trainers.lm_head import Projected, project
from turngym.trainers.microbatch import MicroBatch, micro_batches
from turngym.trainers.models import autocast, clipped_norm, head, recomputing, rows_apart
from turngym.trainers.ranks import SINGLE, Ranks
from turngym.trainers.run_config import OptimizerConfig, Packing


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """How forward passes of the update are computed; none of it changes the result beyond rounding."""

    micro_tokens: int = 8192
    head_chunk: int = 1024
    vocab_size: int | None = None
    """Use only the first ids, when teacher and student are padded to different sizes."""
    distill_temperature: float = 1.0
    sampling_temperature: float = 1.0
    """Temperature of rollouts; only counts for tokens whose episode does not say at which temperature it was drawn."""
    entropy_gradient: bool = False
    autocast: bool = False
    autocast_head: bool = True
    """Whether autocast covers the LM head; log-probabilities are float32 either way."""
    gradient_checkpointing: bool = False
    packing: Packing = "off"
    """Whether the rows of a pass share a line; `auto` wants a model that keeps them apart (see `packing_for`)."""
    ranks: Ranks = SINGLE
    """Each process computes its share of the episodes; loss, gradients and columns are those of the whole batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult:
    """What one update saw. `columns` are float32 [N]: loss, logp, sampled_logp, entropy and the loss's diagnostics."""

    loss: float
    grad_norm: float
    """Gradient norm before clipping."""
    skipped: bool
    """The gradient was not finite, so nothing was changed."""
    columns: Mapping[str, NDArray[np.float32]]
    terms: Mapping[str, float]
    """Values of the terms beside the batch's loss, which `loss` leaves out."""


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over the trainable parameters; the learning rate is set before each update."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(parameters, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay)


def update(
    model: Any,
    optimizer: torch.optim.Optimizer,
    batch: RolloutBatch,
    *,
    targets: Targets,
    weight_N: NDArray[np.float64],
    token_loss: TokenLoss,
    forward: Forward,
    lr: float,
    max_grad_norm: float = 1.0,
    terms: Sequence[Term] = (),
    step: int = 1,
) -> UpdateResult:
    """One step of the optimizer on the whole batch.

    loss = sum_i weight_i * token_loss_i, with `weight_N` fixed before the split into micro-batches, so that their
    number and order change nothing but rounding. Each of `terms` adds its own gradient for step `step`, 1-based.
    A learning rate of 0 only measures: the loss has no backward pass, and no activations are kept for one.

    Args:
        model: the student; its parameters change in place.
        weight_N: how much each token counts [N]; the sum is 1.
        max_grad_norm: the gradient's norm is clipped to this; 0: not at all.
    """
    optimizer.zero_grad(set_to_none=True)
    with torch.set_grad_enabled(lr != 0):
        loss, columns = accumulate(
            model, batch, targets=targets, weight_N=weight_N, token_loss=token_loss, forward=forward
        )
    extra = {term.name: term.backward(model, step, forward.ranks) for term in terms}
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    # without a limit the norm is still measured
    norm = float(clipped_norm(parameters, max_grad_norm))
    # one NaN would stay in AdamW's moments for good: such an update is left out and counted
    finite = bool(np.isfinite(norm))
    if finite:
        for group in optimizer.param_groups:
            # a function of the step, so that a resumed run needs no scheduler's state
            group["lr"] = lr
        optimizer.step()
    # gradients would take their memory through the next rollout
    optimizer.zero_grad(set_to_none=True)
    _return_freed_memory()
    return UpdateResult(loss=loss, grad_norm=norm, skipped=not finite, columns=columns, terms=extra)


def _return_freed_memory() -> None:
    """Give the pages of freed tensors back to the system (glibc alone keeps them).

    Every pass has another length, so that freed memory lies in pieces that the next pass does not fit into, and a run
    would take a little more at each step.
    """
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def accumulate(
    model: Any,
    batch: RolloutBatch,
    *,
    targets: Targets,
    weight_N: NDArray[np.float64],
    token_loss: TokenLoss,
    forward: Forward,
) -> tuple[float, dict[str, NDArray[np.float32]]]:
    """Add the gradient of the batch's loss to the parameters; returns the loss and the per-token columns [N].

    Arguments as `update`.
    """
    total, ranks = 0.0, forward.ranks
    collected: list[tuple[NDArray[np.int64], dict[str, NDArray[np.float32]]]] = []
    packed = forward.packing != "off"
    with recomputing(model, forward.gradient_checkpointing), rows_apart(model, packed):
        for micro in micro_batches(batch, forward.micro_tokens, ranks, packed=packed):
            losses, numbers = _forward(model, batch, micro, targets, token_loss, forward)
            # weights were fixed for the whole batch in float64: no micro-batch divides by its own size
            weight_n = torch.from_numpy(weight_N[micro.tokens]).to(losses.loss_n)
            loss = (weight_n * losses.loss_n).sum()
            if torch.is_grad_enabled():
                # a sharded model averages gradients over the processes; the batch's gradient is their sum
                (loss * ranks.size).backward()
            total += float(loss.detach())
            numbers = {"loss": losses.loss_n, **numbers, **losses.diagnostics}
            collected.append((micro.tokens, {n: v.detach().float().cpu().numpy() for n, v in numbers.items()}))
    columns: dict[str, NDArray[np.float32]] = {}
    # every process gets all columns: each decides the next depth from the whole batch
    for tokens, part in chain.from_iterable(ranks.all_gather(collected)):
        for name, values in part.items():
            columns.setdefault(name, np.full(batch.tokens, np.nan, np.float32))[tokens] = values
    return sum(ranks.all_gather(total)), columns


def _forward(
    model: Any, batch: RolloutBatch, micro: MicroBatch, targets: Targets, token_loss: TokenLoss, forward: Forward
) -> tuple[TokenLosses, dict[str, Tensor]]:
    with autocast(model, forward.autocast):
        states = micro.states(model)
    label_n = _tensor(batch.label_N, micro, states)
    ids_nK = None if targets.topk_ids_NK is None else _tensor(targets.topk_ids_NK, micro, states)
    projected = _project(model, states, label_n, ids_nK, forward, forward.distill_temperature)
    assert projected.entropy_N is not None  # asked for at the distillation temperature
    entropy_n, sampled = projected.entropy_N, _drawn(model, states, label_n, batch, micro, forward, projected.logp_N)
    tokens = Tokens(
        logp_n=projected.logp_N,
        sampled_logp_n=sampled,
        behavior_logp_n=_tensor(batch.behavior_logp_N, micro, states),
        topk_logp_nK=projected.topk_logp_NK,
        teacher_logp_nK=None if targets.topk_logp_NK is None else _tensor(targets.topk_logp_NK, micro, states),
        tail_n=projected.tail_N,
        teacher_tail_n=None if targets.topk_tail_N is None else _tensor(targets.topk_tail_N, micro, states),
        advantage_n=None if targets.advantage_N is None else _tensor(targets.advantage_N, micro, states),
        reference_logp_n=None if targets.reference_logp_N is None else _tensor(targets.reference_logp_N, micro, states),
        kl_mask_n=None if targets.kl_mask_N is None else _tensor(targets.kl_mask_N, micro, states),
        extra={name: _tensor(column, micro, states) for name, column in targets.extra.items()},
        off_policy_n=_tensor(batch.off_policy_N, micro, states),
        entropy_n=entropy_n,
    )
    numbers = {"logp": projected.logp_N, "sampled_logp": sampled, "entropy": entropy_n}
    with failures_of("the token loss", token_loss, SettingsError):
        losses = token_loss(tokens)
    return checked_losses(losses, len(micro.tokens)), numbers


def _drawn(
    model: Any,
    states: Tensor,
    label_n: Tensor,
    batch: RolloutBatch,
    micro: MicroBatch,
    forward: Forward,
    distilled_n: Tensor,
) -> Tensor:
    """Log-probability of each label at the temperature at which it was drawn: [n].

    `distilled_n` are those at the distillation temperature.
    """
    temperature_N = drawn_temperatures(batch, forward.sampling_temperature)
    parts, places = [], []
    # all temperatures of the batch, though none of their tokens may be here: processes that share a model work in step
    for temperature in np.unique(temperature_N):
        where = np.flatnonzero(temperature_N[micro.tokens] == temperature)
        where_n = torch.from_numpy(where).to(states.device)
        if temperature == forward.distill_temperature:
            parts.append(distilled_n[where_n])
        else:
            parts.append(_project(model, states[where_n], label_n[where_n], None, forward, float(temperature)).logp_N)
        places.append(where)
    return torch.cat(parts)[torch.from_numpy(np.argsort(np.concatenate(places))).to(states.device)]


def drawn_temperatures(batch: RolloutBatch, otherwise: float) -> NDArray[np.float64]:
    """The temperature at which each label's log-probability under the policy is comparable with the recorded one: [N].

    As its episode says, else that of the run (`otherwise`). Greedy ids (0) are reported at temperature 1.
    """
    temperature_N = np.where(np.isnan(batch.temperature_N), otherwise, batch.temperature_N)
    return np.where(temperature_N == 0, 1.0, temperature_N)


def _project(
    model: Any, states: Tensor, label_n: Tensor, ids_nK: Tensor | None, forward: Forward, temperature: float
) -> Projected:
    with autocast(model, forward.autocast and forward.autocast_head):
        return project(
            states,
            head(model),
            label_n,
            ids_nK,
            temperature=temperature,
            chunk=forward.head_chunk,
            entropy=temperature == forward.distill_temperature,
            entropy_gradient=forward.entropy_gradient and temperature == forward.distill_temperature,
            vocab=forward.vocab_size,
            into_grad=True,
            tail=ids_nK is not None,
        )


def _tensor(values: NDArray[Any], micro: MicroBatch, like: Tensor) -> Tensor:
    return torch.from_numpy(values[micro.tokens]).to(like.device)


# All optimizer updates of one training step: ppo_epochs over the collected batch, in minibatches of whole episodes.


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStep:
    """Where in training the step stands; steps are 1-based."""

    config: OptimizerConfig
    step: int
    total_steps: int

    @property
    def lr(self) -> float:
        return learning_rate(self.config, self.step, self.total_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Epochs:
    """What the updates saw; `columns` (float32 [N], by name) and `weight_N` (sum 1) are those of the first pass."""

    results: Sequence[UpdateResult]
    columns: Mapping[str, NDArray[np.float32]]
    weight_N: NDArray[np.float64]
    fresh_N: NDArray[np.bool_]
    """Seen before the first update: there, training and rollout used the same weights."""
    lr: float
    critic_losses: Sequence[float] = ()
    """Losses of every update of the critic, if there is one."""
    critic_explained: float | None = None
    """Share of the returns' variance that its values explained before these updates."""


def run_epochs(
    model: Any,
    optimizer: torch.optim.Optimizer,
    batch: RolloutBatch,
    episodes: Sequence[Episode],
    targets: Targets,
    algorithm: Algorithm,
    run_step: RunStep,
    forward: Forward,
    critic: ValueCritic | None = None,
) -> Epochs:
    """Update `ppo_epochs` times `minibatches` times. Each minibatch is an optimizer batch: its weights sum to 1."""
    config = run_step.config
    results: list[UpdateResult] = []
    critic_losses: list[float] = []
    columns: dict[str, NDArray[np.float32]] = {}
    weight_N = np.zeros(batch.tokens)
    parts = minibatches(batch, episodes, targets, algorithm, config.minibatches)
    for epoch in range(config.ppo_epochs):
        for part, part_targets, tokens in parts:
            with calling(algorithm, "weight"):
                weight_n = algorithm.weight(part, step=run_step.step, total_steps=run_step.total_steps)
            checked_weights(weight_n, part.tokens, algorithm.name)
            result = update(
                model,
                optimizer,
                part,
                targets=part_targets,
                weight_N=weight_n,
                token_loss=algorithm.token_loss,
                forward=forward,
                lr=run_step.lr,
                max_grad_norm=config.max_grad_norm,
                terms=algorithm.terms,
                step=run_step.step,
            )
            results.append(result)
            if critic is not None and part_targets.return_N is not None and part_targets.value_N is not None:
                critic_losses.append(critic.update(part, part_targets.return_N, part_targets.value_N))
            if epoch == 0:
                # each minibatch's weights sum to 1, and so shall those of the step
                weight_N[tokens] = weight_n / len(parts)
                for name, values in result.columns.items():
                    columns.setdefault(name, np.full(batch.tokens, np.nan, np.float32))[tokens] = values
    explained = None
    if targets.value_N is not None and targets.return_N is not None:
        explained = explained_variance(targets.value_N, targets.return_N)
    fresh_N = np.zeros(batch.tokens, np.bool_)
    fresh_N[parts[0][2]] = True
    return Epochs(
        results=results,
        columns=columns,
        weight_N=weight_N,
        fresh_N=fresh_N,
        lr=run_step.lr,
        critic_losses=critic_losses,
        critic_explained=explained,
    )


def minibatches(
    batch: RolloutBatch, episodes: Sequence[Episode], targets: Targets, algorithm: Algorithm, count: int
) -> list[tuple[RolloutBatch, Targets, NDArray[np.int64]]]:
    """Up to `count` optimizer batches of whole episodes: each with its targets and the places of its tokens in N."""
    if count == 1:
        return [(batch, targets, np.arange(batch.tokens))]
    # episodes without supervised tokens are left out: they could fill a minibatch with nothing to learn
    supervised = np.unique(batch.episode_N)
    parts = []
    for members in [supervised[start::count] for start in range(min(count, len(supervised)))]:
        # members ascend, so that pack() below brings their tokens in this order
        tokens = np.flatnonzero(np.isin(batch.episode_N, members))
        part = pack([episodes[batch.source_E[index]] for index in members], origins=algorithm.origins)
        parts.append((part, targets.select(tokens), tokens))
    return parts
