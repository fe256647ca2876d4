"""The typed graph: entities with names, and facts that link them, split into a training and an evaluation part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Part = Literal["train", "eval"]
PARTS: tuple[Part, ...] = ("train", "eval")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entity:
    """A person or thing with an article of its own."""

    id: str
    """Kind and number, for example `film17`."""
    kind: str
    name: str
    """Unique among persons, places and organizations; works of different kinds share titles."""
    aliases: tuple[str, ...] = ()
    part: Part
    """Which questions may touch it."""
    rank: float
    """Popularity in (0, 1], 1 for the best known of its kind."""
    year: int
    """Of birth, release or foundation."""
    craft: str
    """What it does or is: `novelist`, `western`, `Works`."""
    female: bool = False
    theme: tuple[str, str] | None = None
    """A work's (who, does what); of no other entity."""
    invention: str | None = None
    """What a scientist is known for; of no other entity."""

    @property
    def answers(self) -> tuple[str, ...]:
        """What counts as naming it."""
        return (self.name, *self.aliases)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """`subject` stands in `relation` to `value`, an entity's name or a literal."""

    subject: str
    relation: str
    value: str
    target: str | None = None
    """Id of the object entity; None for literals."""
    answers: tuple[str, ...]
    """What counts as the value: names, or ways to write a literal."""
    order: int = 0
    """Literals compare by this: a year, days, a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """All entities by id, and all facts by subject and relation (a subject has one object per relation)."""

    entities: Mapping[str, Entity]
    facts: Mapping[tuple[str, str], Fact]

    def of_kind(self, kind: str, part: Part | None = None) -> list[Entity]:
        """The entities of a kind, in order of their ids' numbers."""
        return [e for e in self.entities.values() if e.kind == kind and part in (None, e.part)]
