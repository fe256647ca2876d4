"""Whether depth can pay in a world: how KL and the teacher's entropy behave along episodes of vanilla distillation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turngym.agents.evaluation.statistics import t_quantile
from turngym.trainers.algorithms.turnopd import divergence_mass, effective_depth
from turngym.trainers.diagnostics.run_metrics import Column, numbers

MAX_KL_RATIO, MAX_DEEP_MASS, MAX_ENTROPY_RATIO = 0.60, 0.12, 1.0
FIRST = 3
"""Turns whose share of the KL mass is told apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnSums:
    """Sums by turn over full-depth episodes, float64 [T], T the full depth; nats."""

    tokens_T: Column
    survivors_T: NDArray[np.int64]
    """Episodes that reached the turn."""
    kl_T: Column
    """Raw reverse KL, summed over tokens."""
    fail_tokens_T: Column
    """Tokens of failed episodes whose teacher entropy is known."""
    fail_entropy_T: Column
    """The teacher's entropy, summed over them."""
    fail_kl_T: Column
    success_tokens_T: Column
    success_kl_T: Column


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """What Table 1 asks of a world. Shares and ratios; None where nothing was there to measure.

    Shallow turns are the first third of full depth (t < T / 3), deep ones the last (t >= 2 T / 3).
    """

    episodes: int
    turns: int
    """T, full depth."""
    kl_shallow: float | None
    """Raw reverse KL per token, pooled over the shallow turns, nats."""
    kl_deep: float | None
    kl_ratio: float | None
    """Deep / shallow."""
    deep_mass: float | None
    """Deep third's share of the KL mass m_t = max(K_t, 0) n_t / n_0."""
    deep_share: float | None
    """Deep third's share of the KL summed over tokens (eq. 11)."""
    first_mass: float | None
    """Share of the KL mass in the first three turns."""
    entropy_ratio: float | None
    """Teacher entropy in failed episodes, deep / shallow."""
    deep_support: float
    """Episodes in a deep turn / at the start, mean over the deep turns."""
    separation: float | None
    """G = KL of failed - KL of successful episodes, pooled over all turns, nats per token."""
    h_eff: int
    """Center of the KL mass, turn index."""

    @property
    def failures(self) -> list[str]:
        """The signs that are missing, in words; none: depth can pay here."""
        signs = {
            "deep / shallow KL": (self.kl_ratio, MAX_KL_RATIO, False),
            "deep third's share of the KL mass": (self.deep_mass, MAX_DEEP_MASS, True),
            "teacher entropy deep / shallow in failed episodes": (self.entropy_ratio, MAX_ENTROPY_RATIO, False),
        }
        lines = []
        for name, (value, limit, equal) in signs.items():
            if value is None:
                lines.append(f"{name} was not measured")
            elif value > limit or (value == limit and not equal):
                wanted = "at most" if equal else "below"
                lines.append(f"{name} is {100 * value:.1f} %, {wanted} {100 * limit:.0f} % is wanted")
        return lines

    @property
    def passes(self) -> bool:
        return not self.failures


def measure_regime(sums: TurnSums) -> Regime:
    """Table 1's quantities from sums by turn.

    K_t = sum_{i in t} l_i / n_tok(t); a group of turns is pooled over its tokens, as one turn is.
    Source: [turnopd] Table 1, eq. 11; docs/algorithms.md#turn-statistics. What the paper calls shallow and deep is our
    reading: thirds of full depth, as it takes for the deep third's share.
    """
    turns = len(sums.tokens_T)
    turn_T = np.arange(turns)
    shallow, deep = 3 * turn_T < turns, 3 * turn_T >= 2 * turns
    kl_T = np.divide(sums.kl_T, sums.tokens_T, out=np.full(turns, np.nan), where=sums.tokens_T > 0)
    mass_T, token_T = divergence_mass(kl_T, sums.survivors_T), np.maximum(sums.kl_T, 0.0)
    kl_shallow, kl_deep = _mean(sums.kl_T, sums.tokens_T, shallow), _mean(sums.kl_T, sums.tokens_T, deep)
    entropy = [_mean(sums.fail_entropy_T, sums.fail_tokens_T, mask_T) for mask_T in (deep, shallow)]
    all_turns = np.ones(turns, np.bool_)
    failed = _mean(sums.fail_kl_T, sums.fail_tokens_T, all_turns)
    solved = _mean(sums.success_kl_T, sums.success_tokens_T, all_turns)
    return Regime(
        episodes=int(sums.survivors_T[0]),
        turns=turns,
        kl_shallow=kl_shallow,
        kl_deep=kl_deep,
        kl_ratio=_ratio(kl_deep, kl_shallow),
        deep_mass=_ratio(math.fsum(mass_T[deep]), math.fsum(mass_T)),
        deep_share=_ratio(math.fsum(token_T[deep]), math.fsum(token_T)),
        first_mass=_ratio(math.fsum(mass_T[:FIRST]), math.fsum(mass_T)),
        entropy_ratio=_ratio(*entropy),
        deep_support=fmean(sums.survivors_T[deep]) / sums.survivors_T[0].item() if deep.any() else 0.0,
        separation=None if failed is None or solved is None else failed - solved,
        h_eff=effective_depth(kl_T, sums.survivors_T),
    )


SIGNS = ("kl_ratio", "deep_mass", "entropy_ratio", "separation")


def sign_intervals(rows: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, float]]:
    """95 % intervals of `SIGNS` over the steps of full depth `rows`, which are taken as independent of each other.

    theta +- t_{n-1} sqrt((n - 1) / n sum_i (theta_(i) - mean_(i))^2), theta_(i) what is measured without step i (the
    jackknife). A sign has none where one of these cannot be measured, or where all are alike and say nothing of other
    steps; nothing has one with fewer than three steps.
    """
    n = len(rows)
    if n < 3:
        return {}
    turns = max(int(row["depth/cap"]) for row in rows)
    measured = measure_regime(turn_sums(rows, turns))
    without = [measure_regime(turn_sums([*rows[:i], *rows[i + 1 :]], turns)) for i in range(n)]
    intervals = {}
    for sign in SIGNS:
        value, values = getattr(measured, sign), [getattr(regime, sign) for regime in without]
        if value is not None and None not in values and min(values) < max(values):
            half_width = t_quantile(0.975, n - 1) * pstdev(values) * (n - 1) ** 0.5
            intervals[sign] = (value - half_width, value + half_width)
    return intervals


def turn_sums(rows: Sequence[Mapping[str, Any]], turns: int | None = None) -> TurnSums:
    """Sums by turn of rows of metrics.jsonl that were played to full depth.

    `turns` is T, by default their greatest cap.
    Errors: ValueError without such a row, or for rows without a divergence from a teacher.
    """
    if not rows:
        raise ValueError("there is no full-depth step to measure")
    if "turn/kl_raw" not in rows[0]:
        raise ValueError("the run has no divergence from a teacher (`turn/kl_raw`)")
    depth = max(int(row["depth/cap"]) for row in rows) if turns is None else turns
    tokens, failed, solved = ("turn/tokens", "turn/tokens_failure", "turn/tokens_success")
    return TurnSums(
        tokens_T=_total(rows, depth, tokens),
        survivors_T=_total(rows, depth, "turn/survivors").astype(np.int64),
        kl_T=_total(rows, depth, tokens, "turn/kl_raw"),
        fail_tokens_T=_total(rows, depth, failed),
        fail_entropy_T=_total(rows, depth, failed, "turn/teacher_entropy_failure"),
        fail_kl_T=_total(rows, depth, failed, "turn/kl_raw_failure"),
        success_tokens_T=_total(rows, depth, solved),
        success_kl_T=_total(rows, depth, solved, "turn/kl_raw_success"),
    )


def full_depth_rows(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The training rows played to the run's full depth: all of vanilla OPD's, the probes of a depth controller."""
    train = [row for row in rows if row.get("kind") == "train" and "turn/survivors" in row]
    full = max((int(row["depth/cap"]) for row in train), default=0)
    return [row for row in train if int(row["depth/cap"]) == full]


def _total(rows: Sequence[Mapping[str, Any]], depth: int, count: str, mean: str | None = None) -> Column:
    """Sum over rows of a column by turn, or of its product with a mean by turn."""
    total = np.zeros(depth)
    for row in rows:
        counts = numbers(row.get(count))
        if mean is not None:
            values = numbers(row.get(mean))
            # a turn without such tokens has no mean, and adds nothing
            counts = counts * np.nan_to_num(values) if len(values) == len(counts) else np.zeros(len(counts))
        total[: len(counts)] += counts[:depth]
    return total


def _mean(total_T: Column, count_T: Column, mask_T: NDArray[np.bool_]) -> float | None:
    count = math.fsum(count_T[mask_T])
    return math.fsum(total_T[mask_T]) / count if count else None


def _ratio(value: float | None, base: float | None) -> float | None:
    return None if value is None or base is None or base <= 0 else value / base
