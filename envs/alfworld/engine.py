"""The native engine: the ALFWorld state machine over a Game, equal in every byte to TextWorld with alfworld's wrappers.

Rules are the shipped PDDL domain's, odd corners included: `go to` a receptacle at the agent's own location is not
possible, `examine <object>` needs it in hand, heat / cool / clean need no open door, lamps are never turned off.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

from turngym.envs.alfworld.game import Game
from turngym.envs.alfworld.pddl import Indices, LookGoal, PlaceGoal, Problem, listing

# State of one play, and the commands that are possible in it.

Command = tuple[str, int, int]
"""(verb, index, index): what a command means; -1 where there is no index."""
_TREATMENTS = (
    ("clean", "cleanable", frozenset({"sinktype", "sinkbasintype"})),
    ("heat", "heatable", frozenset({"microwavetype"})),
    ("cool", "coolable", frozenset({"fridgetype"})),
)
_KNIVES = frozenset({"knifetype", "butterknifetype"})


@dataclass(slots=True)
class State:
    """What playing changes; indices are those of `Problem`."""

    location: int
    held: int
    """Object in hand, or -1."""
    opened: set[int]
    contents: list[Indices]
    """By receptacle: objects in it, ascending."""
    at: list[Indices]
    """By location: objects said to be there, ascending."""
    taken: list[Indices]
    """By receptacle: objects once taken out of it and not put back since, ascending."""
    clean: set[int]
    hot: set[int]
    cool: set[int]
    sliced: set[int]
    toggled: set[int]

    @classmethod
    def start(cls, problem: Problem) -> State:
        """The state that the problem's facts describe."""
        flags = [set(problem.unary[name]) for name in ("isclean", "ishot", "iscool", "issliced", "istoggled")]
        taken: list[Indices] = [()] * len(problem.receptacles)
        places = list(problem.contents), list(problem.at), taken
        return cls(problem.start, problem.held, set(problem.opened), *places, *flags)

    def freeze(self) -> tuple[Any, ...]:
        """An immutable, hashable, picklable copy."""
        flags = (frozenset(flag) for flag in (self.clean, self.hot, self.cool, self.sliced, self.toggled))
        places = tuple(self.contents), tuple(self.at), tuple(self.taken)
        return (self.location, self.held, frozenset(self.opened), *places, *flags)

    @classmethod
    def thaw(cls, frozen: tuple[Any, ...]) -> State:
        """The state that `freeze` copied, or `record`."""
        location, held, opened, contents, at, taken, *flags = frozen
        by_receptacle, by_location, gone = ([tuple(things) for things in place] for place in (contents, at, taken))
        return cls(location, held, set(opened), by_receptacle, by_location, gone, *map(set, flags))

    def record(self) -> list[Any]:
        """`freeze` as JSON holds it, sets sorted; `thaw` reads it too."""
        flags = (sorted(flag) for flag in (self.clean, self.hot, self.cool, self.sliced, self.toggled))
        places = ([list(things) for things in place] for place in (self.contents, self.at, self.taken))
        return [self.location, self.held, sorted(self.opened), *places, *flags]


def with_object(things: Indices, thing: int) -> Indices:
    """`things` and `thing`, ascending."""
    return things if thing in things else tuple(sorted((*things, thing)))


def without_object(things: Indices, thing: int) -> Indices:
    """`things` without `thing`."""
    return tuple([other for other in things if other != thing])


def go_commands(game: Game, location: int) -> dict[str, Command]:
    """The `go to` commands that are possible from a location, sorted; made once per game and location."""
    found = game.go.get(location)
    if found is None:
        found = {command[0]: command[1] for command in game.ways if command[1][2] != location}
        game.go[location] = found
    return found


def local_commands(game: Game, state: State) -> dict[str, Command]:
    """Every possible command other than `go to`, with its meaning."""
    problem, names, things = game.problem, game.receptacle_names, game.object_names
    held, unary = state.held, problem.unary
    found: dict[str, Command] = {"inventory": ("inventory", -1, -1), "look": ("look", -1, -1)}
    if game.wording.help is not None:
        found["help"] = ("help", -1, -1)
    if held >= 0:
        found[f"examine {things[held]}"] = ("examine object", held, -1)
    for r in problem.receptacles_at[state.location]:
        name = names[r]
        found[f"examine {name}"] = ("examine receptacle", r, -1)
        reachable = True
        if r in problem.openable:
            reachable = r in state.opened
            if reachable:
                found[f"close {name}"] = ("close", r, -1)
            else:
                found[f"open {name}"] = ("open", r, -1)
        for thing in state.contents[r]:
            if held < 0 and reachable and thing in unary["pickupable"]:
                found[f"take {things[thing]} from {name}"] = ("take", thing, r)
            if thing in unary["toggleable"]:
                found[f"use {things[thing]}"] = ("use", thing, -1)
        if held >= 0:
            _with_held(game, found, r, reachable, held)
    if held >= 0 and problem.object_types[held] in _KNIVES:
        for thing in state.at[state.location]:
            if thing in unary["sliceable"]:
                found[f"slice {things[thing]} with {things[held]}"] = ("slice", thing, held)
    return found


def _with_held(game: Game, found: dict[str, Command], r: int, reachable: bool, held: int) -> None:
    problem = game.problem
    thing, name, kind = game.object_names[held], game.receptacle_names[r], problem.receptacle_types[r]
    if reachable and (kind, problem.object_types[held]) in problem.can_contain:
        found[game.wording.put_command.format(o=thing, r=name)] = ("put", held, r)
    for verb, ability, kinds in _TREATMENTS:
        if kind in kinds and held in problem.unary[ability]:
            found[f"{verb} {thing} with {name}"] = (verb, held, r)


# Whether a goal holds in a state, and how much of it.


def won(problem: Problem, state: State) -> bool:
    """Whether the goal holds."""
    goal = problem.goal
    if isinstance(goal, LookGoal):
        return _holding(problem, goal, state) and _lit(problem, goal, state)
    wanted = _with_flags(goal, state, problem.goal_objects)
    return _most_in_one_place(problem, goal, state, wanted) >= goal.count


def goal_rate(problem: Problem, state: State) -> float:
    """Share of goal conditions that hold, in [0, 1], counted as ALFRED does.

    Place: object in receptacle (1). Clean / heat / cool: some object in place, some object treated, one object both
    (3). Two: how many of them share a receptacle (2). Look: object in hand, lamp on at the agent's location (2).
    Source: [alfred] section 5; docs/algorithms.md#goal-conditions.
    """
    goal = problem.goal
    if isinstance(goal, LookGoal):
        return (_holding(problem, goal, state) + _lit(problem, goal, state)) / 2
    things = problem.goal_objects
    placed = _most_in_one_place(problem, goal, state, things)
    if not goal.flags:
        return min(placed, goal.count) / goal.count
    treated = _with_flags(goal, state, things)
    met = (placed > 0) + bool(treated) + (_most_in_one_place(problem, goal, state, treated) >= goal.count)
    return met / 3


def _with_flags(goal: PlaceGoal, state: State, things: frozenset[int]) -> frozenset[int]:
    for flag in goal.flags:
        things = things & getattr(state, flag)
    return things


def _most_in_one_place(problem: Problem, goal: PlaceGoal, state: State, things: frozenset[int]) -> int:
    if not things:
        return 0
    return max((len(things.intersection(state.contents[r])) for r in problem.goal_receptacles), default=0)


def _holding(problem: Problem, goal: LookGoal, state: State) -> bool:
    return state.held >= 0 and problem.object_types[state.held] == goal.object_type


def _lit(problem: Problem, goal: LookGoal, state: State) -> bool:
    here = problem.receptacles_at[state.location]
    kinds, lamps = problem.object_types, problem.unary["toggleable"]
    return any(
        kinds[lamp] == goal.lamp_type and lamp in lamps and any(lamp in state.contents[r] for r in here)
        for lamp in state.toggled
    )


NOTHING = "Nothing happens."
_PASSIVE = frozenset({"look", "inventory", "help", "examine receptacle", "examine object"})


class NativeEngine:
    """One play of a game. Any text is a legal command; one that is not possible answers `Nothing happens.`"""

    _local: dict[str, Command] | None
    _admissible: tuple[str, ...] | None
    _won: bool | None

    def __init__(self, game: Game) -> None:
        self.game = game
        self.problem = game.problem
        self._start = State.start(game.problem).freeze()
        self._acts = {
            "go": self._go,
            "take": self._take,
            "put": self._put,
            "open": self._open,
            "close": self._close,
            "use": self._use,
            "clean": self._clean,
            "heat": self._heat,
            "cool": self._cool,
            "slice": self._slice,
            "examine receptacle": self._examine_receptacle,
            "examine object": self._examine_object,
            "look": self._look,
            "inventory": self._inventory,
            "help": self._help,
        }
        self.set_state(self._start)

    def reset(self) -> str:
        """Back to the start; returns the first observation."""
        self.set_state(self._start)
        if self.problem.receptacles_at[self.state.location]:
            return self.game.welcome(self._look(-1, -1))
        return self.game.intro

    def step(self, command: str) -> tuple[str, bool]:
        """Play `command` (matched exactly after `strip()`); returns the observation and whether the game is won."""
        found = self.find(command.strip())
        if found is None:
            return NOTHING, self.won
        verb, first, second = found
        observation = self._acts[verb](first, second)
        if verb not in _PASSIVE:
            self._forget()
        return observation, self.won

    def admissible(self) -> tuple[str, ...]:
        """Every command that is possible now, sorted, each once."""
        if self._admissible is None:
            here = sorted(self._here())
            # the many `go to` commands are sorted once per location, only the few others at every step
            middle = bisect_left(here, "go to ")
            self._admissible = (*here[:middle], *go_commands(self.game, self.state.location), *here[middle:])
        return self._admissible

    def find(self, command: str) -> Command | None:
        """What an exact command means: (verb, index, index), -1 for no index; None if it is not possible now."""
        found = self._here().get(command)
        return go_commands(self.game, self.state.location).get(command) if found is None else found

    @property
    def won(self) -> bool:
        """Whether the goal holds right now."""
        if self._won is None:
            self._won = won(self.problem, self.state)
        return self._won

    @property
    def goal_rate(self) -> float:
        """Share of the task's goal conditions that hold now, in [0, 1] (ALFRED's goal-condition success)."""
        return goal_rate(self.problem, self.state)

    def get_state(self) -> tuple[Any, ...]:
        """An exact, picklable, hashable snapshot."""
        return self.state.freeze()

    def set_state(self, state: tuple[Any, ...]) -> None:
        """Return to a snapshot of the same game."""
        self.state = State.thaw(state)
        self._forget()

    def _forget(self) -> None:
        self._local = self._admissible = self._won = None

    def _here(self) -> dict[str, Command]:
        if self._local is None:
            self._local = local_commands(self.game, self.state)
        return self._local

    # --- one method per verb: change the state, say what happened

    def _go(self, receptacle: int, location: int) -> str:
        self.state.location = location
        arrival = self.game.wording.go.format(
            r=self.game.receptacle_names[receptacle], lend=self.game.location_names[location]
        )
        return arrival + self._examine_receptacle(receptacle, -1)

    def _take(self, thing: int, receptacle: int) -> str:
        state = self.state
        state.contents[receptacle] = without_object(state.contents[receptacle], thing)
        state.taken[receptacle] = with_object(state.taken[receptacle], thing)
        state.at[state.location] = without_object(state.at[state.location], thing)
        state.held = thing
        return f"You pick up the {self.game.object_names[thing]} from the {self.game.receptacle_names[receptacle]}."

    def _put(self, thing: int, receptacle: int) -> str:
        state = self.state
        state.contents[receptacle] = with_object(state.contents[receptacle], thing)
        state.taken[receptacle] = without_object(state.taken[receptacle], thing)
        state.at[state.location] = with_object(state.at[state.location], thing)
        state.held = -1
        names = self.game.object_names[thing], self.game.receptacle_names[receptacle]
        return self.game.wording.put.format(o=names[0], r=names[1])

    def _open(self, receptacle: int, _: int) -> str:
        self.state.opened.add(receptacle)
        name = self.game.receptacle_names[receptacle]
        return f"You open the {name}. {self._examine_receptacle(receptacle, -1)}"

    def _close(self, receptacle: int, _: int) -> str:
        self.state.opened.discard(receptacle)
        return f"You close the {self.game.receptacle_names[receptacle]}."

    def _use(self, thing: int, _: int) -> str:
        self.state.toggled.add(thing)
        return f"You turn on the {self.game.object_names[thing]}."

    def _clean(self, thing: int, receptacle: int) -> str:
        self.state.clean.add(thing)
        return self._treated("clean", thing, receptacle)

    def _heat(self, thing: int, receptacle: int) -> str:
        self.state.hot.add(thing)
        self.state.cool.discard(thing)
        return self._treated("heat", thing, receptacle)

    def _cool(self, thing: int, receptacle: int) -> str:
        self.state.cool.add(thing)
        self.state.hot.discard(thing)
        return self._treated("cool", thing, receptacle)

    def _treated(self, verb: str, thing: int, receptacle: int) -> str:
        return f"You {verb} the {self.game.object_names[thing]} using the {self.game.receptacle_names[receptacle]}."

    def _slice(self, thing: int, knife: int) -> str:
        self.state.sliced.add(thing)
        return f"You sliced the {self.game.object_names[thing]} with the {self.game.object_names[knife]}."

    def _examine_receptacle(self, receptacle: int, _: int) -> str:
        name = self.game.receptacle_names[receptacle]
        names = self.game.object_names
        if receptacle not in self.problem.openable:
            return f"On the {name}, you see {listing([names[i] for i in self.state.contents[receptacle]])}."
        if receptacle not in self.state.opened:
            return f"The {name} is closed."
        return f"The {name} is open. In it, you see {listing([names[i] for i in self.state.contents[receptacle]])}."

    def _examine_object(self, thing: int, _: int) -> str:
        state, unary, names = self.state, self.problem.unary, self.game.object_names
        name = names[thing]
        if thing in unary["isreceptacleobject"]:
            return f"This is a normal {name}. In it, you see {listing([names[i] for i in self.problem.inside[thing]])}."
        clean, sliced = thing in state.clean, thing in state.sliced
        warm = "hot" if thing in state.hot else "cool" if thing in state.cool else ""
        if sliced and (clean or warm):
            return f"This is a {warm}{' and ' if clean and warm else ''}{'clean' if clean else ''} sliced {name}."
        if clean:
            return f"This is a {warm}{' and ' if warm else ''}clean {name}."
        if warm:
            return f"This is a {'cold' if warm == 'cool' else warm} {name}."
        if thing in unary["toggleable"] and thing in state.toggled:
            return f"This {name} is on."
        if sliced and thing in unary["sliceable"]:
            return f"This is a sliced {name}."
        return f"There's nothing special about {name}."

    def _look(self, _: int, __: int) -> str:
        state, names = self.state, self.game.receptacle_names
        here = self.problem.receptacles_at[state.location]
        if not here:
            return "You are in the middle of a room. Looking quickly around you, you see nothing."
        facing = ", ".join(names[r] for r in here[:-1]) + (", and " if len(here) > 1 else "") + names[here[-1]]
        # TextWorld knows `not_inreceptacle` only of objects that were taken out of that receptacle
        moved = [self.game.object_names[i] for i in state.at[state.location] for r in here if i in state.taken[r]]
        return f"You are facing the {facing}. Next to it, you see {listing(moved)}."

    def _inventory(self, _: int, __: int) -> str:
        if self.state.held < 0:
            return "You are not carrying anything."
        return f"You are carrying: {listing([self.game.object_names[self.state.held]])}."

    def _help(self, _: int, __: int) -> str:
        return self.game.wording.help or NOTHING
