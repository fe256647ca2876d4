"""Many small fictional worlds of multi-hop search."""

from __future__ import annotations

from collections.abc import Iterable

from turngym.agents.rendering.chat_settings import ChatSettings
from turngym.agents.worlds.worlds import EmbeddedWorld, TinyRecipe
from turngym.envs.search.world import TINY
from turngym.envs.search.world_questions import vocabulary


def _phrases() -> Iterable[str]:
    return vocabulary(TINY)


WORLD = EmbeddedWorld(
    name="search",
    env_id="turngym/Search-v0",
    split="train",
    # one passage a search: a name finds its article, and contexts stay short
    make={"source": "world", "config": "tiny", "topk": 1},
    max_turns=8,
    panel="search-quickstart",
    tags=("search", "answer"),
    chat=ChatSettings(
        channel="text",
        observation_role="user",
        system="Search, then answer.",
        max_new_tokens=12,
        max_context=1024,
    ),
    phrases=_phrases,
    # Before step 70 or so no model of this size copies. The student has only just learned to, from clean episodes: it
    # often gets one part of a name wrong, and has never seen what follows.
    recipes={
        "teacher": TinyRecipe(steps=600, mistakes=1.0),
        "student": TinyRecipe(steps=220, noise=(0.0, 0.0), mistakes=0.0),
    },
)
