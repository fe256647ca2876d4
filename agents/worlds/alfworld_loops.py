"""The small household, twice as long, with models that have seen players fall into loops."""

from __future__ import annotations

from dataclasses import replace

from turngym.agents.worlds.alfworld import WORLD as HOUSEHOLD
from turngym.agents.worlds.worlds import loop_recipes

WORLD = replace(
    HOUSEHOLD,
    name="alfworld-loops",
    # at 24 turns half of the episode is over before a loop has settled
    max_turns=48,
    panel="alfworld-loops",
    chat=replace(HOUSEHOLD.chat, max_context=2048),
    recipes=loop_recipes("alfworld/teacher"),
)
