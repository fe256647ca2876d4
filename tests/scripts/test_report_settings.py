"""`turngym report` of evaluations that were played otherwise: every difference is said, and none is taken for skill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from turngym.agents.evaluation.compare import decisive, describe, differences_of
from turngym.agents.evaluation.evaluate import EVAL_DEFAULTS, evaluate
from turngym.agents.play_spec import EvalSpec
from turngym.agents.resolve_play import resolve_play
from turngym.scripts.main import main

PANEL = "alfworld-quickstart"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two samples of three tasks: the panel's own set-up, said again, with other turns, and by another agent."""
    folder = tmp_path_factory.mktemp("runs")
    ways = {"own": {}, "again": {"max_turns": 24}, "short": {"max_turns": 3}}
    ways["reject"] = {"env_kwargs": {"on_invalid": "reject"}}  # type: ignore[dict-item]
    for name, way in ways.items():
        evaluate(PANEL, "expert", out=folder / name, samples=2, limit=3, progress=False, **way)  # type: ignore[arg-type]
    evaluate(PANEL, "random", out=folder / "random", samples=2, limit=3, progress=False)
    return folder


def report(runs: Path, capsys: pytest.CaptureFixture[str], *names: str) -> str:
    words = [name if name.startswith("--") else str(runs / name) for name in names]
    assert main(["report", *words]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(("other", "said"), [("short", "max_turns 24 and 3"), ("reject", "on_invalid")])
def test_other_settings_are_said_and_the_pair_is_refused(
    runs: Path, capsys: pytest.CaptureFixture[str], other: str, said: str
) -> None:
    text = report(runs, capsys, "own", other)
    assert "## Settings that differ" in text
    assert f"not compared, played otherwise: {said}" in text
    assert "| clear of zero | of |\n" in text
    asked = report(runs, capsys, "own", other, "--different-settings")
    assert "not compared" not in asked
    assert "## Settings that differ" in asked
    assert f"| {other} minus own | " in asked.partition("## Paired difference")[2]


def test_what_the_panel_fixes_may_be_said_again(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = report(runs, capsys, "own", "again")
    assert "Settings that differ" not in text
    assert "not compared" not in text


def test_other_players_are_compared_and_said(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = report(runs, capsys, "own", "random")
    assert "| agent.kind | player | random |" in text
    assert "not compared" not in text


def test_settings_differ_within_a_panel_alone(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for agent in ("random", "first-hit"):
        evaluate("webshop-quickstart", agent, out=tmp_path / agent, samples=1, limit=1, max_turns=2, progress=False)
    shops = [str(tmp_path / agent) for agent in ("first-hit", "random")]
    assert main(["report", f"a={runs / 'own'}", f"b={runs / 'short'}", f"c={shops[0]}", f"d={shops[1]}"]) == 0
    text = capsys.readouterr().out.partition("## Settings that differ")[2].partition("\n## ")[0]
    house, shop = text.partition("webshop-quickstart-v1:")[::2]
    assert "| max_turns | 24 | 3 |" in house
    assert "| agent.kind | player | random |" in shop
    assert "env_kwargs" not in text


def test_which_differences_decide() -> None:
    def spec(**given: Any) -> EvalSpec:
        return resolve_play([("test", {"panel": PANEL, **given})], usual=EVAL_DEFAULTS).spec

    first = spec(agent="openai:a", preset="react", temperature=0.0)
    differ = differences_of(first, spec(agent="random"))
    # who plays and a preset's name decide nothing; its rules do
    assert decisive(differ).keys() == {path for path in differ if path.startswith("play.")} - {"play.samples"}
    assert decisive(differ)["play.env.max_turns"] == (49, 24)
    assert list(decisive(differences_of(first, spec(agent="openai:b", preset="react", temperature=0.85)))) == [
        "agent.temperature"
    ]
    # how much is played, and who computes, change no paired difference
    other = spec(agent="openai:a", preset="react", temperature=0.0, samples=9, limit=2, slots=3, seed=8)
    assert not decisive(differences_of(first, other))
    assert list(differences_of(first, other)) == ["play.tasks.sampling.kind", "play.samples", "play.seed"]
    assert describe({"play.env.max_turns": (24, 3)}) == "max_turns 24 and 3"
