"""A small generated shop of WebShop."""

from __future__ import annotations

from collections.abc import Iterable

from turngym.agents.rendering.chat_settings import ChatSettings
from turngym.agents.worlds.worlds import EmbeddedWorld, TinyRecipe
from turngym.envs.webshop.generate import SMALL, vocabulary


def _phrases() -> Iterable[str]:
    return vocabulary(SMALL)


WORLD = EmbeddedWorld(
    name="webshop",
    env_id="turngym/WebShop-v0",
    split="train",
    # the expert may search only for what the instruction says: a title would be news to who reads it
    make={"profile": "embedded-small", "on_invalid": "noop", "oracle_query": "instruction"},
    max_turns=12,
    panel="webshop-quickstart",
    chat=ChatSettings(
        channel="text",
        observation_role="user",
        system="You are in a shop. Buy what is asked for.",
        max_new_tokens=12,
        max_context=1536,
    ),
    phrases=_phrases,
    # the student has only seen clean episodes: it knows neither refusals nor a way back from a wrong page
    recipes={"teacher": TinyRecipe(steps=300), "student": TinyRecipe(steps=160, noise=(0.0, 0.0), mistakes=0.0)},
)
