"""Experts for ALFWorld: one that knows the whole state, one that only knows what it has seen."""

from __future__ import annotations

from functools import cache

from turngym.envs.alfworld.generate.priors import load_priors
from turngym.envs.alfworld.native.engine import NativeEngine
from turngym.envs.alfworld.players.knowledge import Knowledge, Memory, full_knowledge, here_now
from turngym.envs.alfworld.players.planner import Planner


def next_action(engine: NativeEngine) -> str | None:
    """The next admissible action towards the goal, from any state, with knowledge of the whole state.

    It undoes what is in the way (something useless in hand), keeps what is done (an object already hot, one of two
    placed) and takes the shortest of the trips it knows of. None when the game is won or cannot be won.
    """
    return Planner(engine, full_knowledge(engine), _nothing_to_search).next_action()


def _nothing_to_search(_engine: NativeEngine, _known: Knowledge, _kind: str) -> int | None:
    return None


class SearchingExpert:
    """An expert that only knows what the agent has seen: a player without privileges can learn to do the same.

    Call `observe(action, engine)` after every step, also of actions that others chose. The choice is a function of the
    visible history alone: take the target as soon as it is seen; else look into the next unseen receptacle, receptacle
    types in the order of `search_order`, receptacles of one type in the order of the room line; those at the agent's
    own location first, if the target may be there.
    """

    def __init__(self, engine: NativeEngine) -> None:
        self.memory = Memory(engine)

    def observe(self, action: str, engine: NativeEngine) -> None:
        """Learn from a step that was just played."""
        self.memory.observe(action, engine)

    def next_action(self, engine: NativeEngine) -> str | None:
        """The next admissible action; None when the game is won or everything was searched in vain."""
        return Planner(engine, self.memory.known, next_unseen).next_action()


class SearchingPlayer:
    """The searching expert as a player of one episode: it follows the engine it was made for."""

    def __init__(self, engine: NativeEngine) -> None:
        self._engine = engine
        self._expert = SearchingExpert(engine)

    def observe(self, action: str) -> None:
        self._expert.observe(action, self._engine)

    def act(self) -> str | None:
        return self._expert.next_action(self._engine)


def next_unseen(engine: NativeEngine, known: Knowledge, kind: str) -> int | None:
    """The next receptacle to look into for an object of `kind` (`mugtype`)."""
    problem = engine.problem
    here = here_now(engine)
    order = search_order(kind)
    unseen = [r for r, location in enumerate(problem.receptacle_location) if location >= 0 and r not in known.contents]

    def rank(receptacle: int) -> tuple[bool, int, int]:
        place = order.get(problem.receptacle_types[receptacle], len(order))
        return (receptacle not in here or place == len(order), place, receptacle)

    return min(unseen, key=rank, default=None)


@cache
def search_order(kind: str) -> dict[str, int]:
    """Receptacle types (`fridgetype`), best first: objects of `kind` that one holds in real games, per action to look.

    Going there is one action, opening a second. Types in which none was ever found are absent: they come last.
    """
    priors = load_priors()
    name = next((n for n in priors.anywhere if f"{n.lower()}type" == kind), None)
    if name is None:
        return {}
    counts = priors.anywhere[name]
    worth = {p: count / priors.receptacles[p] / (1 + (priors.openable[p] > 0.5)) for p, count in counts.items()}
    ranked = sorted(worth, key=lambda place: (-worth[place], place))
    return {f"{place.lower()}type": rank for rank, place in enumerate(ranked)}
