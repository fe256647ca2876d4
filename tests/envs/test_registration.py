"""One line registers an environment; what it makes is the guarded environment, alone or several at once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from turngym.agents.presets import presets
from turngym.core import TurngymError
from turngym.envs import ActionGuard, TextEnv, TextVectorEnv, make_env, panel_of_env, register
from turngym.envs.alfworld.env import ALFWorldEnv
from turngym.envs.alfworld.priors import SMALL
from turngym.envs.panels import PanelError, installed_panels, load_panel, verify_panel, write_panel
from turngym.envs.registration import NOT_GIVEN, argument_types, default_arguments, make, registered_class, require_env
from turngym.envs.search.env import SearchEnv
from turngym.envs.search.fiction import PRESETS
from turngym.scripts.main import main

ENV_ID = "turngym-test/Registered-v0"


@pytest.fixture
def env_class(toy_class: type[Any]) -> Iterator[type[Any]]:
    yield type("Registered", (toy_class,), {"env_id": ENV_ID})
    gym.registry.pop(ENV_ID, None)


def test_a_class_is_registered_in_one_line(env_class: type[Any]) -> None:
    register(ENV_ID, env_class, max_turns=2)
    guard = gym.make(ENV_ID)
    assert isinstance(guard, ActionGuard)
    assert (guard.max_turns, guard.on_invalid, guard.channel) == (2, "reject", None)
    guard = gym.make(ENV_ID, max_turns=None, channel="text", on_invalid="penalize", penalty=-1.0)
    assert isinstance(guard, ActionGuard)
    assert (guard.max_turns, guard.on_invalid, guard.penalty) == (None, "penalize", -1.0)
    guard.reset(seed=0)
    assert guard.step("<action>go right</action>")[-1]["verdict"] == "ok"
    assert guard.step("go right")[1] == -1.0
    envs = gym.make_vec(ENV_ID, 3, channel="text")
    assert isinstance(envs, TextVectorEnv)
    assert envs.get_attr("channel")[0].name == "text"
    assert envs.get_attr("max_turns") == (2, 2, 2)


def test_the_last_registration_counts(env_class: type[Any], recwarn: pytest.WarningsRecorder) -> None:
    for turns in (3, 4):
        register(ENV_ID, env_class, max_turns=turns)
    assert gym.make(ENV_ID).get_wrapper_attr("max_turns") == 4
    assert not recwarn.list


def test_specs_of_named_classes_are_json() -> None:
    spec = json.loads(gym.make("turngym/Search-v0").spec.to_json())  # type: ignore[union-attr]
    assert spec["kwargs"]["env_class"] == "turngym.envs.search.env:SearchEnv"


@pytest.mark.parametrize(
    ("env_class", "text"),
    [
        (dict, "must be a class that extends TextEnv"),
        (ALFWorldEnv, "ALFWorldEnv.env_id is 'turngym/ALFWorld-v0'; set it to the same id"),
        ("turngym.envs.search.env", "write it as 'package.module:Class'"),
    ],
)
def test_what_cannot_be_registered(env_class: Any, text: str) -> None:
    with pytest.raises(TurngymError, match=text):
        register(ENV_ID, env_class)
    # and takes no other's place
    with pytest.raises(TurngymError):
        register("turngym/Search-v0", env_class)
    assert "turngym/Search-v0" in gym.registry


def test_a_place_that_holds_no_environment() -> None:
    with pytest.raises(TurngymError, match="an environment is a class that extends TextEnv"):
        make_env("turngym.envs.search.env:Nothing")
    with pytest.raises(TurngymError, match=r"gym\.make takes ids"):
        make_env("turngym/Search-v0")


def test_the_class_says_its_defaults() -> None:
    assert make_env(SearchEnv).on_invalid == gym.make("turngym/Search-v0").get_wrapper_attr("on_invalid") == "noop"
    assert make_env(SearchEnv, on_invalid="reject").on_invalid == "reject"
    for turns, given, limit in ((4, None, 3), (4, 1, 1), (None, None, None), (1, None, 0)):
        assert SearchEnv.options_within(turns, {"search_turns": given})["search_turns"] == limit
    assert make_env(SearchEnv, max_turns=4).base._search_turns == 3  # type: ignore[attr-defined]
    assert make_env(SearchEnv, max_turns=4, max_searches=9).base._search_turns == 3  # type: ignore[attr-defined]


def test_ids_of_other_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, env_class: type[Any]) -> None:
    (tmp_path / "their_envs.py").write_text("import turngym.envs\nturngym.envs.register('their/Toy-v0', 'toys:Toy')\n")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert require_env("their_envs:their/Toy-v0") == "their_envs:their/Toy-v0"
        with pytest.raises(TurngymError, match="Did you mean 'their/Toy-v0'"):
            require_env("their_envs:their/Toi-v0")
    finally:
        gym.registry.pop("their/Toy-v0", None)
    for module in ("their_other_envs", "", ".envs"):
        with pytest.raises(TurngymError, match=f"cannot import '{module}'"):
            require_env(f"{module}:their/Toy-v0")


def test_a_panel_remembers_who_registers_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, env_class: type[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "their_panels"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    register(ENV_ID, env_class)
    panel = panel_of_env("toy", f"their_panels:{ENV_ID}", make_kwargs={"max_turns": 9}, task_ids=["corridor/4"])
    assert [task.env_id for task in panel.tasks] == [ENV_ID]
    write_panel(panel, package / "panel_data")
    for name in ("their_panels:toy", "their_panels:toy-v1"):
        assert load_panel(name) == panel
    assert verify_panel(panel, panel.make_env()) == []
    assert panel.make_env().get_wrapper_attr("max_turns") == 9
    for name, text in (
        ("their_panel:toy", "there is no package 'their_panel'"),
        ("their_panels:toi", "there is no panel 'toi'; panels are: toy-v1. Did you mean 'toy-v1'"),
    ):
        with pytest.raises(PanelError, match=text):
            load_panel(name)
    # installed with an entry point, it stands in every list
    info = tmp_path / "their_panels-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their_panels\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[turngym.packages]\ntheirs = their_panels\n")
    assert "their_panels:toy-v1" in installed_panels()
    # a damaged one is named, and hides no other
    (package / "panel_data" / "broken-v1.json").write_text("{", encoding="utf-8")
    (package / "presets.toml").write_text("= broken", encoding="utf-8")
    assert main(["panel", "list"]) == 1
    said = capsys.readouterr()
    assert "their_panels:toy-v1" in said.out
    assert said.err.startswith("their_panels:broken-v1: ")
    assert presets.__wrapped__() == presets()
    assert "their_panels" in capsys.readouterr().err


def test_pages_name_the_defaults_for_invalid_actions() -> None:
    root = Path(__file__).parents[2]
    policies = {name: gym.make(f"turngym/{name}-v0").get_wrapper_attr("on_invalid") for name in ("ALFWorld", "Search")}
    policies["WebShop"] = gym.make("turngym/WebShop-v0", profile="embedded-small").get_wrapper_attr("on_invalid")
    assert policies == {"ALFWorld": "reject", "WebShop": "reject", "Search": "noop"}
    page = (root / "docs" / "environments.md").read_text(encoding="utf-8")
    assert "| `reject` (default of ALFWorld and WebShop) |" in page
    assert "| `noop` (default of Search) |" in page


WRONG_TYPES = [
    ("Search", "strict_compat", "false"),
    ("Search", "source", 5),
    ("Search", "split", ["eval"]),
    ("Search", "config", 5),
    ("Search", "format_scores", [0.2]),
    ("Search", "format_scores", [0.2, "0.1", 0]),
    ("Search", "retriever", 5),
    ("Search", "count", "len"),
    ("Search", "tool_name", 5),
    ("Search", "tool_name", True),
    ("WebShop", "backdoors", "false"),
    ("WebShop", "show_admissible", "false"),
    ("WebShop", "show_attributes", 1),
    ("WebShop", "price_seed", "7"),
    ("WebShop", "price_seed", 7.5),
    ("WebShop", "price_seed", True),
    ("WebShop", "shop", "mine"),
    ("WebShop", "strict_admissible", None),
    ("ALFWorld", "domain_randomization", "no"),
    ("ALFWorld", "config", {"rooms": 3}),
    ("ALFWorld", "list_admissible", 0),
]


@pytest.mark.parametrize(("env", "name", "value"), WRONG_TYPES, ids=lambda value: str(value))
def test_an_argument_of_another_type_is_refused(env: str, name: str, value: Any) -> None:
    with pytest.raises(TurngymError, match=f"turngym/{env}-v0: {name} is .*; valid: "):
        gym.make(f"turngym/{env}-v0", **{name: value})


@pytest.mark.parametrize(
    ("env", "given"),
    [
        (
            "Search",
            {"format_scores": [0.2, 0, 0], "reward": "format", "topk": np.int64(2), "config": "tiny", "split": "eval"},
        ),
        ("Search", {"held_out": ["world"], "count": len, "config": PRESETS["tiny"]}),
        ("WebShop", {"backdoors": np.bool_(True), "price_seed": None, "invalid_cost": 1}),
        ("ALFWorld", {"config": SMALL, "data": Path("none"), "max_turns": None}),
    ],
)
def test_arguments_of_their_types_are_taken(env: str, given: dict[str, Any]) -> None:
    made = gym.make(f"turngym/{env}-v0", **given)
    assert isinstance(made.unwrapped, TextEnv)
    made.close()


def test_the_types_of_our_arguments_are_known() -> None:
    for env_id in ("turngym/ALFWorld-v0", "turngym/WebShop-v0", "turngym/Search-v0"):
        assert Any not in argument_types(registered_class(env_id).__init__).values()


def test_a_class_whose_types_cannot_be_found_takes_what_it_is_given(toy_class: type[Any]) -> None:
    def begin(self: Any, *, level: Unknown = 1) -> None:  # type: ignore[name-defined] # noqa: F821
        toy_class.__init__(self)
        self.level = level

    env_class = type("Level", (toy_class,), {"env_id": ENV_ID, "__init__": begin})
    assert make_env(env_class, level="high").unwrapped.level == "high"


@pytest.mark.parametrize("name", NOT_GIVEN)
def test_what_is_gymnasiums_cannot_be_given(name: str) -> None:
    with pytest.raises(TurngymError, match=f"turngym/ALFWorld-v0: {name} is no argument"):
        make("turngym/ALFWorld-v0", {name: "this:s"})


@pytest.mark.parametrize("entry_point", ["nowhere:make", lambda **options: None, gym.Env])
def test_an_environment_without_a_known_class_is_refused_with_the_way_to_register_it(entry_point: Any) -> None:
    gym.register("mine/Factory-v0", entry_point=entry_point)
    try:
        with pytest.raises(TurngymError, match=r"^mine/Factory-v0 is .*turngym\.envs\.register\('mine/Factory-v0', CL"):
            default_arguments("mine/Factory-v0")
    finally:
        del gym.registry["mine/Factory-v0"]
