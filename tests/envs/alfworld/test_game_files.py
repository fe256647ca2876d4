"""ALFWorld game files: hashes, rules of other releases, and everything that can be wrong with a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import alfworld_house as houses
import pytest

from turngym.envs.alfworld.engine import NOTHING, NativeEngine
from turngym.envs.alfworld.game import load_game
from turngym.envs.alfworld.pddl import GameError, GameUnsupported

house = houses.house


def changed(key: str, old: str, new: str, data: dict[str, Any] | None = None) -> dict[str, Any]:
    data = dict(data or house())
    assert old in data[key]
    data[key] = data[key].replace(old, new)
    return data


def test_the_hash_covers_the_game_and_nothing_else() -> None:
    plain = load_game(house()).sha256
    assert plain == load_game(house()).sha256
    same = changed("pddl_problem", "(:init", "; a comment\n\n  ( :init".replace("( ", "("))
    same = changed("pddl_domain", "(:requirements", ";; another\n(:requirements", same)
    assert load_game(same | {"walkthrough": ["look"], "solvable": False}).sha256 == plain
    others = [
        changed("pddl_problem", "(openable Fridge_bar_1)", ""),
        changed("grammar", "put some mug on fridge.", "put a mug in fridge."),
        changed("grammar", "move {o} to {r}", "put {o} into {r}"),
        house("heat"),
    ]
    assert len({plain, *(load_game(other).sha256 for other in others)}) == 5


def test_words_come_from_the_games_own_grammar() -> None:
    engine = NativeEngine(load_game(houses.before_release_04(house())))
    engine.reset()
    assert "help" not in engine.admissible()
    assert engine.step("help")[0] == NOTHING
    assert engine.step("go to countertop 1")[0].startswith("You arrive at l1 . On the countertop 1")
    engine.step("take mug 1 from countertop 1")
    assert engine.step("move mug 1 to cabinet 1")[0] == NOTHING
    assert engine.step("put mug 1 in/on cabinet 1")[0] == "You put the mug 1 in/on the cabinet 1."


@pytest.mark.parametrize(
    ("key", "old", "new", "said"),
    [
        ("pddl_domain", "(not (isCool ?o))", "", "unknown heatobject"),
        ("pddl_domain", "(:action SliceObject", "(:action ChopObject", "unknown chopobject; no sliceobject"),
        ("pddl_domain", "(:types agent", "(:types thing agent", "unknown :types"),
        ("grammar", "You turn on the", "You switch on the", "unknown action toggleobject"),
        ("grammar", "is closed.", "is shut.", "unknown examineReceptacle.feedback"),
        ("grammar", "put some mug on fridge.", "put [it] in fridge.", "the grammar gives a meaning"),
        ("pddl_problem", "(openable Fridge_bar_1)", "(lockable Fridge_bar_1)", "unknown predicate (lockable ...)"),
        ("pddl_problem", "(inReceptacle ?o ?r)", "(isToggled ?o)", "its goal is none of the known kinds"),
        ("pddl_problem", "(:init", "(:init (= (total-cost) 0)", "not a plain list of facts"),
        (
            "pddl_problem",
            "(receptacleAtLocation Desk_bar_1 l5)",
            "(receptacleAtLocation Desk_bar_1 l5) (receptacleAtLocation Desk_bar_1 l4)",
            "gives one receptacle two locations",
        ),
        ("pddl_problem", "(atLocation agent1 l0)", "", "it must start with one agent at one location"),
    ],
)
def test_games_that_only_textworld_can_play(key: str, old: str, new: str, said: str) -> None:
    with pytest.raises(GameUnsupported) as caught:
        load_game(changed(key, old, new))
    assert said in str(caught.value)
    assert str(caught.value).endswith('try engine="textworld"')


@pytest.mark.parametrize(
    ("key", "old", "new", "said"),
    [
        ("pddl_problem", "(:goal", "(:gaol", "no (:goal ...) section"),
        ("pddl_problem", "Mug_bar_1 - object\n", "", "names 'mug_bar_1', which (:objects ...) does not declare"),
        ("pddl_problem", "(openable Fridge_bar_1)", "(openable Mug_bar_1)", "needs a receptacle"),
        ("pddl_problem", "(openable Fridge_bar_1)", "(openable)", "(openable ) needs 1 arguments"),
        ("pddl_domain", "(define", "define", "not a complete PDDL domain"),
        ("grammar", "Your task is to: ", "Do this: ", 'no "Your task is to: ..." sentence'),
        ("grammar", '"rhs": "The {r.name} is closed."', '"rhs": The', "a block of rules is not JSON"),
        ("grammar", "action look {", "actions look {", "expected an action or a grammar"),
    ],
)
def test_damaged_texts(key: str, old: str, new: str, said: str) -> None:
    with pytest.raises(GameError) as caught:
        load_game(changed(key, old, new))
    assert not isinstance(caught.value, GameUnsupported)
    assert said in str(caught.value)
    assert key in str(caught.value)


def test_files_that_are_missing_or_damaged(tmp_path: Path) -> None:
    file = tmp_path / "game.tw-pddl"
    with pytest.raises(GameError, match=r"game\.tw-pddl: .*No such file"):
        load_game(file)
    text = json.dumps(house())
    for content, said in [
        (text[: len(text) // 2], "damaged game file: "),
        ("[1, 2]", "Expected `object`, got `array`"),
        ("\udcff", "damaged game file: "),
        (text.replace('"grammar"', '"gramar"'), "`grammar`"),
        (json.dumps(house() | {"pddl_problem": 3}), "pddl_problem"),
        (json.dumps(house() | {"walkthrough": "look"}), "walkthrough"),
    ]:
        file.write_bytes(content.encode("utf-8", "surrogateescape"))
        with pytest.raises(GameError) as caught:
            load_game(file)
        assert str(caught.value).startswith(f"{file}: ")
        assert said in str(caught.value)


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "game.tw-pddl"
    file.write_text(json.dumps(house()), encoding="utf-8")
    first = load_game(file)
    assert load_game(file) is first
    file.write_text(json.dumps(house("heat", task="heat an apple.")), encoding="utf-8")
    assert load_game(file).category == "heat"
