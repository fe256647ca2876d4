"""What was measured of a depth regime, as a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from turngym.core.tables import Table
from turngym.trainers.diagnostics.depth_regime import Regime


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRegime:
    """A regime, and how sure it is."""

    regime: Regime
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Intervals of `depth_regime.SIGNS`, as far as there are steps enough."""
    looping: float | None = None
    """Share of the episodes that loop (`core.loops.loop_end`); None where the episodes were not kept."""


def regime_table(found: Mapping[str, Mapping[str, MeasuredRegime]]) -> Table:
    """One row per world and window."""
    header = ["world", "steps", "turns", "KL shallow", "KL deep", "deep / shallow", "deep third of KL mass"]
    header += ["deep third of KL (eq. 11)", "first 3 turns", "entropy deep / shallow (failed)", "deep support"]
    header += ["G", "H_eff", "looping", "signs"]
    rows = []
    for world, windows in found.items():
        for window, item in windows.items():
            regime, ends = item.regime, item.intervals
            cells = [_number(regime.kl_shallow), _number(regime.kl_deep)]
            shares = "kl_ratio", "deep_mass", "deep_share", "first_mass", "entropy_ratio", "deep_support"
            cells += [_percent(getattr(regime, name), ends.get(name)) for name in shares]
            cells += [_number(regime.separation, ends.get("separation")), str(regime.h_eff), _percent(item.looping)]
            rows.append([world, window, str(regime.turns), *cells, "all" if regime.passes else "missing"])
    return header, rows


def _percent(value: float | None, ends: tuple[float, float] | None = None) -> str:
    between = f" [{100 * ends[0]:.0f}, {100 * ends[1]:.0f}]" if ends else ""
    return "-" if value is None else f"{100 * value:.1f}{between} %"


def _number(value: float | None, ends: tuple[float, float] | None = None) -> str:
    between = f" [{ends[0]:.3f}, {ends[1]:.3f}]" if ends else ""
    return "-" if value is None else f"{value:.3f}{between}"
