"""Leave-one-out policy gradient, as docs/write_an_algorithm.md explains it: an algorithm in one file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from turngym.core import Episode, Spec
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
    """Leave-one-out baseline and clipped importance weights."""

    n: int = 8
    """Episodes per task: each is compared with the mean of the others."""
    cap: float = 2.0
    """Largest importance weight."""


def leave_one_out(reward_E: NDArray[np.float64], group_E: NDArray[np.int64]) -> NDArray[np.float64]:
    """b_j = mean of the rewards of the other episodes of j's group, float64 [E]; an only episode is its own."""
    alike_EE = group_E[:, None] == group_E
    others_E = alike_EE.sum(1) - 1
    return np.where(others_E > 0, (alike_EE @ reward_E - reward_E) / np.maximum(others_E, 1), reward_E)


@dataclass(frozen=True, slots=True)
class LeaveOneOut:
    """A_j = r_j - b_j on all tokens of episode j. The column `baseline` goes to the loss for its log."""

    def __call__(self, batch: RolloutBatch, episodes: Sequence[Episode], scorers: Scorers) -> Targets:
        baseline_E = leave_one_out(batch.reward_E, batch.group_E)
        advantage_E = batch.reward_E - baseline_E
        return Targets(
            advantage_N=advantage_E[batch.episode_N].astype(np.float32),
            reward=batch.reward_E,
            extra={"baseline": baseline_E[batch.episode_N].astype(np.float32)},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClippedImportance:
    """l_i = -min(p_i / mu_i, cap) A_i log p_i, the weight without gradient; mu_i is the behavior's probability."""

    cap: float

    def __call__(self, tokens: Tokens) -> TokenLosses:
        logp_n, advantage_n = tokens.sampled_logp_n, tokens.advantage_n
        assert advantage_n is not None
        # where the behavior's log-probability is unknown (recorded text), the token counts as freshly sampled
        behavior_n = torch.where(tokens.behavior_logp_n.isnan(), logp_n.detach(), tokens.behavior_logp_n)
        ratio_n = (logp_n.detach() - behavior_n).exp()
        diagnostics = {"capped": (ratio_n > self.cap).float(), "baseline": tokens.extra["baseline"]}
        return TokenLosses(loss_n=-ratio_n.clamp(max=self.cap) * advantage_n * logp_n, diagnostics=diagnostics)


def build(config: LooConfig, context: BuildContext) -> Algorithm:
    """The parts put together."""
    return Algorithm(
        name="loo",
        depth=FixedDepth(h_max=context.run.full_depth),
        target_fn=LeaveOneOut(),
        weight=WEIGHTS["token_mean"],
        token_loss=ClippedImportance(cap=config.cap),
        group=config.n,
        needs_teacher=False,
        settings=tables_of(config),
    )


ALGORITHM = AlgorithmSpec(name="loo", config=LooConfig, build=build)
