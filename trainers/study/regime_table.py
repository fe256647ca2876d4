"""What was measured of a depth regime, as a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from turngym.core.tables import Table, table_of
from turngym.trainers.diagnostics.depth_regime import Regime


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRegime:
    """A regime, and how sure it is."""

    regime: Regime
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Intervals of `depth_regime.SIGNS`, as far as there are steps enough."""
    looping: float | None = None
    """Share of the episodes that loop (`core.loops.loop_end`); None where the episodes were not kept."""


ABOUT = """\
Signs that depth can pay: deep / shallow KL below 60 %, the deep third's share of the KL mass at most 12 %, teacher
entropy falling with depth in failed episodes. Shallow and deep turns are the first and last third of full depth; KL is
the raw reverse KL in nats per token; G is that of failed less that of successful episodes. In brackets: 95 % intervals
over steps (jackknife). Looping: episodes that give an observation the same action three times."""
SHARES = {
    "deep / shallow": "kl_ratio",
    "deep third of KL mass": "deep_mass",
    "deep third of KL (eq. 11)": "deep_share",
    "first 3 turns": "first_mass",
    "entropy deep / shallow (failed)": "entropy_ratio",
    "deep support": "deep_support",
}


def regime_table(found: Mapping[str, Mapping[str, MeasuredRegime]]) -> Table:
    """One row per name and window of steps."""
    return table_of(
        {
            "name": name,
            "steps": window,
            "turns": str(item.regime.turns),
            "KL shallow": _number(item.regime.kl_shallow),
            "KL deep": _number(item.regime.kl_deep),
            **{title: _percent(getattr(item.regime, key), item.intervals.get(key)) for title, key in SHARES.items()},
            "G": _number(item.regime.separation, item.intervals.get("separation")),
            "H_eff": str(item.regime.h_eff),
            "looping": _percent(item.looping),
            "signs": f"{3 - len(item.regime.failures)} of 3",
        }
        for name, windows in found.items()
        for window, item in windows.items()
    )


def _percent(value: float | None, ends: tuple[float, float] | None = None) -> str:
    between = f" [{100 * ends[0]:.0f}, {100 * ends[1]:.0f}]" if ends else ""
    return "-" if value is None else f"{100 * value:.1f}{between} %"


def _number(value: float | None, ends: tuple[float, float] | None = None) -> str:
    between = f" [{ends[0]:.3f}, {ends[1]:.3f}]" if ends else ""
    return "-" if value is None else f"{value:.3f}{between}"
