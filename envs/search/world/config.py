"""Settings of fictional worlds, and the named presets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from turngym.envs.core import TaskError
from turngym.envs.suggest import did_you_mean

FAMILIES = ("popqa-like", "nq-like", "2wiki-like", "hotpot-like", "musique-like")
"""Question families, which are also the data sources (rows of the reports)."""


def _shares(shares: dict[str, float]) -> Mapping[str, float]:
    value: Mapping[str, float] = field(default_factory=lambda: dict(shares))
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldConfig:
    """What kind of world is made. The same settings give the same bytes on every machine."""

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
    """Share of the entities or facts (with several worlds: of the possible names) that only evaluation questions may
    touch."""
    kinship: float = 0.9
    """Share of facts whose two entities are both for training or both for evaluation."""
    questions: Mapping[str, tuple[int, int]]
    """Family to (training, evaluation) questions."""
    worlds: tuple[int, int] | None = None
    """So many worlds for training and for evaluation, each with entities, facts and passages of its own and either kind
    of questions; they coin names from the same parts, but no name is in both. None: one world with both."""
    part: Literal["train", "eval"] | None = None
    """Of one among several worlds: what all of it is for. Set where they are made."""
    relations: tuple[str, ...] | None = None
    """Relations that exist (`film.director`, ...); None: all of the table."""
    phrasings: int | None = None
    """At most how many wordings of a relation are used, in passages and in questions; None: all."""
    first_names: int = 240
    last_names: int = 420
    places: int = 900
    """Coined stems that places, companies, teams and awards are named after."""
    title_words: int = 60
    """Adjectives and nouns that titles are made of, so many of each."""
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
        unknown = [name for name in self.questions if name not in FAMILIES]
        if unknown:
            hint = did_you_mean(unknown[0], FAMILIES)
            raise TaskError(f"world {self.name!r}: no family {unknown[0]!r}; families: {', '.join(FAMILIES)}.{hint}")


FULL = WorldConfig(
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
    questions=dict.fromkeys(FAMILIES, (600, 150)),
)
"""About 2,500 entities and 10,000 passages, about as hard for BM25 as the real sets."""

TINY = WorldConfig(
    name="tiny",
    counts={"film": 10, "book": 8, "person": 16, "city": 10, "region": 4},
    questions={"popqa-like": (10, 5), "2wiki-like": (20, 10), "musique-like": (6, 5)},
    worlds=(400, 20),
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
"""Many worlds of about 50 entities in plain words, one short passage each: the quickstart's.

A tiny model that always trains in one world learns its facts by heart. Here the next world has other facts about the
same names, so that all it can learn is to copy; and names have two parts each, so that it must copy both.
"""

PRESETS = {config.name: config for config in (FULL, TINY)}


def preset(name: str) -> WorldConfig:
    """The preset called `name`. Raises TaskError with the nearest names."""
    if name not in PRESETS:
        raise TaskError(f"there is no world {name!r}; worlds are: {', '.join(PRESETS)}.{did_you_mean(name, PRESETS)}")
    return PRESETS[name]
