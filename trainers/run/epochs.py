"""All optimizer updates of one training step: ppo_epochs over the collected batch, in minibatches of whole episodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from turngym.envs.episode import Episode
from turngym.trainers.algorithm import Algorithm, Critic, Targets, Term
from turngym.trainers.batch import RolloutBatch, pack
from turngym.trainers.config import OptimizerConfig
from turngym.trainers.distributed.world import World
from turngym.trainers.run.optimizer_step import Forward, UpdateResult, learning_rate, update
from turngym.trainers.targets.critic import explained_variance


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
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
    """Of every update of the critic, if there is one."""
    critic_explained: float | None = None
    """Share of the returns' variance that its values explained before these updates."""


def run_epochs(
    model: Any,
    optimizer: torch.optim.Optimizer,
    batch: RolloutBatch,
    episodes: Sequence[Episode],
    targets: Targets,
    algorithm: Algorithm,
    schedule: Schedule,
    forward: Forward,
    critic: Critic | None = None,
) -> Epochs:
    """Update `ppo_epochs` times `minibatches` times. Each minibatch is an optimizer batch: its weights sum to 1."""
    config = schedule.config
    results: list[UpdateResult] = []
    critic_losses: list[float] = []
    columns: dict[str, NDArray[np.float32]] = {}
    weight_N = np.zeros(batch.tokens)
    parts = minibatches(batch, episodes, targets, algorithm, config.minibatches)
    for turn in range(config.ppo_epochs):
        for part, chosen, tokens in parts:
            weight_n = algorithm.weight(part, step=schedule.step, total_steps=schedule.total_steps)
            result = update(
                model,
                optimizer,
                part,
                targets=chosen,
                weight_N=weight_n,
                token_loss=algorithm.token_loss,
                forward=forward,
                lr=schedule.lr,
                max_grad_norm=config.max_grad_norm,
                terms=[_bound(term, model, schedule.step, forward.world) for term in algorithm.terms],
            )
            results.append(result)
            if critic is not None and chosen.return_N is not None and chosen.value_N is not None:
                critic_losses.append(critic.update(part, chosen.return_N, chosen.value_N))
            if turn == 0:
                # each minibatch's weights sum to 1, and so shall those of the step
                weight_N[tokens] = weight_n / len(parts)
                for name, values in result.columns.items():
                    columns.setdefault(name, np.full(batch.tokens, np.nan, np.float32))[tokens] = values
    fresh_N = np.zeros(batch.tokens, np.bool_)
    fresh_N[parts[0][2]] = True
    return Epochs(
        results=results,
        columns=columns,
        weight_N=weight_N,
        fresh_N=fresh_N,
        lr=schedule.lr,
        critic_losses=critic_losses,
        critic_explained=_explained(targets),
    )


def _explained(targets: Targets) -> float | None:
    if targets.value_N is None or targets.return_N is None:
        return None
    return explained_variance(targets.value_N, targets.return_N)


def _bound(term: Term, model: Any, step: int, world: World) -> Callable[[], tuple[str, float]]:
    # a function of its own, since a lambda in the comprehension would see its last term only
    return lambda: (term.name, term.backward(model, step, world))


def minibatches(
    batch: RolloutBatch, episodes: Sequence[Episode], targets: Targets, algorithm: Algorithm, count: int
) -> list[tuple[RolloutBatch, Targets, NDArray[np.int64]]]:
    """At most `count` optimizer batches of whole episodes: each with its targets and the places of its tokens in N."""
    if count == 1:
        return [(batch, targets, np.arange(batch.tokens))]
    # episodes without supervised tokens are left out: they could fill a minibatch with nothing to learn
    units = np.unique(batch.episode_N)
    parts = []
    for members in [units[start::count] for start in range(min(count, len(units)))]:
        # members ascend, so that pack() below brings their tokens in this order
        tokens = np.flatnonzero(np.isin(batch.episode_N, members))
        part = pack([episodes[batch.source_E[unit]] for unit in members], origins=algorithm.origins)
        parts.append((part, targets.select(tokens), tokens))
    return parts
