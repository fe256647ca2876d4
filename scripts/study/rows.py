"""Rows of a report: how far a method rises over its seeds, and against its control. As table, curves and figure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from turngym.agents.evaluation.seeds import TaskMeans, over_seeds, rise
from turngym.agents.evaluation.statistics import Interval
from turngym.scripts.report_figures import COLORS, Panel, save_panels
from turngym.scripts.study.grid import Cell, read_record


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One row: a method over its seeds."""

    name: str
    curve: Mapping[int, Interval]
    """Step -> Avg@n over seeds and tasks."""
    by_seed: Mapping[int, Sequence[float]]
    """Step -> Avg@n of each seed."""
    rise: Interval
    """End minus start, paired by task."""
    control: str | None
    against: Interval | None
    """This row's end minus its control's end, paired by task, over the seeds that both have."""
    seconds: float
    """Training of one run, the median over seeds; evaluations excluded."""
    commands: Sequence[str]
    ends: Mapping[int, TaskMeans] = field(repr=False)
    """Seed -> mean success of every task at the end."""

    @property
    def seeds(self) -> int:
        return len(self.ends)

    @property
    def start(self) -> Interval:
        return self.curve[min(self.curve)]

    @property
    def end(self) -> Interval:
        return self.curve[max(self.curve)]

    @property
    def rises(self) -> bool:
        """Whether the interval of the rise lies above zero, and more than one seed says so."""
        return self.seeds > 1 and self.rise.low > 0

    def to_json(self) -> dict[str, Any]:
        found = asdict(self)
        del found["ends"]
        return {**found, "seeds": self.seeds, "start": asdict(self.start), "end": asdict(self.end), "rises": self.rises}


def read_result(name: str, cells: Sequence[Cell], control: Result | None) -> Result:
    """The row `name` from the records of finished cells, one per seed."""
    records = [read_record(cell.folder) for cell in cells]
    steps = [point.step for point in records[0].evaluations]
    means = {step: [record.evaluations[place].tasks for record in records] for place, step in enumerate(steps)}
    ends = {record.seed: record.evaluations[-1].tasks for record in records}
    both = [] if control is None else [seed for seed in ends if seed in control.ends]
    return Result(
        name=name,
        curve={step: over_seeds(values) for step, values in means.items()},
        by_seed={step: [sum(run.values()) / len(run) for run in values] for step, values in means.items()},
        rise=rise(means[steps[0]], means[steps[-1]]),
        control=None if control is None else control.name,
        against=rise([control.ends[s] for s in both], [ends[s] for s in both]) if control and both else None,
        seconds=median(record.total.seconds for record in records),
        commands=[record.command for record in records],
        ends=ends,
    )


def write_files(
    folder: Path, names: tuple[str, str, str], text: str, numbers: Any, results: Sequence[Result], samples: int
) -> None:
    """Print the report; write it, its numbers as JSON and its figure, if there is a row, under these names."""
    print(text)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(text, encoding="utf-8")
    (folder / names[1]).write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    if results:
        print(f"figure: {draw_figure(results, folder / names[2], samples)}")


# The table and the curves in words.

NOTE = (
    "The rise is end minus start, paired by task. Intervals are for new seeds and new tasks, which are crossed "
    "(docs/intervals.md). A row of one seed has an interval for this run and new tasks, and is not told from zero."
)


def table(results: Mapping[str, Result], samples: int) -> tuple[list[str], list[list[str]]]:
    """One row per algorithm."""
    avg = f"Avg@{samples}"
    header = ["algorithm", "seeds", f"start {avg}", f"end {avg} [95 %]", "rise [95 %]", "clear of zero"]
    header += ["against", "end minus control's [95 %]", "training of a run"]
    body = []
    for name, result in results.items():
        clear = "yes" if result.rises else "falls" if result.rise.high < 0 else "no"
        clear = "one run each" if result.seeds == 1 else clear
        against = ["start", ""] if result.against is None else [str(result.control), signed(result.against)]
        body.append(
            [f"`{name}`", str(result.seeds), str(result.start), str(result.end), signed(result.rise), clear, *against]
        )
        body[-1].append(f"{result.seconds:.0f} s")
    return header, body


def signed(interval: Interval) -> str:
    return f"{100 * interval.mean:+.1f} [{100 * interval.low:+.1f}, {100 * interval.high:+.1f}]"


def points(error: float | None) -> str:
    return "-" if error is None else f"{100 * error:.1f}"


def curve_text(result: Result) -> str:
    """`30.2 (step 0) -> 35.1 (20) -> 39.0 (40); seeds end at 38.5, 40.0`."""
    points = " -> ".join(f"{100 * value.mean:.1f} (step {step})" for step, value in result.curve.items())
    ends = ", ".join(f"{100 * value:.1f}" for value in result.by_seed[max(result.by_seed)])
    return f"{points}; seeds end at {ends}"


# The figure.

CLEAR, UNCLEAR, CONTROL = COLORS[0], COLORS[1], COLORS[-1]


def draw_figure(results: Sequence[Result], path: Path, samples: int) -> Path:
    """Write a panel for every row, and one with all rises, to `path`; the suffix chooses the format."""
    by_name = {result.name: result for result in results}
    top = min(100.0, 5 + 100 * max(point.high for result in results for point in result.curve.values()))
    panels = [
        Panel(row.name, partial(_curve, row=row, control=by_name.get(row.control or ""), top=top, samples=samples))
        for row in results
    ]
    panels.append(Panel("rise over the start, points [95 %]", partial(_rises, results=results)))
    save_panels(panels, path, columns=min(4, len(panels)))
    return path


def _curve(axis: Any, row: Result, control: Result | None, top: float, samples: int) -> None:
    """Seeds thin, their mean with its interval bold, the control's mean dashed."""
    steps, points = list(row.curve), list(row.curve.values())
    if control is not None:
        means = [100 * point.mean for point in control.curve.values()]
        axis.plot(list(control.curve), means, "--", color=CONTROL, label=control.name)
        axis.legend(loc="lower right")
    for seed in zip(*row.by_seed.values(), strict=True):
        axis.plot(steps, [100 * value for value in seed], color=CLEAR, linewidth=0.7, alpha=0.6)
    axis.plot(steps, [100 * point.mean for point in points], "o-", color=CLEAR, markersize=3)
    axis.fill_between(
        steps, [100 * point.low for point in points], [100 * point.high for point in points], color=CLEAR, alpha=0.15
    )
    axis.axhline(100 * row.start.mean, color=CONTROL, linewidth=0.8)
    axis.set(ylim=(0, top), xlabel="step", ylabel=f"Avg@{samples} (%)")


def _rises(axis: Any, results: Sequence[Result]) -> None:
    for place, row in enumerate(results):
        mean, low, high = (100 * getattr(row.rise, name) for name in ("mean", "low", "high"))
        shade = CLEAR if row.rises else UNCLEAR
        axis.errorbar(mean, place, xerr=[[mean - low], [high - mean]], fmt="o", color=shade, capsize=3)
    axis.axvline(0, color=CONTROL, linewidth=0.8)
    axis.set_yticks(range(len(results)), [row.name for row in results])
    axis.invert_yaxis()
