"""Figures of training: what the depth controller did and would have done, accuracy, time, and log-probability gaps.

`draw_summary` draws the most important ones in one image.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from turngym.agents.evaluation.scores import Scores
from turngym.agents.evaluation.statistics import CurvePoint, Interval, at_seconds, least_time
from turngym.scripts.report_data import Diagnosed, Run, curves
from turngym.scripts.report_figures import COLORS, MARKERS, Figure, Panel, color, number, save_panels
from turngym.trainers.diagnostics.curves import smooth

CONTROLS = {"depth/cap": "cap", "depth/hbar": "smoothed horizon", "depth/h_eff": "H_eff", "depth/h_cov": "H_cov"}


def depth_figures(runs: Sequence[Diagnosed]) -> list[Figure]:
    """All figures about depth of the runs side by side."""
    return [_controller(runs), _variants(runs), _budget(runs), _horizon(runs)]


def over(run: Diagnosed, name: str) -> Any:
    return run.diagnosis.over_steps.value[name]


def recorded(run: Diagnosed, name: str) -> bool:
    return bool(np.isfinite(over(run, name)).any())


def step_rows(runs: Sequence[Diagnosed], names: Sequence[str]) -> list[list[str]]:
    """One row per run and bin of steps."""
    return [
        [run.name, str(step), *(number(over(run, name)[place]) for name in names)]
        for run in runs
        for place, step in enumerate(run.diagnosis.over_steps.last_step_B.tolist())
    ]


def bins(runs: Sequence[Diagnosed]) -> str:
    """`n: opd 40 steps; ...`, with the width of a point where it is more than one step."""
    parts = []
    for run in runs:
        points = max(len(run.diagnosis.over_steps.last_step_B), 1)
        width = -(-run.diagnosis.shape.steps // points)
        parts.append(f"{run.name} {run.diagnosis.shape.steps} steps" + (f" ({width} per point)" if width > 1 else ""))
    return f"n: {'; '.join(parts)}."


def _controller(runs: Sequence[Diagnosed]) -> Figure:
    known = [run for run in runs if run.controlled and recorded(run, "depth/hbar")]
    said = []
    for run in known:
        found = run.diagnosis.replay
        if found is None or not run.diagnosis.variants:
            said.append(f"{run.name}: probes not recorded, so nothing is replayed")
        elif found.differing:
            of = f"{found.differing} of {found.compared} steps"
            said.append(f"{run.name}: replay differs in {of}, first {found.first}")
        else:
            said.append(f"{run.name}: replay equals the run in all {found.compared} steps")
    caption = (
        "Depth controller over training: the step's cap, H_eff (center of the KL mass), H_cov (coverage of successes) "
        "and the smoothed horizon, as recorded; dots: the controller's own code led along the recorded probes. "
        f"{'; '.join(said)}. {bins(known)}"
    )
    missing = tuple(f"{run.name}: no depth controller in this run" for run in runs if run not in known)
    return Figure(
        name="controller",
        title="Depth controller and its replay",
        caption=caption if known else "No run has a depth controller.",
        table=(["run", "step", *CONTROLS.values()], step_rows(known, list(CONTROLS))),
        panels=tuple(Panel(run.name, partial(_controls, run=run)) for run in known),
        missing=missing,
    )


def _controls(axis: Any, run: Diagnosed) -> None:
    steps = run.diagnosis.over_steps.last_step_B
    looks = zip(CONTROLS.items(), (0.8, 2.0, 1.2, 1.2), ("-", "-", "--", ":"), strict=True)
    for place, ((name, label), width, dash) in enumerate(looks):
        shade = COLORS[(6, 0, 1, 2)[place]]
        axis.step(steps, over(run, name), where="mid", label=label, linewidth=width, linestyle=dash, color=shade)
    if run.diagnosis.variants:
        hbar_B = run.diagnosis.variants[0].hbar_B
        axis.plot(steps, hbar_B, linestyle="none", marker=".", markersize=4, color=COLORS[4], label="replayed horizon")
    axis.set(xlabel="training step", ylabel="turns")
    axis.set_ylim(bottom=0)
    axis.legend(ncols=2)


def _variants(runs: Sequence[Diagnosed]) -> Figure:
    known = [run for run in runs if run.diagnosis.variants]
    rows = [
        [
            *(run.name, item.name, str(item.probes), number(item.hbar), str(item.h_eff), str(item.h_cov)),
            number(item.turns_share),
        ]
        for run in known
        for item in run.diagnosis.variants
    ]
    n = "; ".join(f"{run.name} {run.diagnosis.variants[0].probes} probes" for run in known)
    caption = (
        "Smoothed horizon under other settings, a pure function of the recorded probes: coverage p, smoothing rho, "
        "whose last turns H_cov covers. The student would have learned other things under other caps, so this says "
        f"what the controller makes of these probes, no more. n: {n}."
    )
    missing = tuple(f"{run.name}: probes not recorded in this run" for run in runs if run not in known)
    header = ["run", "setting", "probes", "hbar_last", "h_eff_last", "h_cov_last", "turns_of_full_depth"]
    return Figure(
        name="counterfactual_depth",
        title="Counterfactual depth",
        caption=caption if known else "No run recorded its probes.",
        table=(header, rows),
        panels=tuple(Panel(run.name, partial(_variant_panel, run=run)) for run in known),
        missing=missing,
    )


def _variant_panel(axis: Any, run: Diagnosed) -> None:
    for place, item in enumerate(run.diagnosis.variants):
        look = color(place) if place else {"color": COLORS[0], "linestyle": "-"}
        steps = run.diagnosis.over_steps.last_step_B
        axis.plot(steps, item.hbar_B, label=item.name, linewidth=1.4 if place else 2.4, **look)
    axis.set(xlabel="training step", ylabel="smoothed horizon (turns)")
    axis.set_ylim(bottom=0)
    axis.legend(ncols=2)


def _budget(runs: Sequence[Diagnosed]) -> Figure:
    known = [run for run in runs if recorded(run, "deep_weight")]
    caption = (
        "Token weights: alpha (share of turn weights, where the run or its settings say) and the deep budget that it "
        "realized, the share of a step's weight on the last third of full depth (turns beyond a cap get nothing). "
        f"Thin: per step; thick: moving mean. {bins(known)}"
    )
    panels = [
        Panel("deep budget", partial(_over_panel, runs=known, name="deep_weight", what="weight on deep turns (%)"))
    ]
    blended = [run for run in known if recorded(run, "alpha")]
    if blended:
        panels.append(Panel("alpha", partial(_over_panel, runs=blended, name="alpha", what="alpha (%)")))
    return Figure(
        name="deep_budget",
        title="Alpha and realized deep budget",
        caption=caption,
        table=(["run", "step", "alpha", "deep_weight"], step_rows(known, ["alpha", "deep_weight"])),
        panels=tuple(panels) if known else (),
        missing=tuple(f"{run.name}: weights by turn not recorded in this run" for run in runs if run not in known),
    )


def _over_panel(axis: Any, runs: Sequence[Diagnosed], name: str, what: str, scale: float = 100) -> None:
    """One statistic over training steps: thin as measured, thick as a moving mean."""
    for run in runs:
        steps, value_B = run.diagnosis.over_steps.last_step_B, scale * over(run, name)
        axis.plot(steps, value_B, linewidth=0.6, alpha=0.6, color=color(run.place)["color"])
        axis.plot(steps, smooth(value_B, 2 * (len(steps) // 40) + 3), label=run.name, **color(run.place))
    axis.set(xlabel="training step", ylabel=what)
    axis.set_ylim(bottom=0)
    axis.legend()


def _horizon(runs: Sequence[Diagnosed]) -> Figure:
    known = [run for run in runs if run.diagnosis.horizon is not None]
    rows, said = [], []
    for run in known:
        found = run.diagnosis.horizon
        assert found is not None
        columns = zip(found.covered_H, found.seconds_H, found.rho_H, strict=True)
        rows += [[run.name, str(at + 1), *(number(v) for v in values)] for at, values in enumerate(columns)]
        line = found.time
        fit = (
            f"{line.intercept:.2g} s + {1000 * line.slope:.2g} ms per turn" if line.fitted else "proportional to turns"
        )
        said.append(f"{run.name} H* = {found.best} (step time {fit}, n = {line.steps} steps)")
    caption = (
        "rho(H): share of the KL mass in turns below H, over the seconds of a step that stops there, relative to full "
        f"depth; H* maximizes it. Our reading of Appendix C. {'; '.join(said)}."
    )
    return Figure(
        name="horizon",
        title="Supervision per second by horizon",
        caption=caption,
        table=(["run", "horizon", "covered", "seconds", "rho"], rows),
        panels=(
            Panel("relative to full depth", partial(_rho, runs=known)),
            Panel("KL mass covered", partial(_covered, runs=known)),
        )
        if known
        else (),
        missing=tuple(
            f"{run.name}: KL by turn or step times not recorded in this run" for run in runs if run not in known
        ),
    )


def _rho(axis: Any, runs: Sequence[Diagnosed]) -> None:
    for run in runs:
        found = run.diagnosis.horizon
        assert found is not None
        turns = np.arange(1, len(found.rho_H) + 1)
        axis.plot(turns, found.rho_H, label=f"{run.name}: H* = {found.best}", **color(run.place))
        axis.plot(found.best, found.rho_H[found.best - 1], marker="o", markersize=6, color=color(run.place)["color"])
    axis.axhline(1, color="#8C8C8C", linewidth=0.9)
    axis.set(xlabel="horizon H (turns)", ylabel="rho(H)")
    axis.set_ylim(bottom=0)
    axis.legend()


def _covered(axis: Any, runs: Sequence[Diagnosed]) -> None:
    for run in runs:
        found = run.diagnosis.horizon
        assert found is not None
        turns = np.arange(1, len(found.covered_H) + 1)
        axis.plot(turns, 100 * found.covered_H, label=run.name, **color(run.place))
    axis.set(xlabel="horizon H (turns)", ylabel="KL mass below H (%)")
    axis.set_ylim(bottom=0)
    axis.legend()


# Figures of whole runs: accuracy over steps and time, categories, seconds, gap between trainer and engine.

HATCHES = ("", "//", "..", "xx")
PARTS = {"time/rollout_s": "rollout", "time/teacher_s": "teacher", "time/update_s": "update"}


def accuracy_figures(runs: Sequence[Run]) -> list[Figure]:
    """Accuracy over steps and time, and by category at Least-Time; empty without evaluations during training."""
    known = [run for run in runs if run.points]
    return [_accuracy(known), _categories(known)] if known else []


def cost_figures(runs: Sequence[Diagnosed]) -> list[Figure]:
    """Figures of the seconds of a step, and of the gap between log-probabilities of trainer and engine."""
    return [_seconds(runs), _gap(runs)]


def _accuracy(runs: Sequence[Run]) -> Figure:
    rows = [
        [run.name, str(point.step), *(number(100 * x) for x in (point.value, *band)), number(point.seconds)]
        for run in runs
        for point, band in zip(run.points, run.bands, strict=True)
    ]
    budget = min(max(point.seconds for point in run.points) for run in runs)
    caption = (
        "Success in evaluations during training, percent, with 95 % intervals clustered by task: at equal steps, and "
        f"at equal seconds of training (evaluations not counted); the vertical line is Least-Time, {budget:.0f} s. n: "
        f"{'; '.join(f'{run.name} {len(run.points)} evaluations' for run in runs)}."
    )
    return Figure(
        name="accuracy",
        title="Accuracy at equal steps and equal time",
        caption=caption,
        table=(["run", "step", "success", "low", "high", "train_seconds"], rows),
        panels=(
            Panel("equal steps", partial(_curve, runs=runs, seconds=False, budget=None)),
            Panel("equal time", partial(_curve, runs=runs, seconds=True, budget=budget)),
        ),
    )


def _curve(axis: Any, runs: Sequence[Run], seconds: bool, budget: float | None) -> None:
    for run in runs:
        where = [point.seconds if seconds else point.step for point in run.points]
        look = color(run.place)
        values = [100 * point.value for point in run.points]
        axis.plot(where, values, marker=MARKERS[run.place % 7], markersize=4, label=run.name, **look)
        low, high = zip(*run.bands, strict=True)
        if any(high):
            axis.fill_between(where, [100 * x for x in low], [100 * x for x in high], alpha=0.12, color=look["color"])
    if budget is not None:
        axis.axvline(budget, color="#8C8C8C", linewidth=0.9, linestyle=":")
    axis.set(xlabel="training time (s)" if seconds else "training step", ylabel="success (%)")
    axis.legend()


def _categories(runs: Sequence[Run]) -> Figure:
    budget = min(max(point.seconds for point in run.points) for run in runs)
    names = list(dict.fromkeys(name for run in runs for row in run.categories for name in row))
    places = {run.name: run.place for run in runs}
    cells = {run.name: {name: _at_budget(run, name, budget) for name in names} for run in runs}
    overall = least_time(curves(runs))
    for run in runs:
        cells[run.name]["all"] = (overall[run.name], 0.0, 0.0)
    rows = [
        [run, name, number(100 * bar[0])]
        for run, found in cells.items()
        for name, bar in found.items()
        if bar is not None
    ]
    caption = (
        f"Success by category at Least-Time ({budget:.0f} s of training), on straight lines between the evaluations "
        "around it; one run each, so there is no interval for other seeds."
    )
    return Figure(
        name="categories",
        title="Categories at Least-Time",
        caption=caption,
        table=(["run", "category", "success"], rows),
        panels=(Panel("at equal time", partial(_bars, cells=cells, places=places)),) if names else (),
        missing=() if names else ("success by category not recorded in these runs",),
    )


Bar = tuple[float, float, float]
"""Height, and how far the error bar goes down and up."""


def _at_budget(run: Run, name: str, budget: float) -> Bar | None:
    points = [
        CurvePoint(step=point.step, seconds=point.seconds, value=row[name])
        for point, row in zip(run.points, run.categories, strict=True)
        if name in row
    ]
    if not points or min(point.seconds for point in points) > budget:
        return None
    return at_seconds(points, budget), 0.0, 0.0


def _bars(axis: Any, cells: Mapping[str, Mapping[str, Bar | None]], places: Mapping[str, int]) -> None:
    """Bars of each run by category, `all` last."""
    names = sorted(dict.fromkeys(name for found in cells.values() for name in found), key=lambda name: name == "all")
    width = 0.8 / len(cells)
    for place, (run, found) in enumerate(cells.items()):
        shown = [(names.index(name) + width * (place + 0.5) - 0.4, bar) for name, bar in found.items() if bar]
        axis.bar(
            [x for x, _ in shown],
            [100 * mean for _, (mean, _, _) in shown],
            width,
            yerr=[[100 * below for _, (_, below, _) in shown], [100 * above for _, (_, _, above) in shown]],
            label=run,
            color=COLORS[places[run] % 7],
            hatch=HATCHES[places[run] % 4],
            edgecolor="#fefefd",
            linewidth=0.4,
            ecolor="#1a1b1c",
            error_kw={"linewidth": 0.9},
        )
    axis.set_xticks(range(len(names)), names, rotation=30, ha="right")
    axis.set(ylabel="success (%)")
    axis.set_ylim(0, max(100.0, axis.get_ylim()[1]) * 1.12)
    axis.legend(ncols=2, loc="upper left")


def _seconds(runs: Sequence[Diagnosed]) -> Figure:
    known = [run for run in runs if run.diagnosis.over_steps.total["time/step_s"]]
    rows = []
    for run in known:
        total = run.diagnosis.over_steps.total
        rows.append(
            [run.name, *(number(total[name]) for name in (*PARTS, "time/step_s", "time/eval_s", "tokens", "turns"))]
        )
    caption = (
        "Seconds of training by phase, sums over all steps (rollout includes the environments; other: what the three "
        f"do not cover; evaluations are not counted), and seconds per step. {bins(known)}"
    )
    header = ["run", *PARTS.values(), "steps_total", "evaluations", "tokens", "turns"]
    return Figure(
        name="seconds",
        title="Seconds by phase",
        caption=caption,
        table=(header, rows),
        panels=(
            Panel("whole run", partial(_stack, runs=known)),
            Panel("per step", partial(_over_panel, runs=known, name="time/step_s", what="seconds per step", scale=1)),
        )
        if known
        else (),
        missing=tuple(f"{run.name}: times not recorded in this run" for run in runs if run not in known),
    )


def _stack(axis: Any, runs: Sequence[Diagnosed]) -> None:
    left = np.zeros(len(runs))
    totals = [run.diagnosis.over_steps.total for run in runs]
    parts = {label: np.array([total[name] for total in totals]) for name, label in PARTS.items()}
    parts["other"] = np.maximum(np.array([total["time/step_s"] for total in totals]) - sum(parts.values()), 0.0)
    for place, (label, values) in enumerate(parts.items()):
        shade = COLORS[(0, 4, 2, 6)[place]]
        axis.barh(
            range(len(runs)),
            values,
            left=left,
            label=label,
            color=shade,
            hatch=HATCHES[place],
            edgecolor="#fefefd",
            linewidth=0.4,
        )
        left += values
    axis.set_yticks(range(len(runs)), [run.name for run in runs])
    axis.set_ylim(len(runs) - 0.4, -0.9 - 0.15 * len(runs))
    axis.set(xlabel="seconds of training")
    axis.legend(ncols=4, loc="upper left", columnspacing=0.9, handlelength=1.2)


def _gap(runs: Sequence[Diagnosed]) -> Figure:
    known = [run for run in runs if recorded(run, "gap_mean")]
    caption = (
        "|training - rollout| log-probability of the sampled ids before the step's first update, mean (thick) and "
        f"greatest (thin), nats, log scale: what the engine and the trainer disagree by. {bins(known)}"
    )
    return Figure(
        name="train_rollout_gap",
        title="Train / rollout gap",
        caption=caption,
        table=(["run", "step", "gap_mean", "gap_max"], step_rows(known, ["gap_mean", "gap_max"])),
        panels=(Panel("all runs", partial(_gap_panel, runs=known)),) if known else (),
        missing=tuple(f"{run.name}: log-probability gap not recorded in this run" for run in runs if run not in known),
    )


def _gap_panel(axis: Any, runs: Sequence[Diagnosed]) -> None:
    for run in runs:
        steps = run.diagnosis.over_steps.last_step_B
        look = color(run.place)
        for name, width in (("gap_mean", 1.8), ("gap_max", 0.7)):
            value_B = np.where(over(run, name) > 0, over(run, name), np.nan)
            axis.plot(steps, value_B, linewidth=width, label=run.name if name == "gap_mean" else None, **look)
    axis.set_yscale("log")
    axis.set(xlabel="training step", ylabel="nats")
    axis.legend()


# One image of the most important panels.


def draw_summary(runs: Sequence[Run], scores: Mapping[str, Scores], path: Path) -> None:
    """Writes accuracy over steps and time, depth, and success by category to `path`, as far as there are data."""
    trained = [run for run in runs if run.points]
    panels = []
    if trained:
        panels.append(Panel("same steps", partial(_curve, runs=trained, seconds=False, budget=None)))
        panels.append(Panel("same time", partial(_curve, runs=trained, seconds=True, budget=None)))
    if any(run.depth for run in runs):
        panels.append(Panel("rollout depth (thin: cap)", partial(_depth, runs=runs)))
    if scores:
        rows = {run: [*item.categories, item.overall] for run, item in scores.items()}
        cells = {run: {row.name: _interval_bar(row.avg) for row in found} for run, found in rows.items()}
        places = {run.name: run.place for run in runs}
        panels.append(Panel("by category (95 % interval over tasks)", partial(_bars, cells=cells, places=places)))
    save_panels(panels, path)


def _interval_bar(value: Interval) -> Bar:
    return value.mean, value.mean - value.low, value.high - value.mean


def _depth(axis: Any, runs: Sequence[Run]) -> None:
    for run in runs:
        if run.depth:
            steps, caps, horizon = zip(*run.depth, strict=True)
            axis.plot(steps, horizon, label=f"{run.name}: smoothed horizon", **color(run.place))
            axis.step(steps, caps, where="mid", linewidth=0.8, alpha=0.6, color=color(run.place)["color"])
    axis.set(xlabel="training step", ylabel="turns")
    axis.legend()
