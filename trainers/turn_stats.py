"""Statistics by turn: where along an episode student and teacher part, and who is still playing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turngym.trainers.batch import RolloutBatch

Column = NDArray[np.float64]
Counts = NDArray[np.int64]


def turn_row(
    batch: RolloutBatch, columns: Mapping[str, NDArray[np.float32]], weight_N: NDArray[np.float64], *, full_depth: bool
) -> dict[str, list[Any]]:
    """Statistics by turn, lists over the T turns of the deepest episode; the divergence only where there is a teacher.

    Divergences and entropies are means pooled over a turn's tokens, nats; NaN where it has no tokens of that kind.
    Episodes that the depth cap stopped count as neither success nor failure, unless they had succeeded; with
    `full_depth`, where the cap is the run's full depth, those that were cut there have failed.
    K_t = sum_{i in t} l_i / n_tok(t). Source: [turnopd]; docs/algorithms.md#turn-statistics (what the paper plots).

    Args:
        columns: numbers per token [N] by name, as the forward pass measured them.
        weight_N: how much each token counts [N]; the sum is 1.
    """
    turns = int(batch.depth_E.max())
    unknown_E = batch.truncated_E & batch.short_E if full_depth else batch.truncated_E
    groups = {
        "": np.ones(batch.tokens, np.bool_),
        "_success": batch.success_E[batch.episode_N],
        "_failure": (~batch.success_E & ~unknown_E)[batch.episode_N],
    }

    def mean(name: str, group: str = "") -> Column:
        if name not in columns:
            return np.full(turns, np.nan)
        return pooled_mean(columns[name], batch.turn_N, groups[group], turns)

    row: dict[str, NDArray[Any]] = {
        "turn/loss_share": loss_share(columns["loss"], weight_N, batch),
        "turn/weight": sum_by_turn(weight_N, batch),
        "turn/survivors": survivors(batch.depth_E, turns),
        "turn/entropy": mean("entropy"),
        **{f"turn/tokens{group}": np.bincount(batch.turn_N[keep], minlength=turns) for group, keep in groups.items()},
        # with the survivors these are the last turns of all episodes: what a depth controller can be replayed from
        "turn/ended_success": ended_by_turn(batch, batch.success_E),
        "turn/ended_cut": ended_by_turn(batch, batch.truncated_E),
    }
    if {"kl_bin", "kl_raw"} <= columns.keys():
        row |= {"turn/kl": mean("kl_bin"), "turn/kl_raw": mean("kl_raw")}
        row |= {"turn/kl_share": kl_share(columns["kl_raw"], batch)}
        row |= {f"turn/kl{group}": mean("kl_bin", group) for group in ("_success", "_failure")}
        row |= {f"turn/kl_raw{group}": mean("kl_raw", group) for group in ("_success", "_failure")}
        row |= {f"turn/teacher_entropy{group}": mean("teacher_entropy", group) for group in groups}
    return {name: values.tolist() for name, values in row.items()}


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
    """Each turn's share of the batch's KL: float64 [T], sum 1, or all 0 if there is no KL.

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


def pooled_mean(value_N: NDArray[np.floating], turn_N: Counts, keep_N: NDArray[np.bool_], turns: int) -> Column:
    """Mean of a per-token column over the kept tokens of each turn: float64 [T], NaN without any."""
    count_T = np.bincount(turn_N[keep_N], minlength=turns)
    total_T = np.bincount(turn_N[keep_N], weights=value_N[keep_N], minlength=turns)
    # where() computes both sides: an empty turn must not divide by 0
    return np.where(count_T > 0, total_T / np.maximum(count_T, 1), np.nan)
