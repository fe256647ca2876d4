"""Per-turn statistics pooled over steps, as curves by phase of training and as turn x step maps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from turngym.trainers.diagnostics.run_metrics import ALL, PHASES, Column, Row, RunShape, numbers

KL = ("turn/kl_raw", "turn/kl")
MEANS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "kl": (KL, ("turn/tokens",)),
    "kl_success": (("turn/kl_raw_success", "turn/kl_success"), ("turn/tokens_success",)),
    "kl_failure": (("turn/kl_raw_failure", "turn/kl_failure"), ("turn/tokens_failure",)),
    "teacher_entropy": (("turn/teacher_entropy",), ("turn/tokens",)),
    "teacher_entropy_failure": (("turn/teacher_entropy_failure",), ("turn/tokens_failure",)),
    "entropy": (("turn/entropy",), ("turn/tokens",)),
    "survivors": (("turn/survivors",), ()),
    "tokens": (("turn/tokens",), ()),
    "weight": (("turn/weight",), ()),
}
"""What is averaged over steps: its columns (the first that is recorded counts) and the columns that weigh the steps."""
TOTALS = ("survivors", "tokens", "weight")
"""Where a full-depth step does not list a turn, there was none: it counts as 0."""
MAPS = ("kl", "teacher_entropy", "survivors")
MAX_BINS = 160
"""Most columns of a map: several steps share one in a longer run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnCurves:
    """Means over the steps of one phase that were played to full depth, by turn [T]; NaN where nothing was measured."""

    phase: str
    steps: int
    means: Mapping[str, Column]
    """Means by the names of MEANS; KL and entropy pooled over tokens, in nats per token, the others per step."""
    weights: Mapping[str, Column]
    """What each mean weighs: tokens, or steps."""

    def __getitem__(self, name: str) -> Column:
        return self.means[name]

    def total(self, name: str) -> Column:
        """Sums over the phase by turn: of KL and entropy over tokens, of counts over steps; 0 where nothing was."""
        return np.nan_to_num(self.means[name]) * self.weights[name]

    @property
    def separation_T(self) -> Column:
        """G_t = K_t(fail) - K_t(success): positive where failures diverge more."""
        return self.means["kl_failure"] - self.means["kl_success"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnMap:
    """One statistic over turns and training: float64 [T, B], NaN where no step measured the turn."""

    value_TB: NDArray[np.float64]
    last_step_B: NDArray[np.int64]
    """Last step of each bin of steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ByTurn:
    """Everything by turn of one run."""

    curves: Mapping[str, TurnCurves]
    """Curves by phase, and over all of training under ALL."""
    maps: Mapping[str, TurnMap]
    """Maps by the names of MAPS, over all steps, capped ones included."""
    sources: Mapping[str, str]
    """Which column each mean was read from."""


class _Pool:
    """A weighted mean per cell that is added to row by row."""

    def __init__(self, turns: int, cells: int) -> None:
        self.total = np.zeros((turns, cells))
        self.weight = np.zeros((turns, cells))

    def add(self, cell: int, value_T: Column, weight_T: Column) -> None:
        finite = np.isfinite(value_T) & (weight_T > 0)
        turns = np.flatnonzero(finite)
        self.total[turns, cell] += (value_T * weight_T)[finite]
        self.weight[turns, cell] += weight_T[finite]

    def mean(self) -> NDArray[np.float64]:
        with np.errstate(invalid="ignore"):
            return np.where(self.weight > 0, self.total / np.where(self.weight > 0, self.weight, 1.0), np.nan)


class CurveSums:
    """Adds up the rows of the run that `shape` was taken of; memory grows with its turns, not with its steps."""

    def __init__(self, shape: RunShape) -> None:
        self.shape = shape
        self.sources = {name: _first(columns, shape) for name, (columns, _) in MEANS.items()}
        self.weights = {name: _first(columns, shape) for name, (_, columns) in MEANS.items()}
        self.ends = step_bins(shape.steps)
        self.counts = dict.fromkeys([*PHASES, ALL], 0)
        self.pools = {name: _Pool(shape.turns, len(self.counts)) for name in MEANS}
        self.maps = {name: _Pool(shape.turns, len(self.ends)) for name in MAPS}

    def add(self, row: Row) -> None:
        """One row; evaluations and steps without turns add nothing."""
        if row.get("kind") != "train" or not row.get("turn/survivors"):
            return
        phases = (self.shape.phase(row), ALL) if self.shape.full(row) else ()
        for phase in phases:
            self.counts[phase] += 1
        cells = [list(self.counts).index(phase) for phase in phases]
        bin_index, turns = int(np.searchsorted(self.ends, row["step"])), self.shape.turns
        for name, source in self.sources.items():
            if not source or not (cells or name in self.maps):
                continue
            value_T, weight_T = numbers(row.get(source)), np.nan_to_num(numbers(row.get(self.weights[name])))
            weight_T = weight_T if len(weight_T) else np.ones(len(value_T))
            if name in self.maps:
                self.maps[name].add(bin_index, value_T, weight_T)
            if name in TOTALS:
                value_T, weight_T = np.append(value_T, np.zeros(turns - len(value_T))), np.ones(turns)
            for cell in cells:
                self.pools[name].add(cell, value_T, weight_T)

    def result(self) -> ByTurn:
        """The sums so far."""
        means = {name: pool.mean() for name, pool in self.pools.items()}
        return ByTurn(
            curves={
                phase: TurnCurves(
                    phase=phase,
                    steps=steps,
                    means={name: mean[:, cell] for name, mean in means.items()},
                    weights={name: pool.weight[:, cell] for name, pool in self.pools.items()},
                )
                for cell, (phase, steps) in enumerate(self.counts.items())
            },
            maps={name: TurnMap(value_TB=pool.mean(), last_step_B=self.ends) for name, pool in self.maps.items()},
            sources=self.sources,
        )


def step_bins(steps: int, most: int = MAX_BINS) -> NDArray[np.int64]:
    """Last steps of at most `most` equally wide bins over steps 1..`steps`; the last one may be narrower."""
    width = max(1, -(-steps // most))
    return np.append(np.arange(width, steps, width), steps) if steps else np.zeros(0, np.int64)


def smooth(value_T: Column, window: int = 3) -> Column:
    """Centered moving mean over `window` turns (odd); NaN stays NaN.

    A value counts only with its mirror image, so that the mean stays centered: with a one-sided window lines would bend
    at their ends and beside gaps. A straight line comes out as it is.
    """
    half, count = window // 2, len(value_T)
    padded = np.pad(np.asarray(value_T, np.float64), half, constant_values=np.nan)
    total, weight = padded[half : half + count].copy(), np.ones(count)
    for offset in range(1, half + 1):
        pair = padded[half - offset : half - offset + count] + padded[half + offset : half + offset + count]
        finite = np.isfinite(pair)
        total += np.where(finite, pair, 0.0)
        weight += 2 * finite
    return np.where(np.isfinite(value_T), total / weight, np.nan)


def _first(columns: tuple[str, ...], shape: RunShape) -> str:
    """The first of the columns that the run has; "" if none."""
    return next((name for name in columns if name in shape.columns), "")


# Numbers over training steps: times by phase, depth, alpha and the deep budget, the train / rollout gap; binned.

Alpha = Callable[[int], float]
"""Step (1-based) -> alpha, for runs that did not record it."""
SECONDS = ("time/rollout_s", "time/teacher_s", "time/update_s", "time/step_s")
SCALARS: tuple[str, ...] = (*SECONDS, "depth/cap", "depth/hbar", "depth/h_eff", "depth/h_cov", "gap_mean", "gap_max")
SCALARS += ("success", "turns_mean", "tokens", "kl_raw", "staleness_mean")
DERIVED = ("alpha", "deep_weight")
GREATEST_OF_BIN = ("gap_max",)
"""Statistics of which a bin keeps the greatest value; of all others it keeps the mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverSteps:
    """Columns over B bins of steps (one step each in short runs), NaN where nothing was recorded, and sums."""

    last_step_B: NDArray[np.int64]
    value: Mapping[str, NDArray[np.float64]]
    """Values by the names of SCALARS and DERIVED."""
    by_phase: Mapping[str, Mapping[str, float]]
    """Means of the same values over the parts of training (PHASES and ALL)."""
    total: Mapping[str, float]
    """Sums over training of SECONDS, tokens and turns (`turns`), and of `time/eval_s`; 0 where not recorded."""
    episodes: float
    """Mean episodes per step."""


def deep_weight(weight_T: NDArray[np.float64], deep_from: int) -> float:
    """The realized deep budget of Table 6: share of a step's token weights on turns t >= `deep_from`."""
    total = np.nansum(weight_T)
    return float(np.nansum(weight_T[deep_from:]) / total) if total > 0 else float("nan")


class StepSums:
    """Adds up rows; deep turns begin at two thirds of full depth, also where a step's cap lies below."""

    def __init__(self, shape: RunShape, alpha: Alpha | None = None) -> None:
        self.shape, self.alpha = shape, alpha
        self.ends, self.phases = step_bins(shape.steps), [*PHASES, ALL]
        names = (*SCALARS, *DERIVED)
        self.sums = {name: np.zeros((2, len(self.ends))) for name in names}
        self.parts = {name: np.zeros((2, len(self.phases))) for name in names}
        self.most = {name: np.full(len(self.ends), np.nan) for name in GREATEST_OF_BIN}
        self.total = dict.fromkeys((*SECONDS, "time/eval_s", "tokens", "turns"), 0.0)
        self.steps, self.episodes = 0, 0.0

    def add(self, row: Row) -> None:
        """Adds one row. Of an evaluation's row only the time counts."""
        if row.get("kind") != "train":
            self.total["time/eval_s"] += row.get("time/eval_s") or 0.0
            return
        bin_index, phase = int(np.searchsorted(self.ends, row["step"])), self.phases.index(self.shape.phase(row))
        episodes = row.get("episodes") or 0
        self.steps, self.episodes = self.steps + 1, self.episodes + episodes
        self.total["turns"] += row.get("cost/turns") or 0
        for name, value in _values(row, self.shape, self.alpha).items():
            if name in self.total:
                self.total[name] += value
            self.sums[name][:, bin_index] += (value, 1)
            self.parts[name][:, (phase, -1)] += np.array([[value], [1]])
            if name in self.most:
                self.most[name][bin_index] = np.fmax(self.most[name][bin_index], value)

    def result(self) -> OverSteps:
        """The statistics so far."""
        parts = {name: _mean(pair) for name, pair in self.parts.items()}
        return OverSteps(
            last_step_B=self.ends,
            value={name: _mean(pair) for name, pair in self.sums.items()} | self.most,
            by_phase={
                phase: {name: float(mean[index]) for name, mean in parts.items()}
                for index, phase in enumerate(self.phases)
            },
            total=self.total,
            episodes=self.episodes / max(self.steps, 1),
        )


def _values(row: Row, shape: RunShape, alpha: Alpha | None) -> dict[str, float]:
    values = {name: float(row[name]) for name in SCALARS if row.get(name) is not None}
    alpha_now = row.get("weight/alpha")
    if alpha_now is None and alpha is not None:
        alpha_now = alpha(row["step"])
    if alpha_now is not None:
        values["alpha"] = float(alpha_now)
    weight_T = numbers(row.get("turn/weight"))
    if len(weight_T) and shape.turns >= 3:
        values["deep_weight"] = deep_weight(weight_T, -(-2 * shape.turns // 3))
    return {name: value for name, value in values.items() if np.isfinite(value)}


def _mean(pair: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(pair[1] > 0, pair[0] / np.maximum(pair[1], 1), np.nan)


def kl_shares(curves: TurnCurves) -> Column:
    """Each turn's share of the KL of all tokens of a phase: float64 [T], sum 1 (all NaN where there is none).

    s_t = max(K_t, 0) N_t / sum_u max(K_u, 0) N_u, N_t tokens of turn t, whatever they weigh in the loss.
    Source: [turnopd] eq. 11; docs/algorithms.md#turn-statistics.
    """
    part_T = np.maximum(curves.total("kl"), 0.0)
    return part_T / part_T.sum() if part_T.sum() > 0 else np.full(len(part_T), np.nan)
