"""The main job, end to end, with very few steps and tasks; and the recipes of the shipped models."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs turngym[train]")

from turngym.agents.rendering.chat_settings import ChatSettings
from turngym.agents.worlds import WORLDS, load_world
from turngym.envs.core.errors import TurngymError
from turngym.envs.core.trace import read_trace
from turngym.envs.panels import load_panel
from turngym.scripts import main
from turngym.scripts import quickstart as board
from turngym.scripts import quickstart as evaluations
from turngym.scripts import quickstart as methods_module
from turngym.scripts.quickstart import Plan, Quickstart
from turngym.trainers import metrics
from turngym.trainers.metrics import read_metrics


# a world of loops is another one with other models and more turns: it would cost most and hold nothing more
@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in WORLDS if not name.endswith("-loops")])
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


class Waited:
    """Methods that end one by one while somebody sleeps."""

    def __init__(self, *names: str) -> None:
        self.names, self.told = list(names), list[str]()

    @property
    def running(self) -> int:
        return len(self.names)

    def ended(self) -> list[str]:
        told, self.told = self.told, []
        return told

    def sleep(self, seconds: float) -> None:
        self.told.append(self.names.pop(0))


@pytest.mark.parametrize(
    ("cores", "order"),
    [
        (1, ["one", "two", "teacher 0", "student 0", "one 0", "two 0"]),
        (2, ["one", "teacher 1", "student 1", "one 1", "two", "two 0"]),
        (3, ["teacher 2", "student 2", "one", "one 1", "two", "two 0"]),
    ],
)
def test_models_are_evaluated_while_a_core_is_free(
    cores: int, order: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A method's name alone: it ended; with how many methods trained beside it: an evaluation."""
    plan = Plan.of(Quickstart(out=tmp_path, methods=("one", "two")))
    for method in plan.options.methods:
        (tmp_path / method / "checkpoints" / "step_000003" / "model").mkdir(parents=True)
    methods, seen = Waited("one", "two"), list[str]()

    def sleep(seconds: float) -> None:
        seen.append(methods.names[0])
        methods.sleep(seconds)

    def evaluated(plan: Plan, name: str, model: Path, out: Path, bars: Any) -> Any:
        assert model.is_dir()
        seen.append(f"{name} {methods.running}")

    monkeypatch.setattr(evaluations, "available_cores", lambda: cores)
    monkeypatch.setattr(evaluations, "_evaluate", evaluated)
    monkeypatch.setattr(evaluations.time, "sleep", sleep)
    evaluations.evaluate_all(plan, methods, None)  # type: ignore[arg-type]
    assert seen == order


def test_bars_read_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    look, rows = board.training_look(tmp_path), tmp_path / "metrics.jsonl"
    assert look() == (0, "starting")
    rows.write_text('{"step": 1, "kind": "train", "loss": 0.5}\n')
    first = look()
    assert first[0] == 1
    assert "0.5" in first[1]
    read, again = [], metrics.iter_metrics
    monkeypatch.setattr(metrics, "iter_metrics", lambda folder: read.append(folder) or again(folder))
    look = board.training_look(tmp_path)
    assert look() == look() == first
    assert read == [tmp_path]
    rows.write_text(rows.read_text() + '{"step": 2, "kind": "train", "loss": 0.4}\n')
    assert look()[0] == 2
    trace = tmp_path / "trace.jsonl"
    played = board.evaluation_look(trace)
    assert played()[0] == 0
    trace.write_text("one\ntwo\n")
    assert played()[0] == 2
    with trace.open("a") as file:
        file.write("three\nha")
    assert played()[0] == 3


def test_methods_share_the_cores_and_a_failed_one_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: list[dict[str, str]] = []

    def started(words: list[str], **how: Any) -> Any:
        given.append(how["env"])
        code = int(words[words.index("--algorithm") + 1] == "two")
        return SimpleNamespace(poll=lambda: code, wait=lambda timeout=None: code)

    monkeypatch.setattr(methods_module.subprocess, "Popen", started)
    monkeypatch.setattr(methods_module, "available_cores", lambda: 5)
    plan = Plan.of(Quickstart(out=tmp_path, methods=("one", "two")))
    with methods_module.training(plan) as methods, pytest.raises(TurngymError, match=r"failed: two; .*two\.log"):
        methods.ended()
    assert [(env["TURNGYM_CORES"], env["OMP_NUM_THREADS"]) for env in given] == [("2", "1")] * 2


def test_what_is_missing_is_said_before_anything_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path / "run")]
    assert main.main(["quickstart", *out, "--student", str(tmp_path / "none")]) == 2
    assert "none holds no model" in capsys.readouterr().err
    assert main.main(["quickstart", *out, "--panel", "alfworld-quickstar"]) == 2
    assert "alfworld-quickstart" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("role", ["student", "teacher"])
@pytest.mark.parametrize("name", [*WORLDS])
def test_shipped_models_speak_the_embedded_world(name: str, role: str) -> None:
    world = load_world(name)
    folder = world.checkpoint(role)
    assert ChatSettings.load(folder) == world.chat
    shipped = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    made = json.loads(world.make_tokenizer().backend_tokenizer.to_str())["model"]["vocab"]
    assert shipped == made
    assert (folder / "model.safetensors").stat().st_size < 3_000_000


@pytest.mark.parametrize("name", [*WORLDS])
def test_the_panel_is_played_as_the_student_trains(name: str) -> None:
    world = load_world(name)
    kwargs = load_panel(world.panel).make_kwargs
    assert kwargs["max_turns"] == world.max_turns
    assert {key: kwargs[key] for key in world.make} == dict(world.make)


def test_an_unknown_world_is_named() -> None:
    with pytest.raises(TurngymError, match="the embedded worlds are alfworld"):
        load_world("alfword")
