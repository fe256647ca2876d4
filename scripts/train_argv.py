"""The words with which other verbs call `turngym train`."""

from __future__ import annotations

import json

from turngym.agents.worlds.worlds import EmbeddedWorld, TinyRecipe


def train_argv(world: EmbeddedWorld, split: str | None = None, max_turns: int | None = None) -> list[str]:
    """Options of `turngym train` that select the environment and split of `world`, and its turns if not others."""
    given = world.settings(split=split)
    argv = ["--env", given["env"], "--split", given["split"], "--env-kwargs", json.dumps(given["env_kwargs"])]
    return [*argv, "--max-turns", str(max_turns or given["max_turns"])]


def distill_argv(world: EmbeddedWorld, split: str | None = None) -> list[str]:
    """Options of `turngym train` that distill the student of `world` from its teacher."""
    recipe = world.distill
    argv = [*train_argv(world, split, recipe.max_turns), "--episodes", str(recipe.episodes), "--threads", "1"]
    argv += ["--optimizer.lr", str(recipe.lr), "--optimizer.lr-warmup", str(recipe.warmup)]
    argv += ["--optimizer.schedule", "cosine", "--optimizer.weight-decay", "0"]
    argv += ["--eval-every", str(recipe.eval_every), "--eval-samples", "1"]
    for name, value in {"micro_tokens": 2048, **recipe.settings}.items():
        parts = {f"{name}.{inner}": v for inner, v in value.items()} if isinstance(value, dict) else {name: value}
        for key, v in parts.items():
            # a setting that is switched on is a flag
            argv += [f"--{key.replace('_', '-')}", *([] if v is True else [str(v)])]
    return argv


def sft_argv(world: EmbeddedWorld, recipe: TinyRecipe) -> list[str]:
    """Options of `turngym train sft` that make a tiny model of `world` by supervised fine-tuning."""
    low, high = recipe.noise
    argv = ["--algorithm", "sft", "--expert", world.expert, "--sft.noise", str(low), str(high)]
    argv += ["--sft.mistakes", str(recipe.mistakes), "--steps", str(recipe.steps), "--seed", str(recipe.seed)]
    argv += ["--episodes", str(recipe.episodes), "--optimizer.lr", str(recipe.lr)]
    argv += ["--optimizer.schedule", "cosine", "--optimizer.lr-warmup", str(min(20, recipe.steps // 5))]
    argv += ["--optimizer.betas", "0.9", "0.95", "--checkpoint-every", "50", "--micro-tokens", "2048"]
    argv += ["--sft.weight", recipe.weight, "--threads", "1"]
    if recipe.players:
        argv += ["--sft.players", recipe.players, "--sft.loop-after", str(recipe.loop_after)]
        argv += ["--sft.loop-slips", str(recipe.loop_slips), "--sft.train-on", "both"]
    return [*argv, *train_argv(world)]
