"""Invented names, coined from syllables and put together from title words."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from turngym.envs.core import TaskError
from turngym.envs.search.world.config import WorldConfig
from turngym.envs.search.world.tables import english, words


def pick(rng: np.random.Generator, items: Sequence[str]) -> str:
    """One of `items`, each equally likely."""
    return items[int(rng.integers(len(items)))]


class Namer:
    """Makes names that no other entity of this world has.

    Several worlds of one configuration put the same parts together, whatever their seeds.
    """

    def __init__(self, config: WorldConfig, rng: np.random.Generator) -> None:
        self._rng = rng
        self._plain = config.plain
        self._table = words()
        self._coined: set[str] = set()
        self._taken: set[str] = set()
        self._part, self._eval_share = config.part, config.eval_share
        # without the configuration's seed: all of its worlds share the parts of names
        parts = rng if config.part is None else np.random.default_rng([config.version, 3])
        self.firsts = self._coin(config.first_names, "first_end", parts)
        self.lasts = self._coin(config.last_names, "last_end", parts)
        self.stems = self._coin(config.places, None, parts)
        self.adjectives = self._table["adjectives"][: config.title_words]
        self.nouns = self._table["nouns"][: config.title_words]

    def person(self) -> str:
        return self._new(lambda: f"{pick(self._rng, self.firsts)} {pick(self._rng, self.lasts)}")

    def place(self, kind: str) -> str:
        """A city, region or country."""
        return self._new(lambda: self._stem() + pick(self._rng, self._table[f"{kind}_end"]))

    def tagged(self, tags: Sequence[str]) -> str:
        """A coined name and one of `tags`: `Brendal Pictures`."""
        return self._new(lambda: f"{self._stem()} {pick(self._rng, tags)}")

    def battle(self) -> str:
        return self._new(lambda: f"Battle of {self._stem()}{pick(self._rng, self._table['city_end'])}")

    def title(self) -> str:
        """A work's title."""
        return self._new(self._title)

    def _title(self) -> str:
        rng = self._rng
        adjective, noun = pick(rng, self.adjectives), " " + pick(rng, self.nouns)
        form = 0 if self._plain else int(rng.integers(8))
        if form < 3:
            return adjective + noun
        if form < 5:
            return f"The {adjective}{noun}"
        if form == 5:
            return f"The{noun} and the {pick(rng, self.nouns)}"
        if form == 6:
            return f"A{noun} for {pick(rng, self.firsts)}"
        return f"The{noun} of {self._stem()}"

    def _stem(self) -> str:
        return pick(self._rng, self.stems)

    def _new(self, draw: Callable[[], str]) -> str:
        for _ in range(10_000):
            name = draw()
            if name.lower() not in self._taken and self._ours(name):
                self._taken.add(name.lower())
                return name
        raise TaskError("a world ran out of names: give it more first_names, last_names, places or title_words")

    def _ours(self, name: str) -> bool:
        """Whether this world may use a name: the names of training and evaluation worlds are apart."""
        if self._part is None:
            return True
        draw = int.from_bytes(hashlib.sha256(name.encode("utf-8")).digest()[:4], "big") / 2**32
        return (draw < self._eval_share) == (self._part == "eval")

    def plain_parts(self, kinds: Iterable[str]) -> set[str]:
        """What every name of a plain world with these kinds is put together from."""
        ends = [end for kind in kinds for end in self._table.get(f"{kind}_end", ())]
        spaced = [f" {word}" for word in (*self.lasts, *self.nouns)]
        return {*self.firsts, *self.stems, *self.adjectives, *spaced, *ends}

    def _coin(self, count: int, ends: str | None, rng: np.random.Generator) -> list[str]:
        """`count` new words, none of which is an English word of the tables."""
        reserved = english()
        found: list[str] = []
        while len(found) < count:
            word = self._syllable(rng)
            if ends is not None:
                word += pick(rng, self._table[ends])
            elif rng.random() < 0.5:
                word += self._syllable(rng)
            if 3 <= len(word) <= 9 and word not in self._coined and word not in reserved:
                self._coined.add(word)
                found.append(word.capitalize())
        return found

    def _syllable(self, rng: np.random.Generator) -> str:
        table = self._table
        return pick(rng, table["onsets"]) + pick(rng, table["vowels"]) + pick(rng, table["codas"])
