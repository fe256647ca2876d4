"""The embedded worlds: small generated task families with models tiny enough for two CPU cores."""

from __future__ import annotations

from turngym.agents.worlds.built_in import ALL_WORLDS, REAL_WORLDS, WORLDS
from turngym.agents.worlds.worlds import EmbeddedWorld
from turngym.core.errors import TurngymError, did_you_mean

__all__ = ["ALL_WORLDS", "REAL_WORLDS", "WORLDS", "EmbeddedWorld", "load_world"]


def load_world(name: str) -> EmbeddedWorld:
    """The embedded world called `name`. Raises TurngymError if there is none."""
    if name not in ALL_WORLDS:
        hint = did_you_mean(name, [*ALL_WORLDS])
        raise TurngymError(f"world {name!r}: the embedded worlds are {', '.join(ALL_WORLDS)}.{hint}")
    return ALL_WORLDS[name]
