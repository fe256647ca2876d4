"""What a study's numbers say about its aims, in sentences made from them."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

from turngym.agents.evaluation.statistics import Interval
from turngym.scripts.study.estimates import Estimate, Rows, least_time, reached, same_step, total_cost
from turngym.scripts.study.methods import BASE
from turngym.trainers.diagnostics.depth import Regime

OURS = "turnopd"
HALF = 0.5


def verdict(world: str, rows: Rows, gates: Mapping[str, Regime] | None) -> str:
    """A list: whether the world shows the signs, what TurnOPD saved and cost, and the best fixed depth."""
    lines = [_gate(world, gates)]
    if BASE in rows and OURS in rows:
        lines += [_half(rows), *_accuracy(rows)]
    fixed = {name: seeds for name, seeds in rows.items() if name.startswith("fixed-")}
    if BASE in rows and fixed:
        lines.append(_best_fixed(rows))
    return "\n".join(f"- {line}" for line in lines)


def _gate(world: str, gates: Mapping[str, Regime] | None) -> str:
    if not gates:
        return f"{world}: the regime was not measured (no cell of vanilla OPD)."
    missing = [name for name, regime in gates.items() if not regime.passes]
    if not missing:
        return f"{world} shows the signs that depth can pay, early, late and over all steps."
    where = ", ".join(missing)
    return f"{world} lacks signs that depth can pay ({where}; see Regime): its tables are here for comparison."


def _half(rows: Rows) -> str:
    target, base = same_step(rows)[1][BASE].value.mean, total_cost(rows[BASE])
    at = reached(rows, target)[OURS]
    said = f"TurnOPD's evaluations reach vanilla OPD's Same-Step accuracy ({100 * target:.1f} %), and stay there,"
    if at is None:
        return f"TurnOPD's evaluations do not reach vanilla OPD's Same-Step accuracy ({100 * target:.1f} %) to stay."
    shares = {"turns": at.turns / base.turns, "tokens": at.tokens / base.tokens}
    shares |= {"wall clock": at.seconds / base.seconds, "CPU seconds": at.cpu / base.cpu if base.cpu else 0.0}
    parts = ", ".join(f"{100 * share:.0f} % of its {name}" for name, share in shares.items())
    aim = "within" if max(shares.values()) <= HALF else "not within"
    return f"{said} after {parts}: {aim} half of what OPD's steps cost."


def _accuracy(rows: Rows) -> list[str]:
    lines, pair = [], {name: rows[name] for name in (BASE, OURS)}
    measured = {"Same-Step": same_step(pair)[1], "Least-Time (of the two)": least_time(pair)}
    for name, found in measured.items():
        difference = found[OURS].minus_base if OURS in found else None
        if difference is not None:
            lines.append(f"{name}: TurnOPD minus OPD is {_points(difference)}, {_clear(difference)}.")
    return [*lines, "One seed: the intervals hold for that seed only."] if len(rows[OURS]) == 1 else lines


def _best_fixed(rows: Rows) -> str:
    times: dict[str, Estimate] = least_time(rows)
    fixed = {name: found for name, found in times.items() if name.startswith("fixed-")}
    if not fixed:
        return "No fixed depth has an evaluation within the least time."
    best = max(fixed, key=lambda name: fixed[name].value.mean)
    said = f"The best fixed depth at Least-Time is {best.removeprefix('fixed-')} turns ({fixed[best].value} %)"
    if OURS not in rows:
        return f"{said}."
    steps = [step for record in rows[OURS].values() for step in record.steps if not step.get("depth/probe")]
    mean = f"; TurnOPD's caps off probes are {fmean(s['depth/cap'] for s in steps):.1f} on average" if steps else ""
    own = f" and it has {times[OURS].value} %" if OURS in times else ""
    return f"{said}{mean}{own}."


def _points(value: Interval) -> str:
    return f"{100 * value.mean:+.1f} points [{100 * value.low:+.1f}, {100 * value.high:+.1f}]"


def _clear(value: Interval) -> str:
    if value.low > 0:
        return "ahead, clear of zero"
    return "behind, clear of zero" if value.high < 0 else "not clear of zero"
