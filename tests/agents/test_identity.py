"""Whose weights play, in which precision, and where they were trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from turngym.agents import load_world
from turngym.agents.evaluation.evaluate import evaluate
from turngym.agents.evaluation.scores import EvaluationError
from turngym.agents.models import trained_on
from turngym.agents.named_agent import OpenedAgent, open_agent, weights_of
from turngym.agents.play_spec import Model
from turngym.agents.playing.env_maker import probe
from turngym.agents.resolve_play import resolve_agent
from turngym.core.errors import AgentError, TurngymError
from turngym.core.spec import changed, diff
from turngym.envs.panels import load_panel
from turngym.trainers.panel_evaluation import check_panel

ALFWORLD, PANEL = "turngym/ALFWorld-v0", "alfworld-quickstart"
FEW: dict[str, Any] = {"samples": 1, "limit": 2, "max_turns": 2, "progress": False}


def test_another_precision_is_refused(tmp_path: Path) -> None:
    model = f"model:{load_world('alfworld').checkpoint('student')}"
    first = evaluate(PANEL, model, out=tmp_path, **FEW)
    assert isinstance(first.spec.agent, Model)
    assert first.spec.agent.weights == weights_of(load_world("alfworld").checkpoint("student"))
    with pytest.raises(EvaluationError, match="dtype 'float32', this evaluation has 'bfloat16'"):
        evaluate(PANEL, model, out=tmp_path, dtype="bfloat16", **FEW)
    assert evaluate(PANEL, model, out=tmp_path, **FEW).resumed == 2


def opened(folder: Path) -> OpenedAgent:
    return open_agent(resolve_agent({"agent": f"model:{folder}"}), lambda: probe(ALFWORLD, {}))


def test_the_weights_are_known_wherever_they_lie(tmp_path: Path) -> None:
    own = load_world("alfworld").checkpoint("student")
    twin = tmp_path / "twin"
    twin.symlink_to(own, target_is_directory=True)
    first, second = opened(own).spec, opened(twin).spec
    assert isinstance(first, Model)
    assert set(diff(first, second)) == {"folder"}
    other = load_world("alfworld").checkpoint("teacher")
    with pytest.raises(AgentError, match="another model"):
        open_agent(changed(first, folder=str(other)), lambda: probe(ALFWORLD, {}))


def checkpoint(run: Path, env: str, also: str = "") -> Path:
    """The embedded student as the checkpoint of a run on `env`, and in another environment beside it."""
    folder = run / "checkpoints" / "step_000001" / "model"
    folder.mkdir(parents=True)
    for path in load_world("alfworld").checkpoint("student").iterdir():
        (folder / path.name).symlink_to(path)
    further = f'also = ["{also}"]\n' if also else ""
    (run / "config.toml").write_text(f'[play]\n{further}[play.env]\nid = "{env}"\n')
    return folder


def test_a_model_trained_for_another_environment_is_said(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    other, same = checkpoint(tmp_path / "a", "turngym/WebShop-v0"), checkpoint(tmp_path / "b", f"mine:{ALFWORLD}")
    assert (trained_on(other), trained_on(same), trained_on(tmp_path)) == (("turngym/WebShop-v0",), (ALFWORLD,), ())
    both = checkpoint(tmp_path / "c", "turngym/WebShop-v0", also=f"mine:{ALFWORLD},split=train,env.config=tiny")
    assert trained_on(both) == ("turngym/WebShop-v0", ALFWORLD)
    # a stranger's file may say anything
    (tmp_path / "b" / "config.toml").write_text(f'[play]\nalso = 5\n[play.env]\nid = "{ALFWORLD}"\n')
    assert trained_on(same) == (ALFWORLD,)
    for model in (same, both):
        opened(model)
    assert not recwarn.list
    with pytest.warns(UserWarning, match="trained on turngym/WebShop-v0 and plays turngym/ALFWorld-v0"):
        opened(other)


def test_a_panel_of_another_environment(capsys: pytest.CaptureFixture[str]) -> None:
    panel, tool = load_panel(PANEL), probe(ALFWORLD, {}).tool
    check_panel(panel, panel.make_kwargs, f"package:{ALFWORLD}", tool)
    assert not capsys.readouterr().err
    check_panel(panel, panel.make_kwargs, "mine/Household-v0", tool)
    assert "is of turngym/ALFWorld-v0, the run trains on mine/Household-v0" in capsys.readouterr().err
    shop = load_panel("webshop-quickstart")
    with pytest.raises(TurngymError, match=r"webshop-quickstart-v\d+ is of turngym/WebShop-v0"):
        check_panel(shop, shop.make_kwargs, ALFWORLD, tool)
