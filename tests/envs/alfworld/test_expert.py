"""Experts: literal plans in a kitchen drawn by hand, wins from any state, no use of what was not seen."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from late import late

from turngym.envs.alfworld.engine import NativeEngine
from turngym.envs.alfworld.game import Game, game_texts, load_game
from turngym.envs.alfworld.generate import House, Receptacle, Thing, generate, problem_text, task_sentence
from turngym.envs.alfworld.players import ReadingHouseholdPlayer, SearchingPlayer, next_action, search_order
from turngym.envs.alfworld.priors import PRESETS, SMALL, TaskRow, load_priors

KITCHEN = (  # (type, opens, location); numbers count down: the first cabinet is cabinet 2
    *(("Cabinet", True, 0), ("Cabinet", True, 0), ("CounterTop", False, 1)),
    *(("Fridge", True, 2), ("Microwave", True, 3), ("SinkBasin", False, 4), ("SideTable", False, 5)),
)
PLACES = ("cabinet 2", "cabinet 1", "countertop 1", "fridge 1", "microwave 1", "sinkbasin 1", "sidetable 1")


def kitchen(task: str, target: str, destination: str, things: Sequence[tuple[str, str]]) -> NativeEngine:
    row = TaskRow(task=task, room="kitchen", target=target, destination=destination, count=1)
    receptacles = tuple(Receptacle(type=t, openable=o, location=place) for t, o, place in KITCHEN)
    objects = tuple(Thing(type=t, where=PLACES.index(where)) for t, where in things)
    house = House(row=row, receptacles=receptacles, things=objects, sentence="put a {o} in {r}")
    domain, grammar = game_texts(task_sentence(house))
    problem = problem_text(house, load_priors(), "by_hand")
    return NativeEngine(Game({"pddl_domain": domain, "grammar": grammar, "pddl_problem": problem}))


def privileged(engine: NativeEngine) -> list[str]:
    """Everything it does until the game is won."""
    actions: list[str] = []
    while (action := next_action(engine)) is not None:
        assert action in engine.admissible()
        engine.step(action)
        actions.append(action)
        assert len(actions) <= 50
    assert engine.won
    return actions


def searching(engine: NativeEngine, expert: SearchingPlayer | None = None, limit: int = 100) -> list[str]:
    expert = expert or SearchingPlayer(engine)
    actions: list[str] = []
    while (action := expert.act()) is not None:
        assert action in engine.admissible()
        engine.step(action)
        expert.observe(action)
        actions.append(action)
        assert len(actions) <= limit
    assert engine.won
    return actions


HEAT = ("pick_heat_then_place_in_recep", "Mug", "Cabinet")


def test_a_closed_target_is_heated_and_put_into_a_closed_cabinet() -> None:
    engine = kitchen(*HEAT, [("Mug", "fridge 1"), ("Apple", "countertop 1")])
    assert privileged(engine) == [
        *("go to fridge 1", "open fridge 1", "take mug 1 from fridge 1"),
        *("go to microwave 1", "heat mug 1 with microwave 1"),
        *("go to cabinet 2", "open cabinet 2", "move mug 1 to cabinet 2"),
    ]
    assert next_action(engine) is None


def test_what_is_done_is_kept_and_what_is_in_hand_is_put_away() -> None:
    engine = kitchen(*HEAT, [("Mug", "microwave 1"), ("Apple", "microwave 1")])
    for command in ("go to microwave 1", "open microwave 1", "take mug 1 from microwave 1"):
        engine.step(command)
    engine.step("heat mug 1 with microwave 1")
    assert next_action(engine) == "go to cabinet 2"
    engine.step("cool mug 1 with fridge 1")  # not possible here: still hot
    assert next_action(engine) == "go to cabinet 2"
    for command in ("move mug 1 to microwave 1", "take apple 1 from microwave 1", "close microwave 1"):
        engine.step(command)
    engine.step("go to countertop 1")
    assert privileged(engine) == [
        *("move apple 1 to countertop 1", "go to microwave 1", "open microwave 1", "take mug 1 from microwave 1"),
        *("go to cabinet 2", "open cabinet 2", "move mug 1 to cabinet 2"),
    ]


def test_a_hot_mug_that_was_cooled_is_heated_again() -> None:
    engine = kitchen(*HEAT, [("Mug", "countertop 1")])
    for command in ("go to countertop 1", "take mug 1 from countertop 1", "go to microwave 1"):
        engine.step(command)
    for command in ("heat mug 1 with microwave 1", "go to fridge 1", "cool mug 1 with fridge 1"):
        engine.step(command)
    assert privileged(engine)[:2] == ["go to microwave 1", "heat mug 1 with microwave 1"]


def test_two_objects_end_in_the_same_cabinet_also_from_two_cabinets() -> None:
    task = ("pick_two_obj_and_place", "Mug", "Cabinet")
    engine = kitchen(*task, [("Mug", "cabinet 2"), ("Mug", "cabinet 1")])
    assert privileged(engine) == [
        *("go to cabinet 1", "open cabinet 1", "take mug 1 from cabinet 1"),
        *("open cabinet 2", "move mug 1 to cabinet 2"),
    ]


def test_places_at_the_same_location_need_no_way() -> None:
    engine = kitchen("pick_and_place_simple", "Mug", "Cabinet", [("Mug", "countertop 1")])
    for command in ("go to countertop 1", "take mug 1 from countertop 1", "go to cabinet 1"):
        engine.step(command)
    assert next_action(engine) == "open cabinet 2"
    engine.step("open cabinet 1")
    assert next_action(engine) == "move mug 1 to cabinet 1"


def test_a_lamp_is_used_once_where_it_stands() -> None:
    things = [("Mug", "sidetable 1"), ("DeskLamp", "countertop 1")]
    engine = kitchen("look_at_obj_in_light", "Mug", "DeskLamp", things)
    for command in ("go to countertop 1", "use desklamp 1"):
        engine.step(command)
    assert privileged(engine) == ["go to sidetable 1", "take mug 1 from sidetable 1", "go to countertop 1"]


def test_the_searching_expert_opens_what_is_closed_and_remembers() -> None:
    engine = kitchen(*HEAT, [("Mug", "cabinet 1"), ("Apple", "countertop 1")])
    order = search_order("mugtype")
    assert order["countertoptype"] < order["fridgetype"] < order["microwavetype"] < order["cabinettype"]
    assert searching(engine) == [
        *("go to countertop 1", "go to fridge 1", "open fridge 1", "go to sidetable 1", "go to sinkbasin 1"),
        *("go to microwave 1", "open microwave 1"),
        *("go to cabinet 2", "open cabinet 2", "open cabinet 1", "take mug 1 from cabinet 1"),
        *("go to microwave 1", "heat mug 1 with microwave 1", "go to cabinet 2", "move mug 1 to cabinet 2"),
    ]


def test_the_searching_expert_looks_into_open_places_beside_it() -> None:
    engine = kitchen("pick_and_place_simple", "Mug", "SideTable", [("Mug", "cabinet 1")])
    expert = SearchingPlayer(engine)
    for command in ("go to cabinet 2", "open cabinet 2", "open cabinet 1", "close cabinet 1", "go to fridge 1"):
        engine.step(command)  # not observed: it has seen nothing
    for command in ("go to cabinet 1", "go to cabinet 2"):
        engine.step(command)
        expert.observe(command)
    assert expert.act() == "examine cabinet 2"


def first_places(text: str | None) -> list[str]:
    engine = kitchen("pick_and_place_simple", "Mug", "Fridge", [("Mug", "sidetable 1")])
    player = ReadingHouseholdPlayer(engine)
    if text is not None:
        player.read(text)
    played = searching(engine, player)
    found = next(number for number, action in enumerate(played) if action.startswith("take"))
    return [action.removeprefix("go to ") for action in played[:found] if action.startswith("go to ")]


def test_the_reading_player_looks_where_it_is_told_and_else_in_the_order_of_the_room() -> None:
    assert first_places(None) == ["cabinet 2", "countertop 1", "fridge 1", "microwave 1", "sidetable 1"]
    assert first_places("no place is named") == first_places(None)
    told = first_places("go to sinkbasin 1, desk 1, microwave 1, sinkbasin 1, countertop 1.")
    # what the text does not name comes last, and a desk is not in this kitchen
    assert told == ["sinkbasin 1", "microwave 1", "countertop 1", "cabinet 2", "fridge 1", "sidetable 1"]
    assert first_places("go to sidetable 1.") == ["sidetable 1"]


def test_a_failed_command_teaches_nothing() -> None:
    engine = kitchen("pick_and_place_simple", "Mug", "SideTable", [("Mug", "countertop 1")])
    expert = SearchingPlayer(engine)
    for command in ("examine countertop 1", "open fridge 1", "go to countertop 9", "heat mug 1 with microwave 1", ""):
        assert engine.step(command)[0] == "Nothing happens."
        expert.observe(command)
    assert expert.known.contents == {}
    assert not expert.known.done["hot"]


def test_the_searching_expert_does_not_know_what_it_has_not_seen() -> None:
    elsewhere = ("cabinet 1", "fridge 1", "sinkbasin 1")
    plays = [searching(kitchen(*HEAT, [("Mug", place), ("Apple", "countertop 1")])) for place in elsewhere]
    shortest = min(plays, key=len)
    found = next(i for i, action in enumerate(shortest) if action.startswith("take"))
    assert all(play[:found] == shortest[:found] for play in plays)
    assert len({tuple(play) for play in plays}) == 3


def wander(engine: NativeEngine, seed: int, steps: int, expert: SearchingPlayer) -> None:
    """Random commands, possible and not."""
    rng = random.Random(seed)
    for _ in range(steps):
        action = rng.choice([*engine.admissible(), "open fridge 1", "go to cabinet 1", "take mug 1 from fridge 1"])
        engine.step(action)
        expert.observe(action)


@given(
    config=st.sampled_from(sorted(PRESETS)),
    number=st.integers(0, 40),
    seed=st.integers(0, 999),
    steps=st.integers(0, 40),
    observed=st.booleans(),
)
def test_both_win_from_any_state(config: str, number: int, seed: int, steps: int, observed: bool) -> None:
    engine = NativeEngine(Game(generate(PRESETS[config], "train", number)))
    expert = SearchingPlayer(engine)
    wander(engine, seed, steps, expert)
    state = engine.get_state()
    assert len(privileged(engine)) <= 20
    engine.set_state(state)
    searching(engine, expert if observed else None)


def test_the_same_history_gives_the_same_choice() -> None:
    for number in range(10):
        engine = NativeEngine(Game(generate(SMALL, "train", number)))
        experts = [SearchingPlayer(engine), SearchingPlayer(engine)]
        while (action := experts[0].act()) is not None:
            assert experts[1].act() == action
            engine.step(action)
            for expert in experts:
                expert.observe(action)


@pytest.mark.parametrize(
    ("split", "count"), late([("valid_unseen", 134), ("valid_seen", 140), ("train", 100)], "valid_unseen")
)
def test_real_games_are_won(alfworld_data: Path, split: str, count: int) -> None:
    paths = sorted((alfworld_data / split).glob("*/*/game.tw-pddl"))
    paths = paths if len(paths) == count else random.Random(0).sample(paths, count)
    for path in paths:
        engine = NativeEngine(load_game(path))
        assert len(privileged(engine)) <= 12
        engine.reset()
        searching(engine)
