"""Train the tiny teacher or the weak tiny student of the quickstart again, from its seed."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import tyro

from turngym.agents.worlds import load_world
from turngym.agents.worlds.world import EmbeddedWorld, TinyRecipe
from turngym.envs.core import TurngymError
from turngym.scripts.options.world import sft_words


@dataclass(frozen=True, slots=True, kw_only=True)
class Pretrain:
    """Supervised fine-tuning of a tiny model on noisy episodes of an expert."""

    env: str = "alfworld"
    """Embedded world: alfworld, webshop or search."""
    role: Literal["teacher", "student"] = "teacher"
    """Which of the two shipped models to make."""
    out: Path = Path("runs/pretrain")
    """Folder of the run; the finished model is written to `model` inside it."""
    steps: int | None = None
    """Updates, if not the recipe's."""
    seed: int | None = None
    """Seed of weights and games, if not the recipe's."""
    resume: bool = False
    """Continue an interrupted run."""


def main(argv: Sequence[str]) -> int:
    """Run `turngym pretrain` with `argv` (without the verb itself)."""
    options = tyro.cli(Pretrain, args=list(argv), prog="turngym pretrain", description=(__doc__ or "").split("\n")[0])
    world = load_world(options.env)
    changes = {name: getattr(options, name) for name in ("steps", "seed") if getattr(options, name) is not None}
    print(f"model in {pretrain(world, replace(world.recipes[options.role], **changes), options.out, options.resume)}")
    return 0


def pretrain(world: EmbeddedWorld, recipe: TinyRecipe, out: Path, resume: bool = False) -> Path:
    """Make a model by `recipe`; returns the folder that holds weights, tokenizer and chat settings.

    Raises TurngymError where `turngym[train]` is missing or `out` holds another run.
    """
    from turngym.scripts import train

    start, run = write_untrained(world, recipe, out / "untrained"), out / "sft"
    words = ["--student", str(start), "--out", str(run), *sft_words(world, recipe)]
    train.main([*words, *(["--resume"] if resume else [])])
    newest = max(run.glob("checkpoints/step_*/model"), default=None)
    if newest is None:
        raise TurngymError(f"no checkpoint in {run}")
    return Path(shutil.copytree(newest, out / "model", dirs_exist_ok=True))


def write_untrained(world: EmbeddedWorld, recipe: TinyRecipe, folder: Path) -> Path:
    """A model folder with random weights, the phrase tokenizer and the chat settings."""
    try:
        from turngym.trainers.models.model import save_model, tiny_qwen3
    except ImportError as error:
        raise TurngymError(f"training needs torch and transformers: pip install 'turngym[train]' ({error})") from error
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
    folder.mkdir(parents=True, exist_ok=True)
    save_model(model, folder)
    tokenizer.save_pretrained(str(folder))
    world.chat.save(folder)
    return folder
