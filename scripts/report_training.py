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
from turngym.core.tables import Table
from turngym.scripts.report_data import TRAINING, Diagnosed, Method
from turngym.scripts.report_figures import (
    COLORS,
    INK,
    PAPER,
    Figure,
    Plot,
    color,
    curve_panels,
    legend,
    number,
    of_runs,
    save_panels,
)
from turngym.trainers.diagnostics.curves import smooth
from turngym.trainers.study.results import Rows, curve

CONTROLS = {"depth/cap": "cap", "depth/hbar": "smoothed horizon", "depth/h_eff": "H_eff", "depth/h_cov": "H_cov"}


def depth_figures(runs: Sequence[Diagnosed]) -> list[Figure]:
    """All figures about depth of the runs side by side."""
    return [_controller(runs), _variants(runs), _budget(runs), _horizon(runs)]


def over(run: Diagnosed, name: str) -> Any:
    return run.diagnosis.over_steps.value[name]


def recorded(run: Diagnosed, name: str) -> bool:
    return bool(np.isfinite(over(run, name)).any())


def step_table(runs: Sequence[Diagnosed], columns: Mapping[str, str]) -> Table:
    """One row per run and bin of steps; name of a statistic -> its column."""
    rows = [
        [run.name, str(step), *(number(over(run, name)[index]) for name in columns)]
        for run in runs
        for index, step in enumerate(run.diagnosis.over_steps.last_step_B.tolist())
    ]
    return ["run", "step", *columns.values()], rows


def bins(runs: Sequence[Diagnosed]) -> str:
    """`n: opd 40 steps; ...`, with the width of a point where it is more than one step."""
    parts = []
    for run in runs:
        points = max(len(run.diagnosis.over_steps.last_step_B), 1)
        width = -(-run.diagnosis.shape.steps // points)
        parts.append(f"{run.name} {run.diagnosis.shape.steps} steps" + (f" ({width} per point)" if width > 1 else ""))
    return f"n: {'; '.join(parts)}."


def finish(axis: Any, across: str, up: str, columns: int = 1) -> None:
    """Labels of an axis that begins at zero, and a legend."""
    axis.set(xlabel=across, ylabel=up)
    axis.set_ylim(bottom=0)
    axis.legend(ncols=columns)


def _controller(runs: Sequence[Diagnosed]) -> Figure:
    controlled = [run for run in runs if run.controlled and recorded(run, "depth/hbar")]
    lines = []
    for run in controlled:
        replay = run.diagnosis.replay
        if replay is None or not run.diagnosis.variants:
            lines.append(f"{run.name}: probes not recorded, so nothing is replayed")
        elif replay.differing:
            of = f"{replay.differing} of {replay.compared} steps"
            lines.append(f"{run.name}: replay differs in {of}, first {replay.first}")
        else:
            lines.append(f"{run.name}: replay equals the run in all {replay.compared} steps")
    caption = (
        "Depth controller over training: the step's cap, H_eff (center of the KL mass), H_cov (coverage of successes) "
        "and the smoothed horizon, as recorded; dots: the controller's own code led along the recorded probes. "
        f"{'; '.join(lines)}. {bins(controlled)}"
    )
    return of_runs(
        runs,
        controlled,
        "no depth controller in this run",
        [Plot(run.name, partial(_controls, run=run)) for run in controlled],
        name="controller",
        title="Depth controller and its replay",
        caption=caption if controlled else "No run has a depth controller.",
        table=step_table(controlled, CONTROLS),
    )


def _controls(axis: Any, run: Diagnosed) -> None:
    steps = run.diagnosis.over_steps.last_step_B
    looks = zip(CONTROLS.items(), (0.8, 2.0, 1.2, 1.2), ("-", "-", "--", ":"), (6, 0, 1, 2), strict=True)
    for (name, label), width, dash, shade in looks:
        look = {"linewidth": width, "linestyle": dash, "color": COLORS[shade]}
        axis.step(steps, over(run, name), where="mid", label=label, **look)
    if run.diagnosis.variants:
        hbar_B = run.diagnosis.variants[0].hbar_B
        axis.plot(steps, hbar_B, linestyle="none", marker=".", markersize=4, color=COLORS[4], label="replayed horizon")
    finish(axis, "training step", "turns", columns=2)


def _variants(runs: Sequence[Diagnosed]) -> Figure:
    replayed = [run for run in runs if run.diagnosis.variants]
    rows = []
    for run in replayed:
        for variant in run.diagnosis.variants:
            state = variant.state
            numbers = (variant.probes, state.hbar, state.h_eff, state.h_cov, variant.turns_share)
            rows.append([run.name, variant.name, *map(number, numbers)])
    n = "; ".join(f"{run.name} {run.diagnosis.variants[0].probes} probes" for run in replayed)
    caption = (
        "Smoothed horizon under other settings, a pure function of the recorded probes: coverage p, smoothing rho, "
        "whose last turns H_cov covers. The student would have learned other things under other caps, so this says "
        f"what the controller makes of these probes, no more. n: {n}."
    )
    header = ["run", "setting", "probes", "hbar_last", "h_eff_last", "h_cov_last", "turns_of_full_depth"]
    return of_runs(
        runs,
        replayed,
        "probes not recorded in this run",
        [Plot(run.name, partial(_variant_panel, run=run)) for run in replayed],
        name="counterfactual_depth",
        title="Counterfactual depth",
        caption=caption if replayed else "No run recorded its probes.",
        table=(header, rows),
    )


def _variant_panel(axis: Any, run: Diagnosed) -> None:
    steps = run.diagnosis.over_steps.last_step_B
    for index, variant in enumerate(run.diagnosis.variants):
        look = color(index) if index else {"color": COLORS[0], "linestyle": "-"}
        axis.plot(steps, variant.hbar_B, label=variant.name, linewidth=1.4 if index else 2.4, **look)
    finish(axis, "training step", "smoothed horizon (turns)", columns=2)


def _budget(runs: Sequence[Diagnosed]) -> Figure:
    weighted = [run for run in runs if recorded(run, "deep_weight")]
    caption = (
        "Token weights: alpha (share of turn weights, where the run or its settings say) and the deep budget that it "
        "realized, the share of a step's weight on the last third of full depth (turns beyond a cap get nothing). "
        f"Thin: per step; thick: moving mean. {bins(weighted)}"
    )
    deep = partial(_over_panel, runs=weighted, name="deep_weight", what="weight on deep turns (%)")
    panels = [Plot("deep budget", deep)]
    if blended := [run for run in weighted if recorded(run, "alpha")]:
        panels.append(Plot("alpha", partial(_over_panel, runs=blended, name="alpha", what="alpha (%)")))
    return of_runs(
        runs,
        weighted,
        "weights by turn not recorded in this run",
        panels,
        name="deep_budget",
        title="Alpha and realized deep budget",
        caption=caption,
        table=step_table(weighted, {"alpha": "alpha", "deep_weight": "deep_weight"}),
    )


def _over_panel(axis: Any, runs: Sequence[Diagnosed], name: str, what: str, scale: float = 100) -> None:
    """One statistic over training steps: thin as measured, thick as a moving mean."""
    for run in runs:
        steps, value_B = run.diagnosis.over_steps.last_step_B, scale * over(run, name)
        axis.plot(steps, value_B, linewidth=0.6, alpha=0.6, color=color(run.place)["color"])
        axis.plot(steps, smooth(value_B, 2 * (len(steps) // 40) + 3), label=run.name, **color(run.place))
    axis.set(xlabel="training step", ylabel=what)
    axis.set_ylim(bottom=0)
    legend(axis, thick="moving mean", thin="as measured")


def _horizon(runs: Sequence[Diagnosed]) -> Figure:
    fitted = [(run, horizon) for run in runs if (horizon := run.diagnosis.horizon) is not None]
    rows, lines = [], []
    for run, horizon in fitted:
        columns = zip(horizon.covered_H, horizon.seconds_H, horizon.rho_H, strict=True)
        rows += [[run.name, str(turns), *map(number, values)] for turns, values in enumerate(columns, 1)]
        line, fit = horizon.time, "proportional to turns"
        if line.fitted:
            fit = f"{line.intercept:.2g} s + {1000 * line.slope:.2g} ms per turn"
        lines.append(f"{run.name} H* = {horizon.best} (step time {fit}, n = {line.steps} steps)")
    caption = (
        "rho(H): share of the KL mass in turns below H, over the seconds of a step that stops there, relative to full "
        f"depth; H* maximizes it. Our reading of Appendix C. {'; '.join(lines)}."
    )

    def rho(axis: Any) -> None:
        for run, horizon in fitted:
            look = color(run.place)
            axis.plot(range(1, len(horizon.rho_H) + 1), horizon.rho_H, label=f"{run.name}: H* = {horizon.best}", **look)
            axis.plot(horizon.best, horizon.rho_H[horizon.best - 1], marker="o", markersize=6, color=look["color"])
        axis.axhline(1, color="#8C8C8C", linewidth=0.9, label="full depth")
        finish(axis, "horizon H (turns)", "rho(H)")

    def covered(axis: Any) -> None:
        for run, horizon in fitted:
            axis.plot(range(1, len(horizon.rho_H) + 1), 100 * horizon.covered_H, label=run.name, **color(run.place))
        finish(axis, "horizon H (turns)", "KL mass below H (%)")

    return of_runs(
        runs,
        [run for run, _ in fitted],
        "KL by turn or step times not recorded in this run",
        [Plot("relative to full depth", rho), Plot("KL mass covered", covered)],
        name="horizon",
        title="Supervision per second by horizon",
        caption=caption,
        table=(["run", "horizon", "covered", "seconds", "rho"], rows),
    )


# Figures of whole runs: accuracy over steps and time, seconds, gap between trainer and engine.

HATCHES = ("", "//", "..", "xx")
STEP_PARTS = {"time/rollout_s": "rollout", "time/teacher_s": "teacher", "time/update_s": "update"}


def accuracy_figure(world: str, rows: Rows, places: Mapping[str, int]) -> Figure:
    """Success over steps and over time; `world` names the methods that are in it where not all are."""
    table = []
    for name, seeds in rows.items():
        for point in curve(seeds):
            success = point.value
            numbers = (100 * success.mean, 100 * success.low, 100 * success.high, point.seconds)
            table.append([name, str(point.step), *map(number, numbers)])
    counts = "; ".join(f"{name} {len(curve(seeds))} evaluations, {len(seeds)} seeds" for name, seeds in rows.items())
    caption = (
        "Success in evaluations during training, percent, means over seeds with 95 % intervals for new tasks and new "
        "seeds (of a single run: for this run and new tasks): after equal steps, and after equal seconds of training, "
        f"evaluations not counted. n: {counts}."
    )
    return Figure(
        name="accuracy" if world == TRAINING else f"accuracy-{world.split(':')[0].replace(' ', '-')}",
        title="Accuracy at equal steps and equal time",
        caption=caption,
        table=(["run", "step", "success", "low", "high", "train_seconds"], table),
        panels=curve_panels(rows, ("step", "seconds"), places),
    )


def cost_figures(runs: Sequence[Diagnosed]) -> list[Figure]:
    """Figures of the seconds of a step, and of the gap between log-probabilities of trainer and engine."""
    return [_seconds(runs), _gap(runs)]


def _bars(axis: Any, scores: Mapping[str, Scores], places: Mapping[str, int]) -> None:
    """Bars of each method by category with intervals, `all` last."""
    every = {
        name: {row.name: row.avg for row in (*of_method.categories, of_method.overall)}
        for name, of_method in scores.items()
    }
    kinds = dict.fromkeys(kind for by_kind in every.values() for kind in by_kind)
    names = sorted(kinds, key=lambda kind: kind == "all")
    width = 0.8 / len(every)
    for index, (name, by_kind) in enumerate(every.items()):
        below = [100 * (success.mean - success.low) for success in by_kind.values()]
        above = [100 * (success.high - success.mean) for success in by_kind.values()]
        axis.bar(
            [names.index(kind) + width * (index + 0.5) - 0.4 for kind in by_kind],
            [100 * success.mean for success in by_kind.values()],
            width,
            yerr=[below, above],
            label=name,
            color=COLORS[places[name] % 7],
            hatch=HATCHES[places[name] % 4],
            edgecolor=PAPER,
            linewidth=0.4,
            ecolor=INK,
            error_kw={"linewidth": 0.9},
        )
    axis.set_xticks(range(len(names)), names, rotation=30, ha="right")
    axis.set(ylabel="success (%)")
    axis.set_ylim(0, 112)
    axis.legend(ncols=2, loc="upper left")


def _seconds(runs: Sequence[Diagnosed]) -> Figure:
    timed = [run for run in runs if run.diagnosis.over_steps.total["time/step_s"]]
    names = {**STEP_PARTS, "time/step_s": "steps_total", "time/eval_s": "evaluations"}
    names |= {"tokens": "tokens", "turns": "turns"}
    rows = [[run.name, *(number(run.diagnosis.over_steps.total[name]) for name in names)] for run in timed]
    caption = (
        "Seconds of training by phase, sums over all steps (rollout includes the environments; other: what the three "
        f"do not cover; evaluations are not counted), and seconds per step. {bins(timed)}"
    )
    per_step = partial(_over_panel, runs=timed, name="time/step_s", what="seconds per step", scale=1)
    return of_runs(
        runs,
        timed,
        "times not recorded in this run",
        [Plot("whole run", partial(_stack, runs=timed)), Plot("per step", per_step)],
        name="seconds",
        title="Seconds by phase",
        caption=caption,
        table=(["run", *names.values()], rows),
    )


def _stack(axis: Any, runs: Sequence[Diagnosed]) -> None:
    left = np.zeros(len(runs))
    totals = [run.diagnosis.over_steps.total for run in runs]
    parts = {label: np.array([total[name] for total in totals]) for name, label in STEP_PARTS.items()}
    parts["other"] = np.maximum(np.array([total["time/step_s"] for total in totals]) - sum(parts.values()), 0.0)
    for index, (label, values) in enumerate(parts.items()):
        look = {"color": COLORS[(0, 4, 2, 6)[index]], "hatch": HATCHES[index], "edgecolor": PAPER, "linewidth": 0.4}
        axis.barh(range(len(runs)), values, left=left, label=label, **look)
        left += values
    axis.set_yticks(range(len(runs)), [run.name for run in runs])
    axis.set_ylim(len(runs) - 0.4, -0.9 - 0.15 * len(runs))
    axis.set(xlabel="seconds of training")
    axis.legend(ncols=4, loc="upper left", columnspacing=0.9, handlelength=1.2)


def _gap(runs: Sequence[Diagnosed]) -> Figure:
    measured = [run for run in runs if recorded(run, "gap_mean")]
    caption = (
        "|training - rollout| log-probability of the sampled ids before the step's first update, mean (thick) and "
        f"greatest (thin), nats, log scale: what the engine and the trainer disagree by. {bins(measured)}"
    )
    return of_runs(
        runs,
        measured,
        "log-probability gap not recorded in this run",
        [Plot("all runs", partial(_gap_panel, runs=measured))],
        name="train_rollout_gap",
        title="Train / rollout gap",
        caption=caption,
        table=step_table(measured, {"gap_mean": "gap_mean", "gap_max": "gap_max"}),
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
    legend(axis, thick="mean", thin="greatest")


# One image of the most important panels.


def draw_summary(
    methods: Sequence[Method], worlds: Mapping[str, Rows], scores: Mapping[str, Scores], path: Path
) -> bool:
    """Writes accuracy over steps and time, depth, and success by category to `path`, as far as there are data.

    Returns whether there are any: a run without evaluations has none.
    """
    places = {method.name: method.place for method in methods}
    panels = [panel for rows in worlds.values() for panel in curve_panels(rows, ("step", "seconds"), places)]
    if controlled := [method for method in methods if method.depth]:
        panels.append(Plot("rollout depth", partial(_depth, methods=controlled)))
    if scores:
        panels.append(Plot("by category", partial(_bars, scores=scores, places=places)))
    if panels:
        save_panels(panels, path)
    return bool(panels)


def _depth(axis: Any, methods: Sequence[Method]) -> None:
    for method in methods:
        look = color(method.place)
        for index, record in enumerate(method.records):
            capped = [step for step in record.steps if step.get("depth/cap") is not None]
            steps, caps = [step["step"] for step in capped], [step["depth/cap"] for step in capped]
            label = None if index else method.label
            horizons = [step["depth/hbar"] for step in capped if step.get("depth/hbar") is not None]
            # controllers without a horizon leave it where it began
            moves = len(horizons) == len(capped) and len(set(horizons)) > 1
            axis.plot(steps, horizons if moves else caps, label=label, **look)
            axis.step(steps, caps, where="mid", linewidth=0.8, alpha=0.6, color=look["color"])
    axis.set(xlabel="training step", ylabel="turns")
    axis.set_ylim(bottom=0)
    legend(axis, thick="smoothed horizon", thin="cap of the step")
