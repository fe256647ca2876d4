"""A teacher's server dies in the middle of a step: the run says so in one line, and `--resume` goes on exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from sglang_model import ModelServer
from tiny_runs import save_tiny, untimed, with_file

from turngym.agents.models import load_model
from turngym.core.errors import TurngymError
from turngym.scripts import train
from turngym.trainers.checkpoint import latest_model

torch.set_num_threads(1)


def test_the_step_is_lost_and_nothing_else(tmp_path: Path) -> None:
    for seed, name in enumerate(("student", "teacher")):
        save_tiny(tmp_path / name, seed=seed)
    dead: list[bool] = []
    served = 0

    def scores(path: str, body: Any) -> Any:
        """Within the second of three steps, after one of its rows, it is gone."""
        nonlocal served
        if path != "/generate" or not dead:
            return None
        served += 1
        return (0, None) if served > per_step + 1 else None

    def run(out: str, *more: str) -> None:
        words = ["--algorithm", "opd", "--student", str(tmp_path / "student"), "--out", str(tmp_path / out)]
        words += ["--teacher-server", server.url, "--distill.form", "sampled"]
        words += with_file(tmp_path, ["teacher.server_deadline = 0.5"])
        words += ["--steps", "3", "--episodes", "3", "--max-turns", "2", "--checkpoint-every", "1", "--eval-every", "0"]
        train.main([*words, "--tracker", "none", "--threads", "1", "--device", "cpu", "--seed", "5", *more])

    with ModelServer(folder=tmp_path / "teacher") as server:
        run("whole")
        per_step = len(server.of("/generate")) // 3
        server.orders.append(scores)
        dead.append(True)
        with pytest.raises(TurngymError, match=r"scoring row \d+: .*tried \d+ times") as caught:
            run("broken")
        assert "\n" not in str(caught.value)
        assert [row["step"] for row in untimed(tmp_path / "broken", "train")] == [1]
        dead.clear()
        run("broken", "--resume")
    assert untimed(tmp_path / "broken", "train") == untimed(tmp_path / "whole", "train")
    whole, broken = (load_model(latest_model(tmp_path / name)).state_dict() for name in ("whole", "broken"))
    assert all(torch.equal(whole[name], broken[name]) for name in whole)
