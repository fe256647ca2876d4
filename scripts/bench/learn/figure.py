"""The figure of `turngym bench learn`: a curve per algorithm beside its control, and all rises with their intervals."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from turngym.envs.core.errors import TurngymError
from turngym.scripts.bench.learn.result import Result

COLUMNS = 4
CLEAR, UNCLEAR, CONTROL = "tab:blue", "tab:orange", "0.6"


def draw_figure(results: Sequence[Result], path: Path, samples: int) -> Path:
    """Write the figure to `path`; the suffix chooses the format."""
    try:
        import matplotlib
    except ImportError as error:
        raise TurngymError("the figure needs matplotlib: pip install 'turngym[train]', or --no-report") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = -(-len(results) // COLUMNS)
    figure = pyplot.figure(figsize=(3.0 * COLUMNS, 2.3 * lines + 0.5 + 0.3 * len(results)))
    grid = figure.add_gridspec(lines + 1, COLUMNS, height_ratios=[2.3] * lines + [0.5 + 0.3 * len(results)])
    by_name = {result.name: result for result in results}
    top = 100 * max(point.high for result in results for point in result.curve.values())
    for place, result in enumerate(results):
        axis = figure.add_subplot(grid[place // COLUMNS, place % COLUMNS])
        _curve(axis, result, by_name.get(result.control or ""))
        axis.set(ylim=(0, min(100.0, top + 5)), xlabel="step" if place + COLUMNS >= len(results) else "")
        axis.set_ylabel(f"Avg@{samples} (%)" if place % COLUMNS == 0 else "")
    _rises(figure.add_subplot(grid[lines, :]), results)
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None} if path.suffix == ".png" else None)
    pyplot.close(figure)
    return path


def _curve(axis: Any, result: Result, control: Result | None) -> None:
    """Seeds thin, their mean with its interval bold, the control's mean dashed."""
    steps = list(result.curve)
    if control is not None:
        means = [100 * point.mean for point in control.curve.values()]
        axis.plot(list(control.curve), means, "--", color=CONTROL, label=control.name)
    for seed in zip(*result.by_seed.values(), strict=True):
        axis.plot(steps, [100 * value for value in seed], color=CLEAR, linewidth=0.7, alpha=0.6)
    points = list(result.curve.values())
    axis.plot(steps, [100 * point.mean for point in points], "o-", color=CLEAR, markersize=3, linewidth=2)
    low, high = ([100 * getattr(point, end) for point in points] for end in ("low", "high"))
    axis.fill_between(steps, low, high, color=CLEAR, alpha=0.15)
    axis.axhline(100 * result.start.mean, color=CONTROL, linewidth=0.8)
    axis.set_title(result.name, fontsize=10)
    axis.grid(alpha=0.3)
    if control is not None:
        axis.legend(fontsize=7, loc="lower right")


def _rises(axis: Any, results: Sequence[Result]) -> None:
    for place, result in enumerate(results):
        mean, low, high = (100 * getattr(result.rise, name) for name in ("mean", "low", "high"))
        color = CLEAR if result.rises else UNCLEAR
        axis.errorbar(mean, place, xerr=[[mean - low], [high - mean]], fmt="o", color=color, capsize=3)
    axis.axvline(0, color="black", linewidth=0.8)
    axis.set_yticks(range(len(results)), [result.name for result in results])
    axis.invert_yaxis()
    axis.set_xlabel("rise of the success over the start, points, 95 % interval over seeds and tasks")
    axis.grid(axis="x", alpha=0.3)
