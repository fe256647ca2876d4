"""Writes the world out: an article for every entity, cut into passages of which each knows the facts it states."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from turngym.envs.search.world.config import WorldConfig
from turngym.envs.search.world.graph import Entity, Fact, Graph
from turngym.envs.search.world.names import pick
from turngym.envs.search.world.tables import filler, relations, words
from turngym.retrieval.core import Passage

MOST_WORDS = 200
BACKLINKS = {
    "person": "{s} is remembered for {o}.",
    "city": "Guides to the place never fail to mention {o}.",
    "company": "Its name is tied to that of {o}.",
    "university": "Visitors are told about {o}.",
    "book": "It lives on through {o}.",
    "award": "The list of honours names {o}.",
}
"""Kind of an article's subject to the sentence that names something pointing to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """All passages, and where each fact is told."""

    passages: tuple[Passage, ...]
    told: Mapping[tuple[str, str], str]
    """(subject, relation) to the id of the passage that states the fact."""


@dataclass(slots=True, kw_only=True)
class _Sentence:
    text: str
    fact: Fact | None = None


class Writer:
    """Writes one world; the random generator decides wordings, filler and where passages end."""

    def __init__(self, config: WorldConfig, graph: Graph) -> None:
        self._config, self._graph, self._words, self._filler = config, graph, words(), filler()
        self._relations = relations(config)
        # a stream apart from the graph's (no third number) and the questions' (2): a change of one leaves the others
        self._rng = np.random.default_rng([config.seed, config.version, 1])
        self._kinds = {kind: graph.of_kind(kind) for kind in config.counts}
        self._sources: dict[str, list[Entity]] = {}
        for (subject, _), fact in graph.facts.items():
            if fact.target is not None:
                self._sources.setdefault(fact.target, []).append(graph.entities[subject])
        self._names = Counter(entity.name for entity in graph.entities.values())
        self._facts: dict[str, list[Fact]] = {}
        for fact in graph.facts.values():
            self._facts.setdefault(fact.subject, []).append(fact)

    def write(self) -> Library:
        """Every entity's article, in the order of the entities."""
        passages: list[Passage] = []
        told: dict[tuple[str, str], str] = {}
        for entity in self._graph.entities.values():
            for number, chunk in enumerate(self._chunks(entity)):
                text = " ".join(sentence.text for sentence in chunk)
                passage = Passage(id=f"{entity.id}.{number}", title=self._title(entity), text=text)
                passages.append(passage)
                told.update({(s.fact.subject, s.fact.relation): passage.id for s in chunk if s.fact is not None})
        return Library(passages=tuple(passages), told=told)

    def _title(self, entity: Entity) -> str:
        """The name, and for works that share it what they are."""
        return f"{entity.name} ({entity.kind})" if self._names[entity.name] > 1 else entity.name

    def _chunks(self, entity: Entity) -> list[list[_Sentence]]:
        """The article's sentences, passage by passage."""
        sentences = self._sentences(entity)
        if self._config.plain:
            return [sentences]
        chunks: list[list[_Sentence]] = [[]]
        size, limit = 0, self._limit()
        for sentence in sentences:
            length = len(sentence.text.split())
            if chunks[-1] and (size >= limit or size + length > MOST_WORDS):
                chunks.append([])
                size, limit = 0, self._limit()
            chunks[-1].append(sentence)
            size += length
        return chunks

    def _limit(self) -> int:
        low, high = self._config.words
        return int(self._rng.integers(low, high + 1))

    def _sentences(self, entity: Entity) -> list[_Sentence]:
        config, rng = self._config, self._rng
        early: list[_Sentence] = []
        late: list[_Sentence] = []
        for fact in self._facts.get(entity.id, []):
            place = late if rng.random() < config.late else early
            place.append(_Sentence(text=self._say(entity, fact, first=config.plain), fact=fact))
        if config.plain:
            rng.shuffle(early)  # type: ignore[arg-type]
            return early
        lead = [_Sentence(text=text) for text in self._opening(entity)]
        low, high = config.filler
        rest = late + [_Sentence(text=text) for text in self._idle(entity, round(low + (high - low) * entity.rank))]
        rng.shuffle(rest)  # type: ignore[arg-type]
        return [*lead, *early, *rest]

    def _opening(self, entity: Entity) -> list[str]:
        """What it is, its second name, what is special about it, and who points to it."""
        lead = [f"{_the(entity)} is {self._definition(entity)}."]
        lead += [f"Some sources use the name {alias}." for alias in entity.aliases]
        if entity.theme is not None:
            lead.append(f"It tells of a {entity.theme[0]} who {entity.theme[1]}.")
        if entity.invention is not None:
            lead.append(f"{self._refer(entity)} gave the world {entity.invention}.")
        sources = self._sources.get(entity.id, [])
        if sources and entity.kind in BACKLINKS:
            works = [source for source in sources if source.kind != "person" or entity.kind != "person"]
            named = [source for source in works if self._rng.random() < self._config.backlinks][:2]
            sentence = BACKLINKS[entity.kind]
            lead += [sentence.format(s=self._refer(entity), o=_the(source, start=False)) for source in named]
        return lead

    def _definition(self, entity: Entity) -> str:
        kind, craft = entity.kind, entity.craft
        if kind in ("film", "album", "book"):
            return _a(f"{craft} {kind}")
        if kind == "person":
            return _a(craft)
        if kind == "company":
            return {"film": "a film studio", "album": "a record label", "book": "a publisher"}.get(craft, "a company")
        return {"team": "a football club", "award": "an annual honour", "battle": "an episode of the war"}.get(
            kind, _a(kind)
        )

    def _say(self, entity: Entity, fact: Fact, *, first: bool) -> str:
        template = pick(self._rng, self._relations[fact.relation].say)
        named = first or not template.startswith("{s}") or self._rng.random() < 0.4
        return template.format(s=entity.name if named else self._refer(entity), o=fact.value)

    def _refer(self, entity: Entity) -> str:
        if entity.kind != "person":
            return "It"
        return "She" if entity.female else "He"

    def _idle(self, entity: Entity, count: int) -> list[str]:
        """`count` sentences of filler; where that is more than there are, those with slots come again."""
        bank = list(self._filler[entity.kind])
        self._rng.shuffle(bank)
        again = [template for template in bank if "{" in template]
        return [self._fill(entity, template) for template in (bank + again * 3)[:count]]

    def _fill(self, entity: Entity, template: str) -> str:
        rng, table = self._rng, self._words
        return template.format(
            adj=pick(rng, table["adjectives"]).lower(),
            noun=pick(rng, table["nouns"]).lower(),
            n=int(rng.integers(3, 60)),
            street=pick(rng, table["streets"]),
            same=self._other(entity.kind, entity),
            person=self._other("person", entity),
            city=self._other("city", entity),
        )

    def _other(self, kind: str, entity: Entity) -> str:
        """Another entity of `kind`: a near miss for a search."""
        pool = self._kinds.get(kind) or [entity]
        return _the(pool[int(self._rng.integers(len(pool)))], start=False)


def _the(entity: Entity, start: bool = True) -> str:
    """The name as a sentence says it: prizes and battles have an article."""
    if entity.kind in ("award", "battle"):
        return f"{'The' if start else 'the'} {entity.name}"
    return entity.name


def _a(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"
