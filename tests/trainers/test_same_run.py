"""A checkpoint goes on with the settings that it was made with; what a setting names counts by its content."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from turngym.agents.meaning import MEANING, meaning
from turngym.agents.play_spec import EvalSpec
from turngym.core.nested import put
from turngym.core.resolve import merged
from turngym.core.setting import settings_of
from turngym.trainers.algorithm_spec import BUILT_IN
from turngym.trainers.checkpoint import CheckpointError
from turngym.trainers.run_folder import check_same
from turngym.trainers.train_config import config_class

SPEC: Mapping[str, Any] = {
    "algorithm": "opd",
    "models": {"student": "/a/student", "threads": 1},
    "method": {"teacher": {"kind": "local", "teacher": "/a/teacher"}, "opd": {"weight": "turn"}},
    "run": {"steps": 2, "seed": 0, "micro_tokens": 64, "eval_every": 1},
    "evaluation": {"env": {"id": "E"}, "samples": 2},
    "play": {"also": {"W": {"share": 1.0, "evaluation": None}}},
}
CONTENTS = {"models.student": "s", "method.teacher.teacher": "t", "algorithm": "code"}


def compared(now: Mapping[str, Any], contents: Mapping[str, Any], was: Mapping[str, Any] = SPEC) -> None:
    changed: dict[str, Any] = merged([was])
    for path, value in now.items():
        put(changed, path, value)
    check_same({"spec": was, "contents": CONTENTS}, changed, {**CONTENTS, **contents}, Path("checkpoint"))


@pytest.mark.parametrize(
    ("now", "contents", "said"),
    [
        ({"models.threads": 8, "workers": {"kind": "local", "processes": 4}}, {}, ""),
        # folders move, and another machine computes
        ({"models.student": "/b/student", "method.teacher.teacher": "/b/teacher"}, {}, ""),
        ({"method.teacher": {"kind": "servers", "teacher_server": "http://x", "server_parallel": 2}}, {}, ""),
        (
            {"engine": {"kind": "vllm", "engine_python": "/python"}},
            {"engine.engine_python": "p"},
            "engine.kind is vllm",
        ),
        ({"run.steps": 3, "run.eval_every": 5}, {}, ""),
        ({"run.micro_tokens": 32}, {}, "run.micro_tokens is 32, was 64"),
        ({}, {"algorithm": "other code"}, "content of algorithm"),
        # an environment that was not evaluated until now
        ({"play.also.W.evaluation": {"samples": 2}}, {}, ""),
    ],
)
def test_what_a_run_may_go_on_with(
    now: dict[str, Any], contents: dict[str, str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    compared(now, contents)
    err = capsys.readouterr().err
    assert said in err if said else not err


@pytest.mark.parametrize(
    ("now", "contents", "named"),
    [
        ({"method.opd.weight": "token"}, {}, "method.opd.weight: checkpoint 'turn', now 'token'"),
        ({"algorithm": "mine:OTHER"}, {}, "algorithm: checkpoint 'opd', now 'mine:OTHER'"),
        ({}, {"method.teacher.teacher": "u"}, "content of method.teacher.teacher: checkpoint 't', now 'u'"),
        ({"run.seed": 1}, {}, "run.seed: checkpoint 0, now 1"),
        ({"evaluation.samples": 4}, {}, "evaluation.samples: checkpoint 2, now 4"),
        ({"play.also.W.share": 2.0}, {}, "play.also.W.share"),
        ({"method.opd.new": True}, {}, "method.opd.new: checkpoint None, now True"),
    ],
)
def test_what_is_another_run(now: dict[str, Any], contents: dict[str, str], named: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        compared(now, contents)
    assert named in str(caught.value)


def test_a_run_without_evaluations_may_be_evaluated_from_here_on() -> None:
    compared({"evaluation": {"samples": 2}}, {}, was={**SPEC, "evaluation": None})


def test_every_path_with_a_meaning_is_one_of_a_setting() -> None:
    every = {*settings_of(EvalSpec), *(path for name in BUILT_IN for path in settings_of(config_class(name)))}
    # what a handshake finds out is no setting; the kind of a table is none by itself
    assert {path for path in MEANING if path.removesuffix(".kind") not in every} == {"endpoint"}
    assert meaning("nowhere.at.all") == "player"
