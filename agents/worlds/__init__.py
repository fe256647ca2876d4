"""The embedded worlds: small generated task families with models tiny enough for two CPU cores."""

from __future__ import annotations

from turngym.agents.worlds.built_in import REAL_WORLDS, WORLDS
from turngym.agents.worlds.worlds import EmbeddedWorld
from turngym.envs.core.errors import TurngymError, did_you_mean


def load_world(name: str) -> EmbeddedWorld:
    """The embedded world called `name`. Raises TurngymError if there is none."""
    known = {**WORLDS, **REAL_WORLDS}
    if name not in known:
        raise TurngymError(f"world {name!r}: the embedded worlds are {', '.join(known)}.{did_you_mean(name, [*known])}")
    return known[name]
