"""TurnOPD's depth controller run again over recorded probes: as it was set, and as it might have been."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from turngym.core.errors import TurngymError
from turngym.core.provenance import CONFIG_FILE
from turngym.core.settings import read_toml
from turngym.core.spec import changed
from turngym.trainers.algorithm import Blended, DepthPlan
from turngym.trainers.algorithms.turnopd import (
    AdaptiveDepth,
    DepthConfig,
    DepthStats,
    TurnOpdConfig,
    depth_controller,
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
    won, cut, _ = (np.repeat([index == kind for index in range(3)], [c.sum() for c in counts]) for kind in range(3))
    return DepthStats(
        kl_T=kl_T,
        survivors_T=survivors_T.astype(np.int64),
        last_turn_E=np.concatenate([np.repeat(turns, count_T) for count_T in counts]),
        success_E=won,
        cut_E=cut,
    )


class ControllerReplay:
    """A controller led along the rows of a run; a probe without statistics measures nothing.

    `compared` steps were recorded; in `differing` ones cap, probe, H_eff or H_cov differ, or Hbar by more than
    rounding. `first` is the first of them in words, `hbar_error` the greatest |difference| of Hbar, turns. `probes`
    were measured; `hbar_B` is Hbar at the last step of each bin.

    Args:
        bins: last steps of bins; None: none.
        name: what differs in the settings from the run's own.
    """

    turns_share: float
    """Turns that its caps would play / turns at full depth; known when all rows are."""

    def __init__(self, config: DepthConfig, bins: NDArray[np.int64] | None = None, name: str = "") -> None:
        self.name = name
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


def variants(config: DepthConfig, own: str) -> dict[str, DepthConfig]:
    """The settings of Tables 5 and 6 around `config`, by what differs: coverage p, smoothing rho, whose CDF."""
    by_name = {own: config}
    for p in (0.4, 0.6, 0.8):
        by_name[f"p = {p:g}"] = changed(config, p=p)
    for rho in (0.5, 0.7, 0.9):
        by_name[f"rho = {rho:g}"] = changed(config, rho=rho)
    by_name["CDF of successes"] = changed(config, use_success=True)
    by_name["CDF of all episodes"] = changed(config, use_success=False)
    return {name: variant for name, variant in by_name.items() if name == own or variant != config}


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
    if not (folder / CONFIG_FILE).is_file():
        return Controlled(note=f"no {CONFIG_FILE} in {folder}")
    try:
        table = read_toml(folder / CONFIG_FILE)
        if table.get("algorithm") != "turnopd":
            return Controlled()
        config = train_config("turnopd", table, str(folder / CONFIG_FILE))
        turnopd, steps = cast(TurnOpdConfig, config.own), config.run.steps
        controller, weight = depth_controller(turnopd, config.loop), token_weight(turnopd)
    except (TurngymError, ValueError) as error:
        return Controlled(note=str(error))
    return Controlled(
        depth=controller.config if isinstance(controller, AdaptiveDepth) else None,
        alpha=(lambda step: weight.alpha(step=step, total_steps=steps)) if isinstance(weight, Blended) else None,
    )
