"""Invented names, coined from syllables and put together from title words."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from turngym.envs.core import TaskError
from turngym.envs.search.world.config import WorldConfig
from turngym.envs.search.world.tables import english, words


def pick(rng: np.random.Generator, items: Sequence[str]) -> str:
    """One of `items`, each equally likely."""
    return items[int(rng.integers(len(items)))]


class Namer:
    """Coins names that nobody else in this world has. `pieces` collects the parts that names are made of."""

    def __init__(self, config: WorldConfig, rng: np.random.Generator) -> None:
        self._rng = rng
        self._plain = config.plain
        self._table = words()
        self._coined: set[str] = set()
        self._taken: set[str] = set()
        self.pieces: set[str] = set()
        self.firsts = self._coin(config.first_names, "first_end")
        self.lasts = self._coin(config.last_names, "last_end")
        self.stems = self._coin(config.places, None)
        self.adjectives = self._table["adjectives"][: config.title_words]
        self.nouns = self._table["nouns"][: config.title_words]

    def person(self) -> str:
        return self._new(lambda: self._join(pick(self._rng, self.firsts), " " + pick(self._rng, self.lasts)))

    def place(self, kind: str) -> str:
        """A city, region or country."""
        return self._new(lambda: self._join(self._stem(), pick(self._rng, self._table[f"{kind}_end"])))

    def tagged(self, tags: Sequence[str]) -> str:
        """A coined name and one of `tags`: `Brendal Pictures`."""
        return self._new(lambda: self._join(self._stem(), " " + pick(self._rng, tags)))

    def battle(self) -> str:
        return self._new(lambda: self._join("Battle of ", self._stem(), pick(self._rng, self._table["city_end"])))

    def title(self) -> str:
        """A work's title."""
        return self._new(self._title)

    def _title(self) -> str:
        rng = self._rng
        adjective, noun = pick(rng, self.adjectives), " " + pick(rng, self.nouns)
        form = 0 if self._plain else int(rng.integers(8))
        if form < 3:
            return self._join(adjective, noun)
        if form < 5:
            return self._join("The ", adjective, noun)
        if form == 5:
            return self._join("The", noun, " and the", " " + pick(rng, self.nouns))
        if form == 6:
            return self._join("A", noun, " for ", pick(rng, self.firsts))
        return self._join("The", noun, " of ", self._stem())

    def _join(self, *parts: str) -> str:
        self.pieces.update(parts)
        return "".join(parts)

    def _stem(self) -> str:
        return pick(self._rng, self.stems)

    def _new(self, draw: Callable[[], str]) -> str:
        for _ in range(10_000):
            name = draw()
            if name.lower() not in self._taken:
                self._taken.add(name.lower())
                return name
        raise TaskError("a world ran out of names: give it more first_names, last_names, places or title_words")

    def _coin(self, count: int, ends: str | None) -> list[str]:
        """`count` new words, none of which is an English word of the tables."""
        reserved = english()
        found: list[str] = []
        while len(found) < count:
            word = self._syllable()
            if ends is not None:
                word += pick(self._rng, self._table[ends])
            elif self._rng.random() < 0.5:
                word += self._syllable()
            if 3 <= len(word) <= 9 and word not in self._coined and word not in reserved:
                self._coined.add(word)
                found.append(word.capitalize())
        return found

    def _syllable(self) -> str:
        table = self._table
        return pick(self._rng, table["onsets"]) + pick(self._rng, table["vowels"]) + pick(self._rng, table["codas"])
