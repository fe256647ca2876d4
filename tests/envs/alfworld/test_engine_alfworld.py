"""The native ALFWorld engine: words and rules by hand, snapshots, and any text as a command."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from alfworld_house import house
from hypothesis import given
from hypothesis import strategies as st

from turngym.envs.alfworld.engine import NOTHING, NativeEngine
from turngym.envs.alfworld.game import load_game
from turngym.envs.alfworld.pddl import entity_names, listing, shuffled


def play(*commands: str, goal: str = "place", extra: str = "") -> tuple[NativeEngine, str]:
    """An engine after the commands, and the last observation."""
    engine = NativeEngine(load_game(house(goal, extra=extra)))
    text = engine.reset()
    for command in commands:
        text, _ = engine.step(command)
    return engine, text


def test_intro() -> None:
    _, text = play()
    assert text == (
        "-= Welcome to TextWorld, ALFRED! =-\n\nYou are in the middle of a room. Looking quickly around you, you see "
        "a cabinet 2, a cabinet 1, a countertop 1, a desk 1, a fridge 1, a microwave 1, and a sinkbasin 1.\n\n"
        "Your task is to: put some mug on fridge."
    )


@pytest.mark.parametrize(
    ("commands", "text"),
    [
        (("inventory",), "You are not carrying anything."),
        (("go to cabinet 2",), "You arrive at cabinet 2. The cabinet 2 is closed."),
        (
            ("go to cabinet 2", "open cabinet 2"),
            "You open the cabinet 2. The cabinet 2 is open. In it, you see a mug 2.",
        ),
        (
            ("go to countertop 1",),
            "You arrive at countertop 1. On the countertop 1, you see a knife 1, a mug 1, and a spoon 1.",
        ),
        (("go to countertop 1", "take knife 1 from countertop 1"), "You pick up the knife 1 from the countertop 1."),
        (
            ("go to countertop 1", "look"),
            "You are facing the cabinet 2, cabinet 1, and countertop 1. Next to it, you see nothing.",
        ),
        (
            ("go to countertop 1", "take mug 1 from countertop 1", "move mug 1 to cabinet 1"),
            "You move the mug 1 to the cabinet 1.",
        ),
        (("go to desk 1", "use desklamp 1", "use desklamp 1"), "You turn on the desklamp 1."),
    ],
)
def test_words(commands: tuple[str, ...], text: str) -> None:
    assert play(*commands)[1] == text


@pytest.mark.parametrize(
    ("commands", "wrong"),
    [
        ((), "go to shelf 1"),
        ((), "Look"),
        ((), ""),
        (("go to cabinet 1",), "go to countertop 1"),
        (("go to cabinet 2",), "take mug 2 from cabinet 2"),
        (("go to cabinet 2",), "close cabinet 2"),
        (("go to countertop 1", "take mug 1 from countertop 1"), "take spoon 1 from countertop 1"),
        (("go to countertop 1", "take mug 1 from countertop 1"), "move mug 1 to cabinet 2"),
        (("go to desk 1",), "take desklamp 1 from desk 1"),
    ],
)
def test_what_is_not_possible(commands: tuple[str, ...], wrong: str) -> None:
    engine, _ = play(*commands)
    before = engine.get_state()
    assert engine.step(wrong) == (NOTHING, False)
    assert engine.get_state() == before


def test_white_space_around_a_command_is_forgiven() -> None:
    assert play("  look\n")[1] == play("look")[1]


def test_admissible_is_sorted_and_complete() -> None:
    engine, _ = play("go to countertop 1", "take knife 1 from countertop 1")
    assert engine.admissible() == (
        *("examine cabinet 1", "examine cabinet 2", "examine countertop 1", "examine knife 1"),
        *("go to desk 1", "go to fridge 1", "go to microwave 1", "go to sinkbasin 1"),
        *("help", "inventory", "look", "move knife 1 to cabinet 1", "move knife 1 to countertop 1", "open cabinet 2"),
    )


def test_things_moved_between_neighbors_are_listed_once_for_each_place_they_left() -> None:
    moves = ("go to countertop 1", "open cabinet 2", "take mug 1 from countertop 1", "move mug 1 to cabinet 1")
    facing = "You are facing the cabinet 2, cabinet 1, and countertop 1. Next to it, you see"
    assert play(*moves, "look")[1] == f"{facing} a mug 1."
    further = (*moves, "take mug 1 from cabinet 1", "move mug 1 to cabinet 2")
    assert play(*further, "look")[1] == f"{facing} a mug 1, and a mug 1."
    assert play(*further, "take mug 1 from cabinet 2", "move mug 1 to countertop 1", "look")[1] == (
        f"{facing} a mug 1, and a mug 1."
    )


def test_states_of_an_object() -> None:
    fetch = ("go to fridge 1", "open fridge 1", "take apple 1 from fridge 1")
    heat, cool, clean = (
        ("go to microwave 1", "heat apple 1 with microwave 1"),
        ("go to fridge 1", "cool apple 1 with fridge 1"),
        ("go to sinkbasin 1", "clean apple 1 with sinkbasin 1"),
    )
    assert play(*fetch, *heat)[1] == "You heat the apple 1 using the microwave 1."
    examined = {
        fetch: "There's nothing special about apple 1.",
        (*fetch, *heat): "This is a hot apple 1.",
        (*fetch, *heat, *cool): "This is a cold apple 1.",
        (*fetch, *clean): "This is a clean apple 1.",
        (*fetch, *clean, *heat): "This is a hot and clean apple 1.",
        (*fetch, *clean, *cool): "This is a cool and clean apple 1.",
    }
    for commands, text in examined.items():
        assert play(*commands, "examine apple 1")[1] == text


def test_slicing() -> None:
    knife = ("go to countertop 1", "take knife 1 from countertop 1", "go to fridge 1")
    engine, text = play(*knife, "slice apple 1 with knife 1")
    assert text == "You sliced the apple 1 with the knife 1."
    assert "slice apple 1 with knife 1" in engine.admissible()
    sliced = (*knife, "slice apple 1 with knife 1", "open fridge 1", "move knife 1 to fridge 1")
    assert play(*sliced, "take apple 1 from fridge 1", "examine apple 1")[1] == "This is a sliced apple 1."
    warm = (*sliced, "take apple 1 from fridge 1", "cool apple 1 with fridge 1", "examine apple 1")
    assert play(*warm)[1] == "This is a cool sliced apple 1."


def test_objects_in_objects_do_not_contain_themselves() -> None:
    text = play("go to countertop 1", "take mug 1 from countertop 1", "examine mug 1")[1]
    assert text == "This is a normal mug 1. In it, you see a spoon 1."


def test_a_start_at_a_receptacle_is_told_as_facing_it() -> None:
    data = house()
    data["pddl_problem"] = data["pddl_problem"].replace("(atLocation agent1 l0)", "(atLocation agent1 l5)")
    text = NativeEngine(load_game(data)).reset()
    assert "\n\nYou are facing the desk 1. Next to it, you see nothing.\n\n" in text


def test_winning_and_goal_rate() -> None:
    engine, _ = play("go to countertop 1", "take mug 1 from countertop 1", "go to fridge 1", "open fridge 1")
    assert (engine.won, engine.goal_rate) == (False, 0.0)
    assert engine.step("move mug 1 to fridge 1") == ("You move the mug 1 to the fridge 1.", True)
    assert engine.goal_rate == 1.0
    engine.step("take mug 1 from fridge 1")
    assert not engine.won


def test_goal_rate_counts_conditions() -> None:
    steps = (
        *("go to fridge 1", "open fridge 1", "take apple 1 from fridge 1", "go to microwave 1"),
        *("heat apple 1 with microwave 1", "go to countertop 1", "move apple 1 to countertop 1"),
    )
    rates = [play(*steps[:count], goal="heat")[0].goal_rate for count in range(len(steps) + 1)]
    assert rates == [0, 0, 0, 0, 0, 1 / 3, 1 / 3, 1]
    one = ("go to countertop 1", "take mug 1 from countertop 1", "go to desk 1", "move mug 1 to desk 1")
    assert play(*one, goal="two")[0].goal_rate == 0.5
    assert play("go to countertop 1", "take spoon 1 from countertop 1", goal="look")[0].goal_rate == 0.5
    engine, _ = play("go to desk 1", "use desklamp 1", goal="look")
    assert (engine.goal_rate, engine.won) == (0.5, False)


def test_names_count_down_along_the_order() -> None:
    ids = ["cup_bar_a", "cup_bar_b", "sink_bar_a", "sink_bar_a_bar_sinkbasin", "cuptype"]
    assert list(entity_names(ids).values()) == ["cup 2", "cup 1", "sink 1", "sinkbasin 1", "cuptype "]
    assert [listing([]), listing(["a"]), listing(["a", "b"])] == ["nothing", "a a", "a a, and a b"]


def test_shuffling_equals_alfworlds() -> None:
    misc = pytest.importorskip("alfworld.agents.utils.misc", reason="needs the extra turngym[alfworld]")
    import random

    class Info:
        def __init__(self, word: str) -> None:
            self.id = word

    problem = load_game(house()).problem
    for seed in range(5):
        random.seed(seed)
        theirs = misc.Demangler(game_infos={word: Info(word) for word in problem.entities}, shuffle=True)
        ours = entity_names(shuffled(problem.entities, seed))
        assert ours == {word: theirs.demangle_alfred_name(word) for word in problem.entities}


def test_shuffled_numbers_change_names_only() -> None:
    data = house()
    plain, other = load_game(data), load_game(data, shuffle=3)
    assert sorted(plain.object_names) == sorted(other.object_names)
    assert any(load_game(data, shuffle=seed).object_names != plain.object_names for seed in range(5))
    assert plain.problem == other.problem
    assert plain.sha256 == other.sha256


@given(st.lists(st.one_of(st.text(max_size=30), st.integers(0, 60)), max_size=25))
def test_any_text_is_a_command_and_snapshots_are_exact(script: list[str | int]) -> None:
    engine = NativeEngine(load_game(house("heat")))
    engine.reset()
    for item in script:
        possible = engine.admissible()
        command = item if isinstance(item, str) else possible[item % len(possible)]
        before = pickle.loads(pickle.dumps(engine.get_state()))
        text, won = engine.step(command)
        assert (text == NOTHING) == (command.strip() not in possible)
        after = engine.get_state(), engine.admissible(), engine.won
        engine.set_state(before)
        assert engine.admissible() == possible
        assert engine.step(command) == (text, won)
        assert (engine.get_state(), engine.admissible(), engine.won) == after
        assert list(engine.admissible()) == sorted(set(engine.admissible()))


@pytest.mark.parametrize("every", [31, pytest.param(1, marks=pytest.mark.nightly)])
def test_walkthroughs_win(alfworld_data: Path, every: int) -> None:
    """All of the games that are evaluated on, and of those for training each one or one in 31."""
    files = sorted(alfworld_data.glob("*/*/*/game.tw-pddl"))
    assert len(files) == 4027
    files = [file for number, file in enumerate(files) if number % every == 0 or "valid_unseen" in str(file)]
    categories: dict[str, int] = {}
    for file in files:
        game = load_game(file)
        engine = NativeEngine(game)
        engine.reset()
        assert not engine.won
        results = [engine.step(command) for command in game.walkthrough]
        assert [won for _, won in results] == [False] * (len(results) - 1) + [True], file
        assert all(text != NOTHING for text, _ in results), file
        assert engine.goal_rate == 1.0
        if "valid_unseen" in str(file):
            categories[game.category] = categories.get(game.category, 0) + 1
    assert categories == {"place": 24, "look": 18, "clean": 31, "heat": 23, "cool": 21, "two": 17}
