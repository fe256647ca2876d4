"""How many processes play where nobody says: as many as the cores allow, if their start pays."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from turngym.agents.executor.cores import available_cores

EPISODES = 2000
"""Fewer are not worth the start of workers: some seconds of processor time each, for a third of the time that such
episodes of a tiny model take."""
PARAMETERS = 64_000_000
"""Larger models keep several cores busy with their matrix products, and every worker holds a copy."""
WORKERS = 4
"""Most that are started unasked: a batch cut finer decodes too few episodes at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Playing:
    """What is to be played, as far as it is known before the first episode."""

    episodes: int
    """Of the whole run or evaluation."""
    model: Any = None
    """The model that plays in this process; None: nothing plays here that a worker could play faster."""
    ahead: bool = False
    """A copy of the model plays while the model learns: the cores are busy with both already."""

    @classmethod
    def of(cls, policy: Any, episodes: int, *, ahead: bool = False) -> Playing:
        """`policy` continues token ids; only a local engine's model is this process's own."""
        # not imported: then no engine exists, and torch need not be loaded
        local = sys.modules.get("turngym.agents.local_engine.engine")
        here = local is not None and isinstance(policy, local.LocalEngine)
        return cls(episodes=episodes, model=policy.model if here else None, ahead=ahead)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How many workers, and why."""

    workers: int
    """0: this process plays."""
    reason: str

    def __str__(self) -> str:
        return f"{self.workers} workers ({self.reason})" if self.workers else f"this process ({self.reason})"


def choose_workers(playing: Playing, cores: int | None = None) -> Choice:
    """Follows from what is played and the cores alone, so that a run that goes on plays as it began."""
    cores = available_cores() if cores is None else cores
    if playing.model is None:
        return Choice(workers=0, reason="no model of its own plays")
    first = next(playing.model.parameters())
    size = sum(part.numel() for part in playing.model.parameters())
    for refuses, reason in (
        (cores < 2, "one core"),
        (first.device.type != "cpu", f"the model is on {first.device.type}"),
        (playing.ahead, "it plays ahead"),
        (size > PARAMETERS, f"the model has {size / 1e6:.0f} million parameters"),
        (playing.episodes < EPISODES, f"{playing.episodes} episodes"),
    ):
        if refuses:
            return Choice(workers=0, reason=reason)
    return Choice(workers=min(cores, WORKERS), reason=f"{cores} cores, {playing.episodes} episodes")
