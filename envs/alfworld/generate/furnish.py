"""Put the objects of a game into the receptacles of its house."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from turngym.envs.alfworld.generate.config import GeneratorConfig
from turngym.envs.alfworld.generate.house import LOOK, SIMPLE, TWO, Draw, Rejected, Thing
from turngym.envs.alfworld.generate.priors import Priors, TaskRow


@dataclass(slots=True, kw_only=True)
class Furnishing:
    """Puts objects into the receptacles `types` until the house is as full as the configuration says."""

    config: GeneratorConfig
    priors: Priors
    row: TaskRow
    types: list[str]
    draw: Draw
    things: list[Thing] = field(default_factory=list)
    load: Counter[int] = field(default_factory=Counter)

    def furnish(self) -> None:
        row, draw = self.row, self.draw
        least = 2 if row.task == TWO else 1
        for _ in range(self.draw_number(row.target, least)):
            self.put(row.target)
        if len(self.things) < least:
            raise Rejected("no place for the target")
        if row.task == LOOK:
            self.put(row.destination)
            # put() does nothing where there is no room
            if self.things[-1].type != row.destination:
                raise Rejected("no place for the lamp")
        if self.config.objects is None:
            self._as_measured()
        else:
            self._up_to(draw.between(*self.config.objects))
        # fact order would otherwise tell which object is asked for
        self.things.sort(key=lambda thing: thing.type)
        if self.config.oddities:
            self._odd()

    def kinds(self) -> list[str]:
        """Object types that can be distractors, sorted."""
        flags = self.priors.flags
        allowed = self.config.object_types
        skip = {self.row.target} | ({self.row.destination} if self.row.task == LOOK else set())
        usable = flags["pickupable"] | flags["toggleable"]
        names = self.priors.number[self.row.room]
        return [t for t in sorted(names) if t in usable and t not in skip and (allowed is None or t in allowed)]

    def draw_number(self, name: str, least: int) -> int:
        """How many of `name`, as measured in the room, at least `least`, at most the configured number."""
        counts = self.priors.number[self.row.room].get(name, {})
        most = self.config.instances
        options: Mapping[int, int] = {n: c for n, c in counts.items() if least <= n <= most}
        return self.draw.weighted(options.items()) if options else least

    def put(self, name: str) -> None:
        """Stand one more `name` somewhere it may stand; nothing happens where there is no room."""
        counts = self.priors.placed[self.row.room].get(name, {})
        solved = name == self.row.target and self.row.task in (SIMPLE, TWO)
        # real games have objects that no receptacle takes back; picking one up would leave no way on
        fixed = name not in self.priors.flags["pickupable"]
        spots: dict[str, list[int]] = {}
        for i, kind in enumerate(self.types):
            most = min(self.config.crowd, self.priors.most_objects.get(kind, 0))
            fits = kind in counts and (fixed or name in self.priors.can_contain.get(kind, ()))
            if fits and self.load[i] < most and not (solved and kind == self.row.destination):
                spots.setdefault(kind, []).append(i)
        if not spots:
            return
        options = spots[self.draw.weighted((kind, counts[kind]) for kind in spots)]
        where = options[self.draw.index(len(options))]
        self.load[where] += 1
        self.things.append(Thing(type=name, where=where))

    def _as_measured(self) -> None:
        room = self.row.room
        for name in self.kinds():
            counts = self.priors.number[room][name]
            if self.draw.chance(sum(counts.values()) / self.priors.rooms[room]):
                for _ in range(self.draw_number(name, 1)):
                    self.put(name)

    def _up_to(self, size: int) -> None:
        left = {name: sum(self.priors.number[self.row.room][name].values()) for name in self.kinds()}
        while left and len(self.things) < size:
            name = self.draw.weighted(left.items())
            del left[name]
            for _ in range(min(self.draw_number(name, 1), size - len(self.things))):
                self.put(name)

    def _odd(self) -> None:
        """Cool some objects in the fridge; stand some objects in others."""
        for thing in self.things:
            if self.types[thing.where] == "Fridge" and thing.type in self.priors.flags["coolable"]:
                thing.cool = self.draw.chance(self.priors.cool_in_fridge)
        if not self.draw.chance(self.priors.nested_per_game):
            return
        present = {thing.type for thing in self.things}
        pairs = [(p, n) for p, n in self.priors.nested if set(p) <= present and p[0] != self.row.target]
        if not pairs:
            return
        inner_type, outer_type = self.draw.weighted(pairs)
        inner = next(i for i, t in enumerate(self.things) if t.type == inner_type)
        outers = [i for i, t in enumerate(self.things) if t.type == outer_type and i != inner]
        for outer in outers:
            kind = self.types[self.things[outer].where]
            if inner_type in self.priors.can_contain.get(kind, ()):
                self.things[inner].where, self.things[inner].inside = self.things[outer].where, outer
                return
