"""ALFWorld as a Gymnasium environment: the contract, splits, options, errors."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import ClassVar

import gymnasium as gym
import numpy as np
import pytest
from alfworld_house import house

from turngym.core.errors import TaskError
from turngym.envs.alfworld.env import ALFWorldEnv
from turngym.envs.alfworld.games import find_root
from turngym.envs.guard import ActionGuard, guard_of
from turngym.envs.testing import EnvContract


class TestGenerated(EnvContract):
    env_id = "turngym/ALFWorld-v0"


class TestShuffledNumbers(EnvContract):
    env_id = "turngym/ALFWorld-v0"
    make_kwargs: ClassVar = {"domain_randomization": True, "config": "full"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two games of one split, laid out as alfworld-download does, and a folder that is none."""
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    root = tmp_path / "json_2.1.1"
    for name, goal in (("pick_and_place_simple-Mug-None-Fridge-9", "place"), ("odd-name", "heat")):
        trial = root / "valid_seen" / name / "trial_T1"
        trial.mkdir(parents=True)
        (trial / "game.tw-pddl").write_text(json.dumps(house(goal)), encoding="utf-8")
    (root / "valid_seen" / "no-game" / "trial_T1").mkdir(parents=True)
    return tmp_path


def made(**options: object) -> ActionGuard:
    return guard_of(gym.make("turngym/ALFWorld-v0", **options))


def test_real_games_are_found_with_and_without_the_inner_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for data in (folder, folder / "json_2.1.1", str(folder)):
        env = made(split="valid_seen", data=data)
        assert list(env.task_ids()) == [
            "valid_seen/odd-name/trial_T1",
            "valid_seen/pick_and_place_simple-Mug-None-Fridge-9/trial_T1",
        ]
    monkeypatch.setenv("ALFWORLD_DATA", str(folder))
    env = made(split="valid_seen")
    for task_id, row, scene in zip(env.task_ids(), ("heat", "place"), ("", "scene 9"), strict=True):
        env.reset(options={"task": task_id})
        assert (env.task.category, env.task.split, env.task.cluster) == (row, "valid_seen", scene)


def test_an_episode(folder: Path) -> None:
    env = made(split="valid_seen", data=folder)
    text, info = env.reset(seed=1, options={"task": env.task_ids()[1]})
    assert text.endswith("Your task is to: put some mug on fridge.")
    assert (info["success"], info["score"], info["goal_rate"], info["category"]) == (False, 0.0, 0.0, "place")
    text, reward, terminated, _, info = env.step("go to the moon")
    assert (reward, terminated, info["verdict"], info["env_steps"]) == (0.0, False, "inadmissible", 0)
    assert "Possible actions: go to cabinet 1, " in text
    steps = []
    while not terminated:
        steps.append(env.expert_action())
        _, reward, terminated, truncated, info = env.step(steps[-1])
    assert steps[-1] in ("move mug 1 to fridge 1", "move mug 2 to fridge 1")
    assert (reward, truncated, info["success"], info["score"], info["goal_rate"]) == (1.0, False, True, 1.0, 1.0)


def test_the_words_before_0_4_are_a_matter_of_the_environment_and_not_of_the_task(folder: Path) -> None:
    seen = []
    for words in ("game", "put"):
        env = made(split="valid_seen", data=folder, words=words)
        env.reset(options={"task": env.task_ids()[1]})
        for action in ("go to countertop 1", "take mug 1 from countertop 1"):
            _, _, _, _, info = env.step(action)
        listed = [one for one in info["admissible_actions"] if one.startswith(("put", "move", "help"))]
        old, _, _, _, told = env.step("put mug 1 in/on cabinet 1")
        new, _, _, _, moved = env.step("take mug 1 from cabinet 1")
        new, _, _, _, moved = env.step("move mug 1 to cabinet 1")
        seen.append((env.unwrapped.task.sha256, listed, told["verdict"], old, moved["verdict"], new))
    assert seen[0][0] == seen[1][0]
    assert seen[0][1] == ["help", *sorted(one for one in seen[0][1] if one.startswith("move mug 1 to "))]
    assert seen[1][1] == sorted(f"put mug 1 in/on {one.removeprefix('move mug 1 to ')}" for one in seen[0][1][1:])
    assert (seen[1][2], seen[1][3]) == ("ok", "You put the mug 1 in/on the cabinet 1.")
    assert (seen[0][2], seen[1][4], seen[0][4]) == ("inadmissible", "inadmissible", "ok")


def test_experts_mistakes_and_prompts_say_put_where_the_environment_does() -> None:
    put = "put mug 2 in/on shelf 1"
    for words, said, other in (("game", "move ", "put "), ("put", "put ", "move ")):
        env = made(words=words)
        assert (put in env.tool.examples, "- put <object> in/on" in env.instructions) == (words == "put",) * 2
        assert ("help" in env.instructions) is (words == "game")
        actions, mistakes = [], []
        for number in range(4):
            for player in (None, "searching"):
                text, _ = env.reset(options={"task": env.unwrapped.task_ids()[number]})
                made_by = None if player is None else env.unwrapped.make_player(player)
                terminated = False
                while not terminated:
                    mistakes.append(env.unwrapped.plausible_mistake(np.random.default_rng(len(mistakes))))
                    actions.append(env.expert_action() if made_by is None else made_by.act())
                    text, _, terminated, _, info = env.step(actions[-1])
                    assert info["verdict"] == "ok", actions[-1]
                    if made_by is not None:
                        made_by.observe(actions[-1])
                    if words == "put" and actions[-1].startswith("go to "):
                        assert text.startswith("You arrive at loc ")
        assert any(action.startswith(said) for action in actions)
        assert any(action.startswith(said) for action in mistakes)
        assert not any(action.startswith(other) for action in actions + mistakes)


def test_the_reference_tells_its_own_words() -> None:
    with pytest.raises(TaskError, match="engine='native' alone"):
        ALFWorldEnv(words="put", engine="textworld")
    with pytest.raises(TaskError, match="words is 'putt'"):
        ALFWorldEnv(words="putt")  # type: ignore[arg-type]


def test_numbers_are_shuffled_anew_at_every_reset_and_snapshots_keep_them() -> None:
    env = ALFWorldEnv(domain_randomization=True, config="full")
    task = env.task_ids()[0]
    texts = {env.reset(seed=seed, options={"task": task})[0] for seed in range(6)}
    assert len(texts) > 1
    env.reset(seed=1, options={"task": task})
    state, actions = env.get_state(), env.admissible()
    env.reset(seed=2, options={"task": task})
    env.set_state(state)
    assert env.admissible() == actions


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"split": "valid_unsee"}, "split is 'valid_unsee'; valid: train, .* Did you mean 'valid_unseen'"),
        ({"split": "valid_unseen"}, "set ALFWORLD_DATA, or pass data=; .*alfworld-download"),
        ({"split": "train", "data": "/nowhere"}, "data= is '/nowhere', which has no ALFWorld games"),
        ({"engine": "texworld"}, "engine is 'texworld'; valid: native, textworld. Did you mean 'textworld'"),
        ({"part": "test"}, "part is 'test'; valid: train, eval"),
        ({"config": "smal"}, "the generator preset is 'smal'.*Did you mean 'small'"),
    ],
)
def test_wrong_options(options: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    with pytest.raises(TaskError, match=said):
        made(**options)


def test_wrong_data(folder: Path) -> None:
    with pytest.raises(TaskError, match="has no folder 'train'"):
        made(split="train", data=folder)
    with pytest.raises(TaskError, match="shuffles numbers in training"):
        made(split="valid_seen", data=folder, domain_randomization=True)
    env = made(split="valid_seen", data=folder)
    with pytest.raises(TaskError, match=r"'valid_seen/odd-nam/.*Did you mean 'valid_seen/odd-name/"):
        env.reset(options={"task": "valid_seen/odd-nam/trial_T1"})
    (folder / "json_2.1.1/valid_seen/odd-name/trial_T1/game.tw-pddl").write_text('{"grammar"', encoding="utf-8")
    with pytest.raises(TaskError, match=r"odd-name/trial_T1/game\.tw-pddl: damaged"):
        env.reset(options={"task": "valid_seen/odd-name/trial_T1"})


def test_listing_reads_no_game(folder: Path) -> None:
    (folder / "json_2.1.1/valid_seen/odd-name/trial_T1/game.tw-pddl").write_bytes(b"")
    assert len(made(split="valid_seen", data=folder).task_ids()) == 2
    assert find_root(folder) == folder / "json_2.1.1"


def test_generated_ids() -> None:
    env = made()
    ids = env.task_ids()
    assert (len(ids), ids[0], ids[-1]) == (5000, "generated/small/train/0", "generated/small/train/4999")
    assert ids[1:3] == ["generated/small/train/1", "generated/small/train/2"]
    for task in ("generated/small/eval/7", "generated/small/train/123456"):
        env.reset(options={"task": task})
        assert env.task.task_id == task
    endless = f"generated/small/train/{'9' * 5000}"
    for wrong in ("generated/full/train/0", "generated/small/train/01", "generated/small/test/0", endless):
        with pytest.raises(TaskError, match="unknown task"):
            env.reset(options={"task": wrong})
    assert made(part="eval").task_ids()[0] == "generated/small/eval/0"
    assert len(made(part="eval").task_ids()) == 300


@pytest.mark.long
def test_close_gives_textworld_back_and_reset_takes_it_again() -> None:
    pytest.importorskip("alfworld")
    from turngym.envs.alfworld.textworld import Reference

    guard = guard_of(gym.make("turngym/ALFWorld-v0", engine="textworld"))
    first = guard.reset(seed=0)
    guard.step(guard.expert_action() or "")
    state = guard.get_state()
    guard.close()
    assert guard.base._reference is None  # type: ignore[attr-defined]
    assert guard.reset(seed=0) == first
    assert isinstance(guard.base.engine, Reference), "the native engine plays under TextWorld's name"  # type: ignore[attr-defined]
    guard.close()
    guard.set_state(json.loads(json.dumps(state)))
    assert isinstance(guard.base.engine, Reference)  # type: ignore[attr-defined]
    assert guard.get_state() == state
    moved = pickle.loads(pickle.dumps(guard))
    assert isinstance(moved.base.engine, Reference)
    assert moved.base.engine is not guard.base.engine  # type: ignore[attr-defined]
    assert moved.step("look") == guard.step("look")
    native = guard_of(gym.make("turngym/ALFWorld-v0"))
    with pytest.raises(TaskError, match="engine='textworld', this environment has 'native'"):
        native.set_state(state)
    moved.close()
    guard.close()
