"""A disk that fills up while a run writes: said clearly, nothing half-written, and the run goes on where it was."""

from __future__ import annotations

import errno
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_run as toy
from tiny_runs import untimed

from turngym.agents.models import load_model
from turngym.core.errors import full_disk, is_disk_full
from turngym.core.protocols import EvalPoint
from turngym.trainers.checkpoint import CheckpointError, latest_model, list_checkpoints, load_checkpoint, read_state
from turngym.trainers.train_loop import TrainError

torch.set_num_threads(1)


@contextmanager
def limited() -> Iterator[Any]:
    """Gives a function that lets no file grow beyond so many bytes: real writes fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    trainer(folder, lambda: None).train()
    return folder


def trainer(out: Path, at_step_4: Any) -> Any:
    """8 steps, saved after 3, 6 and 8; `at_step_4` happens at the evaluation between."""

    def evaluate(step: int) -> EvalPoint:
        if step == 4:
            at_step_4()
        return EvalPoint(avg=0.5, low=0.0, high=1.0)

    return toy.trainer(out, steps=8, evaluate=evaluate)


def sizes(run: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in list_checkpoints(run)[-1].rglob("*") if path.is_file()}


@pytest.mark.parametrize("fits", [pytest.param("nothing", marks=pytest.mark.long), "model.safetensors"])
def test_no_room_for_a_checkpoint_leaves_the_one_before(tmp_path: Path, whole: Path, fits: str) -> None:
    run, known = tmp_path / "run", sizes(whole)
    assert known["config.json"] < known["model.safetensors"] < known["optimizer.pt"]
    limit = max(known.get(fits, 0), (whole / "metrics.jsonl").stat().st_size) + 100
    with limited() as limit_files:
        with pytest.raises(CheckpointError, match=r"no room left under .*step 6 .*--resume"):
            trainer(run, lambda: limit_files(limit)).train()
        names = [path.name for path in (run / "checkpoints").iterdir()]
        assert sorted(names) == ["step_000000", "step_000003"]
    assert read_state(list_checkpoints(run)[-1])["step"] == 3
    trainer(run, lambda: None).train(resume=True)
    assert untimed(run) == untimed(whole)
    models = [load_model(latest_model(folder)) for folder in (run, whole)]
    assert all(torch.equal(a, b) for a, b in zip(*(model.parameters() for model in models), strict=True))


@pytest.mark.long
def test_no_room_for_metrics_ends_the_run_and_it_goes_on(tmp_path: Path, whole: Path) -> None:
    run = tmp_path / "run"
    with limited() as limit_files, pytest.raises(TrainError, match=r"metrics of step 5 could not be written"):
        trainer(run, lambda: limit_files((run / "metrics.jsonl").stat().st_size + 300)).train()
    trainer(run, lambda: None).train(resume=True)
    assert untimed(run) == untimed(whole)


@pytest.mark.long
def test_no_room_for_the_first_checkpoint_leaves_a_folder_that_can_be_started(tmp_path: Path, whole: Path) -> None:
    run = tmp_path / "run"
    with limited() as limit_files:
        limit_files(2000)
        with pytest.raises(CheckpointError, match="checkpoint of step 0"):
            trainer(run, lambda: None).train()
    trainer(run, lambda: None).train()
    assert untimed(run) == untimed(whole)


def test_the_errors_of_every_writer_are_understood(tmp_path: Path) -> None:
    quota = OSError(errno.EDQUOT, "Disk quota exceeded")
    for error in (OSError(errno.ENOSPC, "x"), quota, RuntimeError("I/O error: No space left on device (os error 28)")):
        assert is_disk_full(error)
    wrapped = RuntimeError("something")
    wrapped.__cause__ = quota
    assert is_disk_full(wrapped)
    for error in (OSError(errno.EACCES, "Permission denied"), ValueError("disk"), KeyError("full")):
        assert not is_disk_full(error)
        with pytest.raises(type(error)), full_disk(tmp_path, "file"):
            raise error


def test_other_failures_leave_nothing_half_written_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, save = tmp_path / "run", torch.save

    def failing(value: Any, path: Any) -> None:
        if "000003" in str(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        save(value, path)

    monkeypatch.setattr(torch, "save", failing)
    with pytest.raises(PermissionError):
        trainer(run, lambda: None).train()
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_000000"]
    model = toy.tiny(5)
    load_checkpoint(list_checkpoints(run)[0], model=model, optimizer=torch.optim.AdamW(model.parameters()))
    assert torch.equal(model.lm_head.weight, toy.tiny(1).lm_head.weight)
