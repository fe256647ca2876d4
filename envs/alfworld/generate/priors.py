"""Counts measured from the real train games (priors.json), indexed the way the generator and the expert ask."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

Weights = Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRow:
    """One kind of task: what to bring where, in which room, and how often the train games ask for it."""

    task: str
    room: str
    target: str
    destination: str
    """A receptacle type, or the lamp of a look task."""
    count: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Priors:
    """All counts; type names as in PDDL without the `Type` suffix. In order everywhere: sorted, never by hash.

    Equal only to itself, so that what is derived from a table can be cached under it.
    """

    rooms: Weights
    tasks: tuple[TaskRow, ...]
    scenes: Mapping[str, tuple[tuple[Mapping[str, int], int], ...]]
    """Room to (receptacle multiset, games) pairs."""
    number: Mapping[str, Mapping[str, Mapping[int, int]]]
    """Room, object type: how many games have how many of it standing in receptacles."""
    placed: Mapping[str, Mapping[str, Weights]]
    """Room, object type: receptacle types it stood in at the start."""
    anywhere: Mapping[str, Weights]
    """Object type: the same over all rooms."""
    shared: Mapping[str, tuple[tuple[tuple[str, ...], float], ...]]
    """Room to (receptacle types at one location, groups per game) pairs."""
    receptacles: Weights
    """How many receptacles of a type all train games have together."""
    openable: Mapping[str, float]
    """Share of the receptacles of a type that can be opened."""
    can_contain: Mapping[str, tuple[str, ...]]
    most_objects: Mapping[str, int]
    flags: Mapping[str, frozenset[str]]
    """`pickupable`, `cleanable`, ...: object types that have it."""
    nested: tuple[tuple[tuple[str, str], int], ...]
    """((inner, outer), count) pairs."""
    nested_per_game: float
    cool_in_fridge: float
    """Share of the coolable objects in fridges that are cool from the start."""
    sentences: Mapping[str, Weights]


@cache
def load_priors() -> Priors:
    """The shipped table, read once."""
    raw = json.loads(
        resources.files("turngym.envs.alfworld.generate").joinpath("priors.json").read_text(encoding="utf-8")
    )
    placed = {room: _split_pairs(pairs) for room, pairs in raw["placed"].items()}
    nested = tuple(((k.split()[0], k.split()[1]), v) for k, v in raw["nested"].items())
    cool, fridge = raw["cool_in_fridge"]
    return Priors(
        rooms=raw["rooms"],
        tasks=tuple(_task_rows(raw["tasks"])),
        scenes={room: tuple(_scenes(rows)) for room, rows in raw["scenes"].items()},
        number={room: _numbers(rows) for room, rows in raw["number"].items()},
        placed=placed,
        anywhere=_sum_rooms(placed),
        shared={room: _shared(rows, raw["rooms"][room]) for room, rows in raw["shared_location"].items()},
        receptacles={name: total for name, (_, total) in raw["openable"].items()},
        openable={name: yes / total for name, (yes, total) in raw["openable"].items()},
        can_contain={name: tuple(types) for name, types in raw["can_contain"].items()},
        most_objects=raw["most_objects"],
        flags={name: frozenset(types) for name, types in raw["flags"].items()},
        nested=nested,
        nested_per_game=sum(n for _, n in nested) / raw["games"],
        cool_in_fridge=cool / fridge,
        sentences=raw["sentences"],
    )


def _task_rows(raw: Mapping[str, Mapping[str, int]]) -> list[TaskRow]:
    rows = []
    for task, counts in raw.items():
        for words, count in counts.items():
            room, target, destination = words.split()
            rows.append(TaskRow(task=task, room=room, target=target, destination=destination, count=count))
    return rows


def _scenes(rows: Mapping[str, int]) -> list[tuple[Mapping[str, int], int]]:
    return [({k: int(v) for k, v in (pair.split(":") for pair in words.split())}, n) for words, n in rows.items()]


def _shared(rows: Mapping[str, int], games: int) -> tuple[tuple[tuple[str, ...], float], ...]:
    return tuple((tuple(words.split()), count / games) for words, count in rows.items())


def _numbers(rows: Mapping[str, int]) -> dict[str, dict[int, int]]:
    return {name: {int(n): c for n, c in counts.items()} for name, counts in _split_pairs(rows).items()}


def _split_pairs(pairs: Mapping[str, int]) -> dict[str, dict[str, Any]]:
    table: dict[str, dict[str, Any]] = {}
    for words, count in pairs.items():
        first, second = words.split()
        table.setdefault(first, {})[second] = count
    return table


def _sum_rooms(placed: Mapping[str, Mapping[str, Weights]]) -> dict[str, dict[str, int]]:
    table: dict[str, dict[str, int]] = {}
    for rows in placed.values():
        for name, counts in rows.items():
            for receptacle, count in counts.items():
                entry = table.setdefault(name, {})
                entry[receptacle] = entry.get(receptacle, 0) + count
    return table
