"""Questions that follow paths: one after another, or two that meet."""

from __future__ import annotations

from itertools import pairwise

from turngym.envs.search.world.graph import Entity, Fact
from turngym.envs.search.world.teller import Draft, Teller


def linear(teller: Teller, hops: int) -> Draft | None:
    """A path asked for its end; in `config.linked` of them the second passage names where the path begins."""
    facts = walk(teller, teller.one(teller.members()), hops)
    if facts is None or teller.links(facts[0], facts[1]) != _linked(teller):
        return None
    return chain(teller, facts)


def walk(teller: Teller, subject: Entity | None, hops: int) -> tuple[Fact, ...] | None:
    """`hops` facts, each about the object of the one before; nothing comes twice."""
    facts: list[Fact] = []
    seen: set[str] = set()
    while subject is not None and len(facts) < hops:
        seen.add(subject.id)
        last = len(facts) == hops - 1
        found = [f for f in teller.inside(subject) if f.target not in seen and (last or f.target is not None)]
        fact = teller.one(found)
        if fact is None:
            return None
        facts.append(fact)
        subject = None if fact.target is None else teller.target(fact)
    return tuple(facts) if len(facts) == hops else None


def chain(teller: Teller, facts: tuple[Fact, ...], subject: str | None = None) -> Draft:
    """The question for the end of a path; `subject` is what the path starts from, if not the first fact's."""
    text = teller.mention(teller.graph.entities[facts[0].subject]) if subject is None else subject
    for fact, following in pairwise(facts):
        text = teller.called(fact, text)
        if teller.rng.random() < teller.share(teller.config.asides):
            text += teller.aside(following)
    return Draft(text=teller.asked(facts[-1], text), answers=facts[-1].answers, facts=facts)


def meeting(teller: Teller, more: int) -> Draft | None:
    """Two subjects with one object, and `more` hops from there: both are named, so their passages are easy to find."""
    target = teller.one([e for e in teller.members() if len(teller.sources(e)) > 1])
    if target is None:
        return None
    sources = teller.sources(target)
    one, two = (sources[int(i)] for i in teller.rng.choice(len(sources), size=2, replace=False))
    rest = walk(teller, target, more) if more else ()
    ends = (one.subject, two.subject)
    if one.subject == two.subject or rest is None or any(fact.target in ends for fact in rest):
        return None
    if more and (teller.links(one, rest[0]) or teller.links(two, rest[0])) != _linked(teller):
        return None
    a, b = (teller.called(fact, teller.mention(teller.graph.entities[fact.subject])) for fact in (one, two))
    facts = (one, two, *rest)
    if not more:
        return Draft(text=f"What is the name of both {a} and {b}?", answers=target.answers, facts=facts)
    aside = teller.aside(rest[0]) if teller.rng.random() < teller.share(teller.config.asides) else ""
    draft = chain(teller, rest, f"the {target.kind} that is both {a} and {b}{aside}")
    return Draft(text=draft.text, answers=draft.answers, facts=facts)


def _linked(teller: Teller) -> bool:
    return bool(teller.rng.random() < teller.share(teller.config.linked))
