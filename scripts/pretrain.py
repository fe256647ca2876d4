"""Train the tiny teacher or the weak tiny student of the quickstart again, from its seed."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import tyro

from turngym.envs.core import TurngymError
from turngym.scripts import embedded


@dataclass(frozen=True, slots=True, kw_only=True)
class Pretrain:
    """Supervised fine-tuning of a tiny model on noisy episodes of the searching expert."""

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
    changes = {name: getattr(options, name) for name in ("steps", "seed") if getattr(options, name) is not None}
    print(f"model in {pretrain(replace(embedded.RECIPES[options.role], **changes), options.out, options.resume)}")
    return 0


def pretrain(recipe: embedded.TinyRecipe, out: Path, resume: bool = False) -> Path:
    """Make a model by `recipe`; returns the folder that holds weights, tokenizer and chat settings.

    Raises TurngymError where `turngym[train]` is missing or `out` holds another run.
    """
    from turngym.scripts import train

    start, run = embedded.write_untrained(recipe, out / "untrained"), out / "sft"
    low, high = recipe.noise
    words = ["--algorithm", "sft", "--student", str(start), "--out", str(run), "--expert", "searching"]
    words += ["--noise", str(low), str(high), "--blunders", str(recipe.blunders)]
    words += ["--steps", str(recipe.steps), "--episodes", str(recipe.episodes)]
    words += ["--seed", str(recipe.seed), "--optimiser.lr", str(recipe.lr), "--optimiser.schedule", "cosine"]
    words += ["--optimiser.lr-warmup", str(min(20, recipe.steps // 5)), "--optimiser.betas", "0.9", "0.95"]
    words += [*embedded.train_words(), "--checkpoint-every", "50", "--micro-tokens", "2048"]
    train.main([*words, *(["--resume"] if resume else [])])
    newest = max(run.glob("checkpoints/step_*/model"), default=None)
    if newest is None:
        raise TurngymError(f"no checkpoint in {run}")
    return Path(shutil.copytree(newest, out / "model", dirs_exist_ok=True))
