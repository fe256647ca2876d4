"""LoopStop: on-policy distillation that ends an episode where it loops, as long as loops teach less than other turns.

The algorithm is ours. TurnOPD plays all episodes of a step to one depth, since deep turns carry little divergence. Many
of these belong to episodes that loop. A loop is seen when it happens, so single episodes can be ended while all others
go on; what that saves and where it fails is in docs/research/loopstop.md.

Read next: trainers/algorithms/opd.py, core/episode.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from turngym.core import BelowOne, Count, Episode, Portion, Spec, Within, loop_end
from turngym.trainers import (
    WEIGHTS,
    Algorithm,
    AlgorithmSpec,
    BuildContext,
    DepthPlan,
    DepthState,
    RolloutBatch,
    distillation,
    tables_of,
)


class LoopStopConfig(Spec):
    """On-policy distillation that leaves loops."""

    probe_interval: Within[Count] = 8
    """Steps between probes. While episodes leave their loops, some go on in every step that is a multiple of this."""
    probe_share: Portion = 0.25
    """Share of a probe's episodes that go on."""
    rho: BelowOne = 0.7
    """Share of the smoothed ratio that is kept when loops are measured; what was measured gets the rest."""
    min_loops: Count = 4
    """Fewest episodes that went on in a loop: with fewer the ratio stays as it is."""
    weight: Literal["trajectory", "token_mean", "turn_mean"] = "trajectory"
    """What counts the same. Every episode, every token or every response."""


class LoopStats(NamedTuple):
    """Mean KL per token in and outside of loops, nats (NaN without tokens), and how many episodes went on in a loop."""

    loop_kl: float
    rest_kl: float
    loops: int


def loop_stats(batch: RolloutBatch, episodes: Sequence[Episode], kl_N: NDArray[np.floating]) -> LoopStats:
    """What a step says about loops: a token is in a loop if its turn comes after `loop_end`.

    The turn that closes the loop is still outside: an episode that is ended there has it, too. `kl_N` [N] nats;
    `episodes[batch.source_E[e]]` is the batch's episode e. Source: docs/contrib_algorithms.md#leaving-loops.
    """
    ends = [loop_end(episodes[source].turns) for source in batch.source_E]
    end_E = np.array([np.iinfo(np.int64).max if end is None else end for end in ends], dtype=np.int64)
    loop_N = batch.turn_N >= end_E[batch.episode_N]
    loop_kl, rest_kl = (
        float(kl_N[mask_N].mean(dtype=np.float64)) if mask_N.any() else math.nan for mask_N in (loop_N, ~loop_N)
    )
    return LoopStats(loop_kl, rest_kl, len(np.unique(batch.episode_N[loop_N])))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopDepth:
    """Full depth, but an episode ends where it loops while a token there teaches less than one elsewhere.

    r_k = rho r_{k-1} + (1 - rho) KL_loop / KL_rest, the mean KL per token of turns after `loop_end` over that of all
    others (r_1 is the first ratio). Episodes leave loops at step k where r_{k-1} < 1: the marginal value of going on is
    then below the mean, so that the same turns teach more in a new episode. Where they do not, all of them measure.
    That is Charnov's marginal value theorem (1976). Source: docs/contrib_algorithms.md#leaving-loops.
    """

    h_max: int
    config: LoopStopConfig = field(default_factory=LoopStopConfig)

    def start(self) -> DepthState:
        """The state before step 1."""
        return DepthState(hbar=float(self.h_max))

    def plan(self, state: DepthState, step: int) -> DepthPlan:
        """What to collect at `step`, 1-based."""
        if state.loop_ratio is None or state.loop_ratio >= 1.0:
            return DepthPlan(cap=self.h_max, probe=True, full_depth=True)
        probe = step % self.config.probe_interval == 0
        leave = 1.0 - self.config.probe_share if probe else 1.0
        return DepthPlan(cap=self.h_max, probe=probe, full_depth=True, loop_share=leave)

    def learn(
        self,
        state: DepthState,
        plan: DepthPlan,
        batch: RolloutBatch,
        episodes: Sequence[Episode],
        kl_N: NDArray[np.floating],
    ) -> DepthState:
        """The state after a step; loops are measured at every step, whatever was planned."""
        return self.update(state, loop_stats(batch, episodes, kl_N))

    def update(self, state: DepthState, stats: LoopStats) -> DepthState:
        """The state after the step; unchanged where too few episodes went on in a loop, or nothing else has a KL."""
        if stats.loops < self.config.min_loops or not stats.rest_kl > 0.0:
            return state
        # the raw KL may be slightly negative, which is no divergence
        ratio = max(stats.loop_kl, 0.0) / stats.rest_kl
        if state.loop_ratio is not None:
            ratio = self.config.rho * state.loop_ratio + (1.0 - self.config.rho) * ratio
        return replace(state, loop_ratio=ratio, probes=state.probes + 1)


def build(config: LoopStopConfig, context: BuildContext) -> Algorithm:
    """Vanilla OPD whose episodes end where they loop (`LoopDepth`).

    loss = sum_i w_i l_i as in `opd.build`: where loops teach as much as other turns it is OPD itself.
    Source: docs/contrib_algorithms.md#loopstop.
    Differs from the paper: there is none, the algorithm is ours.
    """
    signal, token_loss = distillation(context.distill)
    return Algorithm(
        name="loopstop",
        depth=LoopDepth(h_max=context.run.full_depth, config=config),
        target_fn=signal,
        weight=WEIGHTS[config.weight],
        token_loss=token_loss,
        distill_temperature=context.distill.temperature,
        settings=tables_of(config, context.distill),
    )


ALGORITHM = AlgorithmSpec(
    name="loopstop",
    config=LoopStopConfig,
    build=build,
    uses=frozenset({"teacher", "distill", "distills", "form", "surrogate"}),
)
