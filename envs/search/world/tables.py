"""The tables behind a world: relations with their wordings, words for names, sentences without facts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from turngym.envs.search.world.config import WorldConfig

LITERALS = ("year", "date", "number", "coin")
"""Object types of relations that are values, not entities."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Relation:
    """One kind of fact. A subject has at most one object, so every question about it has one answer."""

    name: str
    """`kind.relation`, for example `film.director`."""
    to: str
    """Kind of the object entity, or one of `LITERALS`."""
    rate: float
    """Share of the subjects that have it."""
    say: tuple[str, ...]
    """Sentences of passages, with {s} and {o}; they share no content word with `np` and `ask`."""
    np: tuple[str, ...]
    """What questions call the object, with {x} for the subject; empty for literals."""
    ask: tuple[str, ...]
    """Questions for the object, with {x} for the subject."""

    @property
    def kind(self) -> str:
        return self.name.partition(".")[0]


def relations(config: WorldConfig) -> dict[str, Relation]:
    """The relations that exist in `config`'s world, in the order of the table."""
    most = config.phrasings
    found: dict[str, Relation] = {}
    for name, row in _table("relations").items():
        kind, to = name.partition(".")[0], row["to"]
        wanted = config.relations is None or name in config.relations
        if wanted and kind in config.counts and (to in LITERALS or to in config.counts):
            banks = {bank: tuple(_usable(row[bank], bank, config)[:most]) for bank in ("say", "np", "ask")}
            found[name] = Relation(name=name, to=to, rate=row["rate"], **banks)
    return found


def _usable(bank: list[str], name: str, config: WorldConfig) -> list[str]:
    """In plain worlds, sentences that end with the object."""
    return [row for row in bank if row.endswith("{o}.")] if config.plain and name == "say" else bank


def words() -> Mapping[str, Any]:
    """Syllables, title words, themes and other words that names and texts are made of."""
    return _table("words")


def filler() -> Mapping[str, list[str]]:
    """Kind to sentences that state no fact of the graph."""
    return _table("filler")


@cache
def english() -> frozenset[str]:
    """Every lower-case word that the tables say: no coined name may be one of them."""
    text = json.dumps([_table("relations"), _table("words"), _table("filler")])
    return frozenset(re.findall(r"[a-z]+", text.lower()))


@cache
def _table(name: str) -> dict[str, Any]:
    text = files("turngym.envs.search.world").joinpath(f"{name}.json").read_text(encoding="utf-8")
    table: dict[str, Any] = json.loads(text)
    return table
