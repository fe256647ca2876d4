"""Statistics by turn: where along an episode student and teacher part, and who is still playing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from turngym.trainers.batch import RolloutBatch

Column = NDArray[np.float64]
Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnStats:
    """Columns over T turns; NaN where a turn has no tokens of that kind. KL and entropy in nats per token."""

    tokens_T: Counts
    """Supervised tokens."""
    tokens_success_T: Counts
    tokens_fail_T: Counts
    survivors_T: Counts
    """n_t: episodes that reached the turn."""
    kl_T: Column
    """K_t: mean KL pooled over tokens."""
    kl_success_T: Column
    kl_fail_T: Column
    entropy_T: Column
    """Mean entropy of the student by turn."""
    teacher_entropy_T: Column
    teacher_entropy_success_T: Column
    teacher_entropy_fail_T: Column


def turn_stats(
    batch: RolloutBatch,
    kl_N: NDArray[np.floating],
    *,
    entropy_N: NDArray[np.floating] | None = None,
    teacher_entropy_N: NDArray[np.floating] | None = None,
    full_depth: bool = False,
) -> TurnStats:
    """Statistics by turn over all episodes of a batch.

    `kl_N` nats per supervised token (the paper's K_t is the raw form, which may be negative); entropies in nats. T is
    the greatest depth. Episodes that the depth cap stopped count as neither success nor failure, unless they had
    succeeded; with `full_depth`, where the cap is the run's full depth, those that were cut there have failed.
    K_t = sum_{i in t} l_i / n_tok(t). Source: [turnopd]; docs/algorithms.md#turn-statistics (what the paper plots).
    Errors: ValueError for a column whose length is not N.

    Args:
        batch: the batch, with N supervised tokens.
        kl_N: divergence [N] from the teacher, nats.
        entropy_N: the student's entropy [N], nats; None where unknown.
        teacher_entropy_N: the teacher's.
        full_depth: whether the depth cap is the full depth of the run.
    """
    _check_lengths(batch, kl=kl_N, entropy=entropy_N, teacher_entropy=teacher_entropy_N)
    turns = int(batch.depth_E.max())
    all_N = np.ones(batch.tokens, np.bool_)
    unknown_E = batch.truncated_E & batch.short_E if full_depth else batch.truncated_E
    success_N = batch.success_E[batch.episode_N]
    fail_N = (~batch.success_E & ~unknown_E)[batch.episode_N]
    kl_T, tokens_T = pooled_mean(kl_N, batch.turn_N, all_N, turns)
    kl_success_T, tokens_success_T = pooled_mean(kl_N, batch.turn_N, success_N, turns)
    kl_fail_T, tokens_fail_T = pooled_mean(kl_N, batch.turn_N, fail_N, turns)
    return TurnStats(
        tokens_T=tokens_T,
        tokens_success_T=tokens_success_T,
        tokens_fail_T=tokens_fail_T,
        survivors_T=survivors(batch.depth_E, turns),
        kl_T=kl_T,
        kl_success_T=kl_success_T,
        kl_fail_T=kl_fail_T,
        entropy_T=_optional_mean(entropy_N, batch.turn_N, all_N, turns),
        teacher_entropy_T=_optional_mean(teacher_entropy_N, batch.turn_N, all_N, turns),
        teacher_entropy_success_T=_optional_mean(teacher_entropy_N, batch.turn_N, success_N, turns),
        teacher_entropy_fail_T=_optional_mean(teacher_entropy_N, batch.turn_N, fail_N, turns),
    )


def sum_by_turn(value_N: NDArray[np.floating], batch: RolloutBatch) -> Column:
    """Sum of a per-token column over the tokens of each turn: float64 [T], T the greatest depth; 0 without tokens."""
    return np.bincount(batch.turn_N, weights=value_N, minlength=int(batch.depth_E.max())).astype(np.float64)


def ended_by_turn(batch: RolloutBatch, keep_E: NDArray[np.bool_]) -> Counts:
    """How many of the episodes `keep_E` have each turn as their last: int64 [T], T the batch's greatest depth."""
    depth_E = batch.depth_E[keep_E]
    # an episode without turns has no last one
    return np.bincount(depth_E[depth_E > 0] - 1, minlength=int(batch.depth_E.max()))


def loss_share(loss_N: NDArray[np.floating], weight_N: NDArray[np.floating], batch: RolloutBatch) -> Column:
    """Each turn's share of the batch's loss: float64 [T], sum 1, or all 0 where nothing has a loss.

    s_t = sum_{i in t} |w_i l_i| / sum_i |w_i l_i|. Source: [turnopd]; docs/algorithms.md#turn-statistics.
    Differs from the paper: absolute values, since a policy gradient's losses have both signs.
    """
    sums_T = sum_by_turn(np.abs(weight_N * loss_N), batch)
    # the least divisor only guards 0 / 0
    return sums_T / max(float(sums_T.sum()), 1e-30)


def kl_share(kl_N: NDArray[np.floating], batch: RolloutBatch) -> Column:
    """Each turn's share of the batch's KL: float64 [T], sum 1, or all 0 where there is no KL.

    s_t = max(sum_{i in t} l_i, 0) / sum_t max(sum_{i in t} l_i, 0), l_i the KL of token i, nats, whatever it weighs.
    Source: [turnopd] eq. 11; docs/algorithms.md#turn-statistics.
    """
    # a turn's raw KL may be slightly negative, which is no share of anything
    sums_T = np.maximum(sum_by_turn(kl_N, batch), 0.0)
    return sums_T / max(float(sums_T.sum()), 1e-30)


def deep_third(share_T: Column) -> float:
    """Sum of shares over the deepest third of the turns: those with t >= 2 T / 3; 0 for fewer than three."""
    # twice negated, // rounds up
    return float(share_T[-(-2 * len(share_T) // 3) :].sum())


def survivors(depth_E: Counts, turns: int) -> Counts:
    """How many of the episodes reached each of `turns` turns: int64 [T]."""
    return (depth_E[:, None] > np.arange(turns)).sum(axis=0)


def pooled_mean(
    value_N: NDArray[np.floating], turn_N: Counts, keep_N: NDArray[np.bool_], turns: int
) -> tuple[Column, Counts]:
    """Mean of a per-token column over the kept tokens of each turn (NaN without any), and their number: [T] each.

    Args:
        value_N: a number per token [N].
        turn_N: the turn [N] of each token, 0-based.
        keep_N: whether [N] a token counts.
        turns: T, the number of turns.
    """
    count_T = np.bincount(turn_N[keep_N], minlength=turns)
    total_T = np.bincount(turn_N[keep_N], weights=value_N[keep_N], minlength=turns)
    # where() computes both sides: an empty turn must not divide by 0
    return np.where(count_T > 0, total_T / np.maximum(count_T, 1), np.nan), count_T


def _optional_mean(
    value_N: NDArray[np.floating] | None, turn_N: Counts, keep_N: NDArray[np.bool_], turns: int
) -> Column:
    return np.full(turns, np.nan) if value_N is None else pooled_mean(value_N, turn_N, keep_N, turns)[0]


def _check_lengths(batch: RolloutBatch, **columns: NDArray[np.floating] | None) -> None:
    for name, column in columns.items():
        if column is not None and column.shape != (batch.tokens,):
            raise ValueError(f"{name} has shape {column.shape}; need one value per supervised token, ({batch.tokens},)")
