"""Links the entities of a world: who directed what, who was born where, and when."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from turngym.envs.search.world.config import WorldConfig
from turngym.envs.search.world.graph import Entity, Fact, Graph
from turngym.envs.search.world.names import Namer
from turngym.envs.search.world.people import make_entities
from turngym.envs.search.world.tables import LITERALS, Relation, relations, words

CRAFTS = {
    "film.director": "filmmaker",
    "film.star": "actor",
    "film.composer": "composer",
    "album.artist": "singer",
    "book.author": "novelist",
    "company.founder": "entrepreneur",
    "team.coach": "football coach",
    "battle.victor": "general",
    "city.mayor": "politician",
    "country.ruler": "monarch",
    "university.head": "scholar",
    "award.namesake": "scientist",
    "film.studio": "film",
    "album.label": "album",
    "book.publisher": "book",
}
"""Relations whose objects are of one craft (all but a few: people have second talents)."""
VERSATILE = 0.15
DRAWS = 100
"""Candidates looked at before a fact is left out."""


def make_graph(config: WorldConfig) -> Graph:
    """The entities and facts of `config`'s world."""
    rng = np.random.default_rng([config.seed, config.version])
    namer = Namer(config, rng)
    entities = make_entities(config, namer, rng)
    linker = _Linker(config, entities, rng)
    for relation in relations(config).values():
        linker.link(relation)
    return Graph(entities=entities, facts=linker.facts)


class _Linker:
    def __init__(self, config: WorldConfig, entities: dict[str, Entity], rng: np.random.Generator) -> None:
        self._config, self._rng, self._words = config, rng, words()
        self._kinds: dict[str, list[Entity]] = {}
        for entity in entities.values():
            self._kinds.setdefault(entity.kind, []).append(entity)
        self._pools: dict[tuple[str, str | None, str | None], tuple[list[Entity], np.ndarray]] = {}
        self.facts: dict[tuple[str, str], Fact] = {}

    def link(self, relation: Relation) -> None:
        """Give every subject of `relation` its object, or none."""
        for subject in self._kinds[relation.kind]:
            if (subject.id, relation.name) in self.facts or self._rng.random() >= relation.rate:
                continue
            if relation.to in LITERALS:
                self._add_literal(subject, relation)
                continue
            target = self._target(subject, relation)
            if target is not None:
                self._add(subject, relation.name, target)
                if relation.name == "person.spouse":
                    self._add(target, relation.name, subject)

    def _add(self, subject: Entity, relation: str, target: Entity) -> None:
        self.facts[subject.id, relation] = Fact(
            subject=subject.id, relation=relation, value=target.name, target=target.id, answers=target.answers
        )

    def _target(self, subject: Entity, relation: Relation) -> Entity | None:
        """A person of the right kind, craft and age, most often of the same part; None if there is none."""
        rng = self._rng
        part = subject.part if rng.random() < self._config.kinship else None
        craft = CRAFTS.get(relation.name)
        if self._config.plain or rng.random() < VERSATILE:
            craft = None
        for _ in range(DRAWS):
            other = self._drawn(relation.to, part, craft) or self._drawn(relation.to, part, None)
            if other is not None and other.id != subject.id and self._fits(subject, relation.name, other):
                return other
        return None

    def _drawn(self, kind: str, part: str | None, craft: str | None) -> Entity | None:
        """A random person of a kind, part and craft (None: any), popular ones more often; None where there is none."""
        key = kind, part, craft
        if key not in self._pools:
            members = [e for e in self._kinds[kind] if part in (None, e.part) and craft in (None, e.craft)]
            self._pools[key] = members, np.cumsum([1.0 if self._config.plain else entity.rank for entity in members])
        members, sums = self._pools[key]
        return members[int(np.searchsorted(sums, self._rng.random() * sums[-1], "right"))] if members else None

    def _fits(self, subject: Entity, relation: str, other: Entity) -> bool:
        test = FITS.get(relation)
        if relation == "person.spouse" and (other.id, relation) in self.facts:
            return False
        if self._config.plain:
            return True
        if test is None:
            return other.kind != "person" or relation.startswith("person.") or _active(subject, other)
        return test(subject, other)

    def _add_literal(self, subject: Entity, relation: Relation) -> None:
        value, answers, order = self._literal(subject, relation)
        fact = Fact(subject=subject.id, relation=relation.name, value=value, answers=answers, order=order)
        self.facts[subject.id, relation.name] = fact

    def _literal(self, subject: Entity, relation: Relation) -> tuple[str, tuple[str, ...], int]:
        rng = self._rng
        if relation.to == "year":
            return str(subject.year), (str(subject.year),), subject.year
        if relation.to == "date":
            year = subject.year if relation.name == "person.birthdate" else subject.year + int(rng.integers(50, 93))
            # up to 28, a day that every month has
            month, day = int(rng.integers(12)), int(rng.integers(1, 29))
            name = self._words["months"][month]
            value = f"{day} {name} {year}"
            return value, (value, f"{name} {day}, {year}"), (year * 12 + month) * 31 + day
        if relation.to == "number":
            number = int(10 ** float(rng.uniform(3.3, 6.2)))
            return f"{number:,}", (f"{number:,}", str(number)), number
        coins = self._words["coins"]
        coin = str(coins[int(subject.id.removeprefix("country")) % len(coins)])
        return coin, (coin,), 0


def _active(subject: Entity, person: Entity) -> bool:
    """Whether a person was at work when something was made; places and the long-lived do not mind."""
    return subject.kind in ("city", "country", "award", "university") or 20 <= subject.year - person.year <= 70


FITS: dict[str, Callable[[Entity, Entity], bool]] = {
    "person.father": lambda child, other: not other.female and 20 <= child.year - other.year <= 45,
    "person.spouse": lambda one, other: one.female != other.female and abs(one.year - other.year) <= 12,
    "film.basis": lambda film, book: book.year < film.year,
}
