"""Train the tiny teacher or the weak tiny student of the quickstart again, from its seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import tyro

from turngym.envs.core import TurngymError
from turngym.scripts import embedded


@dataclass(frozen=True, slots=True, kw_only=True)
class Pretrain:
    """Supervised fine-tuning of a tiny model on episodes of the searching expert, with noise."""

    role: Literal["teacher", "student"] = "teacher"
    """Which of the two shipped models to make."""
    out: Path = Path("runs/pretrain")
    """Folder of the run; the finished model is in its newest checkpoint and in `out/model`."""
    steps: int | None = None
    """Updates, if not the recipe's."""
    lr: float | None = None
    """Peak learning rate, if not the recipe's."""
    seed: int | None = None
    """Seed of weights and games, if not the recipe's."""
    resume: bool = False
    """Continue an interrupted run."""


def main(argv: Sequence[str]) -> int:
    options = tyro.cli(Pretrain, args=argv, prog="turngym pretrain", description=__doc__)
    changes = {name: getattr(options, name) for name in ("steps", "lr", "seed") if getattr(options, name) is not None}
    folder = pretrain(replace(embedded.RECIPES[options.role], **changes), options.out, resume=options.resume)
    print(f"model written to {folder}")
    return 0


def pretrain(recipe: embedded.TinyRecipe, out: Path, *, resume: bool = False) -> Path:
    """Train a model by `recipe`; returns the folder with model, tokenizer and chat settings.

    Raises TurngymError where `turngym[train]` is missing or `out` holds another run.
    """
    try:
        import torch
    except ImportError as error:
        raise TurngymError(f"training needs torch: pip install 'turngym[train]' ({error})") from error
    from turngym.trainers.algorithms.sft import SftConfig, build
    from turngym.trainers.config import OptimiserConfig, RunConfig
    from turngym.trainers.loop import Trainer
    from turngym.trainers.model import save_model, tiny_qwen3
    from turngym.trainers.progress import LiveProgress

    torch.set_num_threads(1)  # more threads only wait for each other at this size
    tokenizer = embedded.make_tokenizer()
    model = tiny_qwen3(
        len(tokenizer),
        width=recipe.width,
        layers=recipe.layers,
        heads=recipe.heads,
        max_length=embedded.CHAT.max_context or 1024,
        eos_id=tokenizer.eos_token_id,
        pad_id=tokenizer.pad_token_id,
        seed=recipe.seed,
    )
    run = RunConfig(
        steps=recipe.steps,
        episodes=recipe.episodes,
        max_turns=embedded.MAX_TURNS,
        seed=recipe.seed,
        eval_every=0,
        micro_tokens=2048,
    )
    warmup = min(20, recipe.steps // 5)
    trainer = Trainer(
        model=model,
        algorithm=build(SftConfig(), run),
        collect=_demonstrations(tokenizer, recipe),
        out=out,
        run=run,
        optimiser=OptimiserConfig(lr=recipe.lr, schedule="cosine", lr_warmup=warmup, betas=(0.9, 0.95)),
        progress=LiveProgress("pretrain", run.steps),
    )
    trainer.train(resume=resume)
    folder = out / "model"
    save_model(model.bfloat16(), folder)
    tokenizer.save_pretrained(str(folder))
    embedded.CHAT.save(folder)
    return folder


def _demonstrations(tokenizer: Any, recipe: embedded.TinyRecipe) -> Any:
    """A rollout source that plays the searching expert on train games, each step on new ones."""
    import gymnasium as gym

    from turngym.agents.render import ChatRenderer
    from turngym.agents.rollout import Job, Rollout
    from turngym.agents.scripted import ExpertAgent, SearchingPlayer
    from turngym.envs.protocols import CollectRequest

    agent = ExpertAgent(ChatRenderer(tokenizer), expert=SearchingPlayer, noise=recipe.noise)
    driver = Rollout(
        lambda: gym.make(embedded.ENV_ID, **embedded.env_kwargs("train")), agent, system=embedded.CHAT.system
    )

    def collect(request: CollectRequest) -> Any:
        first = (request.step - 1) * request.episodes
        jobs = [
            Job(task_id=f"generated/small/train/{first + place}", seed=recipe.seed) for place in range(request.episodes)
        ]
        return driver.run(jobs)

    return collect
