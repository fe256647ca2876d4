"""The embedded default: a small generated household, and models tiny enough to train on two CPU cores."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turngym.agents.phrase_tokenizer import build_phrase_tokenizer
from turngym.agents.settings import ChatSettings
from turngym.envs.core import TurngymError

ENV_ID = "turngym/ALFWorld-v0"
MAX_TURNS = 24
CHECKPOINTS = Path(__file__).parent / "checkpoints"

CHAT = ChatSettings(
    channel="text",
    system="You are in a house. Do the task.",
    max_new_tokens=12,
    max_context=1024,
)
"""A system message of its own, because the environment's instructions would be many tokens to a phrase tokenizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyRecipe:
    """How one shipped model is made from nothing but a seed."""

    width: int = 128
    layers: int = 2
    heads: int = 4
    steps: int
    """Updates of supervised fine-tuning."""
    episodes: int = 64
    """Expert episodes per update. A game may come again, but with other noise."""
    noise: tuple[float, float] = (0.0, 0.5)
    """Share of random actions in an episode, drawn per episode; the expert labels every state that they lead to."""
    blunders: float = 0.5
    """Share of those that are plausible mistakes, most of them refused by the house."""
    lr: float = 3e-3
    seed: int = 0


RECIPES = {
    "teacher": TinyRecipe(steps=500),
    "student": TinyRecipe(steps=300, blunders=0.0),
}
"""Both grow from the same random weights, but the student has never seen what the house says to a mistake.

What other choices did is in the README under "What the tiny models taught us".
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DistilRecipe:
    """How the quickstart distils: the same for every method."""

    steps: int = 100
    episodes: int = 64
    lr: float = 1e-3
    warmup: int = 10


DISTIL = DistilRecipe()
PANEL = "alfworld-quickstart"


def distil_words(split: str) -> list[str]:
    """Options of `turngym train` for distillation with the tiny models."""
    recipe = DISTIL
    words = [*train_words(split), "--episodes", str(recipe.episodes), "--micro-tokens", "2048", "--threads", "1"]
    words += ["--optimiser.lr", str(recipe.lr), "--optimiser.lr-warmup", str(recipe.warmup)]
    words += ["--optimiser.schedule", "cosine", "--optimiser.weight-decay", "0"]
    words += ["--eval-every", "10", "--eval-samples", "1"]
    return words


def train_words(split: str = "generated") -> list[str]:
    """Options of `turngym train` that put it into the embedded world."""
    make = {"config": "small", "on_invalid": "noop"}
    return ["--env", ENV_ID, "--split", split, "--make", json.dumps(make), "--max-turns", str(MAX_TURNS)]


def make_tokenizer() -> Any:
    """One token for each phrase that the generated games can say; the answer to `help` is one, too."""
    from turngym.envs.alfworld.engine import NativeEngine
    from turngym.envs.alfworld.game import load_game
    from turngym.envs.alfworld.generate import SMALL, generate
    from turngym.envs.alfworld.vocabulary import vocabulary

    engine = NativeEngine(load_game(generate(SMALL, "train", 0)))
    engine.reset()
    return build_phrase_tokenizer(
        [*vocabulary(SMALL), engine.step("help")[0], CHAT.system or "", "<action>", "</action>"]
    )


def write_untrained(recipe: TinyRecipe, folder: Path) -> Path:
    """A model folder with random weights, the phrase tokenizer and the chat settings."""
    try:
        from turngym.trainers.model import save_model, tiny_qwen3
    except ImportError as error:
        raise TurngymError(f"training needs torch and transformers: pip install 'turngym[train]' ({error})") from error
    tokenizer = make_tokenizer()
    model = tiny_qwen3(
        len(tokenizer),
        width=recipe.width,
        layers=recipe.layers,
        heads=recipe.heads,
        max_length=CHAT.max_context or 1024,
        eos_id=tokenizer.eos_token_id,
        pad_id=tokenizer.pad_token_id,
        seed=recipe.seed,
    )
    folder.mkdir(parents=True, exist_ok=True)
    save_model(model, folder)
    tokenizer.save_pretrained(str(folder))
    CHAT.save(folder)
    return folder
