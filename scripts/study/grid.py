"""The cells of `study turnopd`: every world x method x seed as a training run, in the order in which they are run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from turngym.agents.worlds import load_world
from turngym.agents.worlds.worlds import EmbeddedWorld
from turngym.scripts.jobs import Job, shown
from turngym.scripts.options import distill_argv
from turngym.scripts.study.settings import GROUPS, Method, StudyOptions, chosen_methods

RECORD = "cell.json"
"""What a finished cell leaves for the tables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell(Job):
    """One run of `study turnopd`."""

    world: str
    method: Method
    seed: int

    @property
    def record(self) -> Path:
        return self.folder / RECORD

    @property
    def finished(self) -> bool:
        """The record is written last, so a cell that was killed before that goes on."""
        return self.record.exists()


def cells_of(options: StudyOptions) -> list[Cell]:
    """All cells, in the order in which they are run: seed by seed, main methods first, worlds in turn."""
    rows = []
    for name in options.worlds:
        world = load_world(name)
        chosen = chosen_methods(options.methods, options.max_turns or world.max_turns, options.base)
        rows += [(world, method) for method in chosen]
    rows.sort(key=lambda row: GROUPS.index(row[1].group))
    return [_cell(options, world, method, seed) for seed in options.seeds for world, method in rows]


def _cell(options: StudyOptions, world: EmbeddedWorld, method: Method, seed: int) -> Cell:
    student, teacher = options.student or world.checkpoint("student"), options.teacher or world.checkpoint("teacher")
    words = [*method.words, "--student", shown(student)]
    # who learns from the reward alone has no teacher
    words += [] if method.group == "reward" else ["--teacher", shown(teacher)]
    settings = _settings(options, world)
    pairs = zip(settings[::2], settings[1::2], strict=True)
    words += [word for name, value in pairs if name not in method.words for word in (name, value)]
    words += ["--steps", str(options.steps), "--seed", str(seed), "--panel", world.panel]
    words += ["--eval-limit", str(options.tasks), "--no-tensorboard"]
    return Cell(
        world=world.name,
        method=method,
        seed=seed,
        name=f"{world.name}/{method.name}/seed{seed}",
        folder=options.out / "cells" / world.name / f"{method.name}-seed{seed}",
        words=tuple(words),
        steps=options.steps,
        evaluates=True,
        same_start=f"{world.name}-seed{seed}",
    )


def _settings(options: StudyOptions, world: EmbeddedWorld) -> list[str]:
    """How the world is distilled in, with what the study wants otherwise in place of what the world says."""
    changed = {
        "--eval-every": str(options.steps // options.evaluations),
        "--eval-samples": str(options.samples),
        **({"--episodes": str(options.episodes)} if options.episodes else {}),
        **({"--max-turns": str(options.max_turns)} if options.max_turns else {}),
        # a warm-up as long as a short run would leave it nothing to learn with
        "--optimizer.lr-warmup": str(min(world.distill.warmup, options.steps // 5)),
    }
    return replaced(distill_argv(world), changed)


def replaced(words: Sequence[str], changed: dict[str, str]) -> list[str]:
    """`words` with other values for some options; those that it lacks are added."""
    found, rest = list(words), dict(changed)
    for place, word in enumerate(words[:-1]):
        if word in rest:
            found[place + 1] = rest.pop(word)
    return found + [word for pair in rest.items() for word in pair]
