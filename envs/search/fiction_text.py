"""How are facts put into words? `Writer` writes the passages of a fiction, `Teller` words its questions.

Every entity has an article, which is cut into passages; each passage knows the facts that it states.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from turngym.envs.search.fiction import (
    FICTION_PARTS,
    Entity,
    Fact,
    FactGraph,
    FictionConfig,
    Part,
    load_table,
    pick,
    relations,
)
from turngym.envs.search.questions import Question
from turngym.envs.search.reward import normalize
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
    """Writes one fiction; the random generator decides wordings, filler and where passages end."""

    def __init__(self, config: FictionConfig, graph: FactGraph) -> None:
        self._config, self._graph, self._words, self._filler = config, graph, load_table("words"), load_table("filler")
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
            # works that share a name have their kind in the title
            title = f"{entity.name} ({entity.kind})" if self._names[entity.name] > 1 else entity.name
            for number, chunk in enumerate(self._chunks(entity)):
                text = " ".join(sentence.text for sentence in chunk)
                passage = Passage(id=f"{entity.id}.{number}", title=title, text=text)
                passages.append(passage)
                told.update({(s.fact.subject, s.fact.relation): passage.id for s in chunk if s.fact is not None})
        return Library(passages=tuple(passages), told=told)

    def _chunks(self, entity: Entity) -> list[list[_Sentence]]:
        """The article's sentences, passage by passage."""
        sentences = self._sentences(entity)
        if self._config.plain:
            return [sentences]
        chunks: list[list[_Sentence]] = [[]]
        low, high = self._config.words
        size, limit = 0, int(self._rng.integers(low, high + 1))
        for sentence in sentences:
            length = len(sentence.text.split())
            if chunks[-1] and (size >= limit or size + length > MOST_WORDS):
                chunks.append([])
                size, limit = 0, int(self._rng.integers(low, high + 1))
            chunks[-1].append(sentence)
            size += length
        return chunks

    def _sentences(self, entity: Entity) -> list[_Sentence]:
        config, rng = self._config, self._rng
        early: list[_Sentence] = []
        late: list[_Sentence] = []
        for fact in self._facts.get(entity.id, []):
            half = late if rng.random() < config.late else early
            half.append(_Sentence(text=self._say(entity, fact), fact=fact))
        if config.plain:
            rng.shuffle(early)  # type: ignore[arg-type]
            return early
        lead = [_Sentence(text=text) for text in self._opening(entity)]
        low, high = config.filler
        later = late + [_Sentence(text=text) for text in self._idle(entity, round(low + (high - low) * entity.rank))]
        rng.shuffle(later)  # type: ignore[arg-type]
        return [*lead, *early, *later]

    def _opening(self, entity: Entity) -> list[str]:
        """The first sentences: what it is, its second name, what is special about it, and what points to it."""
        lead = [f"{_the(entity)} is {self._definition(entity)}."]
        lead += [f"Some sources use the name {alias}." for alias in entity.aliases]
        if entity.theme is not None:
            lead.append(f"It tells of a {entity.theme[0]} who {entity.theme[1]}.")
        if entity.invention is not None:
            lead.append(f"{self._refer(entity)} gave the world {entity.invention}.")
        sources = self._sources.get(entity.id, [])
        if sources and entity.kind in BACKLINKS:
            # no person is remembered for another one
            fitting = [source for source in sources if source.kind != "person" or entity.kind != "person"]
            named = [source for source in fitting if self._rng.random() < self._config.backlinks][:2]
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
        others = {"team": "a football club", "award": "an annual honour", "battle": "an episode of the war"}
        return others.get(kind, _a(kind))

    def _say(self, entity: Entity, fact: Fact) -> str:
        template = pick(self._rng, self._relations[fact.relation].say)
        named = self._config.plain or not template.startswith("{s}") or self._rng.random() < 0.4
        return template.format(s=entity.name if named else self._refer(entity), o=fact.value)

    def _refer(self, entity: Entity) -> str:
        if entity.kind != "person":
            return "It"
        return "She" if entity.female else "He"

    def _idle(self, entity: Entity, count: int) -> list[str]:
        """`count` sentences of filler. If there are not so many, those with slots are used again with other words."""
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


# --- questions: what they call an entity, what they ask, what each hop searches for

Item = TypeVar("Item")


class NoQuestion(Exception):
    """This draw makes no question; another one is tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionDraft:
    """A question before it is checked: `facts` are the gold chain, in the order in which they can be found."""

    text: str
    answers: tuple[str, ...]
    facts: tuple[Fact, ...]
    choice: bool = False
    """The answer is one of the things that the question names, or yes or no."""
    form: str = ""
    """What yes/no questions are balanced by among themselves."""


class Teller:
    """Words for one fiction's questions, and the draws that families make. One object makes all of a fiction's."""

    def __init__(self, config: FictionConfig, graph: FactGraph, library: Library) -> None:
        self.config, self.graph, self.library = config, graph, library
        self.rng = np.random.default_rng([config.seed, config.version, 2])
        self.relations = relations(config)
        self.family = ""
        self.part: Part = "train"
        """What is being made; decides which entities and facts the draws know."""
        self._texts = {passage.id: f"{passage.title}\n{passage.text}" for passage in library.passages}
        self._names = Counter(entity.name for entity in graph.entities.values())
        self._members: dict[tuple[Part, str | None], list[Entity]] = {}
        self._inside: dict[tuple[Part, str], list[Fact]] = {}
        self._sources: dict[tuple[Part, str], list[Fact]] = {}
        self._met: dict[Part, list[Entity]] = {}
        self._same: dict[tuple[Part, str], list[Fact]] = {}
        self._yes: Counter[str] = Counter()
        self._asked: set[str] = set()
        # which entities and facts each part may touch
        entities = graph.entities
        by_facts = config.disjoint == "facts"
        for entity in entities.values():
            for part in FICTION_PARTS if by_facts else (entity.part,):
                for kind in (None, entity.kind):
                    self._members.setdefault((part, kind), []).append(entity)
        for fact in graph.facts.values():
            parts = {entities[end].part for end in (fact.subject, fact.target) if end is not None}
            if by_facts:
                parts = {"eval" if self.rng.random() < config.eval_share else "train"}
            # a fact with an end in either part is for neither
            for part in parts if len(parts) == 1 else ():
                self._inside.setdefault((part, fact.subject), []).append(fact)
                if fact.target is not None:
                    self._sources.setdefault((part, fact.target), []).append(fact)

    # --- draws

    def one(self, items: Sequence[Item]) -> Item:
        """Draws one of `items`, each equally likely. Raises NoQuestion if there are none."""
        if not items:
            raise NoQuestion
        return items[int(self.rng.integers(len(items)))]

    def popular(self) -> Entity:
        """An entity, popular ones more often."""
        members = self.members()
        weights = np.array([entity.rank for entity in members])
        return members[int(self.rng.choice(len(members), p=weights / weights.sum()))]

    def members(self, kind: str | None = None) -> list[Entity]:
        return self._members.get((self.part, kind), [])

    def inside(self, subject: Entity) -> list[Fact]:
        return self._inside.get((self.part, subject.id), [])

    def only(self, subject: Entity, relation: str) -> Fact:
        """The fact of `subject` in `relation`. Raises NoQuestion where there is none."""
        for fact in self.inside(subject):
            if fact.relation == relation:
                return fact
        raise NoQuestion

    def sources(self, target: Entity) -> list[Fact]:
        return self._sources.get((self.part, target.id), [])

    def met(self) -> list[Entity]:
        """The entities that are the object of several facts."""
        if self.part not in self._met:
            self._met[self.part] = [entity for entity in self.members() if len(self.sources(entity)) > 1]
        return self._met[self.part]

    def all_of(self, relation: str) -> list[Fact]:
        """Every subject's fact of `relation`."""
        key = self.part, relation
        if key not in self._same:
            facts = (fact for entity in self.members(relation.partition(".")[0]) for fact in self.inside(entity))
            self._same[key] = [fact for fact in facts if fact.relation == relation]
        return self._same[key]

    def target(self, fact: Fact) -> Entity:
        return self.graph.entities[str(fact.target)]

    def wants_yes(self, form: str) -> bool:
        """Whether the next yes/no question of this form should be answered yes: each answer in turn."""
        return self._yes[form] % 2 == 0

    # --- words

    def mention(self, entity: Entity) -> str:
        """How a question names an entity: by its name, by name and kind if names are shared, or by its second name."""
        if entity.aliases and self.rng.random() < self.share(self.config.alias_questions):
            return entity.aliases[0]
        return self.full(entity)

    def full(self, entity: Entity) -> str:
        """The name, made unambiguous."""
        if entity.kind in ("award", "battle"):
            return f"the {entity.name}"
        return f"the {entity.kind} {entity.name}" if self._names[entity.name] > 1 else entity.name

    def called(self, fact: Fact, subject: str) -> str:
        """The object described by its subject: `the director of Silent Harbour`."""
        return self.one(self.relations[fact.relation].np).format(x=subject)

    def asked(self, fact: Fact, subject: str) -> str:
        """The question for the object: `Who directed Silent Harbour?`"""
        return self.one(self.relations[fact.relation].ask).format(x=subject)

    def aside(self, fact: Fact) -> str:
        """Something else that the passage of `fact` says about its subject; empty where it says nothing else."""
        subject = self.graph.entities[fact.subject]
        same_passage = [f for f in self.inside(subject) if f is not fact and self.gold(f) == self.gold(fact)]
        other_objects = [f for f in same_passage if f.target is not None and f.target != fact.target]
        return f", also connected with {self.one(other_objects).value}," if other_objects else ""

    def hop(self, fact: Fact) -> str:
        """The query that finds one fact once its subject is known."""
        if self.config.plain:
            return self.full(self.graph.entities[fact.subject])
        return self.relations[fact.relation].ask[0].format(x=self.full(self.graph.entities[fact.subject])).rstrip("?")

    # --- passages

    def gold(self, fact: Fact) -> str:
        """Id of the passage that tells a fact."""
        return self.library.told[fact.subject, fact.relation]

    def share(self, shares: Mapping[str, float]) -> float:
        """The value of a setting for the family that is being made."""
        return shares.get(self.family, 0.0)

    def links(self, first: Fact, second: Fact) -> bool:
        """Whether the passage of the second hop names the subject of the first."""
        return self.graph.entities[first.subject].name in self._texts[self.gold(second)]

    def finish(self, draft: QuestionDraft, number: int) -> Question:
        """Makes the question. Raises NoQuestion if it was asked before, gives its answer away, or needs one passage for
        two hops."""
        gold = tuple(self.gold(fact) for fact in draft.facts)
        # blanks around both, so that an answer is found as whole words only
        text = f" {normalize(draft.text)} "
        given_away = any(f" {normalize(answer)} " in text for answer in draft.answers)
        intros = self.rng.random() < self.share(self.config.intros)
        if intros and not all(passage.endswith(".0") for passage in gold):
            raise NoQuestion
        if len(set(gold)) < len(gold) or (given_away and not draft.choice) or text in self._asked:
            raise NoQuestion
        self._asked.add(text)
        if draft.form:
            self._yes[draft.form] += 1
        return Question(
            id=f"{self.config.name}-{number}" if self.config.part else f"{self.config.name}-{self.part}-{number}",
            # an aside ends with a comma, which may meet another one or the question mark
            question=draft.text.replace(",,", ",").replace(",?", "?"),
            golden_answers=draft.answers,
            data_source=self.family,
            gold_ids=gold,
            hops=tuple(self.hop(fact) for fact in draft.facts),
            split=self.part,
        )
