"""Multi-hop search with as many turns as the paper allows, and models that have seen players fall into loops."""

from __future__ import annotations

from dataclasses import replace

from turngym.agents.worlds.search import WORLD as SEARCH
from turngym.agents.worlds.worlds import DistillRecipe, loop_recipes

WORLD = replace(
    SEARCH,
    name="search-loops",
    # at 8 turns, the length of the other world, no loop has settled when the episode is over
    max_turns=30,
    panel="search-loops",
    chat=replace(SEARCH.chat, max_context=2048),
    recipes=loop_recipes("search/teacher", mistakes=1.0),
    # the student has all that it needs to leave a loop: at ten times this rate it knows the rest after twenty steps
    distill=DistillRecipe(lr=1e-4),
)
