"""What tensorboard, wandb and trackio show of a run: the rows of metrics.jsonl, each once, also after a kill.

wandb and trackio stand here for themselves: one counts steps and takes none twice, the other appends whatever comes.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import os
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from late import late
from toy_run import trainer

from turngym.core.errors import TurngymError
from turngym.trainers.metrics import MetricsLog, read_metrics, scalars
from turngym.trainers.run_config import RunConfig, Tensorboard, Trackio, Wandb

torch.set_num_threads(1)
Shown = dict[str, list[tuple[int, dict[str, float]]]]
"""Runs by id or name: the steps and numbers that they show."""


@dataclass
class FakeTracker:
    """A package; `shown` is what people see, in the order in which it came."""

    name: str
    offline: bool = False
    shown: Shown = field(default_factory=dict)
    started: list[dict[str, Any]] = field(default_factory=list)
    finished: int = 0

    def init(self, **given: Any) -> Any:
        self.started.append(given)
        key = given["id" if self.name == "wandb" else "name"]
        rows = self.shown.setdefault(key, [])
        if self.offline:
            # every process writes a folder of its own; which of them are shown is what is on the disk
            folder = Path(given["dir"], "wandb", f"offline-run-{len(self.started)}-{key}")
            (folder / "files").mkdir(parents=True)
            rows = self.shown[folder.name] = []
        # wandb knows the last step of a run that goes on, and takes nothing that is not behind it
        last = [max((step for step, _ in rows), default=-1), rows[-1][0] if rows else -1]

        def log(numbers: dict[str, float], step: int) -> None:
            if self.name == "wandb" and not self.offline and step <= last[0]:
                raise AssertionError(f"step {step} is dropped: the run is at {last[0]}")
            if step > last[1] and self.name == "wandb":
                last[0] = last[1]
            last[1] = step
            rows.append((step, numbers))

        run = types.SimpleNamespace(log=log, finish=self.finish, offline=self.offline)
        if self.offline:
            run.dir = str(folder / "files")
        return run

    def finish(self) -> None:
        self.finished += 1

    def delete_run(self, project: str, name: str) -> bool:
        return self.shown.pop(name, None) is not None

    def all_rows(self, folder: Path) -> list[tuple[int, dict[str, float]]]:
        if self.offline:
            left = [path.name for path in (folder / "wandb").glob("offline-run-*")]
            return [row for name in left for row in self.shown[name]]
        return [row for rows in self.shown.values() for row in rows]


@pytest.fixture(params=late(["trackio", "wandb", "wandb offline", "trackio remote"], "trackio"))
def tracker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeTracker:
    name, _, kind = request.param.partition(" ")
    fake = FakeTracker(name, offline=kind == "offline")
    module, storage = types.ModuleType(name), types.ModuleType(f"{name}.sqlite_storage")
    module.init = fake.init  # type: ignore[attr-defined]
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    storage.SQLiteStorage = fake  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, f"{name}.sqlite_storage", storage)
    for variable in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        monkeypatch.delenv(variable, raising=False)
    if kind == "remote":
        monkeypatch.setenv("TRACKIO_SERVER_URL", "http://127.0.0.1:1/")
    return fake


KINDS: dict[str, Any] = {"wandb": Wandb, "trackio": Trackio}


def run_config(**more: Any) -> RunConfig:
    given: dict[str, Any] = {"steps": 4, "episodes": 12, "max_turns": 6, "eval_every": 2, "checkpoint_every": 2}
    return RunConfig(**{**given, "tracker": None, **more})


def in_file(folder: Path) -> list[tuple[int, dict[str, float]]]:
    return [(row["step"], scalars(row)) for row in read_metrics(folder)]


class Killed(Exception):
    """Stands for SIGKILL: nothing is saved any more."""


# between a checkpoint and the evaluation of its step, and behind both
KILLS = late([(0, "eval"), (1, "train"), (2, "train"), (2, "eval"), (3, "train"), (4, "eval")], (3, "train"))


def kill_at(monkeypatch: pytest.MonkeyPatch, step: int, kind: str) -> None:
    """The run is killed when this row is in the file and wherever else it goes."""
    write = MetricsLog.write

    def then_die(self: MetricsLog, row: Mapping[str, Any]) -> None:
        write(self, row)
        if (row["step"], row["kind"]) == (step, kind):
            raise Killed

    monkeypatch.setattr(MetricsLog, "write", then_die)


def test_every_scalar_of_every_row_is_logged_at_its_step(tmp_path: Path, tracker: FakeTracker) -> None:
    train = run_config(tracker=KINDS[tracker.name](project="mine"))
    trainer(tmp_path / "toy", run=train).train()
    (given,) = tracker.started
    assert (given["project"], given["resume"], tracker.finished) == ("mine", "allow", 1)
    assert given["name"].startswith("toy")
    rows = tracker.all_rows(tmp_path / "toy")
    assert [step for step, _ in rows] == [0, 1, 2, 2, 3, 4, 4]
    assert rows == in_file(tmp_path / "toy")
    assert rows[1][1]["loss"] == read_metrics(tmp_path / "toy")[1]["loss"]
    # a step has one row of each kind, and a number is in one of them
    assert [[set(a) & set(b) for (i, a), (j, b) in pairwise(rows) if i == j]] == [[set(), set()]]


@pytest.mark.long
@pytest.mark.parametrize(("step", "kind"), KILLS)
def test_a_killed_run_that_goes_on_shows_each_row_once(
    step: int, kind: str, tmp_path: Path, tracker: FakeTracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = run_config(tracker=KINDS[tracker.name]())
    with monkeypatch.context() as patched:
        kill_at(patched, step, kind)
        with pytest.raises(Killed):
            trainer(tmp_path / "toy", run=train).train()
    trainer(tmp_path / "toy", run=train).train(resume=True)
    assert tracker.all_rows(tmp_path / "toy") == in_file(tmp_path / "toy")
    assert len(in_file(tmp_path / "toy")) == 7
    assert tracker.started[1] == tracker.started[0], "another run goes on"


def test_an_interrupted_run_and_one_that_gets_more_steps(tmp_path: Path, tracker: FakeTracker) -> None:
    """Ctrl-C comes before the evaluation of step 2, which the resumed run plays."""
    made = trainer(tmp_path / "toy", run=run_config(tracker=KINDS[tracker.name]()))
    evaluate: Any = made.evaluate

    def interrupted(step: int) -> Any:
        if step == 2:
            raise KeyboardInterrupt
        return evaluate(step)

    made.evaluate = interrupted
    with pytest.raises(KeyboardInterrupt):
        made.train()
    trainer(tmp_path / "toy", run=run_config(tracker=KINDS[tracker.name]())).train(resume=True)
    assert tracker.all_rows(tmp_path / "toy") == in_file(tmp_path / "toy")
    assert [step for step, _ in in_file(tmp_path / "toy")] == [0, 1, 2, 2, 3, 4, 4]


def test_a_run_in_a_folder_that_another_run_had_is_another_run(tmp_path: Path, tracker: FakeTracker) -> None:
    train = run_config(tracker=KINDS[tracker.name](), steps=1)
    for _ in range(2):
        trainer(tmp_path / "toy", run=train).train()
        (tmp_path / "toy").rename(tmp_path / f"old-{len(tracker.started)}")
    key = "id" if tracker.name == "wandb" else "name"
    assert tracker.started[0][key] != tracker.started[1][key]


def test_a_tracker_that_is_switched_on_later_gets_all_rows(tmp_path: Path, tracker: FakeTracker) -> None:
    trainer(tmp_path / "toy", run=run_config()).train()
    trainer(tmp_path / "toy", run=run_config(tracker=KINDS[tracker.name]())).train(resume=True)
    assert tracker.all_rows(tmp_path / "toy") == in_file(tmp_path / "toy")


def test_a_missing_package_is_named_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(TurngymError, match=r"pip install 'turngym\[trackio\]'"):
        trainer(tmp_path / "toy", run=run_config(tracker=Trackio())).train()
    assert not (tmp_path / "toy").exists()


@pytest.mark.parametrize(
    ("step", "kind", "name"),
    [
        *(pytest.param(*row.values, "toy", marks=row.marks) for row in KILLS),
        pytest.param(2, "eval", os.fsdecode(b"raw\xff"), marks=pytest.mark.long),
    ],
)
def test_tensorboard_shows_each_row_once(
    step: int, kind: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    out = tmp_path / name
    with monkeypatch.context() as patched:
        kill_at(patched, step, kind)
        with pytest.raises(Killed):
            trainer(out, run=run_config(tracker=Tensorboard())).train()
    trainer(out, run=run_config(tracker=Tensorboard())).train(resume=True)
    (out / "tensorboard").rename(tmp_path / "board")
    events = accumulator.EventAccumulator(str(tmp_path / "board"), size_guidance={"scalars": 0}).Reload()
    rows = in_file(out)
    assert set(events.Tags()["scalars"]) == {name for _, numbers in rows for name in numbers}
    for tag in events.Tags()["scalars"]:
        found = [(event.step, event.value) for event in events.Scalars(tag)]
        assert found == [(step, pytest.approx(numbers[tag], rel=1e-6)) for step, numbers in rows if tag in numbers], tag
