"""Where each algorithm earns its name: settings in which a paper's claim should show, against its control, over seeds.

Each run is a `turngym train` in a process of its own. Runs that are finished are kept, so that the same command goes on
where it stopped. Ends with a report (`report.md`), a figure and the numbers as JSON. A scenario without its runs is
reported as such.

Examples:
    turngym study scenarios
    turngym study scenarios --scenarios luffy grpo-kd --seeds 6
    turngym study scenarios --scenarios luffy --chosen     # seed 0, on the tasks that settings were chosen on
    turngym study scenarios --no-run
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal

import numpy as np
import tyro

from turngym.agents.evaluation.seeds import crossed_error, differences
from turngym.agents.evaluation.statistics import Interval, t_quantile
from turngym.agents.worlds.worlds import EmbeddedWorld
from turngym.envs.core.errors import TurngymError
from turngym.envs.core.tables import Table, markdown
from turngym.scripts.jobs import Job, metric_rows, shown
from turngym.scripts.study.grid import Cell, in_turn, run_cells
from turngym.scripts.study.learn_recipes import imitation_job, recipe_cell
from turngym.scripts.study.rows import NOTE, Result, curve_text, read_result, signed, table, write_files
from turngym.scripts.study.scenario_settings import (
    Scenario,
    ScenarioOptions,
    Start,
    Use,
    chosen_scenarios,
    panel_path,
    text_path,
    write_panels,
    write_passages,
)
from turngym.trainers.algorithm import Algorithm, AlgorithmSpec, BuildContext
from turngym.trainers.algorithms import sft
from turngym.trainers.lm_loss import LmLoss

# A student that has seen text: imitation with language modeling beside it, from which L_PT's scenario starts.

NAME = "turngym.scripts.study.scenarios:READER"
"""As `turngym train --algorithm` takes it."""


def build(config: sft.SftConfig, context: BuildContext) -> Algorithm:
    """Supervised fine-tuning with lambda L_PT added (`--lm-loss.*`)."""
    return replace(sft.build(config, context), terms=(LmLoss.of(context),))


READER = AlgorithmSpec(
    name="sft-text",
    config=sft.SftConfig,
    build=build,
    section="sft",
    uses=frozenset({"expert", "noise", "text"}),
    about="Supervised fine-tuning on demonstrations and on text.",
)


def main(argv: Sequence[str]) -> int:
    """Run `turngym study scenarios` with `argv`."""
    options = tyro.cli(ScenarioOptions, args=list(argv), prog="turngym study scenarios", description=__doc__)
    planned = [plan(options, scenario) for scenario in chosen_scenarios(options.scenarios)]
    if options.run:
        prepare(options, planned)
        run_cells(all_jobs(planned), options.parallel)

    write_report(options, planned)
    return 0


def prepare(options: ScenarioOptions, planned: Sequence[Planned]) -> None:
    """Write the panels and texts that the runs read."""
    for one in planned:
        write_panels(options.out / "panels", one.scenario.place)
        if one.scenario.measure == "text":
            write_passages(options.out / "text")


# --- The runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A scenario and its runs."""

    scenario: Scenario
    start: Job | None
    """Makes what the runs begin with, unless that is shipped."""
    runs: Mapping[str, Sequence[Cell]]
    """Name of the arm -> one per seed, the control first."""

    @property
    def jobs(self) -> list[Job]:
        """The start, then seed by seed, so that a queue that is stopped has whole pairs."""
        return [*([] if self.start is None else [self.start]), *in_turn(list(self.runs.values()))]

    def finished(self) -> Planned:
        """With the seeds alone that every arm has finished."""
        pairs = [pair for pair in zip(*self.runs.values(), strict=True) if all(cell.finished for cell in pair)]
        return replace(self, runs={name: [pair[arm] for pair in pairs] for arm, name in enumerate(self.runs)})


def plan(options: ScenarioOptions, scenario: Scenario) -> Planned:
    """The runs of `scenario`."""
    use: Use = "chosen" if options.chosen else "reported"
    panel = panel_path(options.out / "panels", scenario.place, use)
    world = replace(scenario.place.opened(), panel=shown(panel))
    folder = options.out / f"{scenario.place.name}-{scenario.start.name}"
    text = text_path(options.out / "text", "train")
    start = _start(options, scenario.start, world, folder / "start", text)
    runs = {
        arm.row: [
            recipe_cell(
                scenario.recipe(arm),
                world,
                folder / f"{arm.row.replace(', ', '-').replace(' ', '-')}-seed{seed}",
                size=options.size(scenario),
                seed=seed,
                start=start,
                text=text,
            )
            for seed in options.seeds_played
        ]
        for arm in scenario.arms
    }
    return Planned(scenario=scenario, start=start, runs=runs)


def _start(options: ScenarioOptions, start: Start, world: EmbeddedWorld, folder: Path, text: Path) -> Job | None:
    if start.imitation is None:
        return None
    imitation = replace(start.imitation, steps=2) if options.short else start.imitation
    # the last --algorithm counts
    reads = ("--algorithm", NAME, "--lm-loss.files", str(text)) if start.text else ()
    return imitation_job(imitation, world, folder, *start.words, *reads)


def all_jobs(planned: Sequence[Planned]) -> list[Job]:
    """Every run once. Raises TurngymError if two scenarios want different runs in one folder."""
    found: dict[Path, Job] = {}
    for job in (job for one in planned for job in one.jobs):
        if found.setdefault(job.folder, job).words != job.words:
            raise TurngymError(f"two scenarios want different runs in {job.folder}; an arm needs a name of its own")
    return list(found.values())


# --- What is measured beside success

NATS = "heldout.json"
"""In a run's folder: nats per token of each held-out document under its last model."""
Nats = Mapping[str, float]
"""Document -> nats per token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean with its 95 % interval, which no scale bounds."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"

    @property
    def signed(self) -> str:
        return f"{self.mean:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


def crossed(runs: Sequence[Nats]) -> Estimate:
    """Mean over seeds and documents, both crossed random effects (`crossed_error`); of one seed over documents."""
    values = [[run[name] for name in sorted(runs[0])] for run in runs]
    mean = fmean(fmean(row) for row in values)
    if len(values) > 1:
        half = crossed_error(values)
    else:
        half = t_quantile(0.975, len(values[0]) - 1) * stdev(values[0]) / math.sqrt(len(values[0]))
    return Estimate(mean=mean, low=mean - half, high=mean + half)


def heldout_nats(job: Job, documents: Sequence[str]) -> Nats:
    """Nats per token of `documents` under the job's last model; kept in the job's folder for the next report."""
    path = job.folder / NATS
    if not path.exists():
        path.write_text(json.dumps(text_nats(job.model, documents), indent=1) + "\n", encoding="utf-8")
    found: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))
    return found


def text_nats(model: Path, documents: Sequence[str]) -> dict[str, float]:
    """Number of each document -> mean negative log-likelihood of its tokens after the first, at temperature 1."""
    from turngym.trainers.scorer import load_scorer, load_student

    _, tokenizer = load_student(model, "float32", "cpu")
    rows = [np.asarray(tokenizer.encode(text, add_special_tokens=False), np.int32) for text in documents]
    scorer = load_scorer(model, dtype="float32", device="cpu", temperature=1.0, max_tokens=2048)
    scored = scorer.logprobs(rows, [np.arange(1, len(row)) for row in rows])
    return {str(place): -float(np.mean(part, dtype=np.float64)) for place, part in enumerate(scored)}


def critic_explained(job: Job) -> float | None:
    """Mean of the metric over the second half of the run's steps; None where no step has it."""
    rows = [row for row in metric_rows(job.folder) if row.get("critic_explained") is not None]
    late = [row["critic_explained"] for row in rows if row["step"] > job.steps / 2]
    return fmean(late) if late else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Extra:
    """What a scenario measures beside success."""

    title: str
    table: Table
    numbers: Mapping[str, Any]


def extra_of(options: ScenarioOptions, planned: Planned) -> Extra | None:
    """The measure of a scenario with finished runs; None where success is all."""
    if planned.scenario.measure == "success":
        return None
    return _text(options, planned) if planned.scenario.measure == "text" else _critic(planned)


def _text(options: ScenarioOptions, planned: Planned) -> Extra:
    """Held-out text before and after, by arm."""
    from turngym.trainers.lm_loss import read_texts

    documents = list(read_texts([text_path(options.out / "text", "eval")]))
    assert planned.start is not None, "a scenario that measures text begins with a model that has seen some"
    before = heldout_nats(planned.start, documents)
    after = {name: [heldout_nats(job, documents) for job in jobs] for name, jobs in planned.runs.items()}
    control = after[planned.scenario.control.row]
    # differences are paired by seed and document
    header = ["row", "nats per token at the start", "at the end [95 %]", "more [95 %]", "minus control's [95 %]"]
    body: list[list[str]] = []
    numbers: dict[str, Any] = {}
    for name, runs in after.items():
        start, end, more = crossed([before]), crossed(runs), crossed(differences([before] * len(runs), runs))
        against = None if runs is control else crossed(differences(control, runs))
        told = "" if against is None else against.signed
        body.append([f"`{name}`", f"{start.mean:.3f}", str(end), more.signed, told])
        found = {"start": start, "end": end, "more": more, "against": against}
        numbers[name] = {key: None if value is None else asdict(value) for key, value in found.items()}
    title = f"Negative log-likelihood of {len(documents)} held-out documents, intervals over seeds and documents:"
    return Extra(title=title, table=(header, body), numbers=numbers)


def _critic(planned: Planned) -> Extra:
    """Share of the returns' variance that values explain, by arm and seed."""
    values = {name: [critic_explained(job) for job in jobs] for name, jobs in planned.runs.items()}
    header = ["row", "`critic_explained`, mean of the seeds", "seed by seed"]
    body = []
    for name, found in values.items():
        told = [value for value in found if value is not None]
        line = ["" if value is None else f"{value:.2f}" for value in found]
        body.append([f"`{name}`", f"{fmean(told):.2f}" if told else "", ", ".join(line)])
    title = (
        "Share of the returns' variance that the critic explains before it learns from them, second half of the steps:"
    )
    return Extra(title=title, table=(header, body), numbers=values)


# --- The report

Verdict = Literal["appears", "open", "reversed", "one seed"]
"""The interval of the difference lies above zero, holds it, or lies below. One seed says nothing about others."""


def write_report(options: ScenarioOptions, planned: Sequence[Planned]) -> None:
    """Print the report; write it, its numbers and its figure beside the runs."""
    suffix = "-chosen" if options.chosen else ""
    found = {one.scenario.name: one.finished() for one in planned}
    results = {name: read_scenario(one) for name, one in found.items()}
    extras = {name: extra_of(options, found[name]) for name, rows in results.items() if rows}
    figure = f"scenarios{suffix}.png"
    write_files(
        options.out,
        (f"report{suffix}.md", f"scenarios{suffix}.json", figure),
        render(options, found, results, extras, figure),
        to_json(options, results, extras),
        [result for rows in results.values() for result in rows.values()],
        options.evaluated[1],
    )


def read_scenario(planned: Planned) -> dict[str, Result]:
    """Arm -> its result over the seeds that every arm has finished, the control first; nothing without any."""
    rows: dict[str, Result] = {}
    for name, cells in planned.runs.items():
        if cells:
            control = rows.get(planned.scenario.control.row)
            rows[name] = read_result(f"{planned.scenario.name}: {name}", cells, control)
    return rows


def verdict(difference: Interval, seeds: int) -> Verdict:
    """Whether method minus control over `seeds` seeds is clear of zero, and to which side."""
    if seeds < 2:
        return "one seed"
    return "appears" if difference.low > 0 else "reversed" if difference.high < 0 else "open"


def render(
    options: ScenarioOptions,
    planned: Mapping[str, Planned],
    results: Mapping[str, Mapping[str, Result]],
    extras: Mapping[str, Extra | None],
    figure: str,
) -> str:
    """The report in Markdown."""
    seeds = ", ".join(map(str, options.seeds_played))
    tasks, samples = options.evaluated
    which = "chosen on" if options.chosen else "not chosen on"
    opening = (
        f"Avg@{samples} in percent at temperature 0.85 on the first {tasks} tasks of "
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
            body.append([name, f"`{scenario.method.row}`", f"`{scenario.control.row}`", "0", *["not run"] * 4])
            continue
        control, *others = rows.items()
        for arm, row in others:
            assert row.against is not None
            line = [name, f"`{arm}`", f"`{control[0]}`", str(row.seeds), signed(row.rise)]
            body.append([*line, signed(control[1].rise), signed(row.against), verdict(row.against, row.seeds)])
    return header, body


def _section(options: ScenarioOptions, one: Planned, rows: Mapping[str, Result], extra: Extra | None) -> list[str]:
    scenario, size = one.scenario, options.size(one.scenario)
    place = scenario.place
    told = f"{scenario.claim} Place `{place.name}` (world `{place.world}`), start `{scenario.start.name}`, "
    parts = [f"## {scenario.name}", f"{told}{size.steps} steps of {size.episodes} episodes."]
    if not rows:
        return [*parts, "No seed is finished in both arms: there is nothing to report."]
    named = {result.name: result for result in rows.values()}
    parts.append(markdown(table(named, size.samples)))
    parts.append("\n".join(f"- `{name}`: {curve_text(result)}" for name, result in named.items()))
    if extra is not None:
        parts += [extra.title, markdown(extra.table)]
    commands = [job.command for job in ([one.start] if one.start else []) + [jobs[0] for jobs in one.runs.values()]]
    return [*parts, "```bash\n" + "\n".join(commands) + "\n```"]


def to_json(
    options: ScenarioOptions, results: Mapping[str, Mapping[str, Result]], extras: Mapping[str, Extra | None]
) -> dict[str, Any]:
    """The numbers of the report."""
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in asdict(options).items()}
    rows = {name: {row.name: row.to_json() for row in found.values()} for name, found in results.items()}
    more = {name: extra.numbers for name, extra in extras.items() if extra is not None}
    return {"settings": settings, "scenarios": rows, "measures": more}
