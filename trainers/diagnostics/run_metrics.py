"""What a run's metrics hold at all: how many steps, how many turns, which turns are reliable, which columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Row = Mapping[str, Any]
Column = NDArray[np.float64]
"""[T], one number per turn."""
PHASES: Mapping[str, tuple[float, float]] = {"0-30 %": (0.0, 0.3), "30-60 %": (0.3, 0.6), "60-100 %": (0.6, 1.0)}
"""Parts of training by the share of its steps that are done, ends included; the paper's early, middle and late."""
ALL = "0-100 %"
MIN_SURVIVORS = 8
"""A turn is reliable in a step that this many episodes reach ..."""
MIN_SHARE = 0.10
"""... and this share of the episodes that started."""
MIN_STEPS = 0.60
"""The reliable prefix ends where a smaller share of the steps finds the turn reliable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunShape:
    """The frame that every diagnostic of a run is drawn in."""

    steps: int
    """Last training step."""
    turns: int
    """T: most turns that any step measured."""
    full_depth: int | None
    """Greatest depth cap; None where no cap was recorded."""
    full_steps: int
    """Steps played to that depth."""
    measured_steps: int
    """Steps with statistics by turn, at whatever depth."""
    reliable: int
    """R: turns of the reliable prefix, over the steps played to full depth."""
    columns: frozenset[str]
    """Columns with at least one number."""

    def full(self, row: Row) -> bool:
        """Whether a step was played to full depth: only there deep turns are not cut off by a cap."""
        return self.full_depth is None or (row.get("depth/cap") or 0) >= self.full_depth

    def phase(self, row: Row) -> str:
        """The name in PHASES of the part of training that a step belongs to."""
        done = row["step"] / self.steps
        return next(name for name, (_, end) in PHASES.items() if done <= end + 1e-9)


@dataclass(slots=True)
class _Depth:
    """Reliability of turns over the steps of one depth cap."""

    steps: int = 0
    reliable_T: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    def add(self, survivors_T: NDArray[np.float64]) -> None:
        self.steps += 1
        grown = np.zeros(max(len(survivors_T), len(self.reliable_T)), np.int64)
        grown[: len(self.reliable_T)] = self.reliable_T
        grown[: len(survivors_T)] += reliable_turns(survivors_T)
        self.reliable_T = grown


def numbers(values: Any) -> NDArray[np.float64]:
    """A list of a row as float64; null is NaN."""
    return np.array([np.nan if value is None else value for value in values or ()], np.float64)


def reliable_turns(survivors_T: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Turns that enough episodes reach: n_t >= 8 and n_t >= 0.1 n_0, bool [T]; the rule of the paper's plots."""
    if not len(survivors_T):
        return np.zeros(0, np.bool_)
    return (survivors_T >= MIN_SURVIVORS) & (survivors_T >= MIN_SHARE * survivors_T[0])


def prefix_length(share_T: NDArray[np.float64]) -> int:
    """Turns before the first whose share of reliable steps falls below 0.6."""
    below = np.flatnonzero(share_T < MIN_STEPS)
    return int(below[0]) if len(below) else len(share_T)


def run_shape(rows: Iterable[Row]) -> RunShape:
    """One pass over all rows of a run; evaluations only add columns."""
    steps = turns = 0
    columns: set[str] = set()
    depths: dict[int | None, _Depth] = {}
    for row in rows:
        columns |= {name for name, value in row.items() if value is not None and name not in columns}
        if row.get("kind") != "train":
            continue
        steps = max(steps, row["step"])
        survivors_T = numbers(row.get("turn/survivors"))
        if len(survivors_T):
            turns = max(turns, len(survivors_T))
            depths.setdefault(row.get("depth/cap"), _Depth()).add(survivors_T)
    caps = [cap for cap in depths if cap is not None]
    full_depth = max(caps) if caps else None
    deepest = depths.get(full_depth, _Depth())
    return RunShape(
        steps=steps,
        turns=turns,
        full_depth=full_depth,
        full_steps=deepest.steps,
        measured_steps=sum(depth.steps for depth in depths.values()),
        reliable=prefix_length(deepest.reliable_T / max(deepest.steps, 1)),
        columns=frozenset(columns),
    )
