"""The native engine against TextWorld, byte for byte: fourteen real games in the long form, two hundred by night."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import alfworld_house as houses
import pytest
from differential import SCRIPTS, Play, compare, plan
from late import late

from turngym.core.errors import TurngymError
from turngym.envs.alfworld.engine import NativeEngine
from turngym.envs.alfworld.env import ALFWorldEnv
from turngym.envs.alfworld.game import load_game
from turngym.envs.alfworld.games import RealGames
from turngym.envs.alfworld.textworld import Reference, acquire, release
from turngym.envs.guard import ActionGuard

house = houses.house


@pytest.fixture(scope="module")
def reference() -> Any:
    try:
        engine = acquire()
    except TurngymError as error:
        if os.environ.get("TURNGYM_REQUIRE_REFERENCE"):
            raise
        pytest.skip(str(error))
    yield engine
    release(engine)


@pytest.mark.parametrize(
    ("script", "number"), late([(script, number) for number, script in enumerate(SCRIPTS)], "treatments")
)
def test_a_house_with_every_rule_in_it(reference: Reference, script: str, number: int) -> None:
    play = Play(task_id="house", script=script, seed=number, shuffle=7 if number % 2 else None, steps=12)
    found = compare(reference, house("look" if script == "lamps" else "place"), play)
    assert found.mismatches == ()
    assert found.won or sum(found.verbs.values()) == (0 if script == "walkthrough" else 12)


def test_a_start_at_a_receptacle(reference: Reference) -> None:
    data = house(extra="(isCool Apple_bar_1) (isSliced Mug_bar_1) (isClean Mug_bar_1)")
    data["pddl_problem"] = data["pddl_problem"].replace("(atLocation agent1 l0)", "(atLocation agent1 l1)")
    play = Play(task_id="house", script="wander", seed=3, shuffle=None, steps=15)
    assert compare(reference, data, play).mismatches == ()


@pytest.mark.long
def test_words_before_release_04_and_names_without_numbers(reference: Reference) -> None:
    data = houses.before_release_04(house())
    data["pddl_problem"] = data["pddl_problem"].replace("Desk_bar_1", "Desk")
    play = Play(task_id="house", script="neighbors", seed=1, shuffle=3, steps=20)
    found = compare(reference, data, play)
    assert found.mismatches == ()
    assert found.verbs["put"] > 0


@pytest.mark.long
@pytest.mark.parametrize("script", ["treatments", "wander"])
@pytest.mark.parametrize("earlier", [False, True])
def test_rules_of_alfworlds_own_generator(reference: Reference, script: str, earlier: bool) -> None:
    data = houses.by_the_package(house())
    data = houses.before_release_04(data) if earlier else data
    found = compare(reference, data, Play(task_id="house", script=script, seed=2, shuffle=None, steps=15))
    assert found.mismatches == ()
    assert found.verbs["clean"] or script == "wander"
    reference.load(data)
    engine = NativeEngine(load_game(data))
    assert (engine.reset(), engine.step("help")[0]) == (reference.reset(), reference.step("help")[0])


@pytest.mark.long
@pytest.mark.parametrize("games", [14, pytest.param(200, marks=pytest.mark.nightly)])
def test_real_games(reference: Reference, alfworld_data: Path, games: int) -> None:
    source = RealGames(alfworld_data, "valid_unseen")
    ids: dict[str, list[str]] = {}
    for task_id in source.task_ids:
        ids.setdefault(source.category(task_id) or "?", []).append(task_id)
    plays = plan(ids, games=games, steps=9, load=source.data, seed=5)
    rows = [compare(reference, source.data(play.task_id), play) for play in plays]
    assert [row.mismatches for row in rows] == [()] * games
    assert sorted({row.category for row in rows}) == ["clean", "cool", "heat", "look", "place", "two"]
    assert len({row.play.script for row in rows}) == min(games, len(SCRIPTS))
    assert [row.play.shuffle for row in rows[:6]] == [None, None, 2, None, None, 5]


def test_no_task_is_drawn_twice_before_all_have_been() -> None:
    ids = {"look": ["a"], "place": ["b", "c", "d"], "two": []}
    data = house() | {"walkthrough": ["go to fridge 1"]}
    plays = plan(ids, games=10, steps=3, load=lambda _: data)
    drawn = [play.task_id for play in plays]
    assert sorted(drawn[:4]) == sorted(drawn[4:8]) == ["a", "b", "c", "d"]
    assert len(set(drawn[8:])) == 2


@pytest.mark.long
def test_the_environment_is_the_same_with_both_engines(reference: Reference) -> None:
    native, textworld = (
        ActionGuard(ALFWorldEnv(engine=name, domain_randomization=True)) for name in ("native", "textworld")
    )
    task = "generated/small/eval/3"
    assert native.reset(seed=4, options={"task": task}) == textworld.reset(seed=4, options={"task": task})
    assert native.expert_action() is not None
    snapshot = textworld.get_state()
    over = False
    while not over:
        action = native.expert_action()
        assert action == textworld.expert_action()
        for line in ("dance", str(action)):
            step = native.step(line)
            assert step == textworld.step(line)
        over = step[2] or step[3]
    assert native.success
    textworld.set_state(snapshot)
    assert textworld.describe() == native.reset(seed=4, options={"task": task})[1]
    for env in (native, textworld):
        env.close()


def test_a_difference_is_found(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    play_right = NativeEngine._play

    def play_wrong(self: NativeEngine, verb: str, first: int, second: int) -> str:
        return "Sesame." if verb == "open" else play_right(self, verb, first, second)

    monkeypatch.setattr(NativeEngine, "_play", play_wrong)
    data = house() | {"walkthrough": ["go to fridge 1", "open fridge 1", "look"]}
    play = Play(task_id="house", script="walkthrough", seed=0, shuffle=None, steps=3)
    found = [line.split(":")[0] for line in compare(reference, data, play).mismatches]
    assert found == ["step 1 'open fridge 1'", "step 1 'open fridge 1'", "step 2 'look'"]
