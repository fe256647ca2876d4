"""Judges by name: the built-in ones, one of another package, and what is said of those that are not there."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from turngym.agents.judges.judges import ExpertJudge, JudgeContext, RuleJudge, make_judge
from turngym.agents.judges.model_judges import HttpJudge
from turngym.agents.options import JudgeOptions
from turngym.envs.core.errors import TurngymError
from turngym.envs.core.plugins import PluginError
from turngym.envs.core.protocols import JudgeRequest

CODE = """
from dataclasses import dataclass
from turngym.envs.core.protocols import Judgment


@dataclass
class Shortest:
    context: object

    def judge(self, requests):
        worst = max(len(request.response) for request in requests)
        return [Judgment(votes=(f"\\\\boxed{{{-1 if len(r.response) == worst else 1}}}",)) for r in requests]
"""


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module `outside_judge`, with the installed entry point `shortest`."""
    info = tmp_path / "outside_judge-1.0.dist-info"
    info.mkdir()
    (tmp_path / "outside_judge.py").write_text(CODE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside-judge\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[turngym.judges]\nshortest = outside_judge:Shortest\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "outside_judge", raising=False)


def made(name: str, kind: Any = "score", **more: Any) -> Any:
    options = JudgeOptions(judge=name, judge_strict=True, judge_votes=5, judge_temperature=0.25)
    return make_judge(options, kind, make_env=dict, seed=4, **more)


def test_the_built_in_judges() -> None:
    assert isinstance(made("auto", "score"), RuleJudge)
    assert isinstance(made("auto", "hint"), ExpertJudge)
    assert isinstance(made("rules", "hint"), RuleJudge)
    expert = made("expert", expert="searching")
    assert isinstance(expert, ExpertJudge)
    assert (expert.strict, expert.make_env, expert.expert.name) == (True, dict, "searching")
    http = made("http://127.0.0.1:9/v1")
    assert isinstance(http, HttpJudge)
    assert (http.url, http.votes, http.temperature, http.seed) == ("http://127.0.0.1:9/v1", 5, 0.25, 4)


@pytest.mark.parametrize("name", ["shortest", "outside_judge:Shortest"])
def test_a_judge_of_another_package(outside: None, name: str) -> None:
    judge = made(name, "hint", expert="searching", device="cpu")
    assert isinstance(judge.context, JudgeContext)
    context = judge.context
    assert (context.kind, context.expert, context.seed, context.device) == ("hint", "searching", 4, "cpu")
    assert context.options.judge_votes == 5
    assert context.make_env is dict
    requests = [JudgeRequest(name=str(n), kind="score", response="x" * n, next_state="") for n in (1, 3, 2)]
    assert [one.votes for one in judge.judge(requests)] == [("\\boxed{1}",), ("\\boxed{-1}",), ("\\boxed{1}",)]


def test_judges_that_are_not_there(outside: None) -> None:
    with pytest.raises(
        PluginError, match=r"unknown judge 'exprt'; judges are: rules, expert, .* Did you mean 'expert'"
    ):
        made("exprt")
    with pytest.raises(PluginError, match="judge 'outside_judge:Longest': outside_judge has no 'Longest'"):
        made("outside_judge:Longest")
    with pytest.raises(TurngymError, match="--judge-repeats is 0"):
        make_judge(JudgeOptions(judge="expert", judge_repeats=0), "hint", make_env=dict)
