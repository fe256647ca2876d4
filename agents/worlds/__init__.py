"""The embedded worlds: small generated task families with models tiny enough for two CPU cores."""

from __future__ import annotations

from turngym.agents.worlds.built_in import WORLDS
from turngym.agents.worlds.worlds import EmbeddedWorld
from turngym.envs.core.errors import TurngymError, did_you_mean


def load_world(name: str) -> EmbeddedWorld:
    """The embedded world called `name`. Raises TurngymError if there is none."""
    if name not in WORLDS:
        known = ", ".join(WORLDS)
        raise TurngymError(f"world {name!r}: the embedded worlds are {known}.{did_you_mean(name, [*WORLDS])}")
    return WORLDS[name]
