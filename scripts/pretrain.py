"""Train a tiny model of an embedded world again, or make tiny models for any environment that has an expert."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from turngym.agents.evaluation.play_episodes import play_episodes
from turngym.agents.evaluation.scores import Scores, score, success_table
from turngym.agents.models import load_model
from turngym.agents.playing.env_maker import probe
from turngym.agents.saved_model import save_model, save_tokenizer
from turngym.agents.worlds import load_world
from turngym.agents.worlds.any_world import TEACHER_STEPS, AnyWorld
from turngym.agents.worlds.worlds import EmbeddedWorld, TinyRecipe
from turngym.core.errors import TurngymError, did_you_mean
from turngym.core.files import locked_folder, new_folder, write_sums
from turngym.core.numbers import Count, Million, Seed
from turngym.core.plugins import need
from turngym.core.setting import fields_of
from turngym.core.spec import Spec, Unread, changed, needing
from turngym.core.strict_json import json_object
from turngym.core.tables import columns, table_text
from turngym.envs.base import tasks_of
from turngym.retrieval.precision import cast_parameters
from turngym.scripts.options import read_options

SUCCESS_FILE = "success.json"


class AnyOptions(Spec):
    """Options for an environment given by its id."""

    split: str = "train"
    """Split to train on."""
    env_kwargs: str = "{}"
    """Further arguments for gym.make as JSON; an invalid action is a turn without effect unless they say otherwise."""
    max_turns: Count = 24
    """Turns of an episode."""
    expert: str = "expert"
    """Who is imitated: the environment's expert, or another player by name."""
    student_steps: Count = 60
    """Updates of the student."""
    batch: Million = 32
    """Expert episodes per update."""
    vocabulary_episodes: Million = 256
    """Episodes played to learn the vocabulary, where the environment has no `phrases()`."""
    eval_split: str | None = None
    """Split on which successes are counted at the end; by default the one that was trained on."""
    eval_episodes: Annotated[int, Meta(ge=0, le=10**6)] = 200
    """Episodes of each player for that; 0 counts nothing."""

    def world(self, env_id: str, *, steps: int | None, seed: int) -> AnyWorld:
        """Returns the world that these options describe."""
        return AnyWorld(
            env_id=env_id,
            split=self.split,
            make={"on_invalid": "noop", **json_object("--env-kwargs", self.env_kwargs)},
            max_turns=self.max_turns,
            expert=self.expert,
            episodes=self.vocabulary_episodes,
            steps=(TEACHER_STEPS if steps is None else steps, self.student_steps),
            batch=self.batch,
            seed=seed,
        )

    def measured(self, world: AnyWorld, models: Mapping[str, Path], out: Path) -> str:
        """A table of how often models, a random player and the expert succeed; the numbers are kept in `out`."""
        kwargs = {**world.make, "split": self.eval_split or self.split, "max_turns": self.max_turns}
        tasks = len(tasks_of(probe(world.env_id, kwargs)))
        agents = {name: f"model:{folder}" for name, folder in models.items()} | {"expert": self.expert}
        scores_of = {name: self._played(world, agent, kwargs, tasks) for name, agent in agents.items()}
        overall = {name: scores.overall for name, scores in scores_of.items()}
        numbers = {
            name: {"avg": row.avg.mean, "low": row.avg.low, "high": row.avg.high, "episodes": row.episodes}
            for name, row in overall.items()
        }
        (out / SUCCESS_FILE).write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
        text = table_text(columns(success_table(scores_of)))
        # rewards tell a group's attempts apart only where some win
        if "student" in numbers and not numbers["student"]["avg"]:
            text += f"the student won nothing, and rewards compare: --student-steps above {self.student_steps}\n"
        return text

    def _played(self, world: AnyWorld, agent: str, kwargs: Mapping[str, Any], tasks: int) -> Scores:
        played = min(tasks, self.eval_episodes)
        samples = max(self.eval_episodes // played, 1)
        settings: dict[str, Any] = {"tasks": played, "samples": samples, "seed": world.seed, "env_kwargs": kwargs}
        # where every task is played, drawing would only change their order
        settings |= {"draw": played < tasks, "progress": False}
        settings |= {"threads": 1} if agent.startswith("model:") else {}
        return score(play_episodes(world.env_id, agent, **settings).episodes)


class Pretrain(Spec):
    """Supervised fine-tuning of a tiny model on noisy episodes of an expert, or on a mixture of players."""

    world: str = "alfworld"
    """Embedded world (alfworld, webshop or search, each also with -loops, or search-chains), or the Gymnasium id
    of any other environment that has an expert; `package:namespace/Name-v0` imports `package` first."""
    role: str = ""
    """Which of the world's models to make: teacher, student, or what they grow from; by default the teacher, and of an
    environment by its id teacher and student."""
    out: Path = Path("runs/pretrain")
    """Folder of the run; the finished model is written to `model` inside it, and what it grows from to `NAME/model`. Of
    an environment by its id, the models are `teacher/model` and `student/model`."""
    steps: Count | None = None
    """Updates, if not the recipe's; of an environment by its id 300 for a teacher."""
    seed: Seed = 0
    """Added to the recipes' own seeds of weights and games."""
    resume: bool = False
    """Continue an interrupted run."""
    any: AnyOptions = AnyOptions()

    def unread(self) -> Unread:
        if "/" not in self.world:
            names = (f"any.{field.name}" for field in fields_of(AnyOptions))
            yield from needing("an environment by its id as --world (an embedded one has its own)", *names)


def main(argv: Sequence[str]) -> int:
    """Run `turngym pretrain` with `argv` (without the verb itself)."""
    options = read_options(Pretrain, argv, prog="turngym pretrain", about=__doc__)
    if "/" in options.world:
        return _any(options)
    world = _seeded(load_world(options.world), options)
    role = options.role or "teacher"
    _check_role(world, role)
    with locked_folder(options.out):
        print(f"model in {pretrain(world, world.recipes[role], options.out, options.resume)}")
    return 0


def _any(options: Pretrain) -> int:
    """The tiny models of an environment by its id, and how often each of them succeeds."""
    any_world = options.any.world(options.world, steps=options.steps, seed=options.seed)
    with locked_folder(options.out):
        world = _seeded(any_world.world(), changed(options, steps=None))
        roles = [options.role] if options.role else [*world.recipes]
        _check_role(world, roles[0])
        models = {role: pretrain(world, world.recipes[role], options.out / role, options.resume) for role in roles}
        if options.any.eval_episodes:
            untrained = {"untrained": options.out / roles[0] / "untrained"}
            print(options.any.measured(any_world, {**untrained, **models}, options.out), end="")
        for role, folder in models.items():
            print(f"{role} in {folder}")
    return 0


def _seeded(world: EmbeddedWorld, options: Pretrain) -> EmbeddedWorld:
    recipes = {
        role: replace(recipe, steps=options.steps or recipe.steps, seed=recipe.seed + options.seed)
        for role, recipe in world.recipes.items()
    }
    return replace(world, recipes=recipes)


def _check_role(world: EmbeddedWorld, role: str) -> None:
    if role not in world.recipes:
        hint = did_you_mean(role, [*world.recipes])
        raise TurngymError(f"--role {role!r}: {world.name} has {', '.join(world.recipes)}.{hint}")


def pretrain(world: EmbeddedWorld, recipe: TinyRecipe, out: Path, resume: bool = False) -> Path:
    """Make a model by `recipe`; returns the folder that holds weights, tokenizer and chat settings.

    What it grows from is made first, in a folder of `out`; with `resume`, what is finished there is kept.
    Raises TurngymError where `turngym[train]` is missing or `out` holds another run.

    Args:
        out: folder of the run; the model is written to `model` in it.
    """
    finished = out / "model"
    if resume and finished.is_dir():
        return finished
    if finished.exists():
        raise TurngymError(f"{finished} is there already; name another --out, or keep that model with --resume")
    start, run = write_start(world, recipe, out, resume), out / "sft"
    # this module is read without torch
    from turngym.trainers import train

    train("sft", student=start, out=run, resume=resume and run.is_dir(), **sft_settings(world, recipe))
    newest = max(run.glob("checkpoints/step_*/model"), default=None)
    if newest is None:
        raise TurngymError(f"no checkpoint in {run}")
    return _store(newest, finished, recipe.dtype)


def sft_settings(world: EmbeddedWorld, recipe: TinyRecipe) -> dict[str, Any]:
    """Settings of `turngym.trainers.train` that make a tiny model of `world` by supervised fine-tuning."""
    sft = {"noise": recipe.noise, "mistakes": recipe.mistakes, "weight": recipe.weight}
    if recipe.players:
        sft |= {"players": recipe.players, "loop_after": recipe.loop_after, "loop_slips": recipe.loop_slips}
        sft |= {"train_on": "both"}
    warmup = min(20, recipe.steps // 5)
    return {
        **world.settings(),
        "expert": world.expert,
        "sft": sft,
        "steps": recipe.steps,
        "seed": recipe.seed,
        "episodes": recipe.episodes,
        "optimizer": {"lr": recipe.lr, "schedule": "cosine", "lr_warmup": warmup, "betas": (0.9, 0.95)},
        "checkpoint_every": 50,
        "micro_tokens": 2048,
        "threads": 1,
    }


def _store(trained: Path, folder: Path, dtype: str) -> Path:
    """A copy of a model in the precision `dtype`, all of it or nothing."""
    with new_folder(folder) as partial:
        shutil.copytree(trained, partial, dirs_exist_ok=True)
        if dtype != "float32":
            model = load_model(trained)
            save_model(cast_parameters(model, getattr(need("torch", "turngym pretrain", "train"), dtype)), partial)
            write_sums(partial)
    return folder


def write_start(world: EmbeddedWorld, recipe: TinyRecipe, out: Path, resume: bool) -> Path:
    """The folder that a recipe starts from, with the world's tokenizer and chat settings."""
    if not recipe.start:
        return write_untrained(world, recipe, out / "untrained")
    if recipe.start in world.recipes:
        source = pretrain(world, world.recipes[recipe.start], out / recipe.start, resume)
    else:
        name, _, role = recipe.start.partition("/")
        source = load_world(name).checkpoint(role)
    need("torch", "turngym pretrain", "train")
    model: Any = load_model(source)
    # positions are rotary: a longer context needs no other weights
    model.config.max_position_embeddings = world.chat.max_context or 1024
    return _write(world, model, world.make_tokenizer(), out / "start")


def write_untrained(world: EmbeddedWorld, recipe: TinyRecipe, folder: Path) -> Path:
    """A model folder with random weights, the phrase tokenizer and the chat settings."""
    need("torch", "turngym pretrain", "train")
    from turngym.trainers.models import tiny_qwen3

    tokenizer = world.make_tokenizer()
    model = tiny_qwen3(
        len(tokenizer),
        width=recipe.width,
        layers=recipe.layers,
        heads=recipe.heads,
        max_length=world.chat.max_context or 1024,
        eos_id=tokenizer.eos_token_id,
        pad_id=tokenizer.pad_token_id,
        seed=recipe.seed,
    )
    return _write(world, model, tokenizer, folder)


def _write(world: EmbeddedWorld, model: Any, tokenizer: Any, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_model(model, folder)
    save_tokenizer(tokenizer, folder)
    world.chat.save(folder)
    write_sums(folder)
    return folder
