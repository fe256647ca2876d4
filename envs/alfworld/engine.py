"""How the native engine plays a game: a state machine, equal in every byte to TextWorld with alfworld's wrappers.

The rules are those of the shipped PDDL domain, odd corners included: `go to` a receptacle at the agent's own location
is not possible, `examine <object>` needs it in hand, heat, cool and clean need no open door, and lamps are never
turned off.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import chain
from typing import Any

import msgspec

from turngym.envs.alfworld.game import Game
from turngym.envs.alfworld.pddl import Indices, LookGoal, Problem, listing

NOTHING = "Nothing happens."
Command = tuple[str, int, int]
"""(verb, index, index): what a command means; -1 where there is no index."""
_PASSIVE = frozenset({"look", "inventory", "help", "examine receptacle", "examine object"})
"""Verbs that change nothing."""
_TREATMENTS = (
    ("clean", "cleanable", frozenset({"sinktype", "sinkbasintype"})),
    ("heat", "heatable", frozenset({"microwavetype"})),
    ("cool", "coolable", frozenset({"fridgetype"})),
)
_KNIVES = frozenset({"knifetype", "butterknifetype"})


class GameState(msgspec.Struct, array_like=True):
    """The part of a game that playing changes. Indices are those of `Problem`. Its record is a list of JSON."""

    location: int
    held: int
    """Object in hand, or -1."""
    opened: set[int]
    contents: list[Indices]
    """Objects in each receptacle, ascending."""
    at: list[Indices]
    """Objects said to be at each location, ascending."""
    taken: list[Indices]
    """Objects once taken out of each receptacle and not put back since, ascending."""
    clean: set[int]
    hot: set[int]
    cool: set[int]
    sliced: set[int]
    toggled: set[int]

    @classmethod
    def start(cls, problem: Problem) -> GameState:
        """The state that the problem's facts describe."""
        flags = [set(problem.unary[name]) for name in ("isclean", "ishot", "iscool", "issliced", "istoggled")]
        taken_out: list[Indices] = [()] * len(problem.receptacles)
        lists = list(problem.contents), list(problem.at), taken_out
        return cls(problem.start, problem.held, set(problem.opened), *lists, *flags)

    def record(self) -> list[Any]:
        """A copy in types of JSON, sets sorted."""
        record: list[Any] = msgspec.to_builtins(self, order="deterministic")
        return record


def check_state(problem: Problem, state: GameState) -> None:
    """Raises ValueError for a state that no game of `problem` may have."""
    sizes = (len(state.contents), len(state.taken), len(state.at))
    receptacles, locations = len(problem.receptacles), len(problem.locations)
    if sizes != (receptacles, receptacles, locations):
        raise ValueError(f"contents of {sizes} places; the game has {(receptacles, receptacles, locations)}")
    flags = (state.clean, state.hot, state.cool, state.sliced, state.toggled)
    things = chain.from_iterable((*state.contents, *state.at, *state.taken, *flags))
    for role, numbers, least, count in (
        ("location", [state.location], 0, locations),
        ("receptacle", state.opened, 0, receptacles),
        ("object in hand", [state.held], -1, len(problem.objects)),
        ("object", things, 0, len(problem.objects)),
    ):
        if odd := [number for number in numbers if not least <= number < count]:
            raise ValueError(f"{role} {odd[0]} of {count}")


class NativeEngine:
    """One play of a game. Any text is a legal command; one that is not possible answers `Nothing happens.`"""

    # What follows from the state; None until it is asked for, and again after every change.
    _local: dict[str, Command] | None
    _admissible: tuple[str, ...] | None
    _goal_rate: float | None

    def __init__(self, game: Game) -> None:
        self.game = game
        self.problem = game.problem
        self._start = GameState.start(game.problem).record()
        self.set_state(self._start)

    def reset(self) -> str:
        """Back to the start; returns the first observation."""
        self.set_state(self._start)
        if self.problem.receptacles_at[self.state.location]:
            return self.game.welcome(self._look())
        return self.game.intro

    def step(self, command: str) -> tuple[str, bool]:
        """Play `command` (matched exactly after `strip()`); returns the observation and whether the game is won."""
        meaning = self.find(command.strip())
        if meaning is None:
            return NOTHING, self.won
        observation = self._play(*meaning)
        if meaning[0] not in _PASSIVE:
            self._forget()
        return observation, self.won

    def admissible(self) -> tuple[str, ...]:
        """Every command that is possible now, sorted, each once."""
        if self._admissible is None:
            local = sorted(self._here())
            # the many `go to` commands are sorted once per location, only the few others at every step
            middle = bisect_left(local, "go to ")
            self._admissible = (*local[:middle], *self._go_commands(), *local[middle:])
        return self._admissible

    def find(self, command: str) -> Command | None:
        """What an exact command means: (verb, index, index), -1 for no index; None if it is not possible now."""
        local = self._here().get(command)
        return self._go_commands().get(command) if local is None else local

    @property
    def won(self) -> bool:
        """Whether the goal holds right now."""
        # exact: the rate is a quotient of two equal whole numbers where all conditions hold
        return self.goal_rate == 1.0

    @property
    def goal_rate(self) -> float:
        """Share of the task's goal conditions that hold now, in [0, 1] (ALFRED's goal-condition success)."""
        if self._goal_rate is None:
            self._goal_rate = goal_rate(self.problem, self.state)
        return self._goal_rate

    def get_state(self) -> list[Any]:
        """An exact snapshot in types of JSON."""
        return self.state.record()

    def set_state(self, state: Sequence[Any]) -> None:
        """Return to a snapshot of the same game. Raises a ValueError for what has not the shape of one."""
        self.state = msgspec.convert(state, GameState)
        self._forget()

    def _forget(self) -> None:
        self._local = self._admissible = self._goal_rate = None

    # --- which commands are possible

    def _go_commands(self) -> dict[str, Command]:
        """The `go to` commands that are possible here, sorted; made once per game and location."""
        game, location = self.game, self.state.location
        commands = game.go.get(location)
        if commands is None:
            commands = game.go[location] = {text: command for text, command in game.ways if command[2] != location}
        return commands

    def _here(self) -> dict[str, Command]:
        """Every possible command other than `go to`, with its meaning."""
        if self._local is not None:
            return self._local
        game, problem, state = self.game, self.problem, self.state
        things, held, unary = game.object_names, state.held, problem.unary
        commands: dict[str, Command] = {"inventory": ("inventory", -1, -1), "look": ("look", -1, -1)}
        if game.wording.help is not None:
            commands["help"] = ("help", -1, -1)
        if held >= 0:
            commands[f"examine {things[held]}"] = ("examine object", held, -1)
        for r in problem.receptacles_at[state.location]:
            name, kind = game.receptacle_names[r], problem.receptacle_types[r]
            commands[f"examine {name}"] = ("examine receptacle", r, -1)
            reachable = r not in problem.openable or r in state.opened
            if r in problem.openable:
                verb = "close" if reachable else "open"
                commands[f"{verb} {name}"] = (verb, r, -1)
            for thing in state.contents[r]:
                if held < 0 and reachable and thing in unary["pickupable"]:
                    commands[f"take {things[thing]} from {name}"] = ("take", thing, r)
                if thing in unary["toggleable"]:
                    commands[f"use {things[thing]}"] = ("use", thing, -1)
            if held < 0:
                continue
            if reachable and (kind, problem.object_types[held]) in problem.can_contain:
                commands[game.wording.put_command.format(o=things[held], r=name)] = ("put", held, r)
            for verb, ability, kinds in _TREATMENTS:
                if kind in kinds and held in unary[ability]:
                    commands[f"{verb} {things[held]} with {name}"] = (verb, held, r)
        if held >= 0 and problem.object_types[held] in _KNIVES:
            for thing in state.at[state.location]:
                if thing in unary["sliceable"]:
                    commands[f"slice {things[thing]} with {things[held]}"] = ("slice", thing, held)
        self._local = commands
        return commands

    # --- what a command does and says

    def _play(self, verb: str, first: int, second: int) -> str:
        """Changes the state as a possible command does, whose meaning this is, and returns the observation."""
        game, state = self.game, self.state
        things, places = game.object_names, game.receptacle_names
        if verb == "go":
            state.location = second
            arrival = game.wording.go.format(r=places[first], lend=game.location_names[second])
            return arrival + self._examine_receptacle(first)
        if verb == "examine receptacle":
            return self._examine_receptacle(first)
        if verb == "open":
            state.opened.add(first)
            return f"You open the {places[first]}. {self._examine_receptacle(first)}"
        if verb == "close":
            state.opened.discard(first)
            return f"You close the {places[first]}."
        if verb == "take":
            state.contents[second] = _without(state.contents[second], first)
            state.taken[second] = _with(state.taken[second], first)
            state.at[state.location] = _without(state.at[state.location], first)
            state.held = first
            return f"You pick up the {things[first]} from the {places[second]}."
        if verb == "put":
            state.contents[second] = _with(state.contents[second], first)
            state.taken[second] = _without(state.taken[second], first)
            state.at[state.location] = _with(state.at[state.location], first)
            state.held = -1
            return game.wording.put.format(o=things[first], r=places[second])
        if verb in ("clean", "heat", "cool"):
            # hot and cool exclude each other; clean stays
            if verb == "clean":
                state.clean.add(first)
            else:
                gained, lost = (state.hot, state.cool) if verb == "heat" else (state.cool, state.hot)
                gained.add(first)
                lost.discard(first)
            return f"You {verb} the {things[first]} using the {places[second]}."
        if verb == "use":
            state.toggled.add(first)
            return f"You turn on the {things[first]}."
        if verb == "slice":
            state.sliced.add(first)
            return f"You sliced the {things[first]} with the {things[second]}."
        if verb == "examine object":
            return self._examine_object(first)
        if verb == "look":
            return self._look()
        if verb == "help":
            return game.wording.help or NOTHING
        assert verb == "inventory", verb
        return f"You are carrying: a {things[state.held]}." if state.held >= 0 else "You are not carrying anything."

    def _examine_receptacle(self, receptacle: int) -> str:
        name = self.game.receptacle_names[receptacle]
        contents = listing([self.game.object_names[thing] for thing in self.state.contents[receptacle]])
        if receptacle not in self.problem.openable:
            return f"On the {name}, you see {contents}."
        opened = receptacle in self.state.opened
        return f"The {name} is open. In it, you see {contents}." if opened else f"The {name} is closed."

    def _examine_object(self, thing: int) -> str:
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

    def _look(self) -> str:
        state, game = self.state, self.game
        receptacles = self.problem.receptacles_at[state.location]
        if not receptacles:
            return "You are in the middle of a room. Looking quickly around you, you see nothing."
        *others, last = (game.receptacle_names[r] for r in receptacles)
        facing = f"{', '.join(others)}, and {last}" if others else last
        # TextWorld knows `not_inreceptacle` only of objects that were taken out of that receptacle
        moved = [game.object_names[o] for o in state.at[state.location] for r in receptacles if o in state.taken[r]]
        return f"You are facing the {facing}. Next to it, you see {listing(moved)}."


def goal_rate(problem: Problem, state: GameState) -> float:
    """Share of goal conditions that hold, in [0, 1], counted as ALFRED does; 1.0 exactly where the game is won.

    Place: object in receptacle (1). Clean / heat / cool: some object in place, some object treated, one object both
    (3). Two: how many of them share a receptacle (2). Look: object in hand, lamp on at the agent's location (2).
    Source: [alfred] section 5; docs/algorithms.md#goal-conditions.
    """
    goal, kinds = problem.goal, problem.object_types
    if isinstance(goal, LookGoal):
        holding = state.held >= 0 and kinds[state.held] == goal.object_type
        receptacles = problem.receptacles_at[state.location]
        lit = any(
            kinds[lamp] == goal.lamp_type
            and lamp in problem.unary["toggleable"]
            and any(lamp in state.contents[r] for r in receptacles)
            for lamp in state.toggled
        )
        return (holding + lit) / 2

    def most_in_one_place(things: frozenset[int]) -> int:
        if not things:
            return 0
        return max((len(things.intersection(state.contents[r])) for r in problem.goal_receptacles), default=0)

    things = problem.goal_objects
    placed = most_in_one_place(things)
    if not goal.flags:
        return min(placed, goal.count) / goal.count
    treated = things
    for flag in goal.flags:
        treated = treated & getattr(state, flag)
    return ((placed > 0) + bool(treated) + (most_in_one_place(treated) >= goal.count)) / 3


def _with(things: Indices, thing: int) -> Indices:
    return things if thing in things else tuple(sorted((*things, thing)))


def _without(things: Indices, thing: int) -> Indices:
    return tuple([index for index in things if index != thing])
