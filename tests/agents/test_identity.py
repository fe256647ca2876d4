"""Which settings make another evaluation: every option of an agent is decided, and mixtures are refused."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from turngym.agents import load_world
from turngym.agents.agent_options import AgentOptions
from turngym.agents.endpoint.client import EndpointOptions
from turngym.agents.evaluation.evaluate import evaluate
from turngym.agents.evaluation.evaluate import identity as recorded_identity
from turngym.agents.evaluation.scores import EvaluationError
from turngym.agents.evaluation.training_evaluation import check_panel
from turngym.agents.models import trained_on
from turngym.agents.named_agent import open_agent
from turngym.agents.playing.env_maker import probe
from turngym.core.errors import TurngymError
from turngym.envs.panels import load_panel

ALFWORLD, PANEL = "turngym/ALFWorld-v0", "alfworld-quickstart"
FEW: dict[str, Any] = {"samples": 1, "limit": 2, "max_turns": 2, "progress": False}

OF_MODELS: dict[str, Any] = {
    "temperature": 0.5,
    "channel": "tool:hermes",
    "thinking": "off",
    "observation_role": "tool",
    "system": "Other words.",
    "memory": "window:2",
    "max_new_tokens": 7,
    "max_context": 300,
    "dtype": "bfloat16",
    "examples": __file__,
}
"""Settings of a model that plays in this process, each with another value: another evaluation."""
OF_OTHERS: dict[str, tuple[str, Any]] = {"agent": ("random", "random"), "noise": ("expert", 0.5)}
OF_ENDPOINTS: dict[str, Any] = {
    "send_stop": False,
    "send_seed": False,
    "reasoning_back": "send",
    "extra_body": '{"a": 1}',
    # requests for ids pin what a server would else take from its own configuration
    "token_ids": True,
}
OF_FILES = {"prompts": "tests/agents/test_prompt_templates.py plays with those of a checkout"}
NO_IDENTITY = {
    "device": "the same numbers but for rounding",
    "slots": "episodes do not depend on what is played beside them",
    "threads": "the same numbers but for rounding",
    "endpoint": "its fields are decided one by one",
    "base_url": "where it is",
    "key_env": "who pays",
    "request_deadline": "how long it is waited for",
    "request_retries": "how often it is asked again",
    "handshake": "whether the server is tried first; what that finds is recorded beside the identity",
    **dict.fromkeys(
        ("examples_as", "examples_for"), "nothing without examples; with them it is part of theirs (test_examples)"
    ),
    "price_in": "what it costs",
    "price_cached": "what it costs",
    "price_out": "what it costs",
}


def identity(**options: Any) -> dict[str, Any]:
    opened = open_agent(AgentOptions.of(options), lambda: probe(ALFWORLD, {}))
    return {**recorded_identity({}, opened), "agent": opened.agent.name, "temperature": opened.temperature}


def test_every_option_of_agents_is_decided() -> None:
    """A new option fails here until it is in one of the tables, and with it in the tests below."""
    known = {field.name for options in (AgentOptions, EndpointOptions) for field in fields(options)}
    assert known == {*OF_MODELS, *OF_OTHERS, *OF_ENDPOINTS, *OF_FILES, *NO_IDENTITY}


@pytest.mark.parametrize("name", OF_MODELS)
def test_settings_of_a_model_are_its_identity(name: str) -> None:
    pytest.importorskip("torch")
    folder = f"model:{load_world('alfworld').checkpoint('student')}"
    assert identity(agent=folder) == identity(agent=folder, slots=3, threads=1, device="cpu")
    assert identity(agent=folder, **{name: OF_MODELS[name]}) != identity(agent=folder)


@pytest.mark.parametrize("name", OF_ENDPOINTS)
def test_settings_of_an_endpoint_are_its_identity(name: str) -> None:
    pytest.importorskip("httpx")
    at = {"agent": "openai:some", "base_url": "http://127.0.0.1:9/v1"}
    elsewhere = {"request_deadline": 1.0, "request_retries": 1, "handshake": False, "price_in": 1.0, "price_out": 2.0}
    assert identity(**at) == identity(**{**at, "base_url": "http://127.0.0.1:8/v1"}, **elsewhere)
    assert identity(**at, **{name: OF_ENDPOINTS[name]}) != identity(**at)


def test_who_plays_is_its_identity() -> None:
    for name, (agent, value) in OF_OTHERS.items():
        assert identity(agent="expert") != identity(**{"agent": agent, name: value})


def test_another_precision_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    model = f"model:{load_world('alfworld').checkpoint('student')}"
    first = evaluate(PANEL, model, out=tmp_path, **FEW)
    assert first.settings["dtype"] == "float32"
    with pytest.raises(EvaluationError, match="dtype 'float32', this evaluation has 'bfloat16'"):
        evaluate(PANEL, model, out=tmp_path, dtype="bfloat16", **FEW)
    assert evaluate(PANEL, model, out=tmp_path, **FEW).resumed == 2


def checkpoint(run: Path, env: str, also: str = "") -> Path:
    """The embedded student as the checkpoint of a run on `env`, and in another environment beside it."""
    folder = run / "checkpoints" / "step_000001" / "model"
    folder.mkdir(parents=True)
    for path in load_world("alfworld").checkpoint("student").iterdir():
        (folder / path.name).symlink_to(path)
    (run / "config.toml").write_text(f'env = "{env}"\n' + (f'also = ["{also}"]\n' if also else ""))
    return folder


def test_a_model_trained_for_another_environment_is_said(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    pytest.importorskip("torch")
    other, same = checkpoint(tmp_path / "a", "turngym/WebShop-v0"), checkpoint(tmp_path / "b", f"mine:{ALFWORLD}")
    assert (trained_on(other), trained_on(same), trained_on(tmp_path)) == (("turngym/WebShop-v0",), (ALFWORLD,), ())
    both = checkpoint(tmp_path / "c", "turngym/WebShop-v0", also=f"mine:{ALFWORLD},split=train,env.config=tiny")
    assert trained_on(both) == ("turngym/WebShop-v0", ALFWORLD)
    # a stranger's file may say anything
    (tmp_path / "b" / "config.toml").write_text(f'env = "{ALFWORLD}"\nalso = 5\n')
    assert trained_on(same) == (ALFWORLD,)
    for model in (same, both):
        identity(agent=f"model:{model}")
    assert not recwarn.list
    with pytest.warns(UserWarning, match="trained on turngym/WebShop-v0 and plays turngym/ALFWorld-v0"):
        identity(agent=f"model:{other}")


def test_a_panel_of_another_environment(capsys: pytest.CaptureFixture[str]) -> None:
    panel, tool = load_panel(PANEL), probe(ALFWORLD, {}).tool
    check_panel(panel, panel.make_kwargs, f"package:{ALFWORLD}", tool)
    assert not capsys.readouterr().err
    check_panel(panel, panel.make_kwargs, "mine/Household-v0", tool)
    assert "is of turngym/ALFWorld-v0, the run trains on mine/Household-v0" in capsys.readouterr().err
    shop = load_panel("webshop-quickstart")
    with pytest.raises(TurngymError, match=r"webshop-quickstart-v\d+ is of turngym/WebShop-v0"):
        check_panel(shop, shop.make_kwargs, ALFWORLD, tool)
