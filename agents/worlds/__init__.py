"""The embedded worlds: small generated task families with models tiny enough for two CPU cores."""

from __future__ import annotations

import importlib

from turngym.agents.worlds.worlds import EmbeddedWorld
from turngym.envs.core.errors import TurngymError, did_you_mean

WORLDS = {
    "alfworld": "turngym.agents.worlds.alfworld",
    "alfworld-loops": "turngym.agents.worlds.alfworld_loops",
    "webshop": "turngym.agents.worlds.webshop",
    "search": "turngym.agents.worlds.search",
    "search-loops": "turngym.agents.worlds.search_loops",
}
"""Name on the command line -> module with `WORLD`; imported when asked for."""


def load_world(name: str) -> EmbeddedWorld:
    """The embedded world called `name`; raises TurngymError if there is none."""
    if name not in WORLDS:
        known = ", ".join(WORLDS)
        raise TurngymError(f"world {name!r}: the embedded worlds are {known}.{did_you_mean(name, [*WORLDS])}")
    world: EmbeddedWorld = importlib.import_module(WORLDS[name]).WORLD
    return world
