"""All diagnostics of one run, from two passes over its metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from turngym.trainers.algorithms.turnopd import DepthConfig, divergence_mass
from turngym.trainers.diagnostics.controller_replay import NEEDED, ControllerReplay, variants
from turngym.trainers.diagnostics.curves import Alpha, ByTurn, CurveSums, OverSteps, StepSums, TurnCurves, step_bins
from turngym.trainers.diagnostics.depth_regime import Regime, TurnSums, measure_regime
from turngym.trainers.diagnostics.run_metrics import ALL, Column, Row, RunShape, run_shape

# Table 1 of a run by phase of training, and the shares of KL and of divergence mass by turn.


def mass(curves: TurnCurves) -> Column:
    """m_t = max(K_t, 0) n_t / n_0 over the steps of `curves`: float64 [T], zeros where nothing was measured."""
    return divergence_mass(curves["kl"], np.rint(curves.total("survivors")).astype(np.int64))


def regime_of(curves: TurnCurves) -> Regime | None:
    """The table's row of one phase, from its steps played to full depth; None without KL by turn."""
    if not curves.steps or not np.isfinite(curves["kl"]).any():
        return None
    return measure_regime(
        TurnSums(
            tokens_T=curves.weights["kl"],
            survivors_T=np.rint(curves.total("survivors")),
            kl_T=curves.total("kl"),
            fail_tokens_T=curves.weights["kl_failure"],
            fail_entropy_T=curves.total("teacher_entropy_failure"),
            fail_kl_T=curves.total("kl_failure"),
            success_tokens_T=curves.weights["kl_success"],
            success_kl_T=curves.total("kl_success"),
        )
    )


# Appendix C: how much supervision a second buys when rollouts stop after H turns, and the H that buys most.


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of a step as a line in the turns it plays: intercept + slope * turns."""

    intercept: float
    slope: float
    steps: int
    fitted: bool
    """False: turns differ too little (or the line falls), so time is taken as proportional to turns."""

    def seconds(self, turns: Column) -> Column:
        return self.intercept + self.slope * turns


@dataclass(frozen=True, slots=True, kw_only=True)
class Horizon:
    """Curves over H = 1..T (index H - 1)."""

    covered_H: Column
    """C(H): share of the divergence mass in turns below H."""
    seconds_H: Column
    """Estimated seconds of a step that stops at H."""
    rho_H: Column
    """rho(H): supervision per second, relative to full depth."""
    best: int
    """H*: the turns that maximize rho."""
    time: StepTime


class StepTimeSums:
    """Least squares of `time/step_s` on turns played (`turns_mean` x `episodes`), added up row by row.

    The first step is left out: it pays for warming up.
    """

    def __init__(self) -> None:
        self.count, self.sums = 0, np.zeros(4)

    def add(self, row: Row) -> None:
        """Adds one row; a row without a time or without turns adds nothing."""
        values = [row[name] for name in ("turns_mean", "episodes", "time/step_s") if row.get(name) is not None]
        if row.get("kind") == "train" and row["step"] > 1 and len(values) == 3:
            turns, seconds = values[0] * values[1], values[2]
            self.count += 1
            self.sums += np.array([turns, seconds, turns * turns, turns * seconds])

    def result(self) -> StepTime:
        """The fitted line. It goes through the origin if turns vary by less than 5 %, or the fit has a negative
        part."""
        if not self.count or not self.sums[0]:
            return StepTime(intercept=0.0, slope=float("nan"), steps=self.count, fitted=False)
        x, y, xx, xy = self.sums / self.count
        spread = xx - x * x
        slope = (xy - x * y) / spread if spread > (0.05 * x) ** 2 else 0.0
        if slope <= 0 or y - slope * x < 0:
            return StepTime(intercept=0.0, slope=float(y / x), steps=self.count, fitted=False)
        return StepTime(intercept=float(y - slope * x), slope=float(slope), steps=self.count, fitted=True)


def horizon(curves: TurnCurves, time: StepTime, episodes: float) -> Horizon | None:
    """rho(H) and H* of one run; None without KL or times.

    m_t = max(K_t, 0) n_t / n_0, C(H) = sum_{t<H} m_t / sum_t m_t, turns(H) = E sum_{t<H} n_t / n_0,
    T(H) = intercept + slope turns(H), rho(H) = C(H) T(H_max) / T(H), H* = argmax rho.
    K_t and n_t from the steps of `curves` played to full depth, `episodes` E per step.
    Our reading of the paper's Appendix C, whose text was not at hand.
    """
    survivors_T = curves["survivors"]
    if not len(survivors_T) or not np.isfinite(curves["kl"]).any() or not np.isfinite(time.slope):
        return None
    mass_T = mass(curves)
    if mass_T.sum() <= 0:
        return None
    covered_H = np.cumsum(mass_T) / mass_T.sum()
    seconds_H = time.seconds(episodes * np.cumsum(survivors_T) / survivors_T[0])
    rho_H = covered_H * seconds_H[-1] / seconds_H
    return Horizon(covered_H=covered_H, seconds_H=seconds_H, rho_H=rho_H, best=int(np.argmax(rho_H)) + 1, time=time)


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What is known of one run. Where a statistic was not recorded its numbers are NaN."""

    shape: RunShape
    by_turn: ByTurn
    regimes: Mapping[str, Regime]
    """Table 1 by phase; phases without KL by turn are missing."""
    over_steps: OverSteps
    time: StepTime
    horizon: Horizon | None
    variants: tuple[ControllerReplay, ...]
    """Empty where no probe can be measured again; the first is the run's own setting."""
    replay: ControllerReplay | None
    """Replay with the run's own settings, against what it recorded; None for a run without a depth controller."""


def diagnose(
    read: Callable[[], Iterable[Row]],
    *,
    depth: DepthConfig | None = None,
    controlled: bool = False,
    alpha: Alpha | None = None,
) -> Diagnosis:
    """Diagnose a run. Memory does not grow with the number of its rows.

    Args:
        read: gives the run's rows, oldest first; it is called twice.
        depth: the controller's settings; None: those of the paper, up to the run's full depth.
        controlled: whether the run had this controller, so that the replay is compared with it.
        alpha: gives alpha of a step, for runs that did not record it; None: theirs is left out.
    """
    shape = run_shape(read())
    bins = step_bins(shape.steps)
    full = shape.full_depth or max(shape.turns, 1)
    settings = variants(depth or DepthConfig(h_max=full, h_min=min(2, full)), "defaults" if depth is None else "as set")
    turns, steps, time = CurveSums(shape), StepSums(shape, alpha), StepTimeSums()
    replays = []
    if replayable(shape, depth, controlled):
        replays = [ControllerReplay(config, bins, name) for name, config in settings.items()]
    for row in read():
        turns.add(row)
        steps.add(row)
        time.add(row)
        for replay in replays:
            replay.add(row)
    # ends: they compute
    by_turn, step_time, over_steps = turns.result(), time.result(), steps.result()
    for replay in replays:
        replay.turns_share = replay.turns_played(by_turn.curves[ALL]["survivors"])
    return Diagnosis(
        shape=shape,
        by_turn=by_turn,
        regimes={
            phase: regime for phase, curves in by_turn.curves.items() if (regime := regime_of(curves)) is not None
        },
        over_steps=over_steps,
        time=step_time,
        horizon=horizon(by_turn.curves[ALL], step_time, over_steps.episodes),
        variants=tuple(replays),
        replay=replays[0] if replays and controlled else None,
    )


def replayable(shape: RunShape, depth: DepthConfig | None, controlled: bool) -> bool:
    """Whether the run's probes were recorded: under a controller of its own, or because all steps had full depth.

    Rows of partial probes pool what was measured with what was not.
    """
    if depth is not None and depth.probe_share < 1.0:
        return False
    always_full = shape.full_steps > 0 and shape.full_steps == shape.measured_steps
    return set(NEEDED) <= shape.columns and (controlled or always_full)
