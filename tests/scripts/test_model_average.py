"""`turngym model average`: the mean of the last checkpoints' weights, played as the run's last evaluation was."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from turngym.agents import evaluate, load_world
from turngym.agents.evaluation.compare import compare_recorded, differences_of, rescore
from turngym.agents.evaluation.packed import check_result, first_difference, pack_result
from turngym.agents.models import load_model
from turngym.agents.play_spec import Model
from turngym.core.errors import ModelError
from turngym.scripts.main import main
from turngym.scripts.model import average
from turngym.trainers import train

STUDENT = load_world("search").checkpoint("student")


def checkpoint(run: Path, step: int, add: float = 0.0) -> None:
    """A checkpoint of `run` with the student's weights, each `add` larger."""
    folder = run / "checkpoints" / f"step_{step:06d}" / "model"
    shutil.copytree(STUDENT, folder)
    if add:
        model = load_model(STUDENT)
        with torch.no_grad():
            for weight in model.parameters():
                weight += add
        model.save_pretrained(folder)


def test_the_last_checkpoints_count_alike(tmp_path: Path) -> None:
    for step, add in ((0, 100.0), (10, 1.0), (20, 2.0), (30, 3.0), (100, 7.0)):
        checkpoint(tmp_path, step, add)
    # no folder of ours, though its name is like that of one
    own = tmp_path / "average" / "model.unfinished" / "mine"
    own.parent.mkdir(parents=True)
    own.touch()
    made, first = load_model(average(tmp_path)), load_model(STUDENT)
    assert made.config.tie_word_embeddings
    for (name, weight), before in zip(made.named_parameters(), first.parameters(), strict=True):
        # (1 + 2 + 3 + 7) / 4, tied embeddings once
        assert torch.allclose(weight, before + 3.25, atol=1e-5), name
    assert own.exists()
    assert sorted(path.name for path in own.parents[1].iterdir()) == ["model", "model.unfinished"]
    with pytest.raises(ModelError, match="is there already"):
        average(tmp_path)


def test_it_plays_what_the_run_was_evaluated_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Four equal checkpoints: their mean plays the same episodes, and the report has a column for it."""
    run = tmp_path / "opd"
    settings = {"samples": 2, "limit": 3, "seed": 5, "temperature": 0.5, "max_turns": 4, "progress": False}
    evaluate("search-quickstart", f"model:{STUDENT}", out=tmp_path / "before", workers=0, **settings)
    (run / "eval").mkdir(parents=True)
    shutil.copy(tmp_path / "before" / "trace.jsonl", run / "eval" / "step_000040.jsonl")
    for step in (10, 20, 30, 40):
        checkpoint(run, step)
    assert main(["model", "average", str(run)]) == 0
    before, after = rescore(tmp_path / "before"), rescore(run / "average")
    assert set(differences_of(before.spec, after.spec)) <= {"agent.weights"}
    played = zip(before.episodes, after.episodes, strict=True)
    assert [first_difference(one.turns, two.turns) for one, two in played] == [None] * 6
    row = {"step": 40, "kind": "eval", "eval/avg": 0.25, "time/train_s": 7.0}
    (run / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    capsys.readouterr()
    assert main(["report", str(run), "--no-diagnostics"]) == 0
    lines = capsys.readouterr().out.splitlines()
    mean = 100 * after.scores.overall.avg.mean
    assert "| method | seeds | last evaluation | mean of the last ones | averaged weights |" in lines
    assert f"| opd | 1 | {mean:.1f} | {mean:.1f} | {mean:.1f} |" in lines


@pytest.mark.long
def test_it_plays_as_many_turns_as_the_run_and_reads_its_examples(tmp_path: Path) -> None:
    world, run = load_world("alfworld"), tmp_path / "run"
    settings: dict[str, Any] = {"steps": 1, "episodes": 4, "max_turns": 3, "eval_every": 1}
    settings |= {"panel": "alfworld-generated-eval", "keep_checkpoints": 4}
    settings |= {"env": world.env_id, "split": world.split, "env_kwargs": world.make}
    few = {"eval_samples": 1, "eval_limit": 2, "examples": "skills:alfworld", "tracker": None, "threads": 1}
    models = {name: world.checkpoint(name) for name in ("student", "teacher")}
    train("opd", **models, out=run, **settings, **few)
    shutil.copytree(run / "checkpoints" / "step_000001", run / "checkpoints" / "step_000002")
    assert main(["model", "average", str(run), "--last", "2"]) == 0
    step, mean = rescore(run / "eval" / "step_000001.jsonl"), rescore(run / "average")
    assert {len(one.turns) for one in mean.episodes} <= {1, 2, 3}
    assert compare_recorded(run / "eval" / "step_000001.jsonl", run / "average").alike
    assert step.spec.play.env.max_turns == mean.spec.play.env.max_turns == 3
    assert isinstance(mean.spec.agent, Model)
    assert mean.spec.agent.chat.examples is not None
    pack_result(run / "eval" / "step_000001.jsonl", tmp_path / "packed.result.xz")
    assert check_result(tmp_path / "packed.result.xz") == []


def test_too_few_checkpoints_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint(tmp_path, 10)
    assert main(["model", "average", str(tmp_path)]) == 2
    assert "has 1 checkpoints; train with --keep-checkpoints 4 to average 4" in capsys.readouterr().err
    assert main(["model", "average", str(tmp_path), "--last", "1"]) == 2
    assert "--last is " in capsys.readouterr().err
    checkpoint(tmp_path, 20)
    assert main(["model", "average", str(tmp_path), "--last", "2"]) == 2
    assert "has no evaluation to play again" in capsys.readouterr().err
