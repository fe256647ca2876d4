"""The question families: each draws one question at random, or None where the draw led nowhere."""

from __future__ import annotations

from collections.abc import Callable

from turngym.envs.search.world import compare, paths
from turngym.envs.search.world.teller import Draft, Teller

Family = Callable[[Teller], Draft | None]


def popqa(teller: Teller) -> Draft | None:
    """One hop about an entity drawn by popularity, in a fixed form of words."""
    facts = paths.walk(teller, teller.popular(), 1)
    return None if facts is None else paths.chain(teller, facts)


def nq(teller: Teller) -> Draft | None:
    """One hop about something described instead of named, without capitals."""
    subject = teller.one([e for e in teller.members() if e.theme is not None or e.invention is not None])
    facts = paths.walk(teller, subject, 1)
    if subject is None or facts is None:
        return None
    if subject.theme is not None:
        role, deed = subject.theme
        described = f"the {'movie' if subject.kind == 'film' else 'novel'} about a {role} who {deed}"
    else:
        described = f"the person behind {subject.invention}"
    draft = paths.chain(teller, facts, described)
    return Draft(text=draft.text.lower().rstrip("?"), answers=draft.answers, facts=facts)


def wiki(teller: Teller) -> Draft | None:
    """2Wiki's four types: compositional, inference, comparison, bridge-comparison."""
    config = teller.config
    kind = teller.rng.random() if not config.plain else 0.0
    if kind < 0.45:
        return paths.linear(teller, 2)
    if kind < 0.56:
        return compare.inference(teller)
    return compare.comparison(teller) if kind < 0.84 else compare.bridge_comparison(teller)


def hotpot(teller: Teller) -> Draft | None:
    """HotpotQA's types: bridge, intersection, yes/no."""
    config = teller.config
    kind = teller.rng.random() if not config.plain else 0.75
    if kind < 0.7:
        return paths.linear(teller, 2)
    return paths.meeting(teller, 0) if kind < 0.85 else compare.same(teller)


def musique(teller: Teller) -> Draft | None:
    """Three or four hops, in a line or after two lines that meet."""
    config = teller.config
    kind = teller.rng.random() if not config.plain else 0.0
    if kind < 0.2:
        return paths.linear(teller, 3)
    return paths.linear(teller, 4) if kind < 0.27 else paths.meeting(teller, 1 if kind < 0.95 else 2)


FAMILY: dict[str, Family] = {
    "popqa-like": popqa,
    "nq-like": nq,
    "2wiki-like": wiki,
    "hotpot-like": hotpot,
    "musique-like": musique,
}
"""How each family of `FAMILIES` draws a question."""
