"""A PDDL problem as typed facts by index: what a game is before it has names and words."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

from turngym.envs.alfworld.errors import UnsupportedFacts
from turngym.envs.alfworld.native.goal import Goal, PlaceGoal, parse_goal

_FACT = re.compile(r"\(([^()]*)\)")
_PLAIN = re.compile(r"(?:\s*\([^()]*\))*\s*\)\s*")
_TYPED = re.compile(r"(\S+)\s+-\s+(\S+)")
_ARITY = {
    "atlocation": 2,
    "receptacleatlocation": 2,
    "objectatlocation": 2,
    "inreceptacle": 2,
    "inreceptacleobject": 2,
    "receptacletype": 2,
    "objecttype": 2,
    "cancontain": 2,
    "holds": 2,
    "holdsany": 1,
    "openable": 1,
    "opened": 1,
    "isreceptacleobject": 1,
    "pickupable": 1,
    "cleanable": 1,
    "heatable": 1,
    "coolable": 1,
    "toggleable": 1,
    "sliceable": 1,
    "isclean": 1,
    "ishot": 1,
    "iscool": 1,
    "istoggled": 1,
    "issliced": 1,
    "ison": 1,
    "checked": 1,
    "examined": 1,
    "moveable": 1,
    "full": 1,
    "wasinreceptacle": 2,
    "isreceptacleobjectfull": 1,
    "holdsanyreceptacleobject": 1,
}

Indices = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The facts of one game. Objects, receptacles and locations are indices into their sorted, lower-case ids."""

    entities: tuple[str, ...]
    """Every id that occurs in a fact, sorted: the ids that numbers are handed out to."""
    objects: tuple[str, ...]
    receptacles: tuple[str, ...]
    locations: tuple[str, ...]
    object_types: tuple[str, ...]
    """By object, for example `mugtype`; empty where the problem gives none."""
    receptacle_types: tuple[str, ...]
    receptacle_location: Indices
    """By receptacle; -1 where it stands nowhere."""
    start: int
    """The agent's first location."""
    held: int
    """The object in hand at the start, or -1."""
    contents: tuple[Indices, ...]
    """By receptacle: the objects in it at the start, ascending. An object may be in two receptacles."""
    at: tuple[Indices, ...]
    """By location: the objects that are said to be there at the start (not always where their receptacle is)."""
    inside: tuple[Indices, ...]
    """By object: other objects inside it; they never move."""
    unary: dict[str, frozenset[int]]
    """Objects by predicate: `pickupable`, `cleanable`, `heatable`, `coolable`, `toggleable`, `sliceable`,
    `isreceptacleobject`, and the starting `isclean`, `ishot`, `iscool`, `issliced`, `istoggled`."""
    openable: frozenset[int]
    opened: frozenset[int]
    can_contain: frozenset[tuple[str, str]]
    """Pairs (receptacle type, object type)."""
    goal: Goal

    @cached_property
    def receptacles_at(self) -> tuple[Indices, ...]:
        """By location: its receptacles, ascending."""
        at: list[list[int]] = [[] for _ in self.locations]
        for receptacle, location in enumerate(self.receptacle_location):
            if location >= 0:
                at[location].append(receptacle)
        return tuple(tuple(found) for found in at)

    @cached_property
    def goal_receptacles(self) -> Indices:
        """The receptacles that a place goal names; none for a look goal."""
        return tuple(self.receptacles_of(self.goal.receptacle_type)) if isinstance(self.goal, PlaceGoal) else ()

    @cached_property
    def goal_objects(self) -> frozenset[int]:
        """Objects that can serve the goal: of its type, with its static abilities."""
        found = frozenset(self.objects_of(self.goal.object_type))
        for ability in self.goal.abilities if isinstance(self.goal, PlaceGoal) else ():
            found &= self.unary[ability]
        return found

    def objects_of(self, kind: str) -> list[int]:
        """Objects of a type, ascending."""
        return [index for index, other in enumerate(self.object_types) if other == kind]

    def receptacles_of(self, kind: str) -> list[int]:
        """Receptacles of a type, ascending."""
        return [index for index, other in enumerate(self.receptacle_types) if other == kind]


def parse_problem(text: str) -> Problem:
    """Read the PDDL text. Raises ValueError (damaged) or UnsupportedFacts (not modeled)."""
    text = _without_comments(text).lower()
    objects_at, init_at, goal_at = (_section(text, name) for name in (":objects", ":init", ":goal"))
    if not objects_at < init_at < goal_at:
        raise ValueError("the problem's sections must come in the order :objects, :init, :goal")
    kinds = _typed_list(text[objects_at + len("(:objects") : init_at])
    facts = _facts(text[init_at + len("(:init") : goal_at])
    return _build(kinds, facts, parse_goal(_balanced(text, goal_at)))


def _without_comments(text: str) -> str:
    return "\n".join(line.split(";", 1)[0] for line in text.split("\n")) if ";" in text else text


def _section(text: str, name: str) -> int:
    found = text.find(f"({name}")
    if found < 0:
        raise ValueError(f"the problem has no ({name} ...) section")
    return found


def _balanced(text: str, start: int) -> str:
    depth = 0
    for match in re.compile(r"[()]").finditer(text, start):
        depth += 1 if match.group() == "(" else -1
        if depth == 0:
            return text[start : match.end()]
    raise ValueError("the problem's (:goal ...) section is not closed; the text may be cut off")


def _typed_list(text: str) -> dict[str, str]:
    text = text.rstrip().removesuffix(")")
    pairs = _TYPED.findall(text)
    # a type after every name: the pattern has read all of it
    if len(text.split()) == 3 * len(pairs):
        return dict(pairs)
    kinds: dict[str, str] = {}
    names: list[str] = []
    tokens = iter(text.split())
    for token in tokens:
        if token == "-":
            kinds.update(dict.fromkeys(names, next(tokens, "")))
            names.clear()
        else:
            names.append(token)
    if names:
        raise ValueError(f"(:objects ...) gives no type for {names[0]!r}")
    return kinds


def _facts(text: str) -> dict[str, list[tuple[str, ...]]]:
    if _PLAIN.fullmatch(text) is None:
        rest = " ".join(_FACT.sub("", text).split())
        raise UnsupportedFacts(f"its (:init ...) section is not a plain list of facts, near {rest[:80]!r}")
    facts: dict[str, list[tuple[str, ...]]] = defaultdict(list)
    for fact in _FACT.findall(text):
        name, *arguments = fact.split() or [""]
        facts[name].append(tuple(arguments))
    for name, rows in facts.items():
        if name not in _ARITY:
            raise UnsupportedFacts(f"(:init ...) has the unknown predicate ({name} ...)")
        if set(map(len, rows)) != {_ARITY[name]}:
            wrong = next(row for row in rows if len(row) != _ARITY[name])
            raise ValueError(f"fact ({name} {' '.join(wrong)}) needs {_ARITY[name]} arguments")
    return facts


def _build(kinds: dict[str, str], facts: dict[str, list[tuple[str, ...]]], goal: Goal) -> Problem:
    entities = sorted({word for rows in facts.values() for row in rows for word in row})
    for word in entities:
        if word not in kinds:
            raise ValueError(f"a fact names {word!r}, which (:objects ...) does not declare")
    ids = {kind: [word for word in entities if kinds[word] == kind] for kind in ("object", "receptacle", "location")}
    index = {word: number for names in ids.values() for number, word in enumerate(names)}
    of = _Reader(facts, kinds, index)
    where = of.function("receptacleatlocation", "receptacle", "location")
    held = of.pairs("holds", "agent", "object")
    start = of.pairs("atlocation", "agent", "location")
    if len(start) != 1 or len(held) > 1 or bool(held) != bool(facts.get("holdsany")):
        raise UnsupportedFacts("it must start with one agent at one location, holding at most one object")
    return Problem(
        entities=tuple(entities),
        objects=tuple(ids["object"]),
        receptacles=tuple(ids["receptacle"]),
        locations=tuple(ids["location"]),
        object_types=of.types("objecttype", ids["object"]),
        receptacle_types=of.types("receptacletype", ids["receptacle"]),
        receptacle_location=tuple(where.get(number, -1) for number in range(len(ids["receptacle"]))),
        start=start[0][1],
        held=held[0][1] if held else -1,
        contents=_groups(of.pairs("inreceptacle", "object", "receptacle"), len(ids["receptacle"])),
        at=_groups(of.pairs("objectatlocation", "object", "location"), len(ids["location"])),
        inside=_groups(
            [(a, b) for a, b in of.pairs("inreceptacleobject", "object", "object") if a != b], len(ids["object"])
        ),
        unary={name: of.members(name, "object") for name in _OBJECT_PREDICATES},
        openable=of.members("openable", "receptacle"),
        opened=of.members("opened", "receptacle"),
        can_contain=frozenset((row[0], row[1]) for row in facts.get("cancontain", ())),
        goal=goal,
    )


_OBJECT_PREDICATES = (
    *("pickupable", "cleanable", "heatable", "coolable", "toggleable", "sliceable", "isreceptacleobject"),
    *("isclean", "ishot", "iscool", "issliced", "istoggled"),
)


class _Reader:
    """Facts as index pairs, each argument checked against its declared type."""

    def __init__(self, facts: dict[str, list[tuple[str, ...]]], kinds: dict[str, str], index: dict[str, int]) -> None:
        self.facts, self.kinds, self.index = facts, kinds, index

    def number(self, name: str, word: str, kind: str) -> int:
        if self.kinds[word] != kind:
            raise ValueError(
                f"fact ({name} ... {word}) needs a {kind}, but (:objects ...) declares a {self.kinds[word]}"
            )
        # agents have no index: there is only one
        return self.index.get(word, 0)

    def pairs(self, name: str, first: str, second: str) -> list[tuple[int, int]]:
        rows = self.facts.get(name, ())
        return [(self.number(name, a, first), self.number(name, b, second)) for a, b in rows]

    def members(self, name: str, kind: str) -> frozenset[int]:
        return frozenset(self.number(name, row[0], kind) for row in self.facts.get(name, ()))

    def function(self, name: str, first: str, second: str) -> dict[int, int]:
        values: dict[int, int] = {}
        for a, b in self.pairs(name, first, second):
            if values.setdefault(a, b) != b:
                raise UnsupportedFacts(f"({name} ...) gives one {first} two {second}s")
        return values

    def types(self, name: str, ids: list[str]) -> tuple[str, ...]:
        found: dict[str, str] = {}
        for word, kind in self.facts.get(name, ()):
            if found.setdefault(word, kind) != kind:
                raise UnsupportedFacts(f"{word} has two types, {found[word]} and {kind}")
        return tuple(found.get(word, "") for word in ids)


def _groups(pairs: list[tuple[int, int]], size: int) -> tuple[Indices, ...]:
    groups: list[set[int]] = [set() for _ in range(size)]
    for member, group in pairs:
        groups[group].add(member)
    return tuple(tuple(sorted(group)) for group in groups)
