"""How the PDDL problem of a game file is read, and what its entities are called.

- `parse_problem` turns the problem into a `Problem`: typed facts by index, and one of the six kinds of goal.
- `entity_names` gives the ids of a problem the names that players see.

A damaged text raises ValueError. Sound PDDL that the native engine does not model raises UnsupportedFacts.
"""

from __future__ import annotations

import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from turngym.core.errors import TaskError
from turngym.core.redaction import excerpt

Indices = tuple[int, ...]


class GameError(TaskError):
    """A game file that is missing, damaged or contradicts itself; the text names the file and the key."""


class GameUnsupported(GameError):
    """A sound game with rules or facts that the native engine does not know; `engine="textworld"` may play it."""

    def __init__(self, where: str, what: str) -> None:
        super().__init__(f'{where}: the native engine cannot play this game: {what}; try engine="textworld"')


class UnsupportedFacts(ValueError):
    """Rules or facts that are sound PDDL but that the native engine does not model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceGoal:
    """`count` distinct objects of `object_type`, each with every flag, in one receptacle of `receptacle_type`."""

    object_type: str
    receptacle_type: str
    flags: tuple[str, ...] = ()
    """Among `clean`, `hot`, `cool`, `sliced`; sorted."""
    abilities: tuple[str, ...] = ()
    """Static predicates that the object must also have, such as `heatable`; sorted."""
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LookGoal:
    """Hold an object of `object_type` where a toggled lamp of `lamp_type` is."""

    object_type: str
    lamp_type: str


Goal = PlaceGoal | LookGoal


def category(goal: Goal) -> str:
    """Returns the row of the result tables: `place`, `look`, `clean`, `heat`, `cool` or `two`."""
    if isinstance(goal, LookGoal):
        return "look"
    if goal.count == 2:
        return "two"
    for flag, row in (("hot", "heat"), ("cool", "cool"), ("clean", "clean")):
        if flag in goal.flags:
            return row
    return "place"


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The facts of one game. Objects, receptacles and locations are indices into their sorted, lower-case ids."""

    entities: tuple[str, ...]
    """Every id that occurs in a fact, sorted: the ids that numbers are handed out to."""
    objects: tuple[str, ...]
    receptacles: tuple[str, ...]
    locations: tuple[str, ...]
    object_types: tuple[str, ...]
    """Type of each object, for example `mugtype`; empty where the problem gives none."""
    receptacle_types: tuple[str, ...]
    receptacle_location: Indices
    """Location of each receptacle; -1 where it stands nowhere."""
    start: int
    """The agent's first location."""
    held: int
    """The object in hand at the start, or -1."""
    contents: tuple[Indices, ...]
    """Objects in each receptacle at the start, ascending. An object may be in two receptacles."""
    at: tuple[Indices, ...]
    """Objects that are said to be at each location at the start (not always where their receptacle is)."""
    inside: tuple[Indices, ...]
    """Other objects inside each object; they never move."""
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
        """Receptacles at each location, ascending."""
        at: list[list[int]] = [[] for _ in self.locations]
        for receptacle, location in enumerate(self.receptacle_location):
            if location >= 0:
                at[location].append(receptacle)
        return tuple(tuple(receptacles) for receptacles in at)

    @cached_property
    def goal_receptacles(self) -> Indices:
        """The receptacles that a place goal names; none for a look goal."""
        return tuple(self.receptacles_of(self.goal.receptacle_type)) if isinstance(self.goal, PlaceGoal) else ()

    @cached_property
    def goal_objects(self) -> frozenset[int]:
        """Objects that can serve the goal: of its type, with its static abilities."""
        objects = frozenset(self.objects_of(self.goal.object_type))
        for ability in self.goal.abilities if isinstance(self.goal, PlaceGoal) else ():
            objects &= self.unary[ability]
        return objects

    def objects_of(self, kind: str) -> list[int]:
        """Objects of a type, ascending."""
        return [index for index, object_type in enumerate(self.object_types) if object_type == kind]

    def receptacles_of(self, kind: str) -> list[int]:
        """Receptacles of a type, ascending."""
        return [index for index, receptacle_type in enumerate(self.receptacle_types) if receptacle_type == kind]


_FACT = re.compile(r"\(([^()]*)\)")
_FACTS_ONLY = re.compile(r"(?:\s*+\([^()]*+\))*+\s*+\)\s*+")
_TYPED = re.compile(r"(?<!\S)(\S++)\s++-\s++(\S++)")
TOKEN = re.compile(r"[()]|[^\s()]+")
_STATE_FLAGS = {"isclean": "clean", "ishot": "hot", "iscool": "cool", "issliced": "sliced"}
_ABILITIES = ("cleanable", "heatable", "coolable", "sliceable", "pickupable")
_OBJECT_PREDICATES = (*_ABILITIES, *_STATE_FLAGS, "toggleable", "isreceptacleobject", "istoggled")
_UNARY = (
    *_OBJECT_PREDICATES,
    *("openable", "opened", "holdsany", "ison", "checked", "examined", "moveable", "full"),
    *("isreceptacleobjectfull", "holdsanyreceptacleobject"),
)
_BINARY = (
    *("atlocation", "receptacleatlocation", "objectatlocation", "inreceptacle", "inreceptacleobject"),
    *("receptacletype", "objecttype", "cancontain", "holds", "wasinreceptacle"),
)
_ARITY = dict.fromkeys(_UNARY, 1) | dict.fromkeys(_BINARY, 2)
"""Every predicate of the domain, with the number of its arguments."""


def parse_problem(text: str) -> Problem:
    """Read the PDDL text of a problem. Raises ValueError (damaged) or UnsupportedFacts (not modeled)."""
    text = "\n".join(line.split(";", 1)[0] for line in text.lower().split("\n"))
    starts = []
    for name in (":objects", ":init", ":goal"):
        starts.append(text.find(f"({name}"))
        if starts[-1] < 0:
            raise ValueError(f"the problem has no ({name} ...) section")
    objects_at, init_at, goal_at = starts
    if not objects_at < init_at < goal_at:
        raise ValueError("the problem's sections must come in the order :objects, :init, :goal")
    kinds = _typed_list(text[objects_at + len("(:objects") : init_at])
    facts = _facts(text[init_at + len("(:init") : goal_at])
    goal = parse_goal(text[goal_at:])

    # number the ids of each kind in sorted order; only ids that a fact names take part
    entities = sorted({word for rows in facts.values() for row in rows for word in row})
    for word in entities:
        if word not in kinds:
            raise ValueError(f"a fact names {word!r}, which (:objects ...) does not declare")
    ids = {kind: [word for word in entities if kinds[word] == kind] for kind in ("object", "receptacle", "location")}
    index = {word: number for names in ids.values() for number, word in enumerate(names)}

    def number(name: str, word: str, kind: str) -> int:
        """The index of `word` within its kind; agents have none, because there is only one."""
        if kinds[word] != kind:
            raise ValueError(f"fact ({name} ... {word}) needs a {kind}, but (:objects ...) declares a {kinds[word]}")
        return index.get(word, 0)

    def members(name: str, kind: str) -> frozenset[int]:
        return frozenset(number(name, row[0], kind) for row in facts.get(name, ()))

    def pairs(name: str, first: str, second: str) -> list[tuple[int, int]]:
        return [(number(name, a, first), number(name, b, second)) for a, b in facts.get(name, ())]

    def groups(name: str, first: str, second: str) -> tuple[Indices, ...]:
        """Maps each index of the second kind to the indices of the first kind that a fact gives it, ascending."""
        members_of: list[set[int]] = [set() for _ in ids[second]]
        for member, group in pairs(name, first, second):
            members_of[group].add(member)
        return tuple(tuple(sorted(indices)) for indices in members_of)

    def types(name: str, words: list[str]) -> tuple[str, ...]:
        type_of: dict[str, str] = {}
        for word, kind in facts.get(name, ()):
            if type_of.setdefault(word, kind) != kind:
                raise UnsupportedFacts(f"{word} has two types, {type_of[word]} and {kind}")
        return tuple(type_of.get(word, "") for word in words)

    location: dict[int, int] = {}
    for receptacle, spot in pairs("receptacleatlocation", "receptacle", "location"):
        if location.setdefault(receptacle, spot) != spot:
            raise UnsupportedFacts("(receptacleatlocation ...) gives one receptacle two locations")
    held = pairs("holds", "agent", "object")
    start = pairs("atlocation", "agent", "location")
    if len(start) != 1 or len(held) > 1 or bool(held) != bool(facts.get("holdsany")):
        raise UnsupportedFacts("it must start with one agent at one location, holding at most one object")
    inside = groups("inreceptacleobject", "object", "object")
    return Problem(
        entities=tuple(entities),
        objects=tuple(ids["object"]),
        receptacles=tuple(ids["receptacle"]),
        locations=tuple(ids["location"]),
        object_types=types("objecttype", ids["object"]),
        receptacle_types=types("receptacletype", ids["receptacle"]),
        receptacle_location=tuple(location.get(receptacle, -1) for receptacle in range(len(ids["receptacle"]))),
        start=start[0][1],
        held=held[0][1] if held else -1,
        contents=groups("inreceptacle", "object", "receptacle"),
        at=groups("objectatlocation", "object", "location"),
        # real games say of some objects that they are inside themselves
        inside=tuple(tuple(o for o in things if o != holder) for holder, things in enumerate(inside)),
        unary={name: members(name, "object") for name in _OBJECT_PREDICATES},
        openable=members("openable", "receptacle"),
        opened=members("opened", "receptacle"),
        can_contain=frozenset((row[0], row[1]) for row in facts.get("cancontain", ())),
        goal=goal,
    )


def _typed_list(text: str) -> dict[str, str]:
    """Kind by name from `a b - object c - location`."""
    text = text.rstrip().removesuffix(")")
    pairs = _TYPED.findall(text)
    # the common case: where every name has a type of its own, the pattern has read all words
    if len(text.split()) == 3 * len(pairs):
        return dict(pairs)
    kinds, untyped = _typed(text.split())
    if untyped:
        raise ValueError(f"(:objects ...) gives no type for {untyped[0]!r}")
    return kinds


def _typed(tokens: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """(Kind by name, names after which no kind comes) of tokens such as `a`, `b`, `-`, `object`."""
    kinds: dict[str, str] = {}
    names: list[str] = []
    rest = iter(tokens)
    for token in rest:
        if token == "-":
            kinds.update(dict.fromkeys(names, next(rest, "")))
            names.clear()
        else:
            names.append(token)
    return kinds, names


def _facts(text: str) -> dict[str, list[tuple[str, ...]]]:
    """Arguments by predicate."""
    if _FACTS_ONLY.fullmatch(text) is None:
        leftover = " ".join(_FACT.sub("", text).split())
        raise UnsupportedFacts(f"its (:init ...) section is not a plain list of facts, near {excerpt(leftover, 80)!r}")
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


# --- the goal


def parse_goal(text: str) -> Goal:
    """Read the `(:goal ...)` with which `text` (lower case) begins.

    Raises UnsupportedFacts for a goal that is none of the six kinds, ValueError for a damaged one.
    """
    # the expression as nested lists, up to the bracket that closes it
    stack: list[list[Any]] = [[]]
    for match in TOKEN.finditer(text):
        token = match.group()
        if token == "(":
            stack.append([])
        elif token == ")":
            done = stack.pop()
            stack[-1].append(done)
        else:
            stack[-1].append(token)
        if len(stack) == 1:
            break
    else:
        raise ValueError("the problem's (:goal ...) section is not closed; the text may be cut off")
    written = " ".join(text[: match.end()].split())
    expression = stack[0][0]
    if len(expression) != 2 or expression[0] != ":goal":
        raise ValueError(f"its goal is not one complete expression: {excerpt(written, 200)}")
    parts = [_rename(*_flatten(part)) for part in _conjuncts(expression[1])]
    goal = _place(parts[0]) if len(parts) == 1 else _look(parts) if len(parts) == 2 else None
    if goal is None:
        raise UnsupportedFacts(f"its goal is none of the known kinds: {written}")
    return goal


def _conjuncts(node: Any) -> list[Any]:
    if isinstance(node, list) and node and node[0] == "and":
        return [part for child in node[1:] for part in _conjuncts(child)]
    return [node]


def _flatten(node: Any) -> tuple[dict[str, str], list[list[Any]]]:
    """The typed variables and the literals of nested `exists` and `and`."""
    types: dict[str, str] = {}
    literals: list[list[Any]] = []
    for part in _conjuncts(node):
        if isinstance(part, list) and len(part) == 3 and part[0] == "exists":
            inner_types, inner = _flatten(part[2])
            types |= _typed(part[1])[0] | inner_types
            literals.extend(inner)
        elif isinstance(part, list):
            literals.append(part)
    return types, literals


def _rename(types: dict[str, str], literals: list[list[Any]]) -> frozenset[tuple[str, ...]]:
    """Literals with variables called by their type and order of appearance: `object0`, `object1`, `receptacle0`."""
    renamed: dict[str, str] = {}
    for name, kind in types.items():
        renamed[name] = f"?{kind}{sum(variable.startswith(f'?{kind}') for variable in renamed.values())}"
    atoms = []
    for literal in literals:
        words = ["not", *literal[1]] if literal[:1] == ["not"] and len(literal) == 2 else literal
        atoms.append(tuple(renamed.get(str(word), str(word)) for word in words))
    return frozenset(atoms)


def _place(atoms: frozenset[tuple[str, ...]]) -> Goal | None:
    """The goal of bringing one or two objects to a receptacle; None if `atoms` are not one."""
    unread = set(atoms)
    count = 1 + any(atom[:2] == ("not", "=") for atom in atoms)
    kinds = {name: {a[2] for a in atoms if a[:2] == ("objecttype", name)} for name in ("?object0", "?object1")}
    places = {a[2] for a in atoms if a[:2] == ("receptacletype", "?receptacle0")}
    if len(kinds["?object0"]) != 1 or len(places) != 1:
        return None
    object_type, receptacle_type = kinds["?object0"].pop(), places.pop()
    for number in range(count):
        name = f"?object{number}"
        needed = {("objecttype", name, object_type), ("inreceptacle", name, "?receptacle0")}
        if not needed <= unread:
            return None
        unread -= needed
    unread -= {("receptacletype", "?receptacle0", receptacle_type)}
    unread -= {("not", "=", "?object0", "?object1"), ("not", "=", "?object1", "?object0")}
    # what is left must be flags and abilities of the object
    flags = sorted(_STATE_FLAGS[a[0]] for a in unread if a[0] in _STATE_FLAGS and a[1:] == ("?object0",))
    abilities = sorted(a[0] for a in unread if a[0] in _ABILITIES and a[1:] == ("?object0",))
    if len(flags) + len(abilities) != len(unread) or (count == 2 and unread):
        return None
    return PlaceGoal(
        object_type=object_type,
        receptacle_type=receptacle_type,
        flags=tuple(flags),
        abilities=tuple(abilities),
        count=count,
    )


def _look(parts: list[frozenset[tuple[str, ...]]]) -> Goal | None:
    """The goal of looking at an object under a lamp; None if `parts` are not one."""
    # the lamp's half is the longer one, whichever is written first
    lamp_half, held_half = sorted(parts, key=len, reverse=True)
    held_types = [atom[2] for atom in held_half if atom[:2] == ("objecttype", "?object0")]
    lamp_types = [atom[2] for atom in lamp_half if atom[:2] == ("objecttype", "?object0")]
    if len(held_types) != 1 or len(lamp_types) != 1:
        return None
    if held_half != {("objecttype", "?object0", held_types[0]), ("holds", "?agent0", "?object0")}:
        return None
    under_lamp = {
        ("objecttype", "?object0", lamp_types[0]),
        ("toggleable", "?object0"),
        ("istoggled", "?object0"),
        ("receptacleatlocation", "?receptacle0", "?location0"),
        ("atlocation", "?agent0", "?location0"),
        ("inreceptacle", "?object0", "?receptacle0"),
    }
    return LookGoal(object_type=held_types[0], lamp_type=lamp_types[0]) if lamp_half == under_lamp else None


# --- names: `cabinet 6` for an id such as `cabinet_bar__plus_00_dot_65_bar_...`


def entity_names(order: Sequence[str]) -> dict[str, str]:
    """Name every id, handing out each kind's numbers from the high end along `order`.

    `order` is the sorted ids, or a shuffle of them (number shuffling). Ids without `_bar_` get no number but keep the
    space before it, as in alfworld, so they cannot end a command that is matched after `strip()`.
    """
    kinds = {word: _kind(word) for word in order}
    left = Counter(kind for kind in kinds.values() if kind is not None)
    names: dict[str, str] = {}
    for word in order:
        kind = kinds[word]
        if kind is None:
            names[word] = f"{_plain(word)} "
        else:
            names[word] = f"{kind} {left[kind]}"
            left[kind] -= 1
    return names


def shuffled(ids: Sequence[str], seed: int) -> list[str]:
    """Sorted `ids` in the order that alfworld's shuffling gives after `random.seed(seed)`."""
    order = sorted(ids)
    # the same order as from the global generator, which stays as it is
    random.Random(seed).shuffle(order)
    return order


def _kind(word: str) -> str | None:
    head, bar, _ = word.partition("_bar_")
    if not bar:
        return None
    return _plain(head) + ("basin" if "basin" in word else "")


@lru_cache(maxsize=1024)
def _plain(text: str) -> str:
    for code, sign in (("_minus_", "-"), ("_plus_", "+"), ("_dot_", "."), ("_comma_", ",")):
        text = text.replace(code, sign)
    return text


def listing(names: Sequence[str]) -> str:
    """`a mug 2, and a cup 1`: comma before `and` even for two; `nothing` when empty."""
    if not names:
        return "nothing"
    if len(names) == 1:
        return f"a {names[0]}"
    return f"a {', a '.join(names[:-1])}, and a {names[-1]}"
