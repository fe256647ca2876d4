"""The main job, end to end, with very few steps and tasks; and the recipes of the shipped models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from late import late

from turngym.agents.rendering.chat_settings import ChatSettings
from turngym.agents.worlds import ALL_WORLDS, WORLDS, load_world
from turngym.core.errors import TurngymError
from turngym.core.trace import read_trace
from turngym.envs.panels import load_panel
from turngym.scripts import main, quickstart, train
from turngym.scripts.quickstart import Quickstart, QuickstartPlan
from turngym.trainers.metrics import read_metrics
from turngym.trainers.train_config import train_config


# a world of loops is another one with other models and more turns: it would cost most and hold nothing more
@pytest.mark.long
@pytest.mark.parametrize(
    "name", late([name for name in WORLDS if not name.endswith("-loops")], "alfworld", mark=pytest.mark.nightly)
)
def test_quickstart_runs_and_goes_on_where_it_stopped(name: str, tmp_path: Path) -> None:
    words = ["quickstart", "--env", name, "--out", str(tmp_path), "--steps", "2", "--limit", "4", "--samples", "1"]
    assert main.main(words) == 0
    report = (tmp_path / "report.md").read_text()
    for row in ("student", "teacher", "opd", "turnopd"):
        assert f"| {row} |" in report
    for method in ("opd", "turnopd"):
        steps = [row["step"] for row in read_metrics(tmp_path / method) if row["kind"] == "train"]
        assert steps == [1, 2]
        assert len(read_trace(tmp_path / method / "eval" / "trace.jsonl")[0]) == 4
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    assert "<html" in (tmp_path / "episodes.html").read_text()[:200]

    before = (tmp_path / "opd" / "metrics.jsonl").read_bytes()
    assert main.main(words) == 0
    assert (tmp_path / "opd" / "metrics.jsonl").read_bytes() == before


def test_methods_train_first_and_models_are_evaluated_when_they_are_there(tmp_path: Path) -> None:
    jobs = QuickstartPlan.of(Quickstart(out=tmp_path, methods=("opd", "tcod"), steps=3, limit=5)).jobs()
    assert [job.name for job in jobs] == ["opd", "tcod", "teacher", "student", "opd after", "tcod after"]
    assert [[need.name for need in job.needs] for job in jobs] == [[]] * 4 + [["opd"], ["tcod"]]
    assert jobs[5].folder == tmp_path / "tcod" / "eval"
    assert f"--agent model:{tmp_path}/tcod/checkpoints/step_000003/model --samples 4 --limit 5" in jobs[5].command
    assert "--no-spread" not in jobs[5].command
    assert [job.steps for job in jobs] == [3, 3, 20, 20, 20, 20]


def test_what_is_missing_is_said_before_anything_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path / "run")]
    assert main.main(["quickstart", *out, "--student", str(tmp_path / "none")]) == 2
    assert f"there is no folder {tmp_path / 'none'}" in capsys.readouterr().err
    assert main.main(["quickstart", *out, "--panel", "alfworld-quickstar"]) == 2
    assert "alfworld-quickstart" in capsys.readouterr().err
    for option in ("--methods", "--split"):
        assert main.main(["quickstart", *out, option, "no-such-name"]) == 2
        assert "'no-such-name'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", [*WORLDS])
def test_shipped_models_speak_the_embedded_world(name: str) -> None:
    world = load_world(name)
    made = json.loads(world.make_tokenizer().backend_tokenizer.to_str())["model"]["vocab"]
    for folder in map(world.checkpoint, ("student", "teacher")):
        assert ChatSettings.load(folder) == world.chat
        assert json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"] == made
        assert (folder / "model.safetensors").stat().st_size < 3_000_000


@pytest.mark.parametrize("name", ALL_WORLDS)
def test_the_panel_is_played_as_the_student_trains(name: str) -> None:
    world = load_world(name)
    kwargs = load_panel(world.panel).make_kwargs
    assert kwargs["max_turns"] == world.max_turns
    assert {key: kwargs[key] for key in world.make} == dict(world.make)


def test_an_unknown_world_is_named() -> None:
    with pytest.raises(TurngymError, match="the embedded worlds are alfworld"):
        load_world("alfword")


@pytest.mark.parametrize("name", ALL_WORLDS)
def test_a_training_is_told_all_that_its_world_says(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "smollm2").mkdir(parents=True)
    monkeypatch.setattr(quickstart, "find_spec", {"peft": "there"}.get)
    world = load_world(name)
    job = QuickstartPlan.of(Quickstart(env=name, out=tmp_path, methods=("opd",))).jobs()[0]
    about = {"algorithm": "opd", "out": str(job.folder), "panel": world.panel, "threads": 1}
    about |= {role: str(world.folder(role)) for role in ("student", "teacher")}
    about |= {"steps": world.distill.steps, "eval_every": world.distill.eval_every, "eval_samples": 1}
    wanted = train_config("opd", world.settings("opd") | about, name)
    assert train.resolved([*job.words, "--out", str(job.folder)]).spec == wanted


def test_a_world_of_a_real_model_says_what_it_needs_and_trains_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main.main(["quickstart", "--env", "alfworld-smollm2"]) == 2
    assert "python3 scripts/bootstrap.py smollm2" in capsys.readouterr().err
    (tmp_path / "models" / "smollm2").mkdir(parents=True)
    monkeypatch.setattr(quickstart, "find_spec", {"peft": None}.get)
    assert main.main(["quickstart", "--env", "alfworld-smollm2"]) == 2
    assert "alfworld-smollm2 trains low-rank adapters: pip install 'turngym[lora]'" in capsys.readouterr().err
    monkeypatch.setattr(quickstart, "find_spec", {"peft": "there"}.get)
    jobs = QuickstartPlan.of(Quickstart(env="alfworld-smollm2", out=tmp_path / "run", methods=("turnopd",))).jobs()
    assert [job.steps for job in jobs] == [48, 100, 100, 100]
    assert QuickstartPlan.of(Quickstart(env="alfworld-smollm2")).methods == ("opd",)
    assert QuickstartPlan.of(Quickstart(env="alfworld")).methods == ("opd", "turnopd")
    shop = QuickstartPlan.of(Quickstart(env="webshop-smollm2", out=tmp_path / "shop")).jobs()
    assert "--slots 24" in shop[1].command
    # trained on short episodes, evaluated on the panel's own
    wanted = ["--max-turns 10", "--distill.form forward", "--lora.rank 16", "--autocast bfloat16"]
    for words in (*wanted, "--rollout-dtype bfloat16", "--teacher-dtype bfloat16"):
        assert words in jobs[0].command
    assert "--samples 2 --dtype bfloat16 --limit 50" in jobs[1].command
