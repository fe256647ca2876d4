"""What is asked about a fiction? Makes the fiction and draws its questions, family by family.

`generate_fiction` makes graph, passages and questions from nothing but settings and a seed. Each family of questions
(`FAMILY`) draws one question at random, or raises NoQuestion where the draw led nowhere: a path asked for its end, two
paths that meet, or a comparison of two. `vocabulary` lists every phrase of the episodes in a fiction.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from turngym.core.errors import TaskError
from turngym.envs.search.fiction import (
    FICTION_PARTS,
    Entity,
    Fact,
    FactGraph,
    FictionConfig,
    Namer,
    Part,
    make_graph,
    relations,
)
from turngym.envs.search.fiction_text import NoQuestion, QuestionDraft, Teller, Writer
from turngym.envs.search.passage_text import NOTHING
from turngym.envs.search.questions import Question
from turngym.envs.search.turn_protocol import INVALID
from turngym.retrieval.core import Passage

Chain = tuple[Fact, ...]
Triple = tuple[str, str, str]
ATTEMPTS = 400
"""Draws per question before a family is given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fiction:
    """A corpus with questions about it, all invented."""

    config: FictionConfig
    passages: tuple[Passage, ...]
    questions: tuple[Question, ...]
    """Training and evaluation questions (`split`); no entity, or no fact, is touched by both (`config.disjoint`)."""
    chains: Mapping[str, tuple[Triple, ...]]
    """Task id of a question to its gold facts (subject's name, relation, object), one per hop."""
    graph: FactGraph


def generate_fiction(config: FictionConfig) -> Fiction:
    """The fiction of `config`: the same bytes every time. Raises TaskError where a family finds too few questions."""
    graph = make_graph(config)
    library = Writer(config, graph).write()
    teller = Teller(config, graph, library)
    questions: list[Question] = []
    chains: dict[str, tuple[Triple, ...]] = {}
    for family, counts in config.questions.items():
        for part, count in zip(FICTION_PARTS, counts, strict=True):
            for question, chain in _questions(teller, family, part, count):
                questions.append(question)
                chains[question.task_id] = chain
    return Fiction(config=config, passages=library.passages, questions=tuple(questions), chains=chains, graph=graph)


def generate_fictions(config: FictionConfig, split: str = "all") -> Iterator[Fiction]:
    """The training fictions of `config`, then its evaluation fictions, or those of a `split` alone; a single one, which
    has questions of both, where `config.fictions` is None."""
    if config.fictions is None:
        yield generate_fiction(config)
        return
    for part, count in zip(FICTION_PARTS, config.fictions, strict=True):
        for number in range(count) if split in ("all", part) else ():
            yield generate_fiction(one_fiction(config, part, number))


def one_fiction(config: FictionConfig, part: Part, number: int) -> FictionConfig:
    """The settings of one among several fictions."""
    training = part == "train"
    per_family = config.questions.items()
    counts = {family: (train, 0) if training else (0, evaluation) for family, (train, evaluation) in per_family}
    seed = 2 * number + (not training)
    name = f"{config.name}-{part}{number}"
    # every configuration seed makes other fictions, every fiction has a seed of its own
    return replace(config, name=name, seed=config.seed * 2**20 + seed, fictions=None, part=part, questions=counts)


def _questions(teller: Teller, family: str, part: Part, count: int) -> list[tuple[Question, tuple[Triple, ...]]]:
    questions: list[tuple[Question, tuple[Triple, ...]]] = []
    entities = teller.graph.entities
    teller.family, teller.part = family, part
    for _ in range(count * ATTEMPTS):
        if len(questions) == count:
            return questions
        with suppress(NoQuestion):
            draft = FAMILY[family](teller)
            question = teller.finish(draft, len(questions))
            questions.append((question, tuple((entities[f.subject].name, f.relation, f.value) for f in draft.facts)))
    if len(questions) < count:
        raise TaskError(
            f"fiction {teller.config.name!r}: only {len(questions)} of {count} {part} questions of family {family!r} "
            f"could be made; ask for fewer questions or make the fiction larger"
        )
    return questions


# --- the families


def popqa(teller: Teller) -> QuestionDraft:
    """One hop about an entity drawn by popularity, in a fixed form of words."""
    return chain(teller, walk(teller, teller.popular(), 1))


def nq(teller: Teller) -> QuestionDraft:
    """One hop about something described instead of named, without capitals."""
    subject = teller.one([e for e in teller.members() if e.theme is not None or e.invention is not None])
    facts = walk(teller, subject, 1)
    if subject.theme is not None:
        role, deed = subject.theme
        described = f"the {'movie' if subject.kind == 'film' else 'novel'} about a {role} who {deed}"
    else:
        described = f"the person behind {subject.invention}"
    draft = chain(teller, facts, described)
    return QuestionDraft(text=draft.text.lower().rstrip("?"), answers=draft.answers, facts=facts)


def wiki(teller: Teller) -> QuestionDraft:
    """2Wiki's four types: compositional, inference, comparison, bridge-comparison."""
    kind = teller.rng.random() if not teller.config.plain else 0.0
    if kind < 0.45:
        return linear(teller, 2)
    if kind < 0.56:
        return inference(teller)
    return comparison(teller) if kind < 0.84 else bridge_comparison(teller)


def hotpot(teller: Teller) -> QuestionDraft:
    """HotpotQA's types: bridge, intersection, yes/no."""
    kind = teller.rng.random() if not teller.config.plain else 0.75
    if kind < 0.7:
        return linear(teller, 2)
    return meeting(teller, 0) if kind < 0.85 else same(teller)


def musique(teller: Teller) -> QuestionDraft:
    """Three or four hops, in a line or after two lines that meet."""
    kind = teller.rng.random() if not teller.config.plain else 0.0
    if kind < 0.2:
        return linear(teller, 3)
    return linear(teller, 4) if kind < 0.27 else meeting(teller, 1 if kind < 0.95 else 2)


def long_chain(teller: Teller) -> QuestionDraft:
    """Five or six hops in a line, more than any public set has; no relation comes twice."""
    facts = walk(teller, teller.one(teller.members()), int(teller.rng.integers(5, 7)))
    if len({fact.relation for fact in facts}) < len(facts):
        raise NoQuestion
    return chain(teller, facts)


FAMILY: dict[str, Callable[[Teller], QuestionDraft]] = {
    "popqa-like": popqa,
    "nq-like": nq,
    "2wiki-like": wiki,
    "hotpot-like": hotpot,
    "musique-like": musique,
    "chain": long_chain,
}
"""How each family of `FAMILIES` draws a question."""


# --- questions that follow paths: one after another, or two that meet


def linear(teller: Teller, hops: int) -> QuestionDraft:
    """A path asked for its end; in `config.linked` of them the second passage names where the path begins."""
    facts = walk(teller, teller.one(teller.members()), hops)
    if teller.links(facts[0], facts[1]) != _linked(teller):
        raise NoQuestion
    return chain(teller, facts)


def walk(teller: Teller, subject: Entity, hops: int) -> tuple[Fact, ...]:
    """`hops` facts, each about the object of the one before; nothing comes twice."""
    facts: list[Fact] = []
    seen: set[str] = set()
    while len(facts) < hops:
        seen.add(subject.id)
        last = len(facts) == hops - 1
        options = [f for f in teller.inside(subject) if f.target not in seen and (last or f.target is not None)]
        facts.append(teller.one(options))
        if not last:
            subject = teller.target(facts[-1])
    return tuple(facts)


def chain(teller: Teller, facts: tuple[Fact, ...], subject: str | None = None) -> QuestionDraft:
    """The question for the end of a path; `subject` is what the path starts from, if not the first fact's."""
    text = teller.mention(teller.graph.entities[facts[0].subject]) if subject is None else subject
    for fact, following in pairwise(facts):
        text = teller.called(fact, text)
        if teller.rng.random() < teller.share(teller.config.asides):
            text += teller.aside(following)
    return QuestionDraft(text=teller.asked(facts[-1], text), answers=facts[-1].answers, facts=facts)


def meeting(teller: Teller, more: int) -> QuestionDraft:
    """Two subjects with one object, and `more` hops from there: both are named, so their passages are easy to find."""
    target = teller.one(teller.met())
    sources = teller.sources(target)
    left, right = (sources[int(i)] for i in teller.rng.choice(len(sources), size=2, replace=False))
    hops = walk(teller, target, more) if more else ()
    ends = (left.subject, right.subject)
    if left.subject == right.subject or any(fact.target in ends for fact in hops):
        raise NoQuestion
    if more and (teller.links(left, hops[0]) or teller.links(right, hops[0])) != _linked(teller):
        raise NoQuestion
    a, b = (teller.called(fact, teller.mention(teller.graph.entities[fact.subject])) for fact in (left, right))
    facts = (left, right, *hops)
    if not more:
        return QuestionDraft(text=f"What is the name of both {a} and {b}?", answers=target.answers, facts=facts)
    aside = teller.aside(hops[0]) if teller.rng.random() < teller.share(teller.config.asides) else ""
    draft = chain(teller, hops, f"the {target.kind} that is both {a} and {b}{aside}")
    return QuestionDraft(text=draft.text, answers=draft.answers, facts=facts)


def _linked(teller: Teller) -> bool:
    """Whether the next path's second passage should name where the path begins."""
    return bool(teller.rng.random() < teller.share(teller.config.linked))


# --- questions that compare two chains, and those whose two hops have a name of their own

KINSHIP = (
    ("person.father", "person.father", "Who is the paternal grandfather of {x}?"),
    ("person.spouse", "person.father", "Who is the father-in-law of {x}?"),
    ("company.owner", "company.owner", "Which company ultimately controls {x}?"),
)
"""Inference: (first relation, second relation, question)."""
ORDERS = (
    ("person.birthdate", "Who is older, {a} or {b}?", -1),
    ("person.birthdate", "Who is younger, {a} or {b}?", 1),
    ("person.deathdate", "Who passed away later, {a} or {b}?", 1),
    ("film.year", "Which film came out earlier, {a} or {b}?", -1),
    ("film.year", "Which film was released more recently, {a} or {b}?", 1),
    ("album.year", "Which album was issued earlier, {a} or {b}?", -1),
    ("book.year", "Which novel was published earlier, {a} or {b}?", -1),
    ("company.year", "Which company was established earlier, {a} or {b}?", -1),
    ("city.population", "Which city has the larger population, {a} or {b}?", 1),
    ("team.year", "Which club was founded earlier, {a} or {b}?", -1),
)
"""Comparison: (relation, question, whether the smaller (-1) or the larger (1) literal wins)."""
BRIDGED = (
    ("film.director", "person.birthdate", "Which film has the older director, {a} or {b}?", -1),
    ("film.director", "person.birthdate", "Which film has the younger director, {a} or {b}?", 1),
    ("book.author", "person.birthdate", "Which novel has the older author, {a} or {b}?", -1),
    ("album.artist", "person.birthdate", "Which album has the younger performer, {a} or {b}?", 1),
)
"""Bridge-comparison: the same after one hop."""
SAME = (
    ("person.country", "Are {a} and {b} from the same country?"),
    ("person.university", "Were {a} and {b} educated at the same place?"),
    ("city.region", "Are {a} and {b} located in the same region?"),
    ("company.city", "Do {a} and {b} have their headquarters in the same city?"),
    ("film.studio", "Did one studio produce both {a} and {b}?"),
    ("person.award", "Did {a} and {b} receive the same award?"),
)
"""Yes/no: whether two subjects have one object."""
SAME_BRIDGED = (
    ("film.director", "person.country", "Are the directors of {a} and {b} from the same country?"),
    ("book.author", "person.country", "Are the authors of {a} and {b} from the same country?"),
)
SHARE_YES_NO = 0.3
"""Share of yes/no questions among bridge-comparisons."""


def inference(teller: Teller) -> QuestionDraft:
    """A question about two hops that have one name, such as a paternal grandfather."""
    rows = [row for row in KINSHIP if row[0] in teller.relations and row[1] in teller.relations]
    first_relation, second_relation, form = teller.one(rows)
    subject = teller.one(teller.members(first_relation.partition(".")[0]))
    first = teller.only(subject, first_relation)
    second = teller.only(teller.target(first), second_relation)
    if second.target == subject.id:
        raise NoQuestion
    return QuestionDraft(text=form.format(x=teller.mention(subject)), answers=second.answers, facts=(first, second))


def comparison(teller: Teller) -> QuestionDraft:
    """A question about which of two entities comes first, or has more of something."""
    relation, form, sign = teller.one([row for row in ORDERS if row[0] in teller.relations])
    left, right = _pair(teller, relation)
    return _ordered(teller, form, sign, ((left,), (right,)))


def bridge_comparison(teller: Teller) -> QuestionDraft:
    """A comparison of the directors, authors or artists of two works; some are yes/no questions."""
    if teller.rng.random() < SHARE_YES_NO:
        rows = [row for row in SAME_BRIDGED if row[0] in teller.relations and row[1] in teller.relations]
        first, second, form = teller.one(rows)
        return _yes_no(teller, form, _bridges(teller, first, second))
    ordered = [row for row in BRIDGED if row[0] in teller.relations and row[1] in teller.relations]
    first, second, form, sign = teller.one(ordered)
    return _ordered(teller, form, sign, _bridges(teller, first, second))


def same(teller: Teller) -> QuestionDraft:
    """A question whether two subjects have the same object; yes and no are equally frequent."""
    relation, form = teller.one([row for row in SAME if row[0] in teller.relations])
    left, right = _pair(teller, relation)
    return _yes_no(teller, form, ((left,), (right,)))


def _ordered(teller: Teller, form: str, sign: int, chains: tuple[Chain, Chain]) -> QuestionDraft:
    """A question which of two chains ends in the smaller or larger literal."""
    ends = [chain[-1].order for chain in chains]
    a, b = (teller.graph.entities[chain[0].subject] for chain in chains)
    if ends[0] == ends[1] or a.name == b.name:
        raise NoQuestion
    winner = a if (ends[0] < ends[1]) == (sign < 0) else b
    text = form.format(a=a.name, b=b.name)
    return QuestionDraft(text=text, answers=winner.answers, facts=_interleaved(chains), choice=True)


def _yes_no(teller: Teller, form: str, chains: tuple[Chain, Chain]) -> QuestionDraft:
    """A question whether two chains end in the same object."""
    yes = chains[0][-1].target == chains[1][-1].target
    key = f"{teller.part} {form}"
    if yes != teller.wants_yes(key):
        raise NoQuestion
    a, b = (teller.mention(teller.graph.entities[chain[0].subject]) for chain in chains)
    text, answer = form.format(a=a, b=b), "yes" if yes else "no"
    return QuestionDraft(text=text, answers=(answer,), facts=_interleaved(chains), choice=True, form=key)


def _interleaved(chains: tuple[Chain, Chain]) -> Chain:
    """Both first hops, then both second hops."""
    return tuple(fact for hop in zip(*chains, strict=True) for fact in hop)


def _pair(teller: Teller, relation: str) -> tuple[Fact, Fact]:
    """Two subjects' facts of one relation; half of the draws look for a shared object first."""
    facts = teller.all_of(relation)
    first = teller.one(facts)
    candidates = [fact for fact in facts if fact.subject != first.subject]
    twins = [fact for fact in candidates if fact.target is not None and fact.target == first.target]
    return first, teller.one(twins if twins and teller.rng.random() < 0.5 else candidates)


def _bridges(teller: Teller, first: str, second: str) -> tuple[Chain, Chain]:
    """Two works and a fact about what each leads to (two different ones)."""
    left, right = _pair(teller, first)
    if left.target == right.target:
        raise NoQuestion
    return (left, teller.only(teller.target(left), second)), (right, teller.only(teller.target(right), second))


# --- every name and phrase that can occur in the episodes, for phrase tokenizers of tiny models

MOST_DOCUMENTS = 10
OBSERVATION = (
    *("Question: ", "?", "\n\n<information>", "</information>\n\n", NOTHING, INVALID, INVALID.strip()),
    *('") ', ". ", ".\n", ".", " ", "yes", "no"),
)
_SLOT = re.compile(r"\{[sox]\}")
_WORD = re.compile(r"\w+")


def vocabulary(config: FictionConfig) -> list[str]:
    """Sorted phrases into which questions, passages and sensible actions of a `plain` fiction can be cut.

    Names are cut into the parts that they are made of, which training and evaluation share; every wording of a relation
    is one phrase up to its slot. Single words are there too, for queries that make no sense; none begins with a space,
    because of two equally short ways to cut a sentence one would be rare.
    """
    phrases = set(OBSERVATION)
    # what stands before and between documents of the `search_r1` layout
    for number in range(1, MOST_DOCUMENTS + 1):
        head = f'Doc {number}(Title: "'
        phrases |= {head, f".\n{head}", f"\n{head}"}
    # the relations' sentences and questions around their slots
    for relation in relations(config).values():
        for template in (*relation.say, *relation.np, *relation.ask):
            for part in _SLOT.split(template):
                phrases |= {part, part.rstrip("?.")}
    # several fictions put the same parts of names together, whichever part they are for
    settings = config if config.fictions is None else replace(config, part="train")
    phrases |= Namer(settings, np.random.default_rng([config.seed, config.version])).plain_parts(config.counts)
    return sorted(phrases.union(word for phrase in phrases for word in _WORD.findall(phrase)))
