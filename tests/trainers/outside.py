"""A package of its own, as another author would write it: leave-one-out advantages with a clipped importance loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from turngym.core import Spec
from turngym.core.episode import Episode
from turngym.trainers import (
    WEIGHTS,
    Algorithm,
    AlgorithmSpec,
    BuildContext,
    FixedDepth,
    RolloutBatch,
    Scorers,
    Targets,
    TokenLosses,
    Tokens,
    tables_of,
)


class LooConfig(Spec):
    """Leave-one-out policy gradient."""

    n: int = 4
    """Episodes per task."""
    clip: float = 5.0
    """Most that an importance ratio counts."""


@dataclass(frozen=True, slots=True)
class LeaveOneOut:
    """A_j = r_j - mean of the other rewards of the group; `place` is the episode's number, for the token loss."""

    def __call__(self, batch: RolloutBatch, episodes: Sequence[Episode], scorers: Scorers) -> Targets:
        reward_E = np.array([episodes[source].depth for source in batch.source_E], np.float64)
        advantage_E = np.zeros(batch.episodes)
        for group in np.unique(batch.group_E):
            members = batch.group_E == group
            count = int(members.sum())
            mean_E = (reward_E[members].sum() - reward_E[members]) / max(count - 1, 1)
            advantage_E[members] = reward_E[members] - mean_E
        return Targets(
            advantage_N=advantage_E[batch.episode_N].astype(np.float32),
            extra={"place": batch.episode_N.astype(np.float32)},
            reward=reward_E,
        )


@dataclass(frozen=True, slots=True)
class ClippedImportance:
    """l_i = -min(r_i, clip) A_i log p_i, the ratio detached."""

    clip: float

    def __call__(self, tokens: Tokens) -> TokenLosses:
        assert tokens.advantage_n is not None
        ratio_n = (tokens.sampled_logp_n - tokens.behavior_logp_n).exp().detach().clamp(max=self.clip)
        loss_n = -ratio_n * tokens.advantage_n * tokens.sampled_logp_n
        return TokenLosses(loss_n=loss_n, diagnostics={"place": tokens.extra["place"], "one": torch.ones_like(loss_n)})


def build(config: LooConfig, context: BuildContext) -> Algorithm:
    """The algorithm that `config` describes."""
    return Algorithm(
        name="loo",
        depth=FixedDepth(h_max=context.run.full_depth),
        target_fn=LeaveOneOut(),
        weight=WEIGHTS["token_mean"],
        token_loss=ClippedImportance(config.clip),
        group=config.n,
        needs_teacher=False,
        settings=tables_of(config),
    )


LOO = AlgorithmSpec(name="loo", config=LooConfig, build=build)
