"""`turngym report` of evaluations that were played otherwise: every difference is said, and none is taken for skill."""

from __future__ import annotations

from pathlib import Path

import pytest

from turngym.agents.evaluation.compare import decisive, describe, differing, recorded
from turngym.agents.evaluation.evaluate import evaluate
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


@pytest.mark.parametrize(("other", "said"), [("short", "make.max_turns 24 and 3"), ("reject", "make.on_invalid")])
def test_other_settings_are_said_and_the_pair_is_refused(
    runs: Path, capsys: pytest.CaptureFixture[str], other: str, said: str
) -> None:
    text = report(runs, capsys, "own", other)
    assert "## Settings that differ" in text
    assert f"not compared, played otherwise: {said}" in text
    assert "| clear of zero |\n" in text
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
    assert "| agent | expert | random |" in text
    assert "not compared" not in text


def test_which_differences_decide() -> None:
    first = {"agent": "a", "model": "1", "temperature": 0.0, "make.max_turns": 24, "preset": "react"}
    second = {"agent": "b", "model": "2", "temperature": None, "make.max_turns": 24}
    differ = differing(first, second)
    assert list(differ) == ["agent", "model", "temperature", "preset"]
    assert decisive(differ) == {"preset": ("react", None)}
    assert list(decisive(differing(first, {**first, "temperature": 0.85}))) == ["temperature"]
    assert describe({"preset": ("react", None)}) == "preset 'react' and None"


def test_settings_out_of_the_episodes() -> None:
    evaluated = {"agent": "a", "make": {"on_invalid": "reject", "data": "d"}, "goal_rate": 0.5, "chat": "c"}
    assert recorded([evaluated]) == {"agent": "a", "make.on_invalid": "reject", "chat": "c"}
    # an evaluation in training says its limit of turns beside the rest
    trained = {"agent": "a", "max_turns": 5, "panel": {"name": "alfworld-quickstart-v1"}}
    assert recorded([trained])["make.max_turns"] == 5
    assert recorded([{"panel": {"name": "alfworld-quickstart-v1"}}])["make.max_turns"] == 24
    assert recorded([{"panel": {"name": "gone-v1"}}]) == {}
    assert recorded([{"seed": 1}, {"seed": 2}]) == {"seed": "1 and 2"}
