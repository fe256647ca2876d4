"""What `turngym bench scenarios` found: claim by claim, method against control, as Markdown, JSON and a figure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from turngym.agents.evaluation.statistics import Interval
from turngym.envs.core.tables import markdown
from turngym.scripts.bench.learn.figure import draw_figure
from turngym.scripts.bench.learn.report import NOTE, curve_text, signed, table
from turngym.scripts.bench.learn.result import Result, read_result
from turngym.scripts.bench.scenarios.extras import Extra, extra_of
from turngym.scripts.bench.scenarios.options import ScenariosBench
from turngym.scripts.bench.scenarios.plan import Planned

Verdict = Literal["appears", "open", "reversed", "one seed"]
"""Of a difference whose interval lies above zero, holds it, or lies below; of one seed nothing is said of others."""


def write_report(options: ScenariosBench, planned: Sequence[Planned]) -> None:
    """Print the report; write it, its numbers and its figure beside the runs."""
    suffix = "-chosen" if options.chosen else ""
    found = {one.scenario.name: one.finished() for one in planned}
    results = {name: read_scenario(one) for name, one in found.items()}
    extras = {name: extra_of(options, found[name]) for name, rows in results.items() if rows}
    figure = f"scenarios{suffix}.png"
    text = render(options, found, results, extras, figure)
    print(text)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"report{suffix}.md").write_text(text, encoding="utf-8")
    numbers = json.dumps(to_json(options, results, extras), indent=1)
    (options.out / f"scenarios{suffix}.json").write_text(numbers + "\n", encoding="utf-8")
    drawn = [result for rows in results.values() for result in rows.values()]
    if drawn:
        print(f"figure: {draw_figure(drawn, options.out / figure, options.measured.samples)}")


def read_scenario(planned: Planned) -> dict[str, Result]:
    """Row -> its result over the seeds that every arm has finished; nothing where there are none."""
    scenario = planned.scenario
    rows: dict[str, Result] = {}
    for arm in scenario.arms:
        jobs = planned.runs[arm.name]
        if jobs:
            rows[scenario.row(arm)] = read_result(scenario.row(arm), scenario.recipe(arm), jobs, rows)
    return rows


def verdict(difference: Interval, seeds: int) -> Verdict:
    """Whether method minus control over `seeds` seeds is clear of zero, and to which side."""
    if seeds < 2:
        return "one seed"
    return "appears" if difference.low > 0 else "reversed" if difference.high < 0 else "open"


def render(
    options: ScenariosBench,
    planned: Mapping[str, Planned],
    results: Mapping[str, Mapping[str, Result]],
    extras: Mapping[str, Extra | None],
    figure: str,
) -> str:
    """The report in Markdown."""
    seeds = ", ".join(map(str, options.seeds_played))
    which = "chosen on" if options.chosen else "not chosen on"
    opening = (
        f"Avg@{options.measured.samples} in percent at temperature 0.85 on the first {options.measured.tasks} tasks of "
        f"panels that settings were {which}; seeds {seeds}, as far as both arms have finished them."
    )
    parts = ["# Where each algorithm earns its name", opening, markdown(summary(planned, results)), NOTE]
    if any(results.values()):
        parts.append(f"![Curves and rises]({figure})")
    for name, one in planned.items():
        parts += _section(options, one, results[name], extras.get(name))
    return "\n\n".join(parts) + "\n"


def summary(
    planned: Mapping[str, Planned], results: Mapping[str, Mapping[str, Result]]
) -> tuple[list[str], list[list[str]]]:
    """One row per scenario and row that is compared with its control."""
    header = ["scenario", "row", "against", "seeds", "rise [95 %]", "control's rise [95 %]"]
    header += ["end minus control's [95 %]", "advantage"]
    body = []
    for name, one in planned.items():
        scenario, rows = one.scenario, results[name]
        if not rows:
            body.append([name, f"`{scenario.method.name}`", f"`{scenario.control.name}`", "0", *["not run"] * 4])
            continue
        control = rows[scenario.row(scenario.control)]
        for arm in scenario.arms[1:]:
            row = rows[scenario.row(arm)]
            assert row.against is not None
            line = [name, f"`{arm.name}`", f"`{scenario.control.name}`", str(row.seeds), signed(row.rise)]
            body.append([*line, signed(control.rise), signed(row.against), verdict(row.against, row.seeds)])
    return header, body


def _section(options: ScenariosBench, one: Planned, rows: Mapping[str, Result], extra: Extra | None) -> list[str]:
    scenario, size = one.scenario, options.size(one.scenario)
    place = scenario.place
    told = f"{scenario.claim} Place `{place.name}` (world `{place.world}`), start `{scenario.start.name}`, "
    parts = [f"## {scenario.name}", f"{told}{size.steps} steps of {size.episodes} episodes."]
    if not rows:
        return [*parts, "No seed is finished in both arms: there is nothing to report."]
    parts.append(markdown(table(rows, options.measured.samples)))
    parts.append("\n".join(f"- `{name}`: {curve_text(result)}" for name, result in rows.items()))
    if extra is not None:
        parts += [extra.title, markdown(extra.table)]
    commands = [job.command for job in ([one.start] if one.start else []) + [jobs[0] for jobs in one.runs.values()]]
    return [*parts, "```bash\n" + "\n".join(commands) + "\n```"]


def to_json(
    options: ScenariosBench, results: Mapping[str, Mapping[str, Result]], extras: Mapping[str, Extra | None]
) -> dict[str, Any]:
    """The numbers of the report."""
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in asdict(options).items()}
    rows = {name: {row: result.to_json() for row, result in found.items()} for name, found in results.items()}
    more = {name: extra.numbers for name, extra in extras.items() if extra is not None}
    return {"settings": settings, "scenarios": rows, "measures": more}
