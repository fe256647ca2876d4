"""Statistics by turn: where along an episode student and teacher part, and who is still playing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from turngym.trainers.batch import RolloutBatch
from turngym.trainers.depth import DepthStats, divergence_mass, effective_depth

Column = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnStats:
    """Columns over T turns; NaN where a turn has no tokens of that kind. KL and entropy in nats per token."""

    tokens_T: NDArray[np.int64]
    """Supervised tokens."""
    survivors_T: NDArray[np.int64]
    """n_t: episodes that reached the turn."""
    kl_T: Column
    """K_t: mean KL pooled over tokens."""
    kl_success_T: Column
    kl_fail_T: Column
    tokens_success_T: NDArray[np.int64]
    tokens_fail_T: NDArray[np.int64]
    mass_T: Column
    """m_t = max(K_t, 0) n_t / n_0."""
    mass_share_T: Column
    """q_t = m_t / (sum m + 1e-8)."""
    entropy_T: Column
    """Student."""
    teacher_entropy_T: Column
    loss_share_T: Column
    """s_t: the turn's share of the weighted KL loss."""
    deep_share: float
    """Share of the loss in the deepest third of the turns."""
    h_eff: int

    @property
    def separation_T(self) -> Column:
        """Outcome separation G_t = K_t(failed episodes) - K_t(successful ones), nats."""
        return self.kl_fail_T - self.kl_success_T


def turn_stats(
    batch: RolloutBatch,
    kl_N: NDArray[np.floating],
    *,
    weight_N: NDArray[np.floating] | None = None,
    entropy_N: NDArray[np.floating] | None = None,
    teacher_entropy_N: NDArray[np.floating] | None = None,
    include_E: NDArray[np.bool_] | None = None,
) -> TurnStats:
    """Statistics by turn over all episodes, or those in `include_E` (bool [E]).

    `kl_N` nats per supervised token (the paper's K_t takes the raw form, which may be negative); `weight_N` the loss
    weights, even if None; entropies in nats. T = deepest turn reached + 1.
    s_t = sum_{i in t} w_i l_i / sum_i w_i l_i; all 0 if the total is not positive.
    Source: TurnOPD sections on turn-level diagnostics; algorithms specification section 3.
    Errors: ValueError for a column whose length is not N.
    """
    raise NotImplementedError


def probe_stats(batch: RolloutBatch, kl_N: NDArray[np.floating]) -> DepthStats:
    """What `AdaptiveDepth.update` takes in, episodes stopped by the depth cap left out."""
    raise NotImplementedError


def reliable_prefix(
    survivors_ST: Sequence[NDArray[np.integer]], *, min_count: int = 8, min_share: float = 0.10, min_steps: float = 0.60
) -> int:
    """How many turns to plot, from turn 0: those that enough episodes reach in enough steps."""
    raise NotImplementedError
