"""What a training run stands on: its settings are whole before anything is opened, and each says who gave it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from turngym.agents import resolve_play
from turngym.agents.play_spec import VerlAgent
from turngym.agents.rendering.chat_settings import ChatSettings
from turngym.core.errors import SettingsError
from turngym.core.resolve import Layer
from turngym.core.settings import to_toml, toml_of, whole_toml
from turngym.envs.panels import PanelError
from turngym.scripts import train
from turngym.trainers import run, training_layers
from turngym.trainers.several_envs import further_env
from turngym.trainers.train_config import TrainConfig, beyond, resolve_training, train_config

SHOP = "turngym/WebShop-v0"
HOUSE = {"env": "turngym/ALFWorld-v0", "panel": "alfworld-quickstart"}


def asked(folder: Path, **given: Any) -> dict[str, Any]:
    return {"student": str(folder), "teacher": str(folder), "out": str(folder / "run"), **given}


def config(folder: Path, **given: Any) -> TrainConfig:
    return train_config("opd", asked(folder, **given), "test")


def test_every_value_says_who_gave_it(tmp_path: Path) -> None:
    ChatSettings(max_context=900, max_new_tokens=33).save(tmp_path)
    given = asked(tmp_path, **HOUSE, preset="verl-agent", eval_limit=3)
    found = resolve_training("opd", [Layer(name="command line", table=given, asked=True)])
    came = found.origins
    said = {
        "play.env.max_turns": "preset verl-agent",
        "play.env.invalid_cost": "preset verl-agent",
        "play.env.split": "environment",
        "chat.memory.turns": "preset verl-agent",
        "chat.max_context": "turngym.json of the model",
        "evaluation.panel": "command line",
        "evaluation.game.env.split": "panel alfworld-quickstart-v1",
        "evaluation.game.env_kwargs.part": "panel alfworld-quickstart-v1",
        "evaluation.eval_temperature": "preset verl-agent",
        "evaluation.eval_limit": "command line",
    }
    assert {path: came.get(path) for path in said} == said
    # training pays for mistakes of form, evaluations do not
    assert found.spec.evaluation is not None
    assert (found.spec.play.env.invalid_cost, found.spec.evaluation.game.env.invalid_cost) == (0.01, 0.0)
    # what is shown is read back to the same settings, whoever gave them
    assert train_config("opd", toml_of(to_toml(found.spec, came)), "file") == found.spec
    # the version that a name without one stands for
    assert found.spec.evaluation.panel == "alfworld-quickstart-v1"


@pytest.mark.parametrize(
    ("algorithm", "given", "late"),
    [
        ("opd", {"optimizer": {"lr_warmup": 100}}, []),
        ("opd", {"optimizer": {"lr_warmup": 101}}, ["optimizer.lr-warmup"]),
        ("turnopd", {"steps": 2, "checkpoint_every": 5}, []),  # as by default, or on purpose
        ("turnopd", {"steps": 9, "turnopd.depth.warmup": 10, "lr_warmup": 10}, ["warmup", "optimizer.lr-warmup"]),
        ("turnopd", {"turnopd": {"depth": {"probe_interval": 101}}}, ["turnopd.depth.probe-interval"]),
        ("loopstop", {"loopstop.probe_interval": 101}, ["loopstop.probe-interval"]),
        ("tcod", {"tcod.schedule.eta": 101}, ["tcod.schedule.eta"]),
        ("rlsd", {"rlsd.fade": 101}, ["rlsd.fade"]),
        ("luffy", {"luffy.prefix": {"strategy": "linear", "steps": 101}}, ["luffy.prefix.steps"]),
        ("grpo", {"kl_coef": 0.1, "reference_every": 101}, ["reference-every"]),
    ],
)
def test_steps_that_a_run_does_not_have_are_said(
    algorithm: str, given: dict[str, Any], late: list[str], tmp_path: Path
) -> None:
    settings = {name: value for name, value in asked(tmp_path).items() if name != "teacher" or "opd" in algorithm}
    said = beyond(train_config(algorithm, {**settings, **given}, "test"))
    assert bool(said) == bool(late)
    assert said.count(" is ") == len(late)
    assert all(f"{name} is " in said for name in late)


def test_arguments_of_every_environment_may_stand_among_its_own(tmp_path: Path) -> None:
    found = config(tmp_path, env_kwargs={"on_invalid": "noop", "config": "full", "data": "there"}, reading="folded")
    assert (found.play.env.on_invalid, found.play.env.reading, found.play.data) == ("noop", "folded", "there")
    assert found.play.env_kwargs["config"] == "full"
    for twice in ({"max_turns": 3, "env_kwargs": {"max_turns": 4}}, {"env_kwargs": {"channel": "tool"}}):
        with pytest.raises(SettingsError, match=r"max_turns|channel"):
            config(tmp_path, **twice)


def test_evaluations_need_a_panel(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="panel"):
        config(tmp_path, eval_samples=2)
    # which says what its environment is
    with pytest.raises(PanelError, match=SHOP):
        config(tmp_path, **HOUSE, evaluation={"game": {"env": {"id": SHOP}}})


def test_a_further_environment_has_its_own_preset_and_what_was_asked_for_the_run(tmp_path: Path) -> None:
    given: dict[str, Any] = {**HOUSE, "preset": "verl-agent", "max_new_tokens": 77, "eval_samples": 5, "max_turns": 9}
    given["env_kwargs"] = {"words": None, "engine": "none"}
    run = config(tmp_path, **given)
    shop = further_env(f"{SHOP},panel=webshop-quickstart,env.profile=embedded-small").played(run)
    assert (shop.play.env.id, shop.play.env.tool_name, shop.play.env.max_turns) == (SHOP, "webshop_step", 9)
    assert shop.play.env_kwargs["profile"] == "embedded-small"
    assert isinstance(shop.chat.memory, VerlAgent)
    assert (shop.chat.max_new_tokens, run.chat.max_new_tokens) == (77, 77)
    assert shop.evaluation is not None
    assert (shop.evaluation.panel, shop.evaluation.eval_samples) == ("webshop-quickstart-v1", 5)
    assert shop.evaluation.game.env.id == SHOP
    # without a preset it is spoken to as the run is
    assert further_env(SHOP).played(config(tmp_path, memory="react")).chat == config(tmp_path, memory="react").chat
    # a preset says how many samples are drawn, where nobody else does
    plain = further_env(f"{SHOP},panel=webshop-quickstart").played(config(tmp_path, **HOUSE, preset="turnopd"))
    assert plain.evaluation is not None
    assert plain.evaluation.eval_samples == 4
    # the settings of the run are read again as they were written
    again = train_config("opd", toml_of(to_toml(run)), "file")
    assert again == run
    assert further_env(SHOP).played(again).chat == further_env(SHOP).played(run).chat


def test_the_help_says_what_holds_where_nothing_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train.resolved(["opd", "--help-all"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("  --")]
    assert ["--max-turns", "50"] in [row[:2] for row in rows]
    assert [row[0] for row in rows if "(required)" in row] == ["--student", "--out"]


def test_what_is_put_on_top_of_a_record_decides_what_follows(tmp_path: Path) -> None:
    """A run's whole settings are read for another panel, environment, preset, student or algorithm."""
    other = tmp_path / "other"
    other.mkdir()
    ChatSettings(max_new_tokens=33).save(other)
    given = {**asked(tmp_path, **HOUSE), "eval_limit": 3, "memory": "react"}
    first = resolve_training("opd", [Layer(name="command line", table=given, asked=True)])
    record = toml_of(whole_toml(first))

    def on_top(algorithm: str = "opd", **more: Any) -> TrainConfig:
        return resolve_training(algorithm, [layer(record), layer(more)]).spec

    def layer(table: Any) -> Layer:
        return Layer(name="test", table=table, asked=True)

    def anew(algorithm: str = "opd", **more: Any) -> TrainConfig:
        return train_config(algorithm, {**given, **more}, "test")

    assert on_top() == first.spec
    for more in (
        {"panel": "alfworld-generated-unseen"},
        {"env": SHOP, "panel": "webshop-quickstart"},
        {"preset": "verl-agent"},
        {"student": str(other)},
        {"lora.rank": 4},
        {"max_turns": 9},
    ):
        assert on_top(**more) == anew(**more) != first.spec, more
    record["method"]["teacher"]["teacher"] = str(other)
    assert on_top("turnopd") == anew("turnopd", teacher=str(other))
    # the cells of a study have no folder in their files
    homeless = toml_of(whole_toml(first, but=("models.out",)))
    assert resolve_training("opd", [layer(homeless), layer({"out": str(tmp_path / "run")})]).spec == first.spec
    # what another version decided otherwise is as it was
    record["evaluation"]["game"]["env"]["max_turns"] = 7
    record["optimizer"]["lr"] = 0.5
    kept = on_top(steps=2)
    assert kept.evaluation is not None
    assert (kept.evaluation.game.env.max_turns, kept.optimizer.lr, kept.run.steps) == (7, 0.5, 2)
    # a table that does not say what was asked for is all of it
    del record["provenance"]
    assert on_top(**{"lora.rank": 4}).optimizer.lr == 0.5


def test_a_student_of_the_hub_is_spoken_to_as_its_folder_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run fetches it first; who only reads settings, as a study does, fetches nothing."""
    ChatSettings(max_new_tokens=33).save(tmp_path)
    here: dict[str, Path] = {}

    def fetched(name: str) -> Path:
        return here.setdefault(str(name), tmp_path)

    monkeypatch.setattr(training_layers, "hub_folder", fetched)
    monkeypatch.setattr(training_layers, "cached_folder", here.get)
    monkeypatch.setattr(resolve_play, "hub_folder", fetched)
    given = {**asked(tmp_path), "student": "org/model"}
    layers = [Layer(name="test", table=given, asked=True)]
    assert resolve_training("opd", layers).spec.chat.max_new_tokens == 512
    assert not here
    assert resolve_training("opd", layers, fetch=True).spec.chat.max_new_tokens == 33

    class Begun(Exception):
        pass

    def begun(config: TrainConfig, *_: Any, **__: Any) -> None:
        raise Begun(config.chat.max_new_tokens)

    monkeypatch.setattr(run, "run_training", begun)
    words = ["opd", "--student", "org/model", "--teacher", "t", "--out", str(tmp_path / "run")]
    for begin in (lambda: run.train("opd", student="org/model", teacher="t", out="o"), lambda: train.main(words)):
        here.clear()
        with pytest.raises(Begun, match="33"):
            begin()
