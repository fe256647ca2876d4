"""Makes the entities of a world: names, parts, popularity, and what their articles say besides facts."""

from __future__ import annotations

import numpy as np

from turngym.envs.search.world.config import WorldConfig
from turngym.envs.search.world.graph import Entity, Part
from turngym.envs.search.world.names import Namer, pick
from turngym.envs.search.world.tables import words

YEARS = {
    "person": (1850, 1970),
    "film": (1915, 2015),
    "album": (1950, 2015),
    "book": (1890, 2015),
    "city": (900, 1750),
    "region": (800, 1700),
    "country": (800, 1900),
    "company": (1860, 1990),
    "university": (1300, 1950),
    "team": (1880, 1960),
    "award": (1900, 1990),
    "battle": (1905, 1945),
}
SHARED = ("film", "album", "book")
CRAFT_SHARES = (
    *(("film", 0.16), ("book", 0.16), ("album", 0.13), ("star", 0.12), ("company", 0.12), ("composer", 0.05)),
    *(("team", 0.06), ("battle", 0.05), ("city", 0.06), ("university", 0.05), ("award", 0.03), ("country", 0.01)),
)


def make_entities(config: WorldConfig, namer: Namer, rng: np.random.Generator) -> dict[str, Entity]:
    """Entities by id, kind after kind in the order of `config.counts`."""
    maker = _Maker(config, namer, rng)
    found: dict[str, Entity] = {}
    for kind, count in config.counts.items():
        for number in range(count):
            entity = maker.make(kind, number)
            found[entity.id] = entity
    return found


class _Maker:
    def __init__(self, config: WorldConfig, namer: Namer, rng: np.random.Generator) -> None:
        self._config, self._namer, self._rng, self._words = config, namer, rng, words()
        self._titles: list[str] = []
        self._works: set[tuple[str, str]] = set()
        self._themes = [(role, deed) for role in self._words["roles"] for deed in self._words["deeds"]]
        rng.shuffle(self._themes)
        self._inventions = list(self._words["inventions"])
        rng.shuffle(self._inventions)

    def make(self, kind: str, number: int) -> Entity:
        rng, config = self._rng, self._config
        # multiples of the golden ratio spread evenly: any stretch of numbers has its share of evaluation entities
        part: Part = config.part or ("eval" if (number * 0.6180339887) % 1 < config.eval_share else "train")
        craft = self._craft(kind, number)
        name = self._name(kind, craft)
        first, last = YEARS[kind]
        return Entity(
            id=f"{kind}{number}",
            kind=kind,
            name=name,
            aliases=self._aliases(kind, name) if rng.random() < config.aliases else (),
            part=part,
            rank=1.0 / (1.0 + 0.05 * float(rng.integers(config.counts[kind]))),
            year=int(rng.integers(first, last)),
            craft=craft,
            female=kind == "person" and bool(rng.random() < 0.5),
            theme=self._themes.pop() if kind in ("film", "book") and self._themes else None,
            invention=self._inventions.pop() if craft == "scientist" and self._inventions else None,
        )

    def _craft(self, kind: str, number: int) -> str:
        table = self._words
        if kind == "person":
            crafts = [craft for craft, _ in CRAFT_SHARES]
            shares = np.array([share for _, share in CRAFT_SHARES])
            return str(table["crafts"][crafts[int(self._rng.choice(len(crafts), p=shares))]])
        if kind == "company":
            # works need their companies: three of four are studios, labels and publishers
            return str(("film", "album", "book", "trade")[number % 4])
        return pick(self._rng, table[f"{kind}_kinds"]) if kind in SHARED else kind

    def _name(self, kind: str, craft: str) -> str:
        namer, table = self._namer, self._words
        if kind == "person":
            return namer.person()
        if kind in ("city", "region", "country"):
            return namer.place(kind)
        if kind in SHARED:
            return self._title(kind)
        if kind == "battle":
            return namer.battle()
        tags = {"company": table["company_kinds"].get(craft), "team": table["mascots"], "award": table["award_kinds"]}
        return namer.tagged(tags.get(kind) or ["University", "College", "Institute"])

    def _title(self, kind: str) -> str:
        """A new title, or one that a work of another kind has."""
        title = pick(self._rng, self._titles) if self._titles else ""
        if not title or (kind, title) in self._works or self._rng.random() >= self._config.shared_titles:
            title = self._namer.title()
            self._titles.append(title)
        self._works.add((kind, title))
        return title

    def _aliases(self, kind: str, name: str) -> tuple[str, ...]:
        if kind == "person":
            return (f"{self._namer.person()}",)
        if kind in ("city", "region", "country"):
            return (self._namer.place("city" if kind == "city" else kind),)
        if kind in SHARED:
            return (self._namer.title(),)
        if kind in ("company", "team"):
            return (self._namer.tagged([name.split()[-1]]),)
        return ()
