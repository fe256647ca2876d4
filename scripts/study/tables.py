"""The tables of a study, from its records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from turngym.agents.evaluation.statistics import Interval
from turngym.envs.core.tables import Table
from turngym.scripts.study.estimates import (
    MEASURES,
    Rows,
    at_category,
    budgets,
    by_world,
    least_time,
    picked_within,
    reached,
    same_step,
    total_cost,
)
from turngym.scripts.study.methods import BASE
from turngym.scripts.study.records import PHASES, Cost, Record, pooled_sums
from turngym.scripts.study.regime import WINDOWS, regime_table
from turngym.trainers.diagnostics.depth import Regime, measure_regime

NAMES = {"turns": "turns", "tokens": "tokens", "seconds": "wall clock", "cpu": "CPU"}


def study_tables(records: Sequence[Record]) -> dict[str, Table]:
    """Name -> table; those of a world begin with its name."""
    worlds = by_world(records)
    found = {"overview": overview(worlds), "regime": regime_table(regimes(worlds))}
    for world, rows in worlds.items():
        found[f"{world}-accuracy"] = accuracy(rows)
        found[f"{world}-cost"] = cost(rows)
        found[f"{world}-to-target"] = to_target(rows)
        found[f"{world}-categories"] = categories(rows)
        found[f"{world}-phases"] = phases(rows)
        found[f"{world}-depth"] = depth(rows)
    return found


def overview(worlds: Mapping[str, Rows]) -> Table:
    """Methods against worlds, Same-Step and Least-Time (as Table 2 groups them)."""
    header, names = ["method"], list(dict.fromkeys(name for rows in worlds.values() for name in rows))
    found = {}
    for world, rows in worlds.items():
        header += [f"{world}: Same-Step", f"{world}: Least-Time"]
        found[world] = (same_step(rows)[1], least_time(rows))
    lines = []
    for name in names:
        cells = []
        for steps, times in found.values():
            cells += [_mean(part[name].value) if name in part else "-" for part in (steps, times)]
        lines.append([name, *cells])
    return header, lines


def accuracy(rows: Rows) -> Table:
    """Same-Step and Least-Time with intervals over seeds and tasks, and what each differs from OPD by."""
    step, steps = same_step(rows)
    times, cpus = least_time(rows), least_time(rows, "cpu")
    # without a main method there is no limit
    seconds = f"{fmean(limits.values()):.0f}" if (limits := budgets(rows)) else "-"
    header = ["method", "seeds", f"Same-Step ({step}) [95 %]", "std of the last 4", f"minus {BASE}"]
    header += [f"Least-Time ({seconds} s) [95 %]", f"minus {BASE}", "Least-CPU [95 %]"]
    lines = []
    for name, seeds in rows.items():
        at, within, by_cpu = steps[name], times.get(name), cpus.get(name)
        cells = [str(at.value), f"{100 * at.spread:.1f}", _signed(at.minus_base)]
        cells += ["-", "-"] if within is None else [str(within.value), _signed(within.minus_base)]
        lines.append([name, str(len(seeds)), *cells, "-" if by_cpu is None else str(by_cpu.value)])
    return header, lines


def cost(rows: Rows) -> Table:
    """What all steps cost, mean over seeds, and how many times less than OPD's that is."""
    header = ["method", "turns", "tokens", "wall clock s", "CPU s"]
    header += [f"speed-up, {NAMES[name]}" for name in ("seconds", "cpu", "turns", "tokens")]
    base = total_cost(rows[BASE]) if BASE in rows else None
    lines = []
    for name, seeds in rows.items():
        total = total_cost(seeds)
        cells = [f"{total.turns:.0f}", f"{total.tokens:.0f}", f"{total.seconds:.1f}", f"{total.cpu:.1f}"]
        cells += [_times(base, total, measure) for measure in ("seconds", "cpu", "turns", "tokens")]
        lines.append([name, *cells])
    return header, lines


def to_target(rows: Rows) -> Table:
    """Share of OPD's turns, tokens and time in which a method reaches OPD's Same-Step accuracy (`reached`)."""
    header = ["method", *(f"{NAMES[name]}, % of {BASE}'s" for name in MEASURES)]
    if BASE not in rows:
        return header, []
    target, base = same_step(rows)[1][BASE].value.mean, total_cost(rows[BASE])
    lines = []
    for name, at in reached(rows, target).items():
        shares = [_share(at, base, measure) if at is not None else "-" for measure in MEASURES]
        lines.append([name, *shares])
    return header, lines


def categories(rows: Rows) -> Table:
    """Accuracy by category at Least-Time (Tables 3 and 4)."""
    every = [record.categories.values() for seeds in rows.values() for record in seeds.values()]
    names = sorted({kind for kinds in every for kind in kinds})
    picked = picked_within(rows, budgets(rows), "seconds")
    lines = [
        [name, *(str(at_category(picked[name], seeds, kind)) for kind in names)]
        for name, seeds in rows.items()
        if picked[name]
    ]
    return ["method", *names], lines


def phases(rows: Rows) -> Table:
    """Wall clock and CPU seconds by phase, mean over seeds."""
    header = ["method", *(f"{phase}, {clock}" for phase in PHASES for clock in ("wall s", "CPU s"))]
    lines = []
    for name, seeds in rows.items():
        cells = [
            f"{fmean(record.phases[phase][clock] for record in seeds.values()):.1f}"
            for phase in PHASES
            for clock in (0, 1)
        ]
        lines.append([name, *cells])
    return header, lines


def depth(rows: Rows) -> Table:
    """What the controller chose: caps off probes, horizons at the end, and where weights and loss went (Table 6)."""
    header = ["method", "mean cap", "turns / episode", "last H_eff", "last H_cov", "last Hbar", "mean alpha"]
    header += ["deep third of weights", "deep third of loss", "deep third of KL (eq. 11)"]
    lines = []
    for name, seeds in rows.items():
        steps = [step for record in seeds.values() for step in record.steps]
        ends = [record.steps[-1] for record in seeds.values() if record.steps]
        caps = [step["depth/cap"] for step in steps if not step.get("depth/probe")] or [s["depth/cap"] for s in steps]
        cells = [_average(caps), _average([step.get("turns_mean") for step in steps])]
        cells += [_average([end.get(f"depth/{key}") for end in ends]) for key in ("h_eff", "h_cov", "hbar")]
        cells += [_average([step.get("weight/alpha") for step in steps], 2)]
        for key in ("weight_deep_share", "loss_deep_share", "kl_deep_share"):
            cells.append(_average([None if step.get(key) is None else 100 * step[key] for step in steps], 1, " %"))
        lines.append([name, *cells])
    return header, lines


def regimes(worlds: Mapping[str, Rows]) -> dict[str, dict[str, Regime]]:
    """The regime of vanilla OPD in every world, pooled over seeds: early, late, all."""
    found = {}
    for world, rows in worlds.items():
        parts = [record.regime for record in rows.get(BASE, {}).values() if record.regime]
        if parts:
            found[world] = {name: measure_regime(pooled_sums([part[name] for part in parts])) for name in WINDOWS}
    return found


def _mean(value: Interval) -> str:
    return f"{100 * value.mean:.1f}"


def _signed(value: Interval | None) -> str:
    if value is None:
        return "-"
    clear = " *" if value.low > 0 or value.high < 0 else ""
    return f"{100 * value.mean:+.1f} [{100 * value.low:+.1f}, {100 * value.high:+.1f}]{clear}"


def _times(base: Cost | None, total: Cost, measure: str) -> str:
    if base is None or not getattr(total, measure):
        return "-"
    return f"{getattr(base, measure) / getattr(total, measure):.2f}x"


def _share(at: Cost, base: Cost, measure: str) -> str:
    return f"{100 * getattr(at, measure) / getattr(base, measure):.0f} %" if getattr(base, measure) else "-"


def _average(values: Sequence[float | None], digits: int = 1, unit: str = "") -> str:
    known = [value for value in values if value is not None]
    return f"{fmean(known):.{digits}f}{unit}" if known else "-"
