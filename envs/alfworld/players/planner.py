"""The next action towards the goal, from any state, for a player with the given knowledge."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from turngym.envs.alfworld.native.engine import NativeEngine
from turngym.envs.alfworld.native.goal import LookGoal, PlaceGoal
from turngym.envs.alfworld.players.knowledge import Knowledge, Search, here_now

APPLIANCES = {
    "clean": ("clean", ("sinkbasintype", "sinktype")),
    "hot": ("heat", ("microwavetype",)),
    "cool": ("cool", ("fridgetype",)),
}
"""Goal flag to verb and receptacle types."""


class Planner:
    """One decision: built for a state and a knowledge, asked once, thrown away."""

    def __init__(self, engine: NativeEngine, known: Knowledge, search: Search) -> None:
        self.engine, self.known, self.search = engine, known, search
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
            targets = problem.objects_of(goal.object_type)
            return self._fetch([(o, r) for o, r in self.known.places(targets) if self._movable(o)], goal.object_type)
        if problem.object_types[held] != goal.object_type:
            return self._drop()
        lamps = [o for o in problem.objects_of(goal.lamp_type) if o in problem.unary["toggleable"]]
        lit = self.known.holders(self.known.toggled.intersection(lamps))
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
        targets = [o for o in problem.objects_of(goal.object_type) if self._able(o, goal)]
        spots = problem.receptacles_of(goal.receptacle_type)
        done = {r: self._done(r, targets, goal) for r in spots}
        if goal.count > 1 and any(done.values()):  # both must end in the same one: stay with the fullest
            spots = [max(spots, key=lambda r: (len(done[r]), -r))]
        if held < 0:
            placed = {(o, r) for r in spots for o in done[r]}
            options = [(o, r) for o, r in self.known.places(targets) if (o, r) not in placed and self._movable(o)]
            return self._fetch(self._cheapest(options, spots, goal), goal.object_type)
        if held not in targets:
            return self._drop()
        for flag in goal.flags:
            if not self.known.has(held, flag):
                return self._treat(held, flag)
        return self._put(held, [r for r in spots if self._fits(r, held)])

    def _able(self, thing: int, goal: PlaceGoal) -> bool:
        return all(thing in self.problem.unary[name] for name in goal.abilities)

    def _movable(self, thing: int) -> bool:
        return thing in self.problem.unary["pickupable"]

    def _done(self, receptacle: int, targets: Collection[int], goal: PlaceGoal) -> list[int]:
        inside = self.known.contents.get(receptacle, ())
        return [o for o in inside if o in targets and all(self.known.has(o, flag) for flag in goal.flags)]

    def _cheapest(
        self, options: Sequence[tuple[int, int]], spots: Sequence[int], goal: PlaceGoal
    ) -> list[tuple[int, int]]:
        """The option whose whole trip (fetch, treat, bring) takes the fewest actions; the first of equals."""
        return sorted(options, key=lambda option: self._trip(option[0], option[1], spots, goal))[:1]

    def _trip(self, thing: int, receptacle: int, spots: Sequence[int], goal: PlaceGoal) -> int:
        cost, place = self._steps_to(None, receptacle) + 1, receptacle
        for flag in (flag for flag in goal.flags if not self.known.has(thing, flag)):
            machines = [r for kind in APPLIANCES[flag][1] for r in self.problem.receptacles_of(kind)]
            near = next((r for r in machines if self._together(place, r)), None)
            cost += 1 + (near is None)
            place = near if near is not None else machines[0] if machines else place
        # a door that is opened to take something out stays open
        doors = [self._steps_to(place, r) - (r == receptacle and self._closed(r)) for r in spots]
        return cost + min(doors, default=0)

    def _steps_to(self, place: int | None, receptacle: int) -> int:
        """Actions from `place` (a receptacle; None: where the agent is) until `receptacle` is open before the agent."""
        return int(not self._together(place, receptacle)) + int(self._closed(receptacle))

    def _together(self, place: int | None, receptacle: int) -> bool:
        if place is None:
            return receptacle in here_now(self.engine)
        return self.known.together(self.engine, place, receptacle)

    def _closed(self, receptacle: int) -> bool:
        return self.known.closed(self.engine, receptacle)

    def _nearest(self, receptacles: Sequence[int]) -> int:
        """The one that takes the fewest actions to stand before, open; the first of equals."""
        return min(receptacles, key=lambda r: self._steps_to(None, r))

    def _fetch(self, options: Sequence[tuple[int, int]], kind: str) -> str | None:
        if not options:
            return self._seek(kind)
        thing, receptacle = min(options, key=lambda option: self._steps_to(None, option[1]))
        way = self._approach(receptacle)
        return way or f"take {self._object(thing)} from {self._receptacle(receptacle)}"

    def _seek(self, kind: str) -> str | None:
        receptacle = self.search(self.engine, self.known, kind)
        if receptacle is None:
            return None
        return self._approach(receptacle) or f"examine {self._receptacle(receptacle)}"

    def _treat(self, thing: int, flag: str) -> str | None:
        verb, kinds = APPLIANCES[flag]
        machines = [r for kind in kinds for r in self.problem.receptacles_of(kind)]
        if not machines:
            return None
        here = here_now(self.engine)
        machine = next((r for r in machines if r in here), machines[0])
        # standing there is enough: the rules need no open door for heating, cooling and cleaning
        if machine not in here:
            return f"go to {self._receptacle(machine)}"
        return f"{verb} {self._object(thing)} with {self._receptacle(machine)}"

    def _put(self, thing: int, spots: Sequence[int]) -> str | None:
        if not spots:
            return None
        spot = self._nearest(spots)
        return self._approach(spot) or f"move {self._object(thing)} to {self._receptacle(spot)}"

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
