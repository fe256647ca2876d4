"""What `turngym bench learn` found: rows from the runs' evaluations, as a table, JSON and a verdict."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from turngym.agents.evaluation.statistics import Interval
from turngym.agents.worlds.worlds import EmbeddedWorld
from turngym.envs.core.tables import markdown
from turngym.scripts.bench.learn.figure import draw_figure
from turngym.scripts.bench.learn.jobs import Job
from turngym.scripts.bench.learn.options import LearnBench, size_of
from turngym.scripts.bench.learn.recipes import MUST_RISE, Recipe
from turngym.scripts.bench.learn.result import Result, read_result


def write_report(
    options: LearnBench, world: EmbeddedWorld, recipes: Mapping[str, Recipe], planned: Mapping[str, Sequence[Job]]
) -> bool:
    """Print the table, write report.md, learn.json and learn.png; whether all rows that must rise do so."""
    results: dict[str, Result] = {}
    for name, recipe in recipes.items():
        results[name] = read_result(name, recipe, planned[name], results)
    text = render(options, world, results, planned)
    print(text)
    folder = options.out / world.name
    (folder / "report.md").write_text(text, encoding="utf-8")
    rows_json = {name: result.to_json() for name, result in results.items()}
    settings = {**asdict(options), **asdict(size_of(options, world)), "out": str(options.out)}
    found = json.dumps({"settings": settings, "rows": rows_json}, indent=1)
    (folder / "learn.json").write_text(found + "\n", encoding="utf-8")
    print(f"figure: {draw_figure(list(results.values()), folder / 'learn.png', options.samples)}")
    return all(results[name].rises for name in MUST_RISE if name in results)


def render(
    options: LearnBench, world: EmbeddedWorld, results: Mapping[str, Result], planned: Mapping[str, Sequence[Job]]
) -> str:
    """The report in Markdown."""
    size = size_of(options, world)
    opening = (
        f"{world.name}, panel `{world.panel}` (first {options.tasks} tasks), {size.steps} steps of "
        f"{size.episodes} episodes. Avg@{options.samples} in percent at temperature 0.85, 95 % intervals over seeds "
        "and tasks."
    )
    lines = [f"- `{name}`: {curve_text(result)}" for name, result in results.items()]
    commands = [f"{name}:\n```bash\n{planned[name][0].command}\n```" for name in planned]
    parts = [f"# Does it learn? ({world.name})", opening, markdown(table(results, options.samples)), NOTE]
    parts += ["![Curves and rises](learn.png)", "## Curves", "\n".join(lines), "## Commands (seed 0)", *commands]
    return "\n\n".join(parts) + "\n"


NOTE = (
    "The rise is end minus start, paired by seed and task. Intervals treat seeds and tasks as crossed random effects: "
    "m ± t √(A + B), A the variance of the seeds' means over the number of seeds, B that of the tasks' means over the "
    "number of tasks, degrees of freedom by Satterthwaite. With one seed they are over tasks only."
)


def table(results: Mapping[str, Result], samples: int) -> tuple[list[str], list[list[str]]]:
    """One row per algorithm."""
    avg = f"Avg@{samples}"
    header = ["algorithm", "seeds", f"start {avg}", f"end {avg} [95 %]", "rise [95 %]", "clear of zero"]
    header += ["against", "end minus control's [95 %]", "training of a run"]
    body = []
    for name, result in results.items():
        clear = "yes" if result.rises else "falls" if result.rise.high < 0 else "no"
        against = ["start", ""] if result.against is None else [str(result.control), signed(result.against)]
        body.append(
            [f"`{name}`", str(result.seeds), str(result.start), str(result.end), signed(result.rise), clear, *against]
        )
        body[-1].append(f"{result.seconds:.0f} s")
    return header, body


def signed(interval: Interval) -> str:
    return f"{100 * interval.mean:+.1f} [{100 * interval.low:+.1f}, {100 * interval.high:+.1f}]"


def curve_text(result: Result) -> str:
    """`30.2 (step 0) -> 35.1 (20) -> 39.0 (40); seeds end at 38.5, 40.0`."""
    points = " -> ".join(f"{100 * value.mean:.1f} (step {step})" for step, value in result.curve.items())
    ends = ", ".join(f"{100 * value:.1f}" for value in result.by_seed[max(result.by_seed)])
    return f"{points}; seeds end at {ends}"
