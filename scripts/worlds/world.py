"""What an embedded world is made of, and how its tiny models come from nothing but a seed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turngym.agents.rendering.chat_settings import ChatSettings
from turngym.agents.rendering.phrase_tokenizer import build_phrase_tokenizer
from turngym.envs.core import TurngymError

CHECKPOINTS = Path(__file__).parents[1] / "checkpoints"


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyRecipe:
    """How one shipped model is made by supervised fine-tuning on noisy expert episodes."""

    width: int = 128
    layers: int = 2
    heads: int = 4
    steps: int
    """Updates."""
    episodes: int = 64
    """Expert episodes per update. A task may come again, but with other noise."""
    noise: tuple[float, float] = (0.0, 0.5)
    """Share of random actions in an episode, drawn per episode; the expert labels every state that they lead to."""
    mistakes: float = 0.5
    """Share of those that are plausible mistakes, most of them refused by the environment."""
    lr: float = 3e-3
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DistilRecipe:
    """How the quickstart distils: the same for every method."""

    steps: int = 100
    episodes: int = 64
    lr: float = 1e-3
    warmup: int = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A small task family of one environment, and the two models that the quickstart starts from."""

    name: str
    env_id: str
    split: str
    """What is trained on, as `--split` of `turngym train`."""
    make: Mapping[str, Any]
    """Further arguments of gym.make; the panel's evaluations use the same."""
    max_turns: int
    panel: str
    tags: tuple[str, ...] = ("action",)
    """The tags of the environment's text channel (`ToolSpec.tags`)."""
    expert: str = "expert"
    """Who demonstrates: a name that `turngym train --expert` takes."""
    chat: ChatSettings
    """With a system message of its own: the environment's instructions would be many tokens to a phrase tokenizer."""
    phrases: Callable[[], Iterable[str]]
    """Everything that the world can say or hear, cut into the pieces that become single tokens."""
    recipes: Mapping[str, TinyRecipe]
    """`teacher` and `student`."""
    distil: DistilRecipe = field(default_factory=DistilRecipe)

    def checkpoint(self, role: str) -> Path:
        """Folder of the shipped model, `teacher` or `student`."""
        return CHECKPOINTS / self.name / role

    def train_words(self, split: str | None = None) -> list[str]:
        """Options of `turngym train` that put it into this world."""
        words = ["--env", self.env_id, "--split", split or self.split, "--env-kwargs", json.dumps(dict(self.make))]
        return [*words, "--max-turns", str(self.max_turns)]

    def distil_words(self, split: str | None = None) -> list[str]:
        """Options of `turngym train` for distillation with the tiny models."""
        recipe = self.distil
        words = [*self.train_words(split), "--episodes", str(recipe.episodes), "--micro-tokens", "2048"]
        words += ["--threads", "1", "--optimizer.lr", str(recipe.lr), "--optimizer.lr-warmup", str(recipe.warmup)]
        words += ["--optimizer.schedule", "cosine", "--optimizer.weight-decay", "0"]
        return [*words, "--eval-every", "10", "--eval-samples", "1"]

    def sft_words(self, recipe: TinyRecipe) -> list[str]:
        """Options of `turngym train` for the supervised fine-tuning that makes a tiny model."""
        low, high = recipe.noise
        words = ["--algorithm", "sft", "--expert", self.expert, "--noise", str(low), str(high)]
        words += ["--mistakes", str(recipe.mistakes), "--steps", str(recipe.steps), "--seed", str(recipe.seed)]
        words += ["--episodes", str(recipe.episodes), "--optimizer.lr", str(recipe.lr)]
        words += ["--optimizer.schedule", "cosine", "--optimizer.lr-warmup", str(min(20, recipe.steps // 5))]
        words += ["--optimizer.betas", "0.9", "0.95", "--checkpoint-every", "50", "--micro-tokens", "2048"]
        return [*words, *self.train_words()]

    def make_tokenizer(self) -> Any:
        """One token for each phrase of the world, of the system message and of the text channel's tags."""
        tags = [piece for tag in self.tags for piece in (f"<{tag}>", f"</{tag}>")]
        return build_phrase_tokenizer([*self.phrases(), self.chat.system or "", *tags])

    def write_untrained(self, recipe: TinyRecipe, folder: Path) -> Path:
        """A model folder with random weights, the phrase tokenizer and the chat settings."""
        try:
            from turngym.trainers.models.model import save_model, tiny_qwen3
        except ImportError as error:
            raise TurngymError(
                f"training needs torch and transformers: pip install 'turngym[train]' ({error})"
            ) from error
        tokenizer = self.make_tokenizer()
        model = tiny_qwen3(
            len(tokenizer),
            width=recipe.width,
            layers=recipe.layers,
            heads=recipe.heads,
            max_length=self.chat.max_context or 1024,
            eos_id=tokenizer.eos_token_id,
            pad_id=tokenizer.pad_token_id,
            seed=recipe.seed,
        )
        folder.mkdir(parents=True, exist_ok=True)
        save_model(model, folder)
        tokenizer.save_pretrained(str(folder))
        self.chat.save(folder)
        return folder
