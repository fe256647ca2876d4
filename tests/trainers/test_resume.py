"""kill -9 in the middle of training, then --resume: the same numbers as a run that nobody killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import toy_run as toy
from tiny_runs import untimed

from turngym.agents.models import load_model
from turngym.trainers.checkpoint import latest_model, list_checkpoints

torch.set_num_threads(1)
STEPS = 10


def kill_after(run: Path, lines: int, *words: str) -> None:
    """Train in a process of its own and kill it once `metrics.jsonl` has that many lines."""
    command = [sys.executable, str(Path(toy.__file__)), str(run), str(STEPS), "slow", *words]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 600
    path = run / "metrics.jsonl"
    while not path.exists() or path.read_text().count("\n") < lines:
        assert process.poll() is None, process.stderr.read().decode() if process.stderr else ""
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


@pytest.mark.long
def test_killed_run_continues_to_the_same_numbers(tmp_path: Path) -> None:
    toy.trainer(tmp_path / "whole", steps=STEPS).train()
    kill_after(tmp_path / "killed", 6)
    assert list_checkpoints(tmp_path / "killed")[-1].name < f"step_{STEPS:06d}"
    with (tmp_path / "killed" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 99, "ki')
    result = toy.trainer(tmp_path / "killed", steps=STEPS).train(resume=True)
    assert result.step == STEPS
    assert untimed(tmp_path / "killed") == untimed(tmp_path / "whole")
    models = [load_model(latest_model(tmp_path / name)) for name in ("whole", "killed")]
    assert all(torch.equal(a, b) for a, b in zip(*(model.parameters() for model in models), strict=True))
    moments = [
        torch.load(list_checkpoints(tmp_path / name)[-1] / "optimizer.pt", weights_only=True)["optimizer"]["state"]
        for name in ("whole", "killed")
    ]
    assert all(torch.equal(moments[0][k]["exp_avg"], moments[1][k]["exp_avg"]) for k in moments[0])
