"""The figure of `turngym report`: accuracy over steps and time, the chosen depth, and bars by category."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from turngym.agents.evaluation.scores import Scores
from turngym.envs.core import TurngymError
from turngym.scripts.reports.data import Run


def draw_figure(runs: Sequence[Run], scores: dict[str, Scores], path: Path) -> Path:
    """Write the panels that there are data for as one image (the suffix chooses the format)."""
    try:
        import matplotlib
    except ImportError as error:
        raise TurngymError("figures need matplotlib: pip install 'turngym[train]', or use --no-figure") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = []
    if any(run.points for run in runs):
        panels += [_over_steps, _over_time]
    if any(run.depth for run in runs):
        panels.append(_depth)
    if scores:
        panels.append(_bars)
    figure, axes = pyplot.subplots(1, len(panels), figsize=(4.6 * len(panels), 3.6), squeeze=False)
    for panel, axis in zip(panels, axes[0], strict=True):
        panel(axis, runs, scores)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8, loc="upper left" if panel is _bars else "best", ncols=2 if panel is _bars else 1)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140, metadata={"Software": None} if path.suffix == ".png" else None)
    pyplot.close(figure)
    return path


def _over_steps(axis: Any, runs: Sequence[Run], scores: dict[str, Scores]) -> None:
    for run in runs:
        _curve(axis, run, [float(point.step) for point in run.points])
    axis.set(xlabel="training step", ylabel="success (%)", title="Same steps")


def _over_time(axis: Any, runs: Sequence[Run], scores: dict[str, Scores]) -> None:
    for run in runs:
        _curve(axis, run, [point.seconds for point in run.points])
    axis.set(xlabel="training time (s)", ylabel="success (%)", title="Same time")


def _curve(axis: Any, run: Run, where: list[float]) -> None:
    if not run.points:
        return
    (line,) = axis.plot(where, [100 * point.value for point in run.points], marker="o", markersize=3, label=run.name)
    low, high = zip(*run.bands, strict=True)
    if any(high):
        axis.fill_between(where, [100 * x for x in low], [100 * x for x in high], alpha=0.15, color=line.get_color())


def _depth(axis: Any, runs: Sequence[Run], scores: dict[str, Scores]) -> None:
    for run in runs:
        if run.depth:
            steps, caps, horizon = zip(*run.depth, strict=True)
            (line,) = axis.plot(steps, horizon, label=f"{run.name}: smoothed horizon")
            axis.step(steps, caps, where="mid", linewidth=0.8, alpha=0.6, color=line.get_color())
    axis.set(xlabel="training step", ylabel="turns", title="Rollout depth (thin: cap)")


def _bars(axis: Any, runs: Sequence[Run], scores: dict[str, Scores]) -> None:
    names = [*dict.fromkeys(row.name for item in scores.values() for row in item.categories), "all"]
    width = 0.8 / len(scores)
    for place, (run, item) in enumerate(scores.items()):
        rows = {row.name: row for row in (*item.categories, item.overall)}
        shown = [(names.index(name) + width * (place + 0.5) - 0.4, rows[name].avg) for name in names if name in rows]
        heights = [100 * avg.mean for _, avg in shown]
        below = [100 * (avg.mean - avg.low) for _, avg in shown]
        above = [100 * (avg.high - avg.mean) for _, avg in shown]
        axis.bar([x for x, _ in shown], heights, width, yerr=[below, above], capsize=2, label=run)
    axis.set(ylabel="success (%)", title="By category (95 % interval over tasks)", ylim=(0, 120))
    axis.set_xticks(range(len(names)), names, rotation=30, ha="right", fontsize=8)
