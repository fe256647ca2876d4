"""Questions that compare two chains, and those whose two hops have a name of their own."""

from __future__ import annotations

from turngym.envs.search.world.graph import Fact
from turngym.envs.search.world.teller import Draft, Teller

Chain = tuple[Fact, ...]

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
"""Of bridge-comparisons."""


def inference(teller: Teller) -> Draft | None:
    """Two hops that have one name: a paternal grandfather."""
    row = teller.one([row for row in KINSHIP if row[0] in teller.relations and row[1] in teller.relations])
    if row is None:
        return None
    subject = teller.one(teller.members(row[0].partition(".")[0]))
    first = None if subject is None else teller.only(subject, row[0])
    second = None if first is None else teller.only(teller.target(first), row[1])
    if subject is None or first is None or second is None or second.target == subject.id:
        return None
    return Draft(text=row[2].format(x=teller.mention(subject)), answers=second.answers, facts=(first, second))


def comparison(teller: Teller) -> Draft | None:
    """Which of two comes first, or has more."""
    row = teller.one([row for row in ORDERS if row[0] in teller.relations])
    pair = None if row is None else _pair(teller, row[0])
    return None if row is None or pair is None else _ordered(teller, row[1], row[2], ((pair[0],), (pair[1],)))


def bridge_comparison(teller: Teller) -> Draft | None:
    """The same about what two works lead to; some are yes/no questions."""
    if teller.rng.random() < SHARE_YES_NO:
        form = teller.one([row for row in SAME_BRIDGED if row[0] in teller.relations and row[1] in teller.relations])
        chains = None if form is None else _bridges(teller, form[0], form[1])
        return None if form is None or chains is None else _yes_no(teller, form[2], chains)
    row = teller.one([row for row in BRIDGED if row[0] in teller.relations and row[1] in teller.relations])
    chains = None if row is None else _bridges(teller, row[0], row[1])
    return None if row is None or chains is None else _ordered(teller, row[2], row[3], chains)


def same(teller: Teller) -> Draft | None:
    """Whether two subjects have one object: yes and no equally often."""
    row = teller.one([row for row in SAME if row[0] in teller.relations])
    pair = None if row is None else _pair(teller, row[0])
    return None if row is None or pair is None else _yes_no(teller, row[1], ((pair[0],), (pair[1],)))


def _ordered(teller: Teller, form: str, sign: int, chains: tuple[Chain, Chain]) -> Draft | None:
    """Which of two chains' subjects has the smaller or larger literal at its end; a tie is no question."""
    ends = [chain[-1].order for chain in chains]
    a, b = (teller.graph.entities[chain[0].subject] for chain in chains)
    if ends[0] == ends[1] or a.name == b.name:
        return None
    winner = a if (ends[0] < ends[1]) == (sign < 0) else b
    return Draft(text=form.format(a=a.name, b=b.name), answers=winner.answers, facts=_interleaved(chains), choice=True)


def _yes_no(teller: Teller, form: str, chains: tuple[Chain, Chain]) -> Draft | None:
    yes = chains[0][-1].target == chains[1][-1].target
    key = f"{teller.part} {form}"
    if yes != teller.wants_yes(key):
        return None
    a, b = (teller.mention(teller.graph.entities[chain[0].subject]) for chain in chains)
    text, answer = form.format(a=a, b=b), "yes" if yes else "no"
    return Draft(text=text, answers=(answer,), facts=_interleaved(chains), choice=True, form=key)


def _interleaved(chains: tuple[Chain, Chain]) -> Chain:
    """Both first hops, then both second hops."""
    return tuple(fact for hop in zip(*chains, strict=True) for fact in hop)


def _pair(teller: Teller, relation: str) -> tuple[Fact, Fact] | None:
    """Two subjects' facts of one relation; half of the draws look for a shared object first."""
    members = teller.members(relation.partition(".")[0])
    facts = [fact for entity in members if (fact := teller.only(entity, relation)) is not None]
    first = teller.one(facts)
    if first is None:
        return None
    others = [fact for fact in facts if fact.subject != first.subject]
    twins = [fact for fact in others if fact.target is not None and fact.target == first.target]
    second = teller.one(twins if twins and teller.rng.random() < 0.5 else others)
    return None if second is None else (first, second)


def _bridges(teller: Teller, first: str, second: str) -> tuple[Chain, Chain] | None:
    """Two works and a fact about what each leads to (two different ones)."""
    pair = _pair(teller, first)
    if pair is None or pair[0].target == pair[1].target:
        return None
    ends = [teller.only(teller.target(fact), second) for fact in pair]
    if ends[0] is None or ends[1] is None:
        return None
    return (pair[0], ends[0]), (pair[1], ends[1])
