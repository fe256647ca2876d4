"""TurnOPD's depth controller run again over recorded probes: as it was set, and as it might have been."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from turngym.agents.evaluation.statistics import t_quantile
from turngym.envs.core.errors import TurngymError
from turngym.envs.core.provenance import FILE
from turngym.envs.core.settings import read_toml
from turngym.trainers.algorithm import Blended, DepthPlan
from turngym.trainers.algorithms.turnopd import (
    AdaptiveDepth,
    DepthConfig,
    DepthStats,
    TurnOpdConfig,
    depth_controller,
    divergence_mass,
    effective_depth,
    token_weight,
)
from turngym.trainers.diagnostics.curves import Alpha
from turngym.trainers.diagnostics.run_metrics import Column, Row, numbers
from turngym.trainers.train_config import train_config

NEEDED = ("turn/kl_raw", "turn/survivors", "turn/ended_success", "turn/ended_cut")
"""Columns that a probe must have recorded to be measured again."""
ROUNDING = 1e-9
"""Turns by which a replayed Hbar may differ from the recorded one."""


def probe_stats_of(row: Row) -> DepthStats | None:
    """The controller's statistics from a recorded probe; None where a column is missing or contradicts another.

    The last turns follow from the survivors, n_t - n_{t+1} episodes ended at turn t, so that nothing is kept by
    episode. Partial probes cannot be measured again: their rows pool the short episodes with the others.
    """
    if any(row.get(name) is None for name in NEEDED):
        return None
    kl_T, survivors_T, won_T, cut_T = (numbers(row[name]) for name in NEEDED)
    ended_T = -np.diff(np.append(survivors_T, 0.0))
    counts = [part_T.astype(np.int64) for part_T in (won_T, cut_T, ended_T - won_T - cut_T)]
    if any((count_T < 0).any() for count_T in counts):
        return None
    turns = np.arange(len(kl_T))
    won, cut, _ = (np.repeat([place == kind for place in range(3)], [c.sum() for c in counts]) for kind in range(3))
    return DepthStats(
        kl_T=kl_T,
        survivors_T=survivors_T.astype(np.int64),
        last_turn_E=np.concatenate([np.repeat(turns, count_T) for count_T in counts]),
        success_E=won,
        cut_E=cut,
    )


class Replay:
    """A controller led along the rows of a run; a probe without statistics measures nothing.

    `compared` steps were recorded; in `differing` ones cap, probe, H_eff or H_cov differ, or Hbar by more than
    rounding. `first` is the first of them in words, `hbar_error` the greatest |difference| of Hbar, turns.
    """

    def __init__(self, config: DepthConfig, bins: NDArray[np.int64] | None = None) -> None:
        self.controller = AdaptiveDepth(config)
        self.state = self.controller.start()
        self.caps: Counter[int] = Counter()
        self.bins = np.zeros(0, np.int64) if bins is None else bins
        self.hbar_B = np.full(len(self.bins), np.nan)
        self.probes = self.compared = self.differing = 0
        self.first, self.hbar_error = "", 0.0

    def add(self, row: Row) -> None:
        """Take in the step of `row`; evaluations are passed over."""
        if row.get("kind") != "train":
            return
        plan = self.controller.plan(self.state, row["step"])
        stats = probe_stats_of(row) if plan.probe else None
        if stats is not None:
            self.state = self.controller.update(self.state, plan, stats)
            self.probes += 1
        self.caps[plan.cap] += 1
        if len(self.bins):
            self.hbar_B[int(np.searchsorted(self.bins, row["step"]))] = self.state.hbar
        if row.get("depth/hbar") is not None:
            self._compare(plan, row)

    def _compare(self, plan: DepthPlan, row: Row) -> None:
        """Compare the controller's plan and state with what the run recorded."""
        hbar, recorded = self.state.hbar, row["depth/hbar"]
        error = abs(hbar - recorded)
        pairs = {"cap": plan.cap, "probe": int(plan.probe), "h_eff": self.state.h_eff, "h_cov": self.state.h_cov}
        wrong = [f"{n} {value} for {row[f'depth/{n}']}" for n, value in pairs.items() if value != row[f"depth/{n}"]]
        wrong += [f"hbar {hbar:.6g} for {recorded:.6g}"] if error > ROUNDING else []
        self.compared, self.differing = self.compared + 1, self.differing + bool(wrong)
        self.hbar_error = max(self.hbar_error, error)
        self.first = self.first or (f"step {row['step']}: {', '.join(wrong)}" if wrong else "")

    def turns_played(self, survivors_T: Column) -> float:
        """Turns that these caps play, as a share of full depth, if episodes last as `survivors_T` says: in (0, 1].

        sum_k sum_{t < cap_k} n_t / (K sum_t n_t); probes count in full.
        """
        reached_T = np.cumsum(np.nan_to_num(survivors_T))
        if not self.caps or not len(reached_T) or not reached_T[-1]:
            return float("nan")
        played = sum(count * reached_T[min(cap, len(reached_T)) - 1] for cap, count in self.caps.items())
        return float(played / (self.caps.total() * reached_T[-1]))


def variants(config: DepthConfig, own: str = "as set") -> dict[str, DepthConfig]:
    """The settings of Tables 5 and 6 around `config`, by what differs: coverage p, smoothing rho, whose CDF."""
    found = {own: config}
    for p in (0.4, 0.6, 0.8):
        found[f"p = {p:g}"] = replace(config, p=p)
    for rho in (0.5, 0.7, 0.9):
        found[f"rho = {rho:g}"] = replace(config, rho=rho)
    found["CDF of successes"] = replace(config, use_success=True)
    found["CDF of all episodes"] = replace(config, use_success=False)
    return {name: item for name, item in found.items() if name == own or item != config}


# Whether depth can pay in a world: how KL and the teacher's entropy behave along episodes of vanilla distillation.

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
        found = []
        for name, (value, limit, equal) in signs.items():
            if value is None:
                found.append(f"{name} was not measured")
            elif value > limit or (value == limit and not equal):
                wanted = "at most" if equal else "below"
                found.append(f"{name} is {100 * value:.1f} %, {wanted} {100 * limit:.0f} % is wanted")
        return found

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
    at = np.arange(turns)
    shallow, deep = 3 * at < turns, 3 * at >= 2 * turns
    kl_T = np.divide(sums.kl_T, sums.tokens_T, out=np.full(turns, np.nan), where=sums.tokens_T > 0)
    mass_T, token_T = divergence_mass(kl_T, sums.survivors_T), np.maximum(sums.kl_T, 0.0)
    kl_shallow, kl_deep = _mean(sums.kl_T, sums.tokens_T, shallow), _mean(sums.kl_T, sums.tokens_T, deep)
    entropy = [_mean(sums.fail_entropy_T, sums.fail_tokens_T, which) for which in (deep, shallow)]
    every = np.ones(turns, np.bool_)
    failed = _mean(sums.fail_kl_T, sums.fail_tokens_T, every)
    solved = _mean(sums.success_kl_T, sums.success_tokens_T, every)
    return Regime(
        episodes=int(sums.survivors_T[0]),
        turns=turns,
        kl_shallow=kl_shallow,
        kl_deep=kl_deep,
        kl_ratio=_ratio(kl_deep, kl_shallow),
        deep_mass=_ratio(float(mass_T[deep].sum()), float(mass_T.sum())),
        deep_share=_ratio(float(token_T[deep].sum()), float(token_T.sum())),
        first_mass=_ratio(float(mass_T[:FIRST].sum()), float(mass_T.sum())),
        entropy_ratio=_ratio(*entropy),
        deep_support=float(sums.survivors_T[deep].mean() / sums.survivors_T[0]) if deep.any() else 0.0,
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
    n, turns = len(rows), max(int(row["depth/cap"]) for row in rows)
    if n < 3:
        return {}
    whole = measure_regime(turn_sums(rows, turns))
    without = [measure_regime(turn_sums([*rows[:i], *rows[i + 1 :]], turns)) for i in range(n)]
    found = {}
    for sign in SIGNS:
        value, values = getattr(whole, sign), [getattr(regime, sign) for regime in without]
        if value is not None and None not in values and min(values) < max(values):
            wide = t_quantile(0.975, n - 1) * float(np.std(values)) * (n - 1) ** 0.5
            found[sign] = (value - wide, value + wide)
    return found


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
    entropy, per_fail = "turn/teacher_entropy_failure", "turn/kl_raw_failure"
    return TurnSums(
        tokens_T=_total(rows, depth, tokens),
        survivors_T=_total(rows, depth, "turn/survivors").astype(np.int64),
        kl_T=_total(rows, depth, tokens, "turn/kl_raw"),
        fail_tokens_T=_total(rows, depth, failed),
        fail_entropy_T=_total(rows, depth, failed, entropy),
        fail_kl_T=_total(rows, depth, failed, per_fail),
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


def _mean(total_T: Column, count_T: Column, which: NDArray[np.bool_]) -> float | None:
    count = float(count_T[which].sum())
    return float(total_T[which].sum()) / count if count else None


def _ratio(value: float | None, base: float | None) -> float | None:
    return None if value is None or base is None or base <= 0 else value / base


# What the configuration of a run says about its depth controller and its token weights.


@dataclass(frozen=True, slots=True, kw_only=True)
class Controlled:
    """Settings as far as they are known."""

    depth: DepthConfig | None = None
    """The run's own depth controller; None: it has none, or its configuration is not known."""
    alpha: Alpha | None = None
    """Step to alpha; None where the weights know no such scale."""
    note: str = ""
    """Why nothing is known; empty where something is."""


def run_controls(folder: Path) -> Controlled:
    """The controller and the blend of the run in `folder`, from its `config.toml`; never an error."""
    if not (folder / FILE).is_file():
        return Controlled(note=f"no {FILE} in {folder}")
    try:
        table = read_toml(folder / FILE)
        if table.get("algorithm") != "turnopd":
            return Controlled()
        config = train_config("turnopd", table, str(folder / FILE))
        own, steps = cast(TurnOpdConfig, config.own), config.run.steps
        controller, weight = depth_controller(own, config.run), token_weight(own)
    except (TurngymError, ValueError) as error:
        return Controlled(note=str(error))
    return Controlled(
        depth=controller.config if isinstance(controller, AdaptiveDepth) else None,
        alpha=(lambda step: weight.alpha(step=step, total_steps=steps)) if isinstance(weight, Blended) else None,
    )
