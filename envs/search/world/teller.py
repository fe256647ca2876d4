"""Tells a world's facts as questions: what they call an entity, what they ask, what each hop searches for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from turngym.envs.search.questions import Question, normalize
from turngym.envs.search.world.articles import Library
from turngym.envs.search.world.config import WorldConfig
from turngym.envs.search.world.graph import PARTS, Entity, Fact, Graph, Part
from turngym.envs.search.world.tables import relations

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A question before it is checked: `facts` are the gold chain, in the order in which they can be found."""

    text: str
    answers: tuple[str, ...]
    facts: tuple[Fact, ...]
    choice: bool = False
    """The answer is one of the things that the question names, or yes or no."""
    form: str = ""
    """Of yes/no questions: what is balanced among themselves."""


class Teller:
    """Words for one world's questions, and the draws that families make. One object makes all of a world's."""

    def __init__(self, config: WorldConfig, graph: Graph, library: Library) -> None:
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
        self._yes: Counter[str] = Counter()
        self._asked: set[str] = set()
        self._index()

    def _index(self) -> None:
        entities = self.graph.entities
        whole = self.config.disjoint == "facts"
        for entity in entities.values():
            for part in PARTS if whole else (entity.part,):
                for kind in (None, entity.kind):
                    self._members.setdefault((part, kind), []).append(entity)
        for fact in self.graph.facts.values():
            ends = {entities[end].part for end in (fact.subject, fact.target) if end is not None}
            if whole:
                ends = {"eval" if self.rng.random() < self.config.eval_share else "train"}
            # a fact with an end in either part is for neither
            for part in ends if len(ends) == 1 else ():
                self._inside.setdefault((part, fact.subject), []).append(fact)
                if fact.target is not None:
                    self._sources.setdefault((part, fact.target), []).append(fact)

    # --- draws

    def one(self, items: Sequence[Item]) -> Item | None:
        """One of `items`, each equally likely; None where there is none."""
        return items[int(self.rng.integers(len(items)))] if items else None

    def popular(self) -> Entity:
        """An entity, popular ones more often."""
        members = self.members()
        weights = np.array([entity.rank for entity in members])
        return members[int(self.rng.choice(len(members), p=weights / weights.sum()))]

    def members(self, kind: str | None = None) -> list[Entity]:
        """The entities of one kind, or all."""
        return self._members.get((self.part, kind), [])

    def inside(self, subject: Entity) -> list[Fact]:
        """The facts of `subject`."""
        return self._inside.get((self.part, subject.id), [])

    def only(self, subject: Entity, relation: str) -> Fact | None:
        """The fact of `subject` in `relation`, if there is one."""
        return next((fact for fact in self.inside(subject) if fact.relation == relation), None)

    def sources(self, target: Entity) -> list[Fact]:
        """The facts whose object is `target`."""
        return self._sources.get((self.part, target.id), [])

    def target(self, fact: Fact) -> Entity:
        """The object of a fact that has an entity for object."""
        return self.graph.entities[str(fact.target)]

    def wants_yes(self, form: str) -> bool:
        """Whether the next yes/no question of this form should be answered yes: each answer in turn."""
        return self._yes[form] % 2 == 0

    # --- words

    def mention(self, entity: Entity) -> str:
        """What a question calls an entity: its name, its kind where names are shared, or its second name."""
        if entity.aliases and self.rng.random() < self.share(self.config.alias_questions):
            return entity.aliases[0]
        return self.full(entity)

    def full(self, entity: Entity) -> str:
        """The name, made unambiguous."""
        if entity.kind in ("award", "battle"):
            return f"the {entity.name}"
        return f"the {entity.kind} {entity.name}" if self._names[entity.name] > 1 else entity.name

    def called(self, fact: Fact, subject: str) -> str:
        """The object as the object of its subject: `the director of Silent Harbour`."""
        return str(self.one(self.relations[fact.relation].np)).format(x=subject)

    def asked(self, fact: Fact, subject: str) -> str:
        """The question for the object: `Who directed Silent Harbour?`"""
        return str(self.one(self.relations[fact.relation].ask)).format(x=subject)

    def aside(self, fact: Fact) -> str:
        """Something else that the passage of `fact` says about its subject; empty where it says nothing else."""
        others = self.graph.entities[fact.subject]
        told = [f for f in self.inside(others) if f is not fact and self.gold(f) == self.gold(fact)]
        other = self.one([f for f in told if f.target is not None and f.target != fact.target])
        return "" if other is None else f", also connected with {other.value},"

    def hop(self, fact: Fact) -> str:
        """What to search for to learn one fact once its subject is known."""
        if self.config.plain:
            return self.full(self.graph.entities[fact.subject])
        return self.relations[fact.relation].ask[0].format(x=self.full(self.graph.entities[fact.subject])).rstrip("?")

    # --- passages

    def gold(self, fact: Fact) -> str:
        """Id of the passage that tells a fact."""
        return self.library.told[fact.subject, fact.relation]

    def share(self, shares: Mapping[str, float]) -> float:
        """The present family's entry of a setting."""
        return shares.get(self.family, 0.0)

    def links(self, first: Fact, second: Fact) -> bool:
        """Whether the passage of the second hop names the subject of the first."""
        return self.graph.entities[first.subject].name in self._texts[self.gold(second)]

    def finish(self, draft: Draft, number: int) -> Question | None:
        """The question; None where it was asked before, gives its answer away or uses a passage for two hops."""
        gold = tuple(self.gold(fact) for fact in draft.facts)
        # blanks around both, so that an answer is found as whole words only
        asked = f" {normalize(draft.text)} "
        told = any(f" {normalize(answer)} " in asked for answer in draft.answers)
        intros = self.rng.random() < self.share(self.config.intros)
        if intros and not all(passage.endswith(".0") for passage in gold):
            return None
        if len(set(gold)) < len(gold) or (told and not draft.choice) or asked in self._asked:
            return None
        self._asked.add(asked)
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
