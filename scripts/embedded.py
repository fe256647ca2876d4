"""The embedded default: a small generated household, and models tiny enough to train on two CPU cores."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turngym.agents.phrase_tokenizer import build_phrase_tokenizer
from turngym.agents.settings import ChatSettings

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
    steps: int = 300
    """Updates of supervised fine-tuning."""
    episodes: int = 64
    """Expert episodes per update; none is shown twice."""
    noise: tuple[float, float] = (0.0, 0.5)
    """Share of random actions in an episode, drawn per episode; the expert labels every state that they lead to."""
    lr: float = 3e-3
    seed: int = 0


RECIPES = {
    "teacher": TinyRecipe(),
    "student": TinyRecipe(steps=60, noise=(0.0, 0.0), seed=1),
}


def env_kwargs(part: str) -> dict[str, Any]:
    """Arguments for `gym.make(ENV_ID, ...)`: games of `part`, `train` or `eval`."""
    return {
        "split": "generated",
        "config": "small",
        "part": part,
        "max_turns": MAX_TURNS,
        "on_invalid": "noop",
        "channel": CHAT.channel,
        "disable_env_checker": True,
    }


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
