"""How the models of an embedded world are made: one from another, resumable, by the recipe's own settings."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from turngym.agents.rendering.chat_settings import ChatSettings
from turngym.agents.worlds import load_world
from turngym.agents.worlds.worlds import EmbeddedWorld
from turngym.core.errors import TurngymError
from turngym.scripts import main
from turngym.scripts.pretrain import pretrain, sft_settings

WORLD = load_world("alfworld-loops")


def short(world: EmbeddedWorld = WORLD) -> EmbeddedWorld:
    """The world with four turns, and two episodes a step."""
    recipes = {role: replace(recipe, steps=1, episodes=2) for role, recipe in world.recipes.items()}
    return replace(world, max_turns=4, recipes=recipes)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}


def same(one: Path, other: Path) -> bool:
    a, b = weights(one), weights(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_model_grows_from_the_one_that_its_recipe_names(tmp_path: Path) -> None:
    world = short()
    model = pretrain(world, world.recipes["student"], tmp_path)
    assert model == tmp_path / "model"
    mixture = tmp_path / "mixture"
    assert same(mixture / "start", load_world("alfworld").checkpoint("teacher"))
    assert same(tmp_path / "start", mixture / "model")
    assert not same(mixture / "model", mixture / "start")
    assert not same(model, tmp_path / "start")
    assert {str(tensor.dtype) for tensor in load_file(model / "model.safetensors").values()} == {"torch.float16"}
    # half precision is a copy: what was trained is rounded, and nothing else
    trained = max((tmp_path / "sft").glob("checkpoints/step_*/model"))
    assert all(torch.equal(a.half().float(), weights(model)[name]) for name, a in weights(trained).items())
    assert json.loads((model / "config.json").read_text())["max_position_embeddings"] == 2048
    assert ChatSettings.load(model) == world.chat


def test_a_stopped_chain_goes_on_and_keeps_what_is_finished(tmp_path: Path) -> None:
    world = short()
    mixture = pretrain(world, world.recipes["mixture"], tmp_path / "mixture")
    stamp = (mixture / "model.safetensors").stat().st_mtime_ns
    model = pretrain(world, world.recipes["student"], tmp_path, resume=True)
    assert (mixture / "model.safetensors").stat().st_mtime_ns == stamp
    again = pretrain(world, world.recipes["student"], tmp_path, resume=True)
    assert again == model
    assert same(tmp_path / "start", mixture)


def test_a_model_that_is_there_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine").touch()
    with pytest.raises(TurngymError, match="model is there already"):
        pretrain(WORLD, WORLD.recipes["student"], tmp_path)
    assert [path.name for path in tmp_path.rglob("*")] == ["model", "mine"]


def test_every_setting_of_a_recipe_reaches_the_run(tmp_path: Path) -> None:
    world = short()
    recipe = replace(world.recipes["skilled"], start="alfworld/teacher", loop_after=5.0, loop_slips=0.25, mistakes=0.75)
    pretrain(world, recipe, tmp_path)
    config = tomllib.loads((tmp_path / "sft" / "config.toml").read_text())
    assert config["method"]["sft"] == {
        "weight": "episode_mean",
        "train_on": "both",
        "noise": [0.02, 0.4],
        "mistakes": 0.75,
        "players": "expert:.45,noisy:.5,repeat:.03,cycle:.02",
        "loop_after": 5.0,
        "loop_slips": 0.25,
        "hints": 0.0,
        "told": "",
    }
    assert (config["run"]["seed"], config["method"]["expert"]) == (2, "searching")
    assert (config["play"]["env"]["max_turns"], config["models"]["threads"]) == (4, 1)


def test_a_recipe_of_loops_has_its_worlds_start_and_mistakes() -> None:
    for name, start, mistakes, teacher in (
        ("alfworld-loops", "alfworld/teacher", 0.5, "expert:.4,noisy:.4,repeat:.12,cycle:.08"),
        ("webshop-loops", "webshop/teacher", 0.5, "expert:.4,noisy:.4,wander:.2"),
        ("search-loops", "search/teacher", 1.0, "expert:.4,noisy:.4,repeat:.12,cycle:.08"),
        ("search-chains", "solver", 1.0, "expert:.4,noisy:.4,repeat:.12,cycle:.08"),
    ):
        everyone = load_world(name).recipes
        recipes = {role: recipe for role, recipe in everyone.items() if recipe.players}
        assert recipes["teacher"].players == teacher
        assert {role: recipe.start for role, recipe in recipes.items()} == {
            "mixture": start,
            "student": "mixture",
            "skilled": "student",
            "teacher": "skilled",
        }
        assert {recipe.mistakes for recipe in recipes.values()} == {mistakes}


def test_the_worlds_that_were_there_are_made_as_before() -> None:
    world = load_world("alfworld")
    own = sft_settings(world, world.recipes["teacher"])["sft"]
    assert own == {"noise": (0.0, 0.5), "mistakes": 0.5, "weight": "token_mean"}


def test_a_role_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["pretrain", "--world", "alfworld-loops", "--role", "techer"]) != 0
    assert "alfworld-loops has mixture, student, skilled, teacher. Did you mean 'teacher'?" in capsys.readouterr().err
    with pytest.raises(TurngymError, match="the embedded worlds are"):
        load_world("household")
