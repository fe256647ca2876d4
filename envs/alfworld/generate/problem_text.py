"""A drawn house as the PDDL problem and the task sentence of a `game.tw-pddl`."""

from __future__ import annotations

from collections.abc import Iterable

from turngym.envs.alfworld.generate.house import LOOK, SIMPLE, House
from turngym.envs.alfworld.generate.priors import Priors

DOMAIN_RTYPES = ("Fridge", "Microwave", "SinkBasin")
DOMAIN_OTYPES = ("ButterKnife", "Knife", "Sink")
"""Types that the domain's actions name: every problem must declare them, present or not."""

OBJECT_FLAGS = ("pickupable", "isReceptacleObject", "cleanable", "heatable", "coolable", "sliceable", "toggleable")
MADE = {
    "pick_clean_then_place_in_recep": ("cleanable", "isClean"),
    "pick_heat_then_place_in_recep": ("heatable", "isHot"),
    "pick_cool_then_place_in_recep": ("coolable", "isCool"),
}


def task_sentence(house: House) -> str:
    """The sentence after `Your task is to: `, with its full stop."""
    row = house.row
    return house.sentence.format(o=row.target.lower(), r=row.destination.lower()) + "."


def problem_text(house: House, priors: Priors, name: str) -> str:
    """The PDDL problem called `name`; facts in a fixed order, so equal houses give equal text."""
    receptacles = _ids(r.type for r in house.receptacles)
    things = _ids(t.type for t in house.things)
    spots = [f"loc_bar_{number:02d}" for number in range(1 + max(r.location for r in house.receptacles) + 1)]
    lines = [f"(define (problem {name})", "(:domain alfred)", "(:objects", "agent1 - agent"]
    rtypes = sorted({r.type for r in house.receptacles} | set(DOMAIN_RTYPES))
    otypes = sorted({t.type for t in house.things} | set(DOMAIN_OTYPES))
    lines += [f"{t}Type - otype" for t in otypes] + [f"{t}Type - rtype" for t in rtypes]
    lines += [f"{t} - object" for t in things] + [f"{r} - receptacle" for r in receptacles]
    lines += [f"{spot} - location" for spot in spots] + [")", "(:init"]
    lines += _receptacle_facts(house, priors, receptacles, spots)
    lines += _thing_facts(house, priors, things, receptacles, spots)
    lines += [f"(atLocation agent1 {spots[0]})", ")", f"(:goal {goal(house)})", ")"]
    return "\n".join(lines) + "\n"


def _ids(types: Iterable[str]) -> list[str]:
    """`Cabinet_bar_01`, `Cabinet_bar_02`, ...: numbered per type in the order given.

    Basins are called `Sink_bar_01_bar_SinkBasin`: display names are the part before `_bar_`, plus "basin".
    """
    seen: dict[str, int] = {}
    ids = []
    for name in types:
        seen[name] = seen.get(name, 0) + 1
        stem = name.removesuffix("Basin")
        ids.append(f"{stem}_bar_{seen[name]:02d}" + ("" if stem == name else f"_bar_{name}"))
    return ids


def _receptacle_facts(house: House, priors: Priors, ids: list[str], spots: list[str]) -> list[str]:
    present = sorted({t.type for t in house.things})
    rows = list(zip(ids, house.receptacles, strict=True))
    lines = [f"(receptacleType {i} {r.type}Type)" for i, r in rows]
    for kind in sorted({r.type for r in house.receptacles}):
        contains = priors.can_contain.get(kind, ())
        lines += [f"(canContain {kind}Type {t}Type)" for t in present if t in contains]
    lines += [f"(openable {i})" for i, r in rows if r.openable]
    # spot 0 is where the agent starts: away from everything, as in every real game
    return lines + [f"(receptacleAtLocation {i} {spots[r.location + 1]})" for i, r in rows]


def _thing_facts(house: House, priors: Priors, ids: list[str], receptacles: list[str], spots: list[str]) -> list[str]:
    rows = list(zip(ids, house.things, strict=True))
    lines = [f"(objectType {i} {t.type}Type)" for i, t in rows]
    for flag in OBJECT_FLAGS:
        lines += [f"({flag} {i})" for i, t in rows if t.type in priors.flags[flag]]
    lines += [f"(isCool {i})" for i, t in rows if t.cool]
    lines += [f"(inReceptacle {i} {receptacles[t.where]})" for i, t in rows]
    lines += [f"(inReceptacleObject {i} {ids[t.inside]})" for i, t in rows if t.inside is not None]
    return lines + [f"(objectAtLocation {i} {spots[house.receptacles[t.where].location + 1]})" for i, t in rows]


def goal(house: House) -> str:
    """The goal in the shape that the real games of this task type have."""
    row = house.row
    target, place = f"{row.target}Type", f"{row.destination}Type"
    if row.task == LOOK:
        lamp = (
            f"(exists (?ot - object ?r - receptacle ?a - agent ?l - location) (and (objectType ?ot {place}) "
            "(toggleable ?ot) (isToggled ?ot) (receptacleAtLocation ?r ?l) (atLocation ?a ?l) (inReceptacle ?ot ?r)))"
        )
        return f"(and {lamp} (exists (?o - object ?a - agent) (and (objectType ?o {target}) (holds ?a ?o))))"
    if row.task == SIMPLE or row.task in MADE:
        able, made = MADE.get(row.task, (None, None))
        state = "" if able is None else f"({able} ?o) ({made} ?o) "
        facts = f"{state}(inReceptacle ?o ?r) (objectType ?o {target}) (receptacleType ?r {place})"
        return f"(and (exists (?r - receptacle) (exists (?o - object) (and {facts}))))"
    first = f"(objectType ?o1 {target}) (receptacleType ?r {place}) (inReceptacle ?o1 ?r)"
    second = f"(not (= ?o1 ?o2)) (objectType ?o2 {target}) (receptacleType ?r {place}) (inReceptacle ?o2 ?r)"
    inner = f"(exists (?o2 - object) (and {second}))"
    return f"(and (exists (?r - receptacle) (exists (?o1 - object) (and {first} {inner}))))"
