"""Which runs the scenarios are made of; a control that two of them share is run once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from turngym.agents.worlds.worlds import EmbeddedWorld
from turngym.envs.core.errors import TurngymError
from turngym.scripts.bench.learn.jobs import Job
from turngym.scripts.bench.learn.words import imitation_job, recipe_words, shown
from turngym.scripts.bench.scenarios.options import ScenariosBench
from turngym.scripts.bench.scenarios.panels import Use, panel_path
from turngym.scripts.bench.scenarios.passages import text_path
from turngym.scripts.bench.scenarios.reader import NAME
from turngym.scripts.bench.scenarios.scenario import Arm, Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A scenario and its runs."""

    scenario: Scenario
    start: Job | None
    """Makes what the runs begin with, unless that is shipped."""
    runs: Mapping[str, Sequence[Job]]
    """Name of the arm -> one per seed, the control first."""

    @property
    def jobs(self) -> list[Job]:
        """The start, then seed by seed, so that a queue that is stopped has whole pairs."""
        first = [] if self.start is None else [self.start]
        return first + [job for pair in zip(*self.runs.values(), strict=True) for job in pair]

    def finished(self) -> Planned:
        """With the seeds alone that every arm has finished."""
        whole = [place for place, pair in enumerate(zip(*self.runs.values(), strict=True)) if _all_finished(pair)]
        return replace(self, runs={name: [jobs[place] for place in whole] for name, jobs in self.runs.items()})


def _all_finished(pair: Sequence[Job]) -> bool:
    return all(job.finished for job in pair)


def plan(options: ScenariosBench, scenario: Scenario) -> Planned:
    """The runs of `scenario`."""
    world = world_of(options, scenario)
    start = _start(options, scenario, world)
    runs = {
        arm.name: [_job(options, scenario, world, arm, seed, start) for seed in options.seeds_played]
        for arm in scenario.arms
    }
    return Planned(scenario=scenario, start=start, runs=runs)


def world_of(options: ScenariosBench, scenario: Scenario) -> EmbeddedWorld:
    """The world of `scenario` with the panel that is played."""
    use: Use = "chosen" if options.chosen else "reported"
    path = panel_path(options.out / "panels", scenario.place, use)
    return replace(scenario.place.opened(), panel=shown(path))


def all_jobs(planned: Sequence[Planned]) -> list[Job]:
    """Every run once. Raises TurngymError if two scenarios want different runs in one folder."""
    found: dict[Path, Job] = {}
    for job in (job for one in planned for job in one.jobs):
        if found.setdefault(job.folder, job).words != job.words:
            raise TurngymError(f"two scenarios want different runs in {job.folder}; an arm needs a name of its own")
    return list(found.values())


def _job(
    options: ScenariosBench, scenario: Scenario, world: EmbeddedWorld, arm: Arm, seed: int, start: Job | None
) -> Job:
    size, place = options.size(scenario), scenario.place
    name = f"{place.name}-{scenario.start.name}/{arm.name.replace(', ', '-').replace(' ', '-')}-seed{seed}"
    return Job(
        name=name,
        folder=options.out / name,
        words=recipe_words(
            scenario.recipe(arm),
            world,
            start=world.checkpoint("student") if start is None else start.model,
            size=size,
            seed=seed,
            measured=options.measured,
            text=text_path(options.out / "text", "train"),
        ),
        steps=size.steps,
        needs=start,
        evaluates=True,
        same_start=f"{place.name}-{scenario.start.name}-seed{seed}",
    )


def _start(options: ScenariosBench, scenario: Scenario, world: EmbeddedWorld) -> Job | None:
    start = scenario.start
    if start.imitation is None:
        return None
    imitation = replace(start.imitation, steps=2) if options.short else start.imitation
    name = f"{scenario.place.name}-{start.name}/start"
    job = imitation_job(imitation, world, name=name, folder=options.out / name)
    words = (*job.words, *start.words)
    if start.text:
        # the last --algorithm counts
        words += ("--algorithm", NAME, "--lm-loss.files", str(text_path(options.out / "text", "train")))
    return replace(job, words=words)
