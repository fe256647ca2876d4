"""A small house written by hand, with every rule in it, for tests of the ALFWorld engine."""

from __future__ import annotations

import json
from typing import Any

from turngym.envs.alfworld.game import game_texts

_OBJECTS = {
    "Mug_bar_1": "pickupable cleanable heatable coolable isReceptacleObject",
    "Mug_bar_2": "pickupable cleanable heatable coolable isReceptacleObject",
    "Spoon_bar_1": "pickupable cleanable",
    "Apple_bar_1": "pickupable cleanable heatable coolable sliceable",
    "Knife_bar_1": "pickupable cleanable",
    "DeskLamp_bar_1": "toggleable",
}
_RECEPTACLES = {
    "Cabinet_bar_1": "l1",
    "Cabinet_bar_2": "l1",
    "CounterTop_bar_1": "l1",
    "Fridge_bar_1": "l2",
    "Microwave_bar_1": "l3",
    "Sink_bar_1_bar_SinkBasin": "l4",
    "Desk_bar_1": "l5",
}
_PLACES = {
    "Mug_bar_1": "Cabinet_bar_1",
    "Mug_bar_2": "CounterTop_bar_1",
    "Spoon_bar_1": "CounterTop_bar_1",
    "Apple_bar_1": "Fridge_bar_1",
    "Knife_bar_1": "CounterTop_bar_1",
    "DeskLamp_bar_1": "Desk_bar_1",
}
GOALS = {
    "place": """(and (exists (?r - receptacle) (exists (?o - object) (and (inReceptacle ?o ?r)
        (objectType ?o MugType) (receptacleType ?r FridgeType)))))""",
    "heat": """(and (exists (?r - receptacle) (exists (?o - object) (and (heatable ?o) (objectType ?o AppleType)
        (receptacleType ?r CounterTopType) (isHot ?o) (inReceptacle ?o ?r)))))""",
    "two": """(and (exists (?r - receptacle) (exists (?o1 - object) (and (objectType ?o1 MugType)
        (receptacleType ?r DeskType) (inReceptacle ?o1 ?r) (exists (?o2 - object) (and (not (= ?o1 ?o2))
        (objectType ?o2 MugType) (receptacleType ?r DeskType) (inReceptacle ?o2 ?r)))))))""",
    "look": """(and (exists (?ot - object ?r - receptacle ?a - agent ?l - location) (and (objectType ?ot DeskLampType)
        (toggleable ?ot) (isToggled ?ot) (receptacleAtLocation ?r ?l) (atLocation ?a ?l) (inReceptacle ?ot ?r)))
        (exists (?o - object ?a - agent) (and (objectType ?o SpoonType) (holds ?a ?o))))""",
}


def house(goal: str = "place", task: str = "put some mug on fridge.", extra: str = "") -> dict[str, Any]:
    """Game data. `extra` is more facts. Receptacles 1 and 2 and the counter share a location."""
    types = {word: word.split("_")[0] for word in _OBJECTS}
    kinds = {word: word.rsplit("_", 1)[1] if "Basin" in word else word.split("_")[0] for word in _RECEPTACLES}
    lines = [f"{word} - object" for word in _OBJECTS] + [f"{word} - receptacle" for word in _RECEPTACLES]
    otypes = {*types.values(), "ButterKnife", "Sink"}
    lines += [f"{name}Type - otype" for name in sorted(otypes)]
    lines += [f"{name}Type - rtype" for name in sorted(set(kinds.values()))]
    lines += [f"l{number} - location" for number in range(6)]
    facts = [f"({flag} {word})" for word, flags in _OBJECTS.items() for flag in flags.split()]
    facts += [f"(objectType {word} {kind}Type)" for word, kind in types.items()]
    facts += [f"(receptacleType {word} {kind}Type)" for word, kind in kinds.items()]
    facts += [f"(receptacleAtLocation {word} {place})" for word, place in _RECEPTACLES.items()]
    facts += [f"(openable {word})" for word in ("Cabinet_bar_1", "Fridge_bar_1", "Microwave_bar_1")]
    facts += [f"(inReceptacle {word} {place})" for word, place in _PLACES.items()]
    facts += [f"(objectAtLocation {word} {_RECEPTACLES[place]})" for word, place in _PLACES.items()]
    portable = [word for word, kind in types.items() if kind != "DeskLamp"]
    facts += [f"(canContain {r}Type {types[o]}Type)" for r in sorted(set(kinds.values())) for o in portable]
    facts += ["(inReceptacleObject Spoon_bar_1 Mug_bar_2)", "(inReceptacleObject Mug_bar_2 Mug_bar_2)"]
    facts += ["(atLocation agent1 l0)", extra]
    domain, grammar = game_texts(task)
    listed, known = "\n".join(lines), "\n".join(facts)
    problem = f"(define (problem p)\n(:domain alfred)\n(:objects\nagent1 - agent\n{listed}\n)\n(:init\n{known}\n)\n"
    return {
        "pddl_domain": domain,
        "grammar": grammar,
        "pddl_problem": f"{problem}(:goal {GOALS[goal]})\n)\n",
        "solvable": True,
        "walkthrough": [],
    }


def before_release_04(data: dict[str, Any]) -> dict[str, Any]:
    """The same game with the words that alfworld used before 0.4."""
    grammar = data["grammar"].replace("move {o} to {r}", "put {o} in/on {r}")
    grammar = grammar.replace("You move the {o.name} to the {r.name}.", "You put the {o.name} in/on the {r.name}.")
    grammar = grammar.replace("You arrive at {r.name}. ", "You arrive at {lend.name}. ")
    domain = data["pddl_domain"]
    start = domain.index("(:action help")
    end = domain.index("(:action examineReceptacle")
    return data | {"grammar": grammar, "pddl_domain": domain[:start] + domain[end:]}


def by_the_package(data: dict[str, Any]) -> dict[str, Any]:
    """The game as `alfworld-generate` writes it: an object is cleaned in basins alone, help has a rule of its own."""
    domain = data["pddl_domain"]
    start, end = (domain.index(f"(:action {name}") for name in ("CleanObject", "HeatObject"))
    clean = """(:action CleanObject
        :parameters (?a - agent ?l - location ?r - receptacle ?o - object)
        :precondition (and (cleanable ?o) (or ;(receptacleType ?r SinkType)
            (receptacleType ?r SinkBasinType)) (atLocation ?a ?l) (receptacleAtLocation ?r ?l) (holds ?a ?o))
        :effect (and (increase (total-cost) 5) (isClean ?o)))
    """
    grammar, mark = data["grammar"], 'action help { template :: "help"; feedback :: "'
    head, found, rest = grammar.partition(mark)
    assert found
    words, _, rest = rest.partition('";')
    rule = json.dumps({"help.feedback": [{"rhs": words}]})
    help_action = f'{mark}#help.feedback#"; grammar :: """{rule}""";'
    return data | {"pddl_domain": domain[:start] + clean + domain[end:], "grammar": head + help_action + rest}
