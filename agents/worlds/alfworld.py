"""A small generated household of ALFWorld."""

from __future__ import annotations

from collections.abc import Iterable

from turngym.agents.rendering.chat_settings import ChatSettings
from turngym.agents.worlds.worlds import EmbeddedWorld, TinyRecipe
from turngym.envs.alfworld.engine import NativeEngine
from turngym.envs.alfworld.game import load_game
from turngym.envs.alfworld.generate import generate
from turngym.envs.alfworld.priors import SMALL, vocabulary


def _phrases() -> Iterable[str]:
    """Each phrase that the generated games can say; the answer to `help` is one, too."""
    engine = NativeEngine(load_game(generate(SMALL, "train", 0)))
    engine.reset()
    return [*vocabulary(SMALL), engine.step("help")[0]]


WORLD = EmbeddedWorld(
    name="alfworld",
    env_id="turngym/ALFWorld-v0",
    split="generated",
    make={"config": "small", "on_invalid": "noop"},
    max_turns=24,
    panel="alfworld-quickstart",
    expert="searching",
    chat=ChatSettings(
        channel="text",
        observation_role="user",
        system="You are in a house. Do the task.",
        max_new_tokens=12,
        max_context=1024,
    ),
    phrases=_phrases,
    # Both grow from the same random weights, but the student has never seen what the house says to a mistake. What
    # other choices did is in docs/quickstart.md under "What the tiny models taught us".
    recipes={"teacher": TinyRecipe(steps=500), "student": TinyRecipe(steps=300, mistakes=0.0)},
)
