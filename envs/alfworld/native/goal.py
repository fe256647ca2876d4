"""The goal of a game, read from its PDDL: look at something under a lamp, or bring things to a receptacle."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from turngym.envs.alfworld.errors import UnsupportedFacts

_TOKEN = re.compile(r"[()]|[^\s()]+")
_STATE_FLAGS = {"isclean": "clean", "ishot": "hot", "iscool": "cool", "issliced": "sliced"}
_ABILITIES = {"cleanable", "heatable", "coolable", "sliceable", "pickupable"}


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
    """Row of the result tables: `place`, `look`, `clean`, `heat`, `cool` or `two`."""
    if isinstance(goal, LookGoal):
        return "look"
    if goal.count == 2:
        return "two"
    for flag, row in (("hot", "heat"), ("cool", "cool"), ("clean", "clean")):
        if flag in goal.flags:
            return row
    return "place"


def parse_goal(text: str) -> Goal:
    """Read `(:goal ...)` (lower case). Raises UnsupportedFacts for one that is none of the six kinds."""
    atoms = [_rename(*_flatten(part)) for part in _conjuncts(_nested(text)[1])]
    goal = _place(atoms[0]) if len(atoms) == 1 else _look(atoms) if len(atoms) == 2 else None
    if goal is None:
        raise UnsupportedFacts(f"its goal is none of the known kinds: {' '.join(text.split())}")
    return goal


def _nested(text: str) -> list[Any]:
    stack: list[list[Any]] = [[]]
    for token in _TOKEN.findall(text):
        if token == "(":
            stack.append([])
        elif token == ")":
            if len(stack) < 2:
                raise ValueError("its goal has a closing bracket too many")
            done = stack.pop()
            stack[-1].append(done)
        else:
            stack[-1].append(token)
    if len(stack) != 1 or len(stack[0]) != 1 or len(stack[0][0]) != 2 or stack[0][0][0] != ":goal":
        raise ValueError(f"its goal is not one complete expression: {' '.join(text.split())[:200]}")
    whole: list[Any] = stack[0][0]
    return whole


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
            names: list[str] = []
            tokens = iter(part[1])
            for token in tokens:
                if token == "-":
                    kind = next(tokens, "")
                    types.update(dict.fromkeys(names, kind))
                    names = []
                else:
                    names.append(token)
            inner_types, inner = _flatten(part[2])
            types.update(inner_types)
            literals.extend(inner)
        elif isinstance(part, list):
            literals.append(part)
    return types, literals


def _rename(types: dict[str, str], literals: list[list[Any]]) -> frozenset[tuple[str, ...]]:
    """Literals with variables called by their type and order of appearance: `object0`, `object1`, `receptacle0`."""
    seen: dict[str, str] = {}
    for name, kind in types.items():
        seen[name] = f"?{kind}{sum(other.startswith(f'?{kind}') for other in seen.values())}"
    flat = []
    for literal in literals:
        words = ["not", *literal[1]] if literal[:1] == ["not"] and len(literal) == 2 else literal
        flat.append(tuple(seen.get(str(word), str(word)) for word in words))
    return frozenset(flat)


def _place(atoms: frozenset[tuple[str, ...]]) -> Goal | None:
    rest = set(atoms)
    count = 1 + any(atom[:2] == ("not", "=") for atom in atoms)
    kinds = {name: {a[2] for a in atoms if a[:2] == ("objecttype", name)} for name in ("?object0", "?object1")}
    places = {a[2] for a in atoms if a[:2] == ("receptacletype", "?receptacle0")}
    if len(kinds["?object0"]) != 1 or len(places) != 1:
        return None
    object_type, receptacle_type = kinds["?object0"].pop(), places.pop()
    for number in range(count):
        name = f"?object{number}"
        needed = {("objecttype", name, object_type), ("inreceptacle", name, "?receptacle0")}
        if not needed <= rest:
            return None
        rest -= needed
    rest -= {("receptacletype", "?receptacle0", receptacle_type)}
    rest -= {("not", "=", "?object0", "?object1"), ("not", "=", "?object1", "?object0")}
    flags = sorted(_STATE_FLAGS[a[0]] for a in rest if a[0] in _STATE_FLAGS and a[1:] == ("?object0",))
    abilities = sorted(a[0] for a in rest if a[0] in _ABILITIES and a[1:] == ("?object0",))
    if len(flags) + len(abilities) != len(rest) or (count == 2 and rest):
        return None
    return PlaceGoal(
        object_type=object_type,
        receptacle_type=receptacle_type,
        flags=tuple(flags),
        abilities=tuple(abilities),
        count=count,
    )


def _look(parts: list[frozenset[tuple[str, ...]]]) -> Goal | None:
    # the lamp's half is the longer one, whichever is written first
    lamp, thing = sorted(parts, key=len, reverse=True)
    held = [atom[2] for atom in thing if atom[:2] == ("objecttype", "?object0")]
    kind = [atom[2] for atom in lamp if atom[:2] == ("objecttype", "?object0")]
    if len(held) != 1 or len(kind) != 1:
        return None
    if thing != {("objecttype", "?object0", held[0]), ("holds", "?agent0", "?object0")}:
        return None
    under_lamp = {
        ("objecttype", "?object0", kind[0]),
        ("toggleable", "?object0"),
        ("istoggled", "?object0"),
        ("receptacleatlocation", "?receptacle0", "?location0"),
        ("atlocation", "?agent0", "?location0"),
        ("inreceptacle", "?object0", "?receptacle0"),
    }
    return LookGoal(object_type=held[0], lamp_type=kind[0]) if lamp == under_lamp else None
