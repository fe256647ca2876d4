"""The papers' own runs: print their exact commands, or run the same path here with tiny models.

Examples:
    turngym study recipe alfworld-1.7b --print
    turngym study recipe luffy-search --embedded --out runs/recipe
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from turngym.agents.worlds import load_world
from turngym.agents.worlds.worlds import EmbeddedWorld
from turngym.envs.core.errors import TurngymError
from turngym.envs.core.tables import print_table
from turngym.scripts.options import distill_argv
from turngym.scripts.study.grid import replaced, shown
from turngym.scripts.study.learn import write_text
from turngym.scripts.study.recipe.results import result_table
from turngym.scripts.study.recipe.runs import RECIPES, PaperRun, find_recipe
from turngym.scripts.study.recipe.steps import Embedded, Step, embedded_steps, paper_steps, render

LR = "2e-4"
"""embedded: of every run. The world's own for distillation, without a warm-up, undoes a tiny model in four steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeOptions:
    """Which run, and what is done with it."""

    name: Annotated[str | None, tyro.conf.Positional] = None
    """alfworld-1.7b, webshop-4b, search-2b, tcod-alfworld, luffy-search, ...; without one they are listed."""
    print: bool = False
    """Print the commands of the paper's run."""
    embedded: bool = False
    """Run the same path with the tiny models of the embedded world: GRPO for the teacher, then every method in two
    processes and its evaluation."""
    out: Path = Path("runs/recipe")
    """Folder of models and runs."""
    steps: int = 4
    """embedded: training steps of every run."""
    episodes: int = 16
    """embedded: episodes per step; whole groups of 8."""


def main(argv: Sequence[str]) -> int:
    """Run `turngym study recipe`."""
    about = (__doc__ or "").split("\n")[0]
    options = tyro.cli(RecipeOptions, args=list(argv), prog="turngym study recipe", description=about)
    if options.name is None:
        print("\n".join(described(run) for run in RECIPES.values()))
        return 0
    run = find_recipe(options.name)
    if options.print == options.embedded:
        raise TurngymError("say --print for the commands of the paper's run, or --embedded to run the path here")
    if options.print:
        print(render(run, paper_steps(run, str(options.out))))
        return 0
    if run.has_text:
        world = load_world(run.world)
        write_text(world, Path(at_home(options, world).text))
    spent: dict[str, float] = {}
    for step in planned(options):
        print(f"# {step.why}\n{step.line}", flush=True)
        before = children_cpu()
        execute(step)
        spent[step.out] = children_cpu() - before
    print_table(
        result_table(run, options.out, spent), f"{run.name}: {options.steps} steps of {options.episodes} episodes"
    )
    return 0


def children_cpu() -> float:
    """CPU seconds of all commands that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def planned(options: RecipeOptions) -> list[Step]:
    """The steps of --embedded."""
    run = find_recipe(options.name or "")
    return embedded_steps(run, at_home(options, load_world(run.world)))


def at_home(options: RecipeOptions, world: EmbeddedWorld) -> Embedded:
    """What the path needs in `world`."""
    changed = {"--episodes": str(options.episodes), "--optimizer.lr": LR, "--optimizer.lr-warmup": "0"}
    return Embedded(
        words=tuple(replaced(distill_argv(world), changed)),
        student=shown(world.checkpoint("student")),
        base=shown(world.checkpoint("teacher")),
        panel=world.panel,
        steps=options.steps,
        out=str(options.out),
    )


def described(run: PaperRun) -> str:
    """A line of the list."""
    methods = ", ".join(method.name for method in run.methods)
    helper = f" {'judged by' if run.has_judge else 'from'} {run.teacher}" if run.has_judge or run.has_teacher else ""
    return f"{run.name}: {run.student}{helper}, {run.env}; {run.paper}: {methods}"


def execute(step: Step) -> None:
    """Run a step with this Python's turngym and torchrun. Raises TurngymError where it fails."""
    programs = {
        "torchrun": [sys.executable, "-m", "torch.distributed.run"],
        "turngym": [sys.executable, "-m", "turngym.scripts"],
    }
    words = [*programs[step.words[0]], *step.words[1:]]
    done = subprocess.run(words, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
    if done.returncode:
        raise TurngymError(f"{step.why} failed (exit status {done.returncode}): {step.line}")
