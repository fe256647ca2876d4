"""Rows that go to wandb and trackio, which stand here for themselves."""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_run import trainer

from turngym.envs.core.errors import TurngymError
from turngym.trainers.config import RunConfig
from turngym.trainers.metrics import read_metrics, tensorboard_sink

torch.set_num_threads(1)


class FakeRun:
    def __init__(self, **given: Any) -> None:
        self.given, self.logged, self.finished = given, [], 0

    def log(self, numbers: dict[str, float], step: int) -> None:
        assert not self.finished
        self.logged.append((step, numbers))

    def finish(self) -> None:
        self.finished += 1


def install(monkeypatch: pytest.MonkeyPatch, name: str) -> list[FakeRun]:
    runs: list[FakeRun] = []

    def init(**given: Any) -> FakeRun:
        runs.append(FakeRun(**given))
        return runs[-1]

    module = types.ModuleType(name)
    module.init = init  # type: ignore[attr-defined]
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    monkeypatch.setitem(sys.modules, name, module)
    return runs


def run_config(**more: Any) -> RunConfig:
    return RunConfig(steps=2, episodes=12, max_turns=6, eval_every=2, tensorboard=False, **more)


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_every_scalar_of_every_row_is_logged_at_its_step(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (runs,) = (install(monkeypatch, name),)
    trainer(tmp_path / "toy", run=run_config(**{name: True}, log_project="mine")).train()
    (run,) = runs
    assert (run.given["project"], run.given["name"], run.given["resume"]) == ("mine", "toy", "allow")
    assert run.finished == 1
    rows = read_metrics(tmp_path / "toy")
    assert [step for step, _ in run.logged] == [row["step"] for row in rows] == [0, 1, 2, 2]
    for (_, numbers), row in zip(run.logged, rows, strict=True):
        assert numbers == {k: v for k, v in row.items() if isinstance(v, int | float) and k != "step"}
    assert run.logged[1][1]["loss"] == rows[1]["loss"]
    trainer(tmp_path / "toy", run=run_config(**{name: True}, log_project="mine")).train(resume=True)
    assert len(runs) == 2
    assert runs[1].given == run.given  # the same run goes on


def test_a_missing_package_is_named_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(TurngymError, match=r"trackio is not installed: pip install 'turngym\[trackio\]'"):
        trainer(tmp_path / "toy", run=run_config(trackio=True)).train()
    assert not (tmp_path / "toy").exists()


def test_tensorboard_hides_what_was_written_after_the_checkpoint_at_step_0(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for number, steps in enumerate([(0, 1, 2, 3), (1,)]):
        sink = tensorboard_sink(tmp_path, 0)
        assert sink is not None
        for step in steps:
            sink.write({"step": step, "loss": float(number)})
        sink.close()
    found = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("loss")
    assert [(event.step, event.value) for event in found] == [(0, 0.0), (1, 1.0)]
