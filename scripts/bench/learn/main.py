"""Does it learn? Every algorithm from a tiny student in a generated world: Avg@n before, during and after, by seed.

Each run is a `turngym train` in a process of its own. Runs that are finished are kept, so that the same command goes on
where it stopped, and adds what is new when it asks for more algorithms or seeds. Ends with a table, a figure and the
numbers as JSON.

Examples:
    turngym bench learn
    turngym bench learn --algorithms grpo luffy prm-rl opd-hints --seeds 3 --env webshop
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tyro

from turngym.agents.worlds import load_world
from turngym.agents.worlds.worlds import EmbeddedWorld
from turngym.scripts.bench.learn.jobs import Job, Runner
from turngym.scripts.bench.learn.options import LearnBench, size_of
from turngym.scripts.bench.learn.recipes import Imitation, Recipe, Start, choose, setup_of
from turngym.scripts.bench.learn.words import Measured, imitation_job, recipe_words


def main(argv: Sequence[str]) -> int:
    """Run `turngym bench learn` with `argv`; status 1 if a row that must rise does not clearly do so."""
    options = tyro.cli(LearnBench, args=list(argv), prog="turngym bench learn", description=__doc__)
    recipes, world = choose(options.algorithms), load_world(options.env)
    if any(recipe.text for recipe in recipes.values()):
        from turngym.scripts.bench.learn.text import write_text

        write_text(world, text_file(options, world))
    planned = plan(options, world, recipes)
    Runner(jobs=in_turn(list(planned.values())), parallel=options.parallel).run()
    if not options.report:
        return 0
    from turngym.scripts.bench.learn.report import write_report

    return 0 if write_report(options, world, recipes, planned) else 1


def plan(options: LearnBench, world: EmbeddedWorld, recipes: dict[str, Recipe]) -> dict[str, list[Job]]:
    """Row -> one run per seed; first the runs that make what rows start from."""
    setup = setup_of(world.name)
    made: dict[Start, Job] = {}
    if setup.warm and any(recipe.start == "student" for recipe in recipes.values()):
        made["student"] = _start(options, world, "warm", setup.warm)
    if any(recipe.start == "hints" for recipe in recipes.values()):
        made["hints"] = _start(options, world, "hints", setup.hints)
    planned = {job.folder.name: [job] for job in made.values()}
    for name, recipe in recipes.items():
        needs = made.get(recipe.start)
        planned[name] = [_job(options, world, name, recipe, seed, needs) for seed in options.seeds_of(name)]
    return planned


def in_turn(rows: Sequence[Sequence[Job]]) -> list[Job]:
    """All jobs, the first of every row before the second of any."""
    return [jobs[place] for place in range(max(map(len, rows))) for jobs in rows if place < len(jobs)]


def text_file(options: LearnBench, world: EmbeddedWorld) -> Path:
    """Where the text for L_PT is."""
    return options.out / world.name / "text.txt"


def _job(options: LearnBench, world: EmbeddedWorld, name: str, recipe: Recipe, seed: int, needs: Job | None) -> Job:
    size = size_of(options, world)
    start = world.checkpoint("student") if needs is None else needs.model
    measured = Measured(tasks=options.tasks, samples=options.samples)
    text = text_file(options, world)
    return Job(
        name=f"{world.name}/{name}/seed{seed}",
        folder=options.out / world.name / f"{name}-seed{seed}",
        words=recipe_words(recipe, world, start=start, size=size, seed=seed, measured=measured, text=text),
        steps=size.steps,
        needs=needs,
        evaluates=True,
        same_start=f"{world.name}/{recipe.start}-seed{seed}",
    )


def _start(options: LearnBench, world: EmbeddedWorld, name: str, imitation: Imitation) -> Job:
    return imitation_job(imitation, world, name=f"{world.name}/{name}", folder=options.out / world.name / name)
