"""`turngym train` with a judge: every kind of judge, every environment, resumption, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from judged import judge_of
from metric_columns import known_metric
from tiny_runs import break_off, save_tiny, untimed, with_file

from turngym.agents.judges.judges import WORDS, make_judge
from turngym.agents.meaning import meaning
from turngym.core.errors import SettingsError, TurngymError
from turngym.core.trace import read_trace
from turngym.scripts import train
from turngym.trainers.checkpoint import CheckpointError
from turngym.trainers.judged_episodes import JudgedSource
from turngym.trainers.run import build_trainer

torch.set_num_threads(1)
COMMON = ("--episodes", "4", "--max-turns", "3", "--env-kwargs", '{"on_invalid": "noop"}', "--tracker", "none")
COMMON = (*COMMON, "--threads", "1", "--device", "cpu", "--eval-every", "0", "--steps", "2")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained student that reads and writes single bytes, too."""
    return save_tiny(tmp_path_factory.mktemp("model"), length=8192)


def command(model: Path, out: Path, algorithm: str, *more: str) -> list[str]:
    words = ["--algorithm", algorithm, "--student", str(model), "--out", str(out), *COMMON]
    return [*words, *with_file(out.parent, more)]


@pytest.mark.parametrize(
    ("algorithm", "more"),
    [
        ("prm-rl", ("--judge", "expert", "prm_rl.exclude = 'openclaw'", "--prm-rl.kl-coef", "0")),
        ("opd-hints", ("--opd-hints.form", "topk", "opd_hints.position = 'last_message'")),
        pytest.param("opd-hints", ("--judge", "rules", "--opd-hints.entropy-coef", "0.01"), marks=pytest.mark.long),
        pytest.param("opd-hints", ("--expert", "searching", "--teacher", "MODEL"), marks=pytest.mark.long),
        ("prm-opd", ("--prm-opd.form", "topk", "prm_opd.reject_below = 0.05", "--judge", "rules")),
    ],
)
def test_training_with_the_judges_that_need_no_model(
    model: Path, tmp_path: Path, algorithm: str, more: tuple[str, ...]
) -> None:
    words = [str(model) if word == "MODEL" else word for word in more]
    train.main(command(model, tmp_path / "run", algorithm, *words))
    found = untimed(tmp_path / "run")
    assert [row["step"] for row in found] == [1, 2]
    assert all(known_metric(name) for row in found for name in row)
    for row in found:
        assert (row["judge/votes"], row["judge/votes_failed"], row["judge/votes_unread"]) == (12, 0, 0)
        assert row["gap_max"] is None or row["gap_max"] < 1e-4
    episodes, problems = read_trace(tmp_path / "run" / "judged" / "step_000001.jsonl")
    assert not problems
    assert len(episodes) == 4
    assert all(turn.judge_scores is not None and turn.judge_votes for e in episodes for turn in e.turns)


@pytest.mark.long
def test_a_model_judges_and_a_stopped_run_resumes_to_the_same_rows(model: Path, tmp_path: Path) -> None:
    judge = ("--judge", f"model:{model}", "--judge-votes", "2", "--judge-max-tokens", "4", "--checkpoint-every", "1")
    train.main(command(model, tmp_path / "whole", "prm-rl", *judge))
    words = command(model, tmp_path / "stopped", "prm-rl", *judge)
    made = build_trainer(train.resolved(words).spec)
    break_off(made, 2)
    train.main([*words, "--resume"])
    whole = untimed(tmp_path / "whole")
    assert untimed(tmp_path / "stopped") == whole
    assert [(row["judge/votes"], row["judge/votes_unread"]) for row in whole] == [(24, 24)] * 2
    with pytest.raises(CheckpointError, match=r"judge_votes"):
        train.main([*words, "--resume", "--judge-votes", "3"])


def test_recorded_episodes_are_judged_and_trained_on(model: Path, tmp_path: Path) -> None:
    train.main(command(model, tmp_path / "live", "prm-rl", "--steps", "1"))
    trace = tmp_path / "live" / "judged" / "step_000001.jsonl"
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    for line in lines:
        for turn in line["turns"]:
            turn["judge_scores"] = None
            del turn["judge_votes"]
    bare = tmp_path / "bare.jsonl"
    bare.write_text("".join(json.dumps(line) + "\n" for line in lines))
    train.main(command(model, tmp_path / "again", "prm-rl", "--steps", "1", "--traces", str(bare)))
    drop = ("turn/", "depth/")
    live, again = (
        {k: v for k, v in untimed(tmp_path / name)[0].items() if not k.startswith(drop)} for name in ("live", "again")
    )
    assert live["judge/score"] == again["judge/score"]
    assert again["loss"] == pytest.approx(live["loss"], abs=1e-6)


def test_unknown_judges_are_refused_by_name(model: Path, tmp_path: Path) -> None:
    for name, text in (("ruels", "rules"), ("model:", "model:FOLDER"), ("http://", "http")):
        with pytest.raises(TurngymError, match=text):
            train.main(command(model, tmp_path / "run", "prm-rl", "--judge", name))
    with pytest.raises(TurngymError, match="holds no model"):
        make_judge(judge_of(f"model:{tmp_path}"), "score", WORDS, make_env=lambda: None)
    with pytest.raises(TurngymError, match=r"all 12 votes .*127.0.0.1:1"):
        train.main(
            command(model, tmp_path / "away", "prm-rl", "--judge", "http://127.0.0.1:1/v1", "--judge-votes", "1")
        )


def test_when_a_judge_is_given_up_is_an_option_that_a_resumed_run_may_change(model: Path, tmp_path: Path) -> None:
    options = command(model, tmp_path / "run", "prm-rl", "judge_unread = 0.25")
    made = build_trainer(train.resolved(options).spec)
    assert isinstance(made.source, JudgedSource)
    assert made.source.unread.limit == 0.25
    assert meaning("method.judge.judge_unread") == "cost"
    with pytest.raises(SettingsError, match=r"judge_unread is 1\.5; .*at most 1"):
        train.resolved(command(model, tmp_path / "run", "prm-rl", "judge_unread = 1.5"))


def test_a_judge_that_rambles_ends_the_run(model: Path, tmp_path: Path) -> None:
    """The untrained student as its own judge: every vote is cut after four tokens, none has a box."""
    judge = ("--judge", f"model:{model}", "--judge-max-tokens", "4", "--judge-votes", "2", "--steps", "4")
    said = r"have no valid \\boxed\{\} \(\d+ votes ended at --judge-max-tokens: give it more\)"
    with pytest.warns(UserWarning, match=f"step 1: .* {said}"), pytest.raises(TurngymError, match=f"step 3: .* {said}"):
        train.main(command(model, tmp_path / "run", "prm-rl", *judge))
    read = [row for row in untimed(tmp_path / "run") if row["kind"] == "train"]
    assert [row["step"] for row in read] == [1, 2]
    assert all(row["judge/votes_unread"] == row["judge/votes"] == row["judge/votes_cut"] > 0 for row in read)
