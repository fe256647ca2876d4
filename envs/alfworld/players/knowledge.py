"""What a player knows of a game: everything (the state itself), or only what it has seen so far."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import cache

from turngym.envs.alfworld.generate.priors import load_priors
from turngym.envs.alfworld.native.engine import NativeEngine
from turngym.envs.alfworld.native.problem import Indices

HEAT, COOL, CLEAN = "heat", "cool", "clean"


@dataclass(slots=True, kw_only=True)
class Knowledge:
    """Where objects are and what was done to them, as far as the player knows. Indices are those of `Problem`."""

    contents: dict[int, Indices] = field(default_factory=dict)
    """Receptacles whose contents are known; every other one is unseen."""
    complete: bool = False
    """Whether this is the whole state: locations and doors far away included."""
    clean: set[int] = field(default_factory=set)
    hot: set[int] = field(default_factory=set)
    cool: set[int] = field(default_factory=set)
    toggled: set[int] = field(default_factory=set)

    def has(self, thing: int, flag: str) -> bool:
        """Whether `thing` is known to be `clean`, `hot` or `cool`."""
        flags: dict[str, set[int]] = {"clean": self.clean, "hot": self.hot, "cool": self.cool}
        return thing in flags.get(flag, ())

    def places(self, things: Collection[int]) -> list[tuple[int, int]]:
        """Known (object, receptacle) pairs of `things`, by receptacle, then object."""
        return [(o, r) for r in sorted(self.contents) for o in self.contents[r] if o in things]

    def holders(self, things: Collection[int]) -> list[int]:
        """Known receptacles that hold any of `things`, ascending."""
        return [r for r in sorted(self.contents) if any(o in things for o in self.contents[r])]

    def together(self, engine: NativeEngine, first: int, second: int) -> bool:
        """Whether two receptacles are known to share a location."""
        if self.complete:
            where = engine.problem.receptacle_location
            return where[first] == where[second]
        here = here_now(engine)
        return first == second or (first in here and second in here)

    def closed(self, engine: NativeEngine, receptacle: int) -> bool:
        """Whether `receptacle` is closed; one that was never visited is taken to be as its type usually is."""
        if self.complete or receptacle in self.contents or receptacle in here_now(engine):
            return not accessible(engine, receptacle)
        return usually_closed(engine.problem.receptacle_types[receptacle])


def full_knowledge(engine: NativeEngine) -> Knowledge:
    """Everything: the privileged view."""
    state = engine.state
    return Knowledge(
        complete=True,
        contents=dict(enumerate(state.contents)),
        clean=set(state.clean),
        hot=set(state.hot),
        cool=set(state.cool),
        toggled=set(state.toggled),
    )


class Memory:
    """What could be read from the observations so far; `observe` after every step of the engine.

    A receptacle is seen when the agent goes to, opens or examines it while it is not closed. States of objects are
    known from the player's own heating, cooling and cleaning: the game does not say that something in the fridge is
    cool already.
    """

    def __init__(self, engine: NativeEngine) -> None:
        self.known = Knowledge()
        self._location = engine.state.location
        self._opened = frozenset(engine.state.opened)
        self._receptacles = engine.game.receptacle_index
        self._objects = engine.game.object_index

    def observe(self, action: str, engine: NativeEngine) -> None:
        """Learn from `action`, which `engine` has just played (whether or not it was admissible)."""
        verb, _, rest = action.strip().partition(" ")
        receptacle = self._receptacles.get(rest.removeprefix("to ") if verb == "go" else rest)
        here = here_now(engine)
        if receptacle is not None and receptacle in here and accessible(engine, receptacle):
            # the words do not tell whether the game took the action; only a change of its state does
            arrived = verb == "go" and self._location != engine.state.location
            opened = verb == "open" and receptacle not in self._opened
            if arrived or opened or verb == "examine":
                # only the mark that it was seen: the loop below fills in what it holds
                self.known.contents[receptacle] = ()
        for seen in here:
            if seen in self.known.contents and accessible(engine, seen):
                self.known.contents[seen] = engine.state.contents[seen]
        self._learn_flags(verb, rest, engine)
        self._location = engine.state.location
        self._opened = frozenset(engine.state.opened)

    def _learn_flags(self, verb: str, rest: str, engine: NativeEngine) -> None:
        thing = self._objects.get(rest.partition(" with ")[0])
        if thing is None:
            return
        known, state = self.known, engine.state
        if verb == HEAT and thing in state.hot:
            known.hot.add(thing)
            known.cool.discard(thing)
        elif verb == COOL and thing in state.cool:
            known.cool.add(thing)
            known.hot.discard(thing)
        elif verb == CLEAN and thing in state.clean:
            known.clean.add(thing)
        elif verb == "use" and thing in state.toggled:
            known.toggled.add(thing)


def here_now(engine: NativeEngine) -> Indices:
    """Receptacles at the agent's location: the ones that `examine` is admissible for."""
    return engine.problem.receptacles_at[engine.state.location]


def accessible(engine: NativeEngine, receptacle: int) -> bool:
    """Whether its contents can be seen and changed by an agent that stands there."""
    return receptacle not in engine.problem.openable or receptacle in engine.state.opened


@cache
def usually_closed(kind: str) -> bool:
    """Whether most receptacles of a type (`cabinettype`) can be opened in real games."""
    return any(share > 0.5 and f"{name.lower()}type" == kind for name, share in load_priors().openable.items())


Search = Callable[[NativeEngine, Knowledge, str], int | None]
"""Picks the next unseen receptacle to look into for an object type; None when nothing is left."""
