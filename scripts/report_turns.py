"""Figures by turn: KL and teacher entropy, surviving episodes, G_t, shares of KL, and signs of loops."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np

from turngym.scripts.report_data import Diagnosed
from turngym.scripts.report_figures import INK, Figure, Plot, color, legend, number, of_runs
from turngym.trainers.diagnostics.curves import TurnCurves, TurnMap, kl_shares, smooth
from turngym.trainers.diagnostics.run_metrics import ALL, MIN_SHARE, MIN_STEPS, MIN_SURVIVORS, PHASES
from turngym.trainers.diagnostics.trace_curves import GROUPS, RATES, TraceCurves

# Maps: turn x training step.


def has(run: Diagnosed, name: str) -> bool:
    """Whether `run` recorded the statistic `name`."""
    return bool(run.diagnosis.by_turn.sources.get(name))


def turn_map(runs: Sequence[Diagnosed], name: str, stem: str, title: str, what: str) -> Figure:
    """A statistic over turns and training, one panel per run, all on one color scale. `name` is a key of
    `run.diagnosis.by_turn.maps`, `stem` that of the files."""
    mapped = [run for run in runs if has(run, name)]
    maps = [run.diagnosis.by_turn.maps[name] for run in mapped]
    rows = [
        [run.name, str(turn), str(first), str(last), number(value)]
        for run, of_run in zip(mapped, maps, strict=True)
        for turn, value_B in enumerate(of_run.value_TB)
        for first, last, value in zip(*_edges(of_run), value_B, strict=True)
        if np.isfinite(value)
    ]
    heat = partial(_heat, top=_top(maps), what=what)
    panels = [Plot(run.name, partial(heat, drawn=of_run)) for run, of_run in zip(mapped, maps, strict=True)]
    n = "; ".join(f"{run.name} {run.diagnosis.shape.steps} steps" for run in mapped)
    caption = (
        f"{title}: every training step, capped ones included (blank: no episode got there). One color scale for all "
        f"runs, which ends at the 99th percentile. n: {n}."
    )
    table = (["run", "turn", "first_step", "last_step", name], rows)
    lacks = f"{title} not recorded in this run"
    return of_runs(runs, mapped, lacks, panels, name=stem, title=title, caption=caption, table=table)


def _edges(drawn: TurnMap) -> tuple[list[int], list[int]]:
    last = drawn.last_step_B.tolist()
    return [1, *(step + 1 for step in last[:-1])], last


def _top(maps: Sequence[TurnMap]) -> float:
    values = [of_run.value_TB[np.isfinite(of_run.value_TB)] for of_run in maps]
    finite = np.concatenate(values) if values else np.zeros(0)
    return max(float(np.percentile(finite, 99)), 1e-9) if len(finite) else 1.0


def _heat(axis: Any, drawn: TurnMap, top: float, what: str) -> None:
    steps, turns = int(drawn.last_step_B[-1]), len(drawn.value_TB)
    extent = (0.5, steps + 0.5, -0.5, turns - 0.5)
    look = {"origin": "lower", "aspect": "auto", "cmap": "viridis", "interpolation": "none"}
    image = axis.imshow(drawn.value_TB, extent=extent, vmin=0, vmax=top, **look)
    axis.grid(False)
    axis.set(xlabel="training step", ylabel="turn")
    axis.figure.colorbar(image, ax=axis, label=what, pad=0.02)


PHASE_LOOK = dict(zip(PHASES, (("#E69F00", ":"), ("#CC79A7", "--"), ("#0072B2", "-")), strict=True))
"""Color and dash of each phase."""
SMOOTHED = {"thick": "moving mean", "thin": "as measured"}
FULL_DEPTH = "Steps played to full depth only."


def turn_figures(runs: Sequence[Diagnosed]) -> list[Figure]:
    return [
        _curves(runs, "kl", "kl_by_turn", "KL by turn", "K_t, reverse KL per token"),
        _curves(runs, "teacher_entropy", "teacher_entropy_by_turn", "Teacher entropy by turn", "Teacher entropy"),
        turn_map(runs, "kl", "kl_map", "KL over turns and training", "K_t (nats per token)"),
        turn_map(runs, "teacher_entropy", "teacher_entropy_map", "Teacher entropy over turns and training", "nats"),
        _survivors(runs),
        _separation(runs),
        _share(runs),
    ]


def counts(runs: Sequence[Diagnosed]) -> str:
    """`n: opd 40 of 40 steps; ...`."""
    parts = [f"{run.name} {run.diagnosis.shape.full_steps} of {run.diagnosis.shape.steps} steps" for run in runs]
    return f"n: {'; '.join(parts)}."


def turn_rows(runs: Sequence[Diagnosed], columns: Callable[[Diagnosed, TurnCurves], Sequence[Any]]) -> list[list[str]]:
    """Rows of run, phase, turn and further columns, each of which has a value for every turn."""
    return [
        [run.name, phase, str(turn), *map(number, values)]
        for run in runs
        for phase, curves in run.diagnosis.by_turn.curves.items()
        for turn, values in enumerate(zip(*columns(run, curves), strict=True))
    ]


def _curves(runs: Sequence[Diagnosed], name: str, stem: str, title: str, what: str) -> Figure:
    measured = [run for run in runs if has(run, name)]

    def columns(run: Diagnosed, curves: TurnCurves) -> tuple[Any, ...]:
        return curves[name], curves["survivors"], [curves.steps] * len(curves[name])

    together = partial(_overlay, runs=measured, name=name, what="nats per token")
    by_phase = partial(_by_phase, values=itemgetter(name), what="nats per token")
    panels = [Plot("all training, by run", together)] if len(measured) > 1 else []
    panels += [Plot(f"{run.name}, by phase", partial(by_phase, run=run)) for run in measured]
    caption = (
        f"{what} (nats), pooled over the tokens of a phase of training. {FULL_DEPTH} Thin: as measured; thick: moving "
        f"mean over 3 turns; a vertical line ends the reliable prefix. {counts(measured)}"
    )
    table = (["run", "phase", "turn", name, "survivors_mean", "steps"], turn_rows(measured, columns))
    lacks = f"{what} not recorded in this run"
    return of_runs(runs, measured, lacks, panels, name=stem, title=title, caption=caption, table=table)


def _overlay(axis: Any, runs: Sequence[Diagnosed], name: str, what: str, smoothed: bool = True) -> None:
    for run in runs:
        _line(axis, run.diagnosis.by_turn.curves[ALL][name], run.name, smoothed, **color(run.place))
    _finish(axis, what, **(SMOOTHED if smoothed else {}))


def _by_phase(axis: Any, run: Diagnosed, values: Callable[[TurnCurves], Any], what: str, smoothed: bool = True) -> None:
    """A curve for each phase of training; a vertical line ends the reliable prefix."""
    _phase_lines(axis, run, values, smoothed)
    shape = run.diagnosis.shape
    if shape.reliable < shape.turns:
        axis.axvline(shape.reliable - 0.5, color=INK, linewidth=0.9, linestyle=":", label="end of the reliable prefix")
    _finish(axis, what, **(SMOOTHED if smoothed else {}))


def _phase_lines(axis: Any, run: Diagnosed, values: Callable[[TurnCurves], Any], smoothed: bool) -> None:
    for phase, (shade, dash) in PHASE_LOOK.items():
        _line(axis, values(run.diagnosis.by_turn.curves[phase]), phase, smoothed, color=shade, linestyle=dash)


def _line(axis: Any, value_T: Any, label: str, smoothed: bool, **look: Any) -> None:
    """Draws values as measured, or these thin and their moving mean thick."""
    if np.isfinite(value_T).any():
        turns = np.arange(len(value_T))
        if smoothed:
            axis.plot(turns, value_T, linewidth=0.6, alpha=0.6, color=look["color"])
        axis.plot(turns, smooth(value_T) if smoothed else value_T, label=label, **look)


def _finish(axis: Any, what: str, **styles: str) -> None:
    axis.set(xlabel="turn", ylabel=what)
    values = [value for line in axis.lines for value in line.get_ydata() if np.isfinite(value)]
    # the margin below a rate of 0 is no part of its scale
    if min(values, default=0.0) >= 0:
        axis.set_ylim(bottom=0)
    legend(axis, **styles)


def _survivors(runs: Sequence[Diagnosed]) -> Figure:
    measured = [run for run in runs if has(run, "survivors")]

    def columns(run: Diagnosed, curves: TurnCurves) -> tuple[Any, ...]:
        left = curves["survivors"]
        reliable = np.arange(len(left)) < run.diagnosis.shape.reliable
        return (left, left / max(left[0], 1e-9), reliable) if curves.steps else ()

    shapes = [(run.name, run.diagnosis.shape) for run in measured]
    prefixes = "; ".join(f"{name} {shape.reliable} of {shape.turns}" for name, shape in shapes)
    caption = (
        f"n_t: episodes that reach turn t, mean over steps. {FULL_DEPTH} Reliable prefix: turns with at least "
        f"{MIN_SURVIVORS} survivors and {100 * MIN_SHARE:.0f} % of turn 0 in at least {100 * MIN_STEPS:.0f} % of the "
        f"steps; turns: {prefixes}. {counts(measured)}"
    )
    together = partial(_overlay, runs=measured, name="survivors", what="episodes", smoothed=False)
    panels = [Plot("all training, by run", together)] if len(measured) > 1 else []
    panels += [Plot(f"{run.name}, by phase", partial(_survivor_phases, run=run)) for run in measured]
    return of_runs(
        runs,
        measured,
        "survivors not recorded in this run",
        panels,
        name="survivors",
        title="Survivors and reliable prefix",
        caption=caption,
        table=(["run", "phase", "turn", "survivors", "share_of_turn_0", "reliable"], turn_rows(measured, columns)),
    )


def _survivor_phases(axis: Any, run: Diagnosed) -> None:
    axis.axhline(MIN_SURVIVORS, color="#8C8C8C", linewidth=0.9, linestyle=":", label=f"{MIN_SURVIVORS} episodes")
    _by_phase(axis, run, itemgetter("survivors"), "episodes", smoothed=False)


def _separation(runs: Sequence[Diagnosed]) -> Figure:
    measured = [run for run in runs if has(run, "kl_success") and has(run, "kl_failure")]
    rows = turn_rows(measured, lambda run, curves: (curves.separation_T, curves["kl_failure"], curves["kl_success"]))
    forms = sorted({"raw" if "raw" in run.diagnosis.by_turn.sources["kl_success"] else "tail bin" for run in measured})
    caption = (
        "G_t = K_t(failed) - K_t(successful) by phase of training, nats per token: above zero where failures diverge "
        f"more. {FULL_DEPTH} Form of the KL: {', '.join(forms) or '-'}. Episodes that a cap below full depth stopped "
        f"are neither. {counts(measured)}"
    )
    return of_runs(
        runs,
        measured,
        "KL by outcome not recorded in this run",
        [Plot(run.name, partial(_gap, run=run)) for run in measured],
        name="outcome_separation",
        title="Outcome separation G_t",
        caption=caption,
        table=(["run", "phase", "turn", "separation", "kl_failure", "kl_success"], rows),
    )


def _gap(axis: Any, run: Diagnosed) -> None:
    axis.axhline(0, color="#8C8C8C", linewidth=0.9)
    _by_phase(axis, run, attrgetter("separation_T"), "G_t (nats per token)")


def _share(runs: Sequence[Diagnosed]) -> Figure:
    measured = [run for run in runs if has(run, "kl") and has(run, "tokens")]
    caption = (
        "s_t: each turn's share of the KL of all tokens, whatever they weigh in the loss (eq. 11); shaded: the deep "
        f"third of the turns. {FULL_DEPTH} {counts(measured)}"
    )
    return of_runs(
        runs,
        measured,
        "KL by turn not recorded in this run",
        [Plot(run.name, partial(_share_panel, run=run)) for run in measured],
        name="kl_share",
        title="KL share by turn",
        caption=caption,
        table=(["run", "phase", "turn", "kl_share"], turn_rows(measured, lambda run, curves: (kl_shares(curves),))),
    )


def _share_panel(axis: Any, run: Diagnosed) -> None:
    turns = run.diagnosis.shape.turns
    if turns >= 3:
        deep = -(-2 * turns // 3) - 0.5, turns - 0.5
        axis.axvspan(*deep, color="#8C8C8C", alpha=0.15, linewidth=0, label="deep third")
    _phase_lines(axis, run, lambda curves: 100 * kl_shares(curves), smoothed=False)
    _finish(axis, "share of the KL (%)")


# Figures that need no teacher: survival by outcome, and signs of loops.

WORDS = {
    "survivors": "share of all episodes (%)",
    "repeated": "repeated actions (%)",
    "invalid": "invalid actions (%)",
    "surprise": "-log p (nats per token)",
    "sampled_kl": "log p - log q (nats per token)",
}
SCALE = {"repeated": 100.0, "invalid": 100.0}


def episode_figures(traces: Mapping[str, TraceCurves], places: Mapping[str, int]) -> list[Figure]:
    """One figure with a panel per statistic that any trace has; empty without traces."""
    if not traces:
        return []
    rows = []
    for run, trace in traces.items():
        for group in GROUPS:
            columns = trace.survivors[group], *(trace.rates[group][name] for name in RATES)
            for turn in range(trace.turns):
                rows.append([run, group, str(turn), *(number(column[turn]) for column in columns)])
    rates = [name for name in RATES if any(np.isfinite(trace.rates["all"][name]).any() for trace in traces.values())]
    rate = partial(_rate, traces=traces, places=places)
    panels = [Plot("still playing", partial(rate, name="survivors"))]
    panels += [Plot(WORDS[name], partial(rate, name=name)) for name in rates]
    counts = {run: trace.episodes for run, trace in traces.items()}
    n = "; ".join(f"{run} {count['all']} episodes, {count['won']} won" for run, count in counts.items())
    caption = (
        "Evaluation episodes by turn. Repeated: the same action at the same observation as before in the episode. "
        "These are proxies: how much of the teacher's agreement the history forces cannot be told from two "
        f"distributions. Thick: all episodes; thin: lost ones. n: {n}."
    )
    missing = tuple(f"{WORDS[name]} not recorded in these traces" for name in RATES if name not in rates)
    table = (["run", "outcome", "turn", "survivors", *RATES], rows)
    title = "Episodes by turn"
    return [Figure(name="episodes", title=title, caption=caption, table=table, panels=tuple(panels), missing=missing)]


def _rate(axis: Any, traces: Mapping[str, TraceCurves], places: Mapping[str, int], name: str) -> None:
    """One statistic by turn: thick over all episodes, thin over lost ones."""
    for run, trace in traces.items():
        for group, width in (("all", 1.8), ("lost", 0.8)):
            if name == "survivors":
                value_T = 100 * trace.survivors[group] / max(trace.episodes["all"], 1)
            else:
                value_T = SCALE.get(name, 1.0) * trace.rates[group][name]
            if np.isfinite(value_T).any():
                axis.plot(value_T, label=run if group == "all" else None, linewidth=width, **color(places[run]))
    _finish(axis, WORDS[name], thick="all episodes", thin="lost ones")
