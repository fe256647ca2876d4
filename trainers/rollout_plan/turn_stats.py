"""Statistics by turn: where along an episode student and teacher part, and who is still playing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turngym.trainers.algorithm import DepthStats
from turngym.trainers.batch import RolloutBatch
from turngym.trainers.rollout_plan.depth import MASS_EPS, divergence_mass, effective_depth

Column = NDArray[np.float64]
Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnStats:
    """Columns over T turns; NaN where a turn has no tokens of that kind. KL and entropy in nats per token."""

    tokens_T: Counts
    """Supervised tokens."""
    survivors_T: Counts
    """n_t: episodes that reached the turn."""
    kl_T: Column
    """K_t: mean KL pooled over tokens."""
    kl_success_T: Column
    kl_fail_T: Column
    tokens_success_T: Counts
    tokens_fail_T: Counts
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
    """Centre of the divergence mass, turn index."""

    @property
    def separation_T(self) -> Column:
        """Outcome separation G_t = K_t(failed episodes) - K_t(successful ones), nats; NaN where either is missing."""
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
    """Statistics by turn over all episodes, or over those in `include_E` (bool [E]).

    `kl_N` nats per supervised token (the paper's K_t is the raw form, which may be negative); `weight_N` the loss
    weights, None for equal ones; entropies in nats. T is the greatest depth. Episodes that the depth cap stopped count
    as neither success nor failure, unless they had succeeded.
    K_t = sum_{i in t} l_i / n_tok(t); G_t = K_t(fail) - K_t(success); s_t = sum_{i in t} w_i l_i / sum_i w_i l_i, all 0
    if that total is not positive. Source: [turnopd]; docs/algorithms.md#turn-statistics (what the paper plots).
    Errors: ValueError for a column whose length is not N, or E for `include_E`.
    """
    include_E = np.ones(batch.episodes, dtype=np.bool_) if include_E is None else include_E
    _check_lengths(batch, include_E, kl=kl_N, weight=weight_N, entropy=entropy_N, teacher_entropy=teacher_entropy_N)
    depth_E = batch.depth_E[include_E]
    turns = int(depth_E.max(initial=0))
    keep_N = include_E[batch.episode_N]
    success_N = keep_N & batch.success_E[batch.episode_N]
    fail_N = keep_N & (~batch.success_E & ~batch.truncated_E)[batch.episode_N]
    kl_T, tokens_T = _pooled_mean(kl_N, batch.turn_N, keep_N, turns)
    kl_success_T, tokens_success_T = _pooled_mean(kl_N, batch.turn_N, success_N, turns)
    kl_fail_T, tokens_fail_T = _pooled_mean(kl_N, batch.turn_N, fail_N, turns)
    survivors_T = _survivors(depth_E, turns)
    mass_T = divergence_mass(kl_T, survivors_T)
    share_T = _loss_share(kl_N, weight_N, batch.turn_N, keep_N, turns)
    return TurnStats(
        tokens_T=tokens_T,
        survivors_T=survivors_T,
        kl_T=kl_T,
        kl_success_T=kl_success_T,
        kl_fail_T=kl_fail_T,
        tokens_success_T=tokens_success_T,
        tokens_fail_T=tokens_fail_T,
        mass_T=mass_T,
        mass_share_T=mass_T / (mass_T.sum() + MASS_EPS),
        entropy_T=_optional_mean(entropy_N, batch.turn_N, keep_N, turns),
        teacher_entropy_T=_optional_mean(teacher_entropy_N, batch.turn_N, keep_N, turns),
        loss_share_T=share_T,
        deep_share=deep_third(share_T),
        h_eff=effective_depth(kl_T, survivors_T),
    )


def probe_stats(batch: RolloutBatch, kl_N: NDArray[np.floating]) -> DepthStats:
    """What `AdaptiveDepth.update` takes in: K_t, survivors, last turns and returns, depth-capped episodes left out.

    `kl_N` [N] nats per supervised token. The environment's limit of turns should not lie beyond the probes' depth:
    episodes that a probe itself cuts short are `truncated_depth` too, so only short episodes would be measured.
    Source: [turnopd] Algorithm 1; docs/algorithms.md#turn-statistics.
    """
    include_E = ~batch.truncated_E
    depth_E = batch.depth_E[include_E]
    turns = int(depth_E.max(initial=0))
    kl_T, _ = _pooled_mean(kl_N, batch.turn_N, include_E[batch.episode_N], turns)
    return DepthStats(
        kl_T=kl_T,
        survivors_T=_survivors(depth_E, turns),
        last_turn_E=depth_E - 1,
        reward_E=batch.reward_E[include_E],
    )


def deep_third(share_T: Column) -> float:
    """Sum of shares over the deepest third of the turns: those with t >= 2 T / 3; 0 for fewer than three."""
    return float(share_T[-(-2 * len(share_T) // 3) :].sum())


def separation_by_phase(steps: Sequence[TurnStats], phases: int = 3) -> list[Column]:
    """Outcome separation G_t in each of `phases` equal parts of training: columns over the deepest turn of the part.

    K_t of failures and of successes are pooled over the tokens of all steps of the part, then subtracted; nats, NaN
    where a turn has no tokens of one kind. A part without steps is an empty column.
    Errors: ValueError if `phases` is below 1.
    """
    if phases < 1:
        raise ValueError(f"phases is {phases}; training has at least 1")
    cuts = [round(part * len(steps) / phases) for part in range(phases + 1)]
    return [_pooled_separation(steps[start:stop]) for start, stop in pairwise(cuts)]


def reliable_prefix(
    survivors: Sequence[NDArray[np.integer]],
    *,
    n_min: int = 8,
    min_share: float = 0.10,
    min_steps: float = 0.60,
) -> int:
    """How many turns to plot, counted from turn 0: the longest prefix of turns that enough episodes reach.

    `survivors` holds n_t int [T] of each step. A turn is kept if in at least `min_steps` of the steps
    n_t >= `n_min` and n_t >= `min_share` * n_0. Source: [turnopd]; docs/algorithms.md#turn-statistics.
    """
    if not survivors:
        return 0
    turns = max(len(n_T) for n_T in survivors)
    kept = np.zeros(turns)
    for n_T in survivors:
        # 10 % of 30 episodes is 3, though 0.1 * 30 is a little more
        kept[: len(n_T)] += (n_T >= n_min) & (n_T >= min_share * n_T[:1] - 1e-9)
    reliable = kept >= min_steps * len(survivors) - 1e-9
    return turns if reliable.all() else int(np.argmin(reliable))


def stats_to_json(stats: TurnStats) -> dict[str, Any]:
    """`stats` for a metrics line: columns as lists, None where a turn has no value."""
    return {field.name: _plain(getattr(stats, field.name)) for field in fields(stats)}


def stats_from_json(values: Mapping[str, Any]) -> TurnStats:
    """The statistics that `stats_to_json` wrote. Errors: ValueError for missing fields."""
    missing = sorted({field.name for field in fields(TurnStats)} - set(values))
    if missing:
        raise ValueError(f"turn statistics lack {missing}; they are written by stats_to_json")
    columns: dict[str, Any] = {}
    for field in fields(TurnStats):
        value = values[field.name]
        if isinstance(value, list):
            integer = field.name.startswith(("tokens", "survivors"))
            value = np.array([np.nan if v is None else v for v in value], dtype=np.int64 if integer else np.float64)
        columns[field.name] = value
    return TurnStats(**columns)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [None if v != v else v for v in value.tolist()]
    return value


def _survivors(depth_E: Counts, turns: int) -> Counts:
    return (depth_E[:, None] > np.arange(turns)).sum(axis=0)


def _pooled_mean(
    value_N: NDArray[np.floating], turn_N: Counts, keep_N: NDArray[np.bool_], turns: int
) -> tuple[Column, Counts]:
    count_T = np.bincount(turn_N[keep_N], minlength=turns)
    total_T = np.bincount(turn_N[keep_N], weights=value_N[keep_N], minlength=turns)
    return np.where(count_T > 0, total_T / np.maximum(count_T, 1), np.nan), count_T


def _optional_mean(
    value_N: NDArray[np.floating] | None, turn_N: Counts, keep_N: NDArray[np.bool_], turns: int
) -> Column:
    return np.full(turns, np.nan) if value_N is None else _pooled_mean(value_N, turn_N, keep_N, turns)[0]


def _loss_share(
    kl_N: NDArray[np.floating],
    weight_N: NDArray[np.floating] | None,
    turn_N: Counts,
    keep_N: NDArray[np.bool_],
    turns: int,
) -> Column:
    loss_N = (kl_N if weight_N is None else kl_N * weight_N)[keep_N]
    loss_T = np.bincount(turn_N[keep_N], weights=loss_N, minlength=turns)
    total = loss_T.sum()
    return loss_T / total if total > 0 else np.zeros(turns)


def _pooled_separation(steps: Sequence[TurnStats]) -> Column:
    turns = max((len(step.kl_T) for step in steps), default=0)
    total, count = np.zeros((2, turns)), np.zeros((2, turns))
    for step in steps:
        kinds = ((step.kl_fail_T, step.tokens_fail_T), (step.kl_success_T, step.tokens_success_T))
        for kind, (kl_T, tokens_T) in enumerate(kinds):
            total[kind, : len(kl_T)] += np.nan_to_num(kl_T) * tokens_T
            count[kind, : len(kl_T)] += tokens_T
    mean = np.where(count > 0, total / np.maximum(count, 1), np.nan)
    return mean[0] - mean[1]


def _check_lengths(batch: RolloutBatch, include_E: NDArray[np.bool_], **columns: NDArray[np.floating] | None) -> None:
    if len(include_E) != batch.episodes:
        raise ValueError(f"include_E has {len(include_E)} entries for {batch.episodes} episodes")
    for name, column in columns.items():
        if column is not None and column.shape != (batch.tokens,):
            raise ValueError(f"{name} has shape {column.shape}; need one value per supervised token, ({batch.tokens},)")
