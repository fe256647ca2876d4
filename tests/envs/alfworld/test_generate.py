"""Generated games: same seed same bytes, never won at the start, winnable, parts that cannot overlap."""

from __future__ import annotations

import dataclasses
import hashlib
import random
from collections import Counter
from functools import cache
from typing import Any

import numpy as np
import pytest

from turngym.core.errors import TaskError
from turngym.envs.alfworld.engine import NativeEngine
from turngym.envs.alfworld.game import Game, load_game
from turngym.envs.alfworld.generate import generate, parse_task_id
from turngym.envs.alfworld.players import SearchingPlayer
from turngym.envs.alfworld.priors import (
    FULL,
    PRESETS,
    SMALL,
    TASK_TYPES,
    GeneratorConfig,
    Part,
    load_priors,
    preset,
    vocabulary,
)
from turngym.envs.testing import expect


@cache
def game(config: GeneratorConfig, part: Part, number: int) -> dict[str, Any]:
    return generate(config, part, number)


def content(data: dict[str, Any]) -> str:
    """The problem without its name."""
    return str(data["pddl_problem"]).split("\n", 1)[1]


def digest(config: GeneratorConfig, part: Part, number: int) -> str:
    data = generate(config, part, number)
    return hashlib.sha256((data["pddl_problem"] + data["grammar"]).encode()).hexdigest()[:16]


@pytest.mark.parametrize("config", PRESETS.values(), ids=lambda config: config.name)
@pytest.mark.parametrize("part", ["train", "eval"])
def test_games_start_unsolved_and_their_walkthrough_wins(config: GeneratorConfig, part: Part) -> None:
    for number in range(40):
        data = game(config, part, number)
        engine = NativeEngine(load_game(data))
        engine.reset()
        assert not engine.won
        assert 2 <= len(data["walkthrough"]) <= config.expert_steps
        for command in data["walkthrough"]:
            assert command in engine.admissible()
            engine.step(command)
        assert engine.won
        assert data["solvable"] is True


def test_the_same_number_gives_the_same_bytes_whatever_else_happens() -> None:
    first = generate(SMALL, "train", 7)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002  (global state on purpose: it must not matter)
    before = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    assert generate(SMALL, "train", 8) != first
    assert generate(dataclasses.replace(SMALL), "train", 7) == first
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # noqa: NPY002


def test_the_name_the_version_and_the_part_change_the_games() -> None:
    base = content(game(SMALL, "train", 3))
    for other in (dataclasses.replace(SMALL, name="mine"), dataclasses.replace(SMALL, version=2)):
        assert content(generate(other, "train", 3)) != base
    assert content(game(SMALL, "eval", 3)) != base


@pytest.mark.parametrize("count", [60, pytest.param(5000, marks=pytest.mark.long)])
def test_no_evaluation_game_is_a_training_game(count: int) -> None:
    evaluation = [content(game(SMALL, "eval", number)) for number in range(min(count, 300))]
    train = {content(generate(SMALL, "train", number)) for number in range(count)}
    assert len(set(evaluation)) == len(evaluation)
    assert len(train) >= 0.99 * count
    assert not train.intersection(evaluation)


def test_small_houses_are_small_and_have_hidden_and_shared_places() -> None:
    games = [Game(game(SMALL, "train", number)) for number in range(150)]
    shared, hidden = 0, 0
    for one in games:
        problem = one.problem
        assert 6 <= len(problem.receptacles) <= 9
        assert 2 <= len(problem.objects) <= 8
        assert not problem.opened
        shared += len(set(problem.receptacle_location)) < len(problem.receptacles)
        targets = problem.objects_of(problem.goal.object_type)
        hidden += all(r in problem.openable for r, inside in enumerate(problem.contents) if set(inside) & set(targets))
    assert 10 <= shared <= 75
    assert 15 <= hidden <= 100


def test_a_player_without_privileges_needs_at_most_thirty_steps_in_small_houses() -> None:
    steps = []
    for number in range(150):
        engine = NativeEngine(Game(game(SMALL, "train", number)))
        expert, count = SearchingPlayer(engine), 0
        while not engine.won:
            action = expert.act()
            assert action is not None
            engine.step(action)
            expert.observe(action)
            count += 1
        steps.append(count)
    assert max(steps) <= 30
    assert 5 <= sum(steps) / len(steps) <= 12


def test_full_houses_are_like_real_ones() -> None:
    problems = [Game(game(FULL, "train", number)).problem for number in range(40)]
    receptacles = [len(problem.receptacles) for problem in problems]
    objects = [len(problem.objects) for problem in problems]
    # the train games have 23.5 receptacles (6 to 54) and 31.6 objects (9 to 64) in the mean
    assert 18 <= sum(receptacles) / 40 <= 29
    assert 25 <= sum(objects) / 40 <= 38
    assert all(6 <= count <= 54 for count in receptacles)


def test_nothing_can_be_taken_that_cannot_be_put_back() -> None:
    for number in range(30):
        problem = Game(game(FULL, "train", number)).problem
        for receptacle, inside in enumerate(problem.contents):
            for thing in set(inside) & problem.unary["pickupable"]:
                pair = (problem.receptacle_types[receptacle], problem.object_types[thing])
                assert pair in problem.can_contain


def test_all_task_types_and_both_wordings_occur() -> None:
    tasks = Counter(game(SMALL, "train", number)["task_type"] for number in range(150))
    assert set(tasks) == set(TASK_TYPES)
    assert min(tasks.values()) >= 10
    starts = {Game(game(SMALL, "train", number)).task_text.split()[0] for number in range(150)}
    assert starts == {"put", "clean", "heat", "cool", "find", "look", "examine"}


def test_the_mix_is_settable() -> None:
    config = GeneratorConfig(name="lamps", mix=(("look_at_obj_in_light", 1.0),))
    assert {generate(config, "train", number)["task_type"] for number in range(8)} == {"look_at_obj_in_light"}


@pytest.mark.parametrize("task_id", ["generated/small/test/1", "generated/small/train/x", "small/train/1", ""])
def test_other_ids_are_refused(task_id: str) -> None:
    with pytest.raises(TaskError, match="generated/<config>"):
        parse_task_id(task_id)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"name": "a b"}, "use letters"),
        ({"name": "x", "mix": (("pick", 1.0),)}, "a task type is 'pick'; valid: "),
        ({"name": "x", "mix": ((TASK_TYPES[0], -1.0),)}, "0 or more"),
        ({"name": "x", "receptacles": (9, 6)}, "fewest <= most"),
        ({"name": "x", "rooms": ("cellar",)}, "a room is 'cellar'; valid: "),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(TaskError, match=text):
        GeneratorConfig(**settings)


def test_what_cannot_be_generated_is_an_error() -> None:
    heat_in_bathrooms = GeneratorConfig(name="x", rooms=("bathroom",), mix=(("pick_heat_then_place_in_recep", 1.0),))
    assert "generated game x/train/0: no playable house" in expect(TaskError, generate, heat_in_bathrooms, "train", 0)
    assert "the part is train or eval" in expect(TaskError, generate, SMALL, "test", 0)
    assert "the number 0 or more" in expect(TaskError, generate, SMALL, "train", -1)
    assert "Did you mean 'small'" in expect(TaskError, preset, "smal")


def test_the_priors_add_up() -> None:
    priors = load_priors()
    assert sum(priors.rooms.values()) == 3553
    assert sum(row.count for row in priors.tasks) == 3553
    assert sum(sum(counts.values()) for counts in priors.sentences.values()) == 3553
    assert all(sum(n for _, n in priors.scenes[room]) == games for room, games in priors.rooms.items())
    assert sorted(priors.sentences["pick_heat_then_place_in_recep"]) == [
        "heat some {o} and put it in {r}",
        "put a hot {o} in {r}",
    ]


def leftover(text: str, phrases: list[str]) -> str:
    """What remains of `text` once no phrase fits: empty when it can be cut into phrases."""
    reachable = {0}
    for start in range(len(text)):
        if start in reachable:
            reachable.update(start + len(phrase) for phrase in phrases if text.startswith(phrase, start))
    return "" if len(text) in reachable else text[max(reachable) :]


@pytest.mark.parametrize(("config", "games"), [(SMALL, 25), (FULL, 3)], ids=["small", "full"])
def test_the_vocabulary_spells_everything_that_is_said(config: GeneratorConfig, games: int) -> None:
    phrases = vocabulary(config)
    said: set[str] = set()
    for number in range(games):
        engine = NativeEngine(Game(game(config, "train", number)))
        rng = random.Random(number)
        said.add(engine.reset())
        for step in range(40):
            options = [action for action in engine.admissible() if action != "help"]
            said.update(options)
            action = rng.choice(options) if step % 3 else "look"
            said.add(engine.step(action)[0])
    assert {text for text in said if leftover(text, phrases)} == set()
