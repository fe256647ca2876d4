"""The options of `turngym train` that a recipe becomes in a world."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from turngym.agents.worlds.worlds import EmbeddedWorld
from turngym.scripts.bench.learn.jobs import Job
from turngym.scripts.bench.learn.options import Size
from turngym.scripts.bench.learn.recipes import COMMON, Imitation, Recipe
from turngym.scripts.options import train_argv


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What every run is evaluated on, beside the world's panel."""

    tasks: int
    """The first so many of the panel."""
    samples: int
    """Episodes per task."""


def recipe_words(
    recipe: Recipe, world: EmbeddedWorld, *, start: Path, size: Size, seed: int, measured: Measured, text: Path
) -> tuple[str, ...]:
    """One run of `recipe` from the model in `start`; `text` is the file that L_PT reads."""
    words = ["--algorithm", recipe.algorithm, "--student", shown(start), *train_argv(world)]
    words += ["--teacher", shown(world.checkpoint("teacher"))] if recipe.teacher else []
    words += ["--expert", world.expert] if recipe.expert else []
    words += ["--lm-loss.files", str(text)] if recipe.text else []
    words += ["--steps", str(size.steps), "--episodes", str(size.episodes), "--seed", str(seed)]
    words += ["--panel", world.panel, "--eval-limit", str(measured.tasks), "--eval-samples", str(measured.samples)]
    words += ["--eval-every", str(size.every)]
    return (*words, *COMMON, *recipe.words, *recipe.in_env.get(world.name, ()))


def imitation_job(imitation: Imitation, world: EmbeddedWorld, *, name: str, folder: Path) -> Job:
    """The run that makes what other runs start from, beginning at the shipped student."""
    words = ["--student", shown(world.checkpoint("student")), *train_argv(world), "--expert", world.expert]
    return Job(name=name, folder=folder, words=(*words, *imitation.words()), steps=imitation.steps)


def shown(path: Path) -> str:
    """A path as a reader can type it: relative to the working folder where that is shorter."""
    return min(str(path), os.path.relpath(path), key=len)
