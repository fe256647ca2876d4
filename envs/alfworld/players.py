"""Who plays ALFWorld without a model: three experts and a player that makes plausible mistakes.

`next_action` is the expert that knows the whole state. `SearchingPlayer` is the expert that only knows what it has
seen, and `ReadingHouseholdPlayer` one that does not even know where things usually are unless it is told. All ask a
`Planner` for the next step towards the goal; they differ in the `Knowledge` and the order of search that they give it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from turngym.envs.alfworld.engine import NativeEngine
from turngym.envs.alfworld.pddl import Indices, LookGoal, PlaceGoal
from turngym.envs.alfworld.priors import load_priors


def next_action(engine: NativeEngine) -> str | None:
    """The next admissible action towards the goal, from any state, with knowledge of the whole state.

    It undoes what is in the way (something useless in hand), keeps what is done (an object already hot, one of two
    placed) and takes the shortest of the trips it knows of. None when the game is won or cannot be won.
    """
    state = engine.state
    done = {flag: set(getattr(state, flag)) for flag in DONE_BY.values()}
    knowledge = Knowledge(complete=True, contents=dict(enumerate(state.contents)), done=done)
    return Planner(engine, knowledge).next_action()


class SearchingPlayer:
    """An expert that only knows what the agent has seen: a player without privileges can learn to do the same.

    Call `observe(action)` after every step of the engine, also of actions that others chose. The choice is a function
    of the visible history alone: take the target as soon as it is seen; else look into the next unseen receptacle,
    receptacle types in the order of `search_order`, receptacles of one type in the order of the room line; those at
    the agent's own location first, if the target may be there.

    A receptacle is seen when the agent goes to, opens or examines it while it is not closed. States of objects are
    known from the player's own heating, cooling and cleaning: the game does not say that something in the fridge is
    cool already.
    """

    def __init__(self, engine: NativeEngine) -> None:
        self.engine = engine
        self.known = Knowledge()
        self._location = engine.state.location
        self._opened = frozenset(engine.state.opened)

    def observe(self, action: str) -> None:
        """Learn from `action`, which the engine has just played (whether or not it was admissible)."""
        engine, known, state = self.engine, self.known, self.engine.state
        verb, _, argument = action.strip().partition(" ")
        receptacle = engine.game.receptacle_index.get(argument.removeprefix("to ") if verb == "go" else argument)
        near = here_now(engine)
        if receptacle is not None and receptacle in near and accessible(engine, receptacle):
            # the words do not tell whether the game took the action; only a change of its state does
            arrived = verb == "go" and self._location != state.location
            opened = verb == "open" and receptacle not in self._opened
            if arrived or opened or verb == "examine":
                # only the mark that it was seen: the loop below fills in what it holds
                known.contents[receptacle] = ()
        for seen in near:
            if seen in known.contents and accessible(engine, seen):
                known.contents[seen] = state.contents[seen]
        thing = engine.game.object_index.get(argument.partition(" with ")[0])
        flag = DONE_BY.get(verb, "")
        if thing is not None and flag and thing in getattr(state, flag):
            known.done[flag].add(thing)
            # hot and cool exclude each other
            if flag in ("hot", "cool"):
                known.done["cool" if flag == "hot" else "hot"].discard(thing)
        self._location = state.location
        self._opened = frozenset(state.opened)

    def act(self) -> str | None:
        """The next admissible action; None when the game is won or everything was searched in vain."""
        return Planner(self.engine, self.known, self._order).next_action()

    def _order(self, kind: str) -> Mapping[str, int]:
        return search_order(kind)


DONE_BY = {"clean": "clean", "heat": "hot", "cool": "cool", "use": "toggled"}
"""What an object is once a verb was done to it."""


class ReadingHouseholdPlayer(SearchingPlayer):
    """A `SearchingPlayer` that does not know where things usually are: it looks where a text says.

    Receptacle types come in the order in which the text names them first, whatever is sought; types that it does not
    name, and all without a text, in the order of the room line. A model that imitates it learns to read such texts,
    and nothing about where things are.
    """

    def __init__(self, engine: NativeEngine) -> None:
        super().__init__(engine)
        self._told: dict[str, int] = {}

    def read(self, text: str) -> None:
        """Look in the order of this text from now on."""
        named = dict.fromkeys(f"{word}type" for word in re.findall(r"[a-z]+", text))
        present = [kind for kind in named if kind in self.engine.problem.receptacle_types]
        self._told = {kind: rank for rank, kind in enumerate(present)}

    def _order(self, kind: str) -> Mapping[str, int]:
        return self._told


@dataclass(slots=True, kw_only=True)
class Knowledge:
    """Where objects are and what was done to them, as far as the player knows. Indices are those of `Problem`."""

    contents: dict[int, Indices] = field(default_factory=dict)
    """Receptacles whose contents are known; every other one is unseen."""
    complete: bool = False
    """Whether this is the whole state: locations and doors far away included."""
    done: dict[str, set[int]] = field(default_factory=lambda: {flag: set() for flag in DONE_BY.values()})
    """Objects that are `clean`, `hot`, `cool` or `toggled`."""

    def has(self, thing: int, flag: str) -> bool:
        """Whether `thing` is known to be `clean`, `hot` or `cool`."""
        # a player never slices: `sliced` is not among what it knows
        return thing in self.done.get(flag, ())

    def places(self, things: Collection[int]) -> list[tuple[int, int]]:
        """Known (object, receptacle) pairs of `things`, by receptacle, then object."""
        return [(o, r) for r in sorted(self.contents) for o in self.contents[r] if o in things]

    def holders(self, things: Collection[int]) -> list[int]:
        """Known receptacles that hold any of `things`, ascending."""
        return [r for r in sorted(self.contents) if any(o in things for o in self.contents[r])]


def here_now(engine: NativeEngine) -> Indices:
    """Receptacles at the agent's location: the ones that `examine` is admissible for."""
    return engine.problem.receptacles_at[engine.state.location]


def accessible(engine: NativeEngine, receptacle: int) -> bool:
    """Whether its contents can be seen and changed by an agent that stands there."""
    return receptacle not in engine.problem.openable or receptacle in engine.state.opened


@cache
def usually_closed() -> frozenset[str]:
    """The types (`cabinettype`) of which most receptacles can be opened in real games."""
    return frozenset(f"{name.lower()}type" for name, share in load_priors().openable.items() if share > 0.5)


APPLIANCES = {
    "clean": ("clean", ("sinkbasintype", "sinktype")),
    "hot": ("heat", ("microwavetype",)),
    "cool": ("cool", ("fridgetype",)),
}
"""Goal flag to verb and receptacle types."""


class Planner:
    """The next action towards the goal, from any state, for a player with the given knowledge.

    One decision: it is built for a state and a knowledge, asked once and thrown away.
    """

    def __init__(
        self, engine: NativeEngine, known: Knowledge, order: Callable[[str], Mapping[str, int]] | None = None
    ) -> None:
        self.engine, self.known, self.order = engine, known, order or search_order
        self.problem, self.state = engine.problem, engine.state

    def next_action(self) -> str | None:
        """An admissible action; None when the game is won or the player sees no way on."""
        if self.engine.won:
            return None
        goal = self.problem.goal
        return self._look(goal) if isinstance(goal, LookGoal) else self._place(goal)

    def _look(self, goal: LookGoal) -> str | None:
        held, problem = self.state.held, self.problem
        if held < 0:
            movable = problem.unary["pickupable"] & problem.goal_objects
            return self._fetch(self.known.places(movable), goal.object_type)
        if problem.object_types[held] != goal.object_type:
            return self._drop()
        lamps = [o for o in problem.objects_of(goal.lamp_type) if o in problem.unary["toggleable"]]
        lit = self.known.holders(self.known.done["toggled"].intersection(lamps))
        spots = lit or self.known.holders(lamps)
        if not spots:
            return self._seek(goal.lamp_type)
        spot = self._nearest(spots)
        if spot not in here_now(self.engine):
            return f"go to {self._receptacle(spot)}"
        lamp = next(o for o in self.known.contents[spot] if o in lamps)
        return f"use {self._object(lamp)}"

    def _place(self, goal: PlaceGoal) -> str | None:
        held, problem = self.state.held, self.problem
        targets = problem.goal_objects
        spots = problem.receptacles_of(goal.receptacle_type)
        done = {r: self._done(r, targets, goal) for r in spots}
        # both must end in the same one: stay with the fullest
        if goal.count > 1 and any(done.values()):
            spots = [max(spots, key=lambda r: (len(done[r]), -r))]
        if held < 0:
            placed = {(o, r) for r in spots for o in done[r]}
            movable = problem.unary["pickupable"] & targets
            options = [option for option in self.known.places(movable) if option not in placed]
            # the option whose whole trip (fetch, treat, bring) takes the fewest actions; the first of equals
            options = sorted(options, key=lambda option: self._trip(option[0], option[1], spots, goal))
            return self._fetch(options[:1], goal.object_type)
        if held not in targets:
            return self._drop()
        for flag in goal.flags:
            if not self.known.has(held, flag):
                return self._treat(held, flag)
        return self._put(held, [r for r in spots if self._fits(r, held)])

    def _done(self, receptacle: int, targets: Collection[int], goal: PlaceGoal) -> list[int]:
        inside = self.known.contents.get(receptacle, ())
        return [o for o in inside if o in targets and all(self.known.has(o, flag) for flag in goal.flags)]

    def _trip(self, thing: int, receptacle: int, spots: Sequence[int], goal: PlaceGoal) -> int:
        """Actions to fetch `thing` from `receptacle`, treat it and bring it to the nearest of `spots`."""
        cost, position = self._steps_to(None, receptacle) + 1, receptacle
        for flag in (flag for flag in goal.flags if not self.known.has(thing, flag)):
            machines = [r for kind in APPLIANCES[flag][1] for r in self.problem.receptacles_of(kind)]
            machine = next((r for r in machines if self._together(position, r)), None)
            cost += 1 + (machine is None)
            position = machine if machine is not None else machines[0] if machines else position
        # a door that is opened to take something out stays open
        last_steps = [self._steps_to(position, r) - (r == receptacle and self._closed(r)) for r in spots]
        return cost + min(last_steps, default=0)

    def _steps_to(self, position: int | None, receptacle: int) -> int:
        """Actions from `position` (a receptacle; None: the agent's) until `receptacle` is open before the agent."""
        return int(not self._together(position, receptacle)) + int(self._closed(receptacle))

    def _together(self, position: int | None, receptacle: int) -> bool:
        """Whether `receptacle` is known to be at the location of `position`."""
        near = here_now(self.engine)
        if self.known.complete and position is not None:
            where = self.problem.receptacle_location
            return where[position] == where[receptacle]
        return position == receptacle or (receptacle in near and (position is None or position in near))

    def _closed(self, receptacle: int) -> bool:
        """Whether `receptacle` is closed. One that was never visited is taken to be as its type usually is."""
        knowledge = self.known
        if knowledge.complete or receptacle in knowledge.contents or receptacle in here_now(self.engine):
            return not accessible(self.engine, receptacle)
        return self.problem.receptacle_types[receptacle] in usually_closed()

    def _nearest(self, receptacles: Sequence[int]) -> int:
        """The receptacle that takes the fewest actions to stand before, open; the first of equals."""
        return min(receptacles, key=lambda r: self._steps_to(None, r))

    def _fetch(self, options: Sequence[tuple[int, int]], kind: str) -> str | None:
        """The next action on the way to the nearest (object, receptacle) of `options`; if there are none, of a search
        for `kind`."""
        if not options:
            return self._seek(kind)
        thing, receptacle = min(options, key=lambda option: self._steps_to(None, option[1]))
        way = self._approach(receptacle)
        return way or f"take {self._object(thing)} from {self._receptacle(receptacle)}"

    def _seek(self, kind: str) -> str | None:
        """The next action on the way to the next receptacle to look into for an object of `kind` (`mugtype`)."""
        problem, near, order = self.problem, here_now(self.engine), self.order(kind)
        unseen = [r for r, at in enumerate(problem.receptacle_location) if at >= 0 and r not in self.known.contents]

        def rank(receptacle: int) -> tuple[bool, int, int]:
            order_rank = order.get(problem.receptacle_types[receptacle], len(order))
            return (receptacle not in near or order_rank == len(order), order_rank, receptacle)

        if not unseen:
            return None
        receptacle = min(unseen, key=rank)
        return self._approach(receptacle) or f"examine {self._receptacle(receptacle)}"

    def _treat(self, thing: int, flag: str) -> str | None:
        verb, kinds = APPLIANCES[flag]
        machines = [r for kind in kinds for r in self.problem.receptacles_of(kind)]
        if not machines:
            return None
        near = here_now(self.engine)
        machine = next((r for r in machines if r in near), machines[0])
        # standing there is enough: the rules need no open door for heating, cooling and cleaning
        if machine not in near:
            return f"go to {self._receptacle(machine)}"
        return f"{verb} {self._object(thing)} with {self._receptacle(machine)}"

    def _put(self, thing: int, spots: Sequence[int]) -> str | None:
        if not spots:
            return None
        spot = self._nearest(spots)
        command = self.engine.game.wording.put_command
        return self._approach(spot) or command.format(o=self._object(thing), r=self._receptacle(spot))

    def _drop(self) -> str | None:
        """Put what is in hand and of no use into the nearest receptacle that takes it."""
        held = self.state.held
        return self._put(held, [r for r in range(len(self.problem.receptacles)) if self._fits(r, held)])

    def _fits(self, receptacle: int, thing: int) -> bool:
        problem = self.problem
        kinds = (problem.receptacle_types[receptacle], problem.object_types[thing])
        return problem.receptacle_location[receptacle] >= 0 and kinds in problem.can_contain

    def _approach(self, receptacle: int) -> str | None:
        """The next step on the way to an open `receptacle`; None when it is reached."""
        if receptacle not in here_now(self.engine):
            return f"go to {self._receptacle(receptacle)}"
        return f"open {self._receptacle(receptacle)}" if self._closed(receptacle) else None

    def _receptacle(self, receptacle: int) -> str:
        return self.engine.game.receptacle_names[receptacle]

    def _object(self, thing: int) -> str:
        return self.engine.game.object_names[thing]


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
    worth = {r: count / priors.opened[r][1] / (1 + (priors.openable[r] > 0.5)) for r, count in counts.items()}
    ranked = sorted(worth, key=lambda receptacle: (-worth[receptacle], receptacle))
    return {f"{receptacle.lower()}type": rank for rank, receptacle in enumerate(ranked)}


# --- plausible mistakes: the commands of a player that misremembers where things are and what it holds

_VERBS = ("go", "take", "move", "treat", "open", "use")
_SHARES = (0.35, 0.3, 0.1, 0.1, 0.1, 0.05)


def plausible_mistake(engine: NativeEngine, rng: np.random.Generator) -> str:
    """A well-formed command about this house that may be impossible now; the goal's objects are named most often."""
    game, goal = engine.game, sorted(engine.problem.goal_objects)

    def pick(options: Sequence[str]) -> str:
        return options[int(rng.integers(len(options)))]

    def thing() -> str:
        if goal and rng.random() < 0.5:
            return game.object_names[goal[int(rng.integers(len(goal)))]]
        return pick(game.object_names)

    def place() -> str:
        near = here_now(engine)
        if near and rng.random() < 0.6:
            return game.receptacle_names[near[int(rng.integers(len(near)))]]
        return pick(game.receptacle_names)

    verb = _VERBS[int(rng.choice(len(_VERBS), p=_SHARES))]
    if verb == "go":
        return f"go to {pick(game.receptacle_names)}"
    if verb == "take":
        return f"take {thing()} from {place()}"
    if verb == "move":
        return game.wording.put_command.format(o=thing(), r=place())
    if verb == "treat":
        return f"{pick(('clean', 'heat', 'cool'))} {thing()} with {place()}"
    return f"{pick(('open', 'close'))} {place()}" if verb == "open" else f"use {thing()}"
