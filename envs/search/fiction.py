"""What is in a fiction? Its settings, its entities with invented names, and the facts that link them.

`make_graph` makes the graph of a `FictionConfig`: the same settings give the same bytes on every machine.
`fiction_text` writes the passages and `fiction_questions` the questions.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import numpy as np

from turngym.core.errors import TaskError, checked_choice
from turngym.core.user_files import json_of

LIKE_PUBLIC = ("popqa-like", "nq-like", "2wiki-like", "hotpot-like", "musique-like")
FAMILIES = (*LIKE_PUBLIC, "chain")
"""Question families, which are also the data sources (rows of the reports): like a public set's, and long chains."""


def _shares(shares: dict[str, float]) -> Mapping[str, float]:
    value: Mapping[str, float] = field(default_factory=lambda: dict(shares))
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class FictionConfig:
    """What kind of fiction is made. The same settings give the same bytes on every machine."""

    name: str
    """Part of the question ids; a configuration of your own needs a name of its own."""
    version: int = 1
    """Counts changes of the generator; part of the seed."""
    seed: int = 0
    counts: Mapping[str, int]
    """Entities of each kind; kinds that are missing do not exist, nor do relations from or to them."""
    disjoint: Literal["entities", "facts"] = "entities"
    """What training and evaluation questions do not share. Models whose tokens are whole names can only be tested on
    names that they have seen, so for them the facts are new."""
    eval_share: float = 0.3
    """Share of the entities or facts (with several fictions: of the possible names) that only evaluation questions may
    touch."""
    kinship: float = 0.9
    """Share of facts whose two entities are both for training or both for evaluation."""
    questions: Mapping[str, tuple[int, int]]
    """Family to (training, evaluation) questions."""
    fictions: tuple[int, int] | None = None
    """So many fictions for training and for evaluation, each with entities, facts and passages of its own and either
    kind of questions; they coin names from the same parts, but no name is in both. None: one fiction with both."""
    part: Literal["train", "eval"] | None = None
    """What this fiction is for, where it is one of several (`train`, ...). Set where they are made."""
    relations: tuple[str, ...] | None = None
    """Relations that exist (`film.director`, ...); None: all of the table."""
    phrasings: int | None = None
    """Most wordings of a relation that are used, in passages and in questions; None: all."""
    first_names: int = 240
    last_names: int = 420
    places: int = 900
    """Coined stems that places, companies, teams and awards are named after."""
    title_words: int = 60
    """Number of adjectives, and of nouns, that titles are made of."""
    plain: bool = False
    """Titles are adjective and noun, articles one passage of bare facts in any order, each sentence ends with what it
    tells, no person is popular or too old, queries are names: for tiny models."""
    shared_titles: float = 0.15
    """Share of works that take the title of a work of another kind."""
    aliases: float = 0.5
    """Share of entities that have a second name."""
    alias_questions: Mapping[str, float] = _shares({"popqa-like": 0.1, "hotpot-like": 0.12, "musique-like": 0.66})
    """Family to the share of its mentions that use the second name where there is one."""
    late: float = 0.4
    """Share of facts that are told late in an article instead of in its first passage."""
    intros: Mapping[str, float] = _shares(
        {"2wiki-like": 0.95, "hotpot-like": 0.95, "nq-like": 0.4, "musique-like": 0.0}
    )
    """Family to the share of its questions that only use what first passages tell, as HotpotQA and 2Wiki do."""
    backlinks: float = 0.5
    """Chance that an article's first passage names something that points to its subject."""
    filler: tuple[int, int] = (12, 60)
    """Sentences without facts in the article of the least and of the most popular entity."""
    words: tuple[int, int] = (35, 75)
    """Fewest and most words of a passage, give or take a sentence; 200 is the hard limit."""
    linked: Mapping[str, float] = _shares({"2wiki-like": 0.22, "hotpot-like": 0.7, "musique-like": 0.95})
    """Family to the share of its paths whose second passage names the first entity; in the rest it never does."""
    asides: Mapping[str, float] = _shares({"hotpot-like": 0.85, "musique-like": 1.0})
    """Family to the chance that a hop of its paths adds something that the next passage says."""

    def __post_init__(self) -> None:
        for family in self.questions:
            checked_choice(f"fiction {self.name!r}: a family of questions", family, FAMILIES, TaskError)


FULL = FictionConfig(
    name="full",
    counts={
        "person": 900,
        "film": 320,
        "album": 220,
        "book": 260,
        "city": 260,
        "region": 40,
        "country": 16,
        "company": 180,
        "university": 90,
        "team": 110,
        "award": 50,
        "battle": 70,
    },
    questions=dict.fromkeys(LIKE_PUBLIC, (600, 150)),
)
"""About 2,500 entities and 10,000 passages, about as hard for BM25 as the real sets."""
TINY = FictionConfig(
    name="tiny",
    counts={"film": 10, "book": 8, "person": 16, "city": 10, "region": 4},
    questions={"popqa-like": (10, 5), "2wiki-like": (20, 10), "musique-like": (6, 5)},
    fictions=(400, 20),
    relations=(
        *("film.director", "film.star", "film.basis", "book.author", "book.setting", "person.birthplace"),
        *("person.spouse", "city.region", "city.twin", "region.capital"),
    ),
    phrasings=1,
    first_names=20,
    last_names=20,
    places=20,
    title_words=20,
    plain=True,
    shared_titles=0.0,
    aliases=0.0,
    late=0.0,
    linked={},
    asides={},
)
"""Many fictions of about 50 entities in plain words, one short passage each: the quickstart's.

A tiny model that always trains in one fiction learns its facts by heart. Here the next fiction has other facts about
the same names, so that all it can learn is to copy; and names have two parts each, so that it must copy both.
"""
CHAINS = replace(TINY, name="chains", questions={"chain": (6, 5)}, fictions=(600, 20))
"""The same kind of fictions, asked for the ends of long paths: episodes stay long, and their late turns count."""
PRESETS = {config.name: config for config in (FULL, TINY, CHAINS)}


def preset(name: str) -> FictionConfig:
    """The preset called `name`. Raises TaskError with the nearest names."""
    return PRESETS[checked_choice("the fiction", name, PRESETS, TaskError)]


# --- the typed graph

Part = Literal["train", "eval"]
FICTION_PARTS: tuple[Part, ...] = ("train", "eval")


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
    """Year of birth, release or foundation."""
    craft: str
    """What it does or is: `novelist`, `western`, `Works`."""
    female: bool = False
    theme: tuple[str, str] | None = None
    """A work's (who, does what); of no other entity."""
    invention: str | None = None
    """What a scientist is known for; of no other entity."""

    @property
    def answers(self) -> tuple[str, ...]:
        """Every text that counts as naming it."""
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
class FactGraph:
    """All entities by id, and all facts by subject and relation (a subject has one object per relation)."""

    entities: Mapping[str, Entity]
    facts: Mapping[tuple[str, str], Fact]

    def of_kind(self, kind: str) -> list[Entity]:
        """The entities of a kind, in order of their ids' numbers."""
        return [entity for entity in self.entities.values() if entity.kind == kind]


# --- the tables behind a fiction

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


def relations(config: FictionConfig) -> dict[str, Relation]:
    """The relations that exist in `config`'s fiction, in the order of the table."""
    most = config.phrasings
    by_name: dict[str, Relation] = {}
    for name, row in load_table("relations").items():
        kind, to = name.partition(".")[0], row["to"]
        wanted = config.relations is None or name in config.relations
        if wanted and kind in config.counts and (to in LITERALS or to in config.counts):
            # in plain fictions, only sentences that end with the object
            say = [text for text in row["say"] if text.endswith("{o}.") or not config.plain][:most]
            np_, ask = tuple(row["np"][:most]), tuple(row["ask"][:most])
            by_name[name] = Relation(name=name, to=to, rate=row["rate"], say=tuple(say), np=np_, ask=ask)
    return by_name


@cache
def english() -> frozenset[str]:
    """Every word of the tables in lower case; no invented name may be one of them."""
    text = json.dumps([load_table("relations"), load_table("words"), load_table("filler")])
    return frozenset(re.findall(r"[a-z]+", text.lower()))


@cache
def load_table(name: str) -> dict[str, Any]:
    """`relations`; `words`: what names and texts are made of; `filler`: kind to sentences that state no fact."""
    text = (files("turngym.envs.search") / "data" / f"{name}.json").read_text(encoding="utf-8")
    table: dict[str, Any] = json_of(text)
    return table


# --- invented names, coined from syllables and put together from title words


def pick(rng: np.random.Generator, items: Sequence[str]) -> str:
    """One of `items`, each equally likely."""
    return items[int(rng.integers(len(items)))]


class Namer:
    """Makes names that no other entity of this fiction has.

    Several fictions of one configuration put the same parts together, whatever their seeds.
    """

    def __init__(self, config: FictionConfig, rng: np.random.Generator) -> None:
        self._rng = rng
        self._plain = config.plain
        self._table = load_table("words")
        self._coined: set[str] = set()
        self._taken: set[str] = set()
        self._part, self._eval_share = config.part, config.eval_share
        # without the configuration's seed: all of its fictions share the parts of names
        parts_rng = rng if config.part is None else np.random.default_rng([config.version, 3])
        self.firsts = self._coin(config.first_names, "first_end", parts_rng)
        self.lasts = self._coin(config.last_names, "last_end", parts_rng)
        self.stems = self._coin(config.places, None, parts_rng)
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
        adjective, noun = pick(rng, self.adjectives), pick(rng, self.nouns)
        form = 0 if self._plain else int(rng.integers(8))
        if form < 3:
            return f"{adjective} {noun}"
        if form < 5:
            return f"The {adjective} {noun}"
        if form == 5:
            return f"The {noun} and the {pick(rng, self.nouns)}"
        if form == 6:
            return f"A {noun} for {pick(rng, self.firsts)}"
        return f"The {noun} of {self._stem()}"

    def _stem(self) -> str:
        return pick(self._rng, self.stems)

    def _new(self, draw: Callable[[], str]) -> str:
        for _ in range(10_000):
            name = draw()
            share = int.from_bytes(hashlib.sha256(name.encode("utf-8")).digest()[:4], "big") / 2**32
            # training and evaluation fictions share no name
            ours = self._part is None or (share < self._eval_share) == (self._part == "eval")
            if ours and name.lower() not in self._taken:
                self._taken.add(name.lower())
                return name
        raise TaskError("a fiction ran out of names: give it more first_names, last_names, places or title_words")

    def plain_parts(self, kinds: Iterable[str]) -> set[str]:
        """The parts of which every name in a plain fiction with these kinds consists."""
        ends = [end for kind in kinds for end in self._table.get(f"{kind}_end", ())]
        spaced = [f" {word}" for word in (*self.lasts, *self.nouns)]
        return {*self.firsts, *self.stems, *self.adjectives, *spaced, *ends}

    def _coin(self, count: int, ends: str | None, rng: np.random.Generator) -> list[str]:
        """`count` new words, none of which is an English word of the tables."""
        reserved = english()
        words: list[str] = []
        while len(words) < count:
            word = self._syllable(rng)
            if ends is not None:
                word += pick(rng, self._table[ends])
            elif rng.random() < 0.5:
                word += self._syllable(rng)
            if 3 <= len(word) <= 9 and word not in self._coined and word not in reserved:
                self._coined.add(word)
                words.append(word.capitalize())
        return words

    def _syllable(self, rng: np.random.Generator) -> str:
        return "".join(pick(rng, self._table[part]) for part in ("onsets", "vowels", "codas"))


# --- the entities: names, parts, popularity, and what their articles say besides facts

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


class _Maker:
    def __init__(self, config: FictionConfig, namer: Namer, rng: np.random.Generator) -> None:
        self._config, self._namer, self._rng, self._words = config, namer, rng, load_table("words")
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
            return (self._namer.person(),)
        if kind in ("city", "region", "country"):
            return (self._namer.place(kind),)
        if kind in SHARED:
            return (self._namer.title(),)
        if kind in ("company", "team"):
            return (self._namer.tagged([name.split()[-1]]),)
        return ()


# --- the facts: who directed what, who was born where, and when

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


def make_graph(config: FictionConfig) -> FactGraph:
    """The entities and facts of `config`'s fiction."""
    rng = np.random.default_rng([config.seed, config.version])
    namer = Namer(config, rng)
    maker = _Maker(config, namer, rng)
    everything = [maker.make(kind, number) for kind, count in config.counts.items() for number in range(count)]
    entities = {entity.id: entity for entity in everything}
    linker = _Linker(config, entities, rng)
    for relation in relations(config).values():
        linker.link(relation)
    return FactGraph(entities=entities, facts=linker.facts)


class _Linker:
    def __init__(self, config: FictionConfig, entities: dict[str, Entity], rng: np.random.Generator) -> None:
        self._config, self._rng, self._words = config, rng, load_table("words")
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
                value, answers, order = self._literal(subject, relation)
                fact = Fact(subject=subject.id, relation=relation.name, value=value, answers=answers, order=order)
                self.facts[subject.id, relation.name] = fact
                continue
            target = self._target(subject, relation)
            pairs = [] if target is None else [(subject, target)]
            if target is not None and relation.name == "person.spouse":
                pairs.append((target, subject))
            for owner, object_ in pairs:
                self.facts[owner.id, relation.name] = Fact(
                    subject=owner.id,
                    relation=relation.name,
                    value=object_.name,
                    target=object_.id,
                    answers=object_.answers,
                )

    def _target(self, subject: Entity, relation: Relation) -> Entity | None:
        """An entity of the right kind, craft and age, most often of the same part; None if there is none."""
        rng = self._rng
        part = subject.part if rng.random() < self._config.kinship else None
        craft = CRAFTS.get(relation.name)
        if self._config.plain or rng.random() < VERSATILE:
            craft = None
        for _ in range(DRAWS):
            candidate = self._drawn(relation.to, part, craft) or self._drawn(relation.to, part, None)
            if candidate is not None and candidate.id != subject.id and self._fits(subject, relation.name, candidate):
                return candidate
        return None

    def _drawn(self, kind: str, part: str | None, craft: str | None) -> Entity | None:
        """A random entity of a kind, part and craft (None: any), popular ones more often; None where there is none."""
        key = kind, part, craft
        if key not in self._pools:
            members = [e for e in self._kinds[kind] if part in (None, e.part) and craft in (None, e.craft)]
            self._pools[key] = members, np.cumsum([1.0 if self._config.plain else entity.rank for entity in members])
        members, sums = self._pools[key]
        return members[int(np.searchsorted(sums, self._rng.random() * sums[-1], "right"))] if members else None

    def _fits(self, subject: Entity, relation: str, target: Entity) -> bool:
        """Whether `target` can be the object: unmarried for a spouse, and of an age that makes sense."""
        if relation == "person.spouse" and (target.id, relation) in self.facts:
            return False
        if self._config.plain:
            return True
        if relation in FITS:
            return FITS[relation](subject, target)
        if target.kind != "person" or relation.startswith("person."):
            return True
        # at work when something was made; places and what lives long do not mind
        return subject.kind in ("city", "country", "award", "university") or 20 <= subject.year - target.year <= 70

    def _literal(self, subject: Entity, relation: Relation) -> tuple[str, tuple[str, ...], int]:
        """(value, ways to write it, the number by which it compares)."""
        rng = self._rng
        if relation.to == "year":
            return str(subject.year), (str(subject.year),), subject.year
        if relation.to == "date":
            year = subject.year if relation.name == "person.birthdate" else subject.year + int(rng.integers(50, 93))
            # up to 28, a day that every month has
            month, day = int(rng.integers(12)), int(rng.integers(1, 29))
            month_name = self._words["months"][month]
            value = f"{day} {month_name} {year}"
            return value, (value, f"{month_name} {day}, {year}"), (year * 12 + month) * 31 + day
        if relation.to == "number":
            number = int(10 ** float(rng.uniform(3.3, 6.2)))
            return f"{number:,}", (f"{number:,}", str(number)), number
        coins = self._words["coins"]
        coin = str(coins[int(subject.id.removeprefix("country")) % len(coins)])
        return coin, (coin,), 0


FITS: dict[str, Callable[[Entity, Entity], bool]] = {
    "person.father": lambda child, father: not father.female and 20 <= child.year - father.year <= 45,
    "person.spouse": lambda person, spouse: person.female != spouse.female and abs(person.year - spouse.year) <= 12,
    "film.basis": lambda film, book: book.year < film.year,
}
