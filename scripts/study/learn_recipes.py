"""Training recipes of `turngym study learn`: one per row of its table, with the settings that tiny models need.

The algorithms keep their documented defaults, which suit models of billions of parameters. What a model of 386,000
parameters needs instead is here and nowhere else: higher learning rates, fewer and smaller steps. The second part
turns a recipe into a cell.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from turngym.agents.worlds.worlds import EmbeddedWorld
from turngym.envs.core.errors import TurngymError, did_you_mean
from turngym.scripts.jobs import Job, shown
from turngym.scripts.options import train_argv
from turngym.scripts.study.grid import Cell

# --- The recipes

Start = Literal["student", "hints"]
"""The shipped student (warmed up where the world asks for it: `Setup.warm`), or the shipped student after it has
learned to read hints (`Setup.hints`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One row: an algorithm, where it starts, what it is compared with."""

    algorithm: str
    """As `turngym train --algorithm` takes it."""
    name: str = ""
    """Its name, if not the algorithm's."""
    start: Start = "student"
    control: str | None = None
    """Row whose end this row's end is compared with, beside its own start."""
    teacher: bool = False
    """Whether the world's teacher takes part."""
    text: bool = False
    """Whether L_PT reads text, here what the world's expert sees and does."""
    expert: bool = False
    """Whether the world's expert demonstrates or is asked."""
    words: tuple[str, ...] = ()
    """Further options of `turngym train`."""
    in_env: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Options for one world only; of an option that comes twice the last one counts."""

    @property
    def row(self) -> str:
        """Name of its row."""
        return self.name or self.algorithm


COMMON = (
    *("--threads", "1", "--micro-tokens", "2048", "--temperature", "1.0", "--no-tensorboard"),
    *("--optimizer.weight-decay", "0", "--optimizer.lr-warmup", "3", "--optimizer.schedule", "linear"),
)
DISTIL = ("--optimizer.lr", "5e-4")
"""At 1e-3 success falls first, and of three runs of 24 steps one is back in time (docs/learn.md)."""
REWARD = ("--optimizer.lr", "2e-4", "--optimizer.ppo-epochs", "2", "--optimizer.minibatches", "2")
"""At 1e-3 policy gradients undo the student within ten steps: success 14 % -> 0 %, entropy 0.7 -> 3 nats. Rollouts cost
more than updates, so each batch is used four times; on tasks of the next batch the advantage-weighted change of the
probabilities still grows with the fifth use."""
FREE_CRITIC = ("--ppo-kd.critic.lr", "1e-3", "--ppo-kd.critic.clip", "None")
"""Returns are some -14 nats: clipped at 0.2 and at 1e-5, as is usual for large models, the critic does not get there in
24 steps, and in the household success falls by 6 points (docs/learn.md)."""
CRITIC = (*REWARD, *FREE_CRITIC)
TEXT = ("--lm-loss.coef", "0.01")
"""The tiny models have never modeled text (9 nats a token): at 1 learning to do so is all that they learn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Imitation:
    """A run that imitates the world's expert before rows begin.

    Half of what the noise does are mistakes, so that hints are also read after a refusal: without those the student
    followed 94 % of the hints elsewhere, 72 % there.
    """

    hints: float = 0.0
    """Share of the observations that carry the expert's next action; more than half makes the student forget what to do
    without them."""
    steps: int
    episodes: int = 16
    lr: str
    schedule: Literal["constant", "linear"]

    def words(self) -> list[str]:
        """Options of `turngym train`."""
        return [
            *("--algorithm", "sft", "--hints", str(self.hints), "--noise", "0", "0.5", "--mistakes", "0.5"),
            *("--steps", str(self.steps), "--episodes", str(self.episodes)),
            *("--optimizer.lr", self.lr, "--optimizer.lr-warmup", "5", "--optimizer.schedule", self.schedule),
            *("--optimizer.weight-decay", "0", "--threads", "1", "--micro-tokens", "2048", "--no-tensorboard"),
            *("--seed", "0"),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a world needs beside the recipes."""

    steps: int = 24
    """Training steps of every run."""
    episodes: int = 64
    """Episodes per step."""
    warm: Imitation | None = None
    """Comes before the rows that start at the student; without it they start at the shipped one."""
    hints: Imitation = Imitation(hints=0.5, steps=200, lr="3e-3", schedule="linear")
    """Makes the student that reads hints."""


SETUPS: Mapping[str, Setup] = {
    "alfworld": Setup(),
    # the page refuses 73 % of what the shipped student says: nearly all that it samples is failure (docs/learn.md)
    "webshop": Setup(warm=Imitation(steps=48, lr="1e-3", schedule="constant")),
    # episodes of three turns and a dozen tokens: a batch of 64 says little, and 256 cost no more than 64 elsewhere
    "search": Setup(steps=36, episodes=256),
}
"""By world."""


def setup_of(world: str) -> Setup:
    """What the rows need in `world`. Raises TurngymError for one that this bench knows no recipes for."""
    if world not in SETUPS:
        raise TurngymError(f"--env {world!r}: there are recipes for {', '.join(SETUPS)} only")
    return SETUPS[world]


def hinted(algorithm: Literal["opd-hints", "prm-opd"]) -> Recipe:
    """The expert's next action as a hint.

    One id and a tail bin: what a nearly certain teacher gives to other ids is noise. Stuck episodes repeat one hint,
    and behind a word that it rejects the teacher babbles: both would decide what is learned (docs/learn.md).
    """
    words: tuple[str, ...] = ("--judge-repeats", "2", f"--{algorithm}.form", "topk", "--distill.top-k", "1")
    words += (f"--{algorithm}.reject-below", "0.05", "--optimizer.lr", "1e-3", "--optimizer.minibatches", "4")
    return Recipe(algorithm=algorithm, expert=True, words=words)


RECIPES: Mapping[str, Recipe] = {
    # long failures would outweigh short successes if every token counted the same
    "grpo": Recipe(algorithm="grpo", words=(*REWARD, "--grpo.weight", "trajectory")),
    # without the KL to the start, as grpo's row: the turns' own advantage is what differs
    "gigpo": Recipe(
        algorithm="gigpo", control="grpo", words=(*REWARD, "--gigpo.weight", "trajectory", "--gigpo.kl-coef", "0")
    ),
    "luffy": Recipe(algorithm="luffy", control="grpo", expert=True, words=(*REWARD, "--luffy.weight", "trajectory")),
    # a judge who neither rewards nor punishes what is merely possible teaches to walk about (docs/learn.md)
    "prm-rl": Recipe(
        algorithm="prm-rl",
        expert=True,
        words=(*REWARD, "--judge", "expert", "--judge-strict", "--optimizer.ppo-epochs", "1"),
        # nobody idles in search; 59 % of the student's turns are not the expert's, and blame for them scatters it
        in_env={"search": ("--no-judge-strict",)},
    ),
    "opd-from-hints": Recipe(algorithm="opd", start="hints", teacher=True, words=DISTIL),
    "opd-hints": replace(hinted("opd-hints"), start="hints", control="opd-from-hints"),
    "prm-opd": replace(hinted("prm-opd"), start="hints", control="opd-hints"),
    "opd": Recipe(algorithm="opd", teacher=True, words=DISTIL),
    "turnopd": Recipe(algorithm="turnopd", control="opd", teacher=True, words=DISTIL),
    "tcod": Recipe(
        algorithm="tcod",
        control="opd",
        teacher=True,
        words=DISTIL,
        in_env={
            "alfworld": ("--tcod.schedule.eta", "2"),
            "webshop": ("--tcod.schedule.eta", "4"),
            "search": ("--tcod.schedule.eta", "2"),
        },
    ),
    "loopstop": Recipe(algorithm="loopstop", control="opd", teacher=True, words=DISTIL),
    "guided-opd": Recipe(algorithm="guided-opd", control="opd", teacher=True, words=DISTIL),
    "sage-opd": Recipe(
        algorithm="sage-opd", control="opd", teacher=True, expert=True, words=(*DISTIL, "--judge", "expert")
    ),
    "atod": Recipe(algorithm="atod", control="opd", teacher=True, words=REWARD),
    "grpo-opd": Recipe(algorithm="grpo-opd", control="opd", teacher=True, words=REWARD),
    "grpo-kd": Recipe(algorithm="grpo-kd", control="opd", teacher=True, words=REWARD),
    "grpo-minillm": Recipe(
        algorithm="grpo-minillm", control="grpo-kd", teacher=True, text=True, words=(*REWARD, *TEXT)
    ),
    "ppo-kd": Recipe(algorithm="ppo-kd", control="opd", teacher=True, words=CRITIC),
    "ppo-minillm": Recipe(algorithm="ppo-minillm", control="ppo-kd", teacher=True, text=True, words=(*CRITIC, *TEXT)),
}
"""Rows by name, in the order of the table; what others are compared with comes before them."""
MUST_RISE = ("grpo", "luffy", "prm-rl", "opd-hints")
"""Rows whose rise must be clear of zero."""


def choose(names: tuple[str, ...]) -> dict[str, Recipe]:
    """The recipes called `names` (all without names) and those that they are compared with, in the table's order."""
    wanted = set(names or RECIPES)
    for name in sorted(wanted):
        if name not in RECIPES:
            known = ", ".join(RECIPES)
            raise TurngymError(f"--algorithms {name!r}: there are {known}.{did_you_mean(name, [*RECIPES])}")
        control = RECIPES[name].control
        wanted |= {control} if control else set()
    return {name: recipe for name, recipe in RECIPES.items() if name in wanted}


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much every run trains, how often it is evaluated, and on how much."""

    steps: int
    episodes: int
    """Episodes per step."""
    every: int
    """Steps between evaluations."""
    tasks: int
    """Tasks of an evaluation: the first so many of the panel."""
    samples: int
    """Episodes per task of an evaluation."""


# --- As cells


def recipe_words(
    recipe: Recipe, world: EmbeddedWorld, *, start: Path, size: Size, seed: int, text: Path
) -> tuple[str, ...]:
    """One run of `recipe` from the model in `start`; `text` is the file that L_PT reads."""
    words = ["--algorithm", recipe.algorithm, "--student", shown(start), *train_argv(world)]
    words += ["--teacher", shown(world.checkpoint("teacher"))] if recipe.teacher else []
    words += ["--expert", world.expert] if recipe.expert else []
    words += ["--lm-loss.files", str(text)] if recipe.text else []
    words += ["--steps", str(size.steps), "--episodes", str(size.episodes), "--seed", str(seed)]
    words += ["--panel", world.panel, "--eval-limit", str(size.tasks), "--eval-samples", str(size.samples)]
    words += ["--eval-every", str(size.every)]
    return (*words, *COMMON, *recipe.words, *recipe.in_env.get(world.name, ()))


def recipe_cell(
    recipe: Recipe,
    world: EmbeddedWorld,
    folder: Path,
    *,
    size: Size,
    seed: int,
    start: Job | None,
    text: Path,
) -> Cell:
    """The run of `recipe` in `folder`, from the model that `start` makes or from the world's student."""
    begins = f"{folder.parent}/{recipe.start}" if start is None else str(start.folder)
    return Cell(
        world=world.name,
        method=recipe.row,
        seed=seed,
        name="/".join(folder.parts[-2:]),
        folder=folder,
        words=recipe_words(
            recipe,
            world,
            start=world.checkpoint("student") if start is None else start.model,
            size=size,
            seed=seed,
            text=text,
        ),
        steps=size.steps,
        needs=start,
        evaluates=True,
        same_start=f"{begins}-seed{seed}",
    )


def imitation_job(imitation: Imitation, world: EmbeddedWorld, folder: Path, *more: str) -> Job:
    """The run that makes what other runs start from, beginning at the shipped student; `more` are further words."""
    words = ["--student", shown(world.checkpoint("student")), *train_argv(world), "--expert", world.expert]
    name = "/".join(folder.parts[-2:])
    return Job(name=name, folder=folder, words=(*words, *imitation.words(), *more), steps=imitation.steps)
