"""`turngym bench gpu` with tiny shapes on the CPU: the whole path, and checks that can fail."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from turngym.core.errors import TurngymError
from turngym.scripts.bench_gpu import LIBRARIES, GpuBench, Phase, StepFigures, checks, main, planned, table_rows
from turngym.trainers.model_shapes import shape_named
from turngym.trainers.training_costs import chip_named

TINY = [
    *("--device", "cpu", "--student", "tiny", "--teacher", "tiny", "--episodes", "2", "--turns", "2"),
    *("--observation", "10", "--response", "5", "--system", "80", "--micro-tokens", "512", "--threads", "1"),
]


def figures(**changes: Any) -> StepFigures:
    """Of a GPU that nobody has seen."""
    found = StepFigures(
        phases={
            "rollout": Phase(seconds=50.0, peak=60e9, tokens=64 * 3000),
            "teacher": Phase(seconds=20.0, peak=70e9, tokens=64 * 7500, flops=4e15),
            "update": Phase(seconds=20.0, peak=72e9, tokens=64 * 7500, flops=6e15),
        },
        tokens=64 * 7500,
        fed=64 * 4500,
        gap=0.01,
        loss=0.5,
        moved=True,
        matmul=700e12,
    )
    return replace(found, **changes)


@pytest.mark.long
def test_the_whole_path_on_a_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "gpu.json"
    monkeypatch.delenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", raising=False)
    assert main([*TINY, "--json", str(out)]) == 0
    # as in a training, whose models are loaded from folders
    assert os.environ["TORCH_CUDNN_SDPA_DEPRIORITIZED"] == "1"
    found = json.loads(out.read_text())
    step = found["step"]
    assert (step["tokens"], step["phases"]["rollout"]["tokens"]) == (2 * (80 + 2 * 15), 20)
    assert sorted(step["phases"]) == ["rollout", "teacher", "update"]
    # the system prompt is read once for both; of what is said, only the last id of a first response is read to go on
    assert 80 < step["fed"] <= step["tokens"] - 80 - 2 * (4 + 5)
    assert step["gap"] < 1e-4
    assert [check["holds"] for check in found["checks"]] == [True] * 3
    assert found["plan"] is None
    said = capsys.readouterr().out
    # a step of the default sizes takes minutes: each of its turns and phases says when it is done
    assert "turn 2 of 2 after" in said
    assert all(f"  {phase}: " in said for phase in ("rollout", "teacher", "update"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(TurngymError, match="--device cuda: "):
        main(["--episodes", "1"])


def test_the_plan_is_made_of_the_same_sizes() -> None:
    plan = planned(GpuBench())
    # 16 bytes of the student's states, 2 of its copy that plays, 2 of the teacher's
    student, teacher = shape_named("1.7B").parameters, shape_named("8B").parameters
    assert plan.states == 18 * student + 2 * teacher
    # 300 of the system and 30 x (140 + 100): 64 caches in bfloat16
    assert plan.rollout == 64 * shape_named("1.7B").episode_bytes(7500, "bfloat16")


def test_every_check_can_fail() -> None:
    good, bench = figures(), GpuBench()
    plan = planned(bench)
    assert all(check.holds for check in checks(good, bench, plan))
    full = {**good.phases, "update": Phase(seconds=20.0, peak=plan.peak + LIBRARIES + 1, tokens=1, flops=1.0)}
    bad = {
        "gap": figures(gap=0.07),
        "no number": figures(gap=float("nan")),
        "loss": figures(loss=float("nan")),
        "weights": figures(moved=False),
        "memory": figures(phases=full),
    }
    for what, found in bad.items():
        assert sum(not check.holds for check in checks(found, bench, plan)) == 1, what


def test_shares_by_hand() -> None:
    table = table_rows(figures(), planned(GpuBench()), chip_named("H200"))
    assert table[0] == ["rollout", "50.00", "60.0", "3,840", "-"]
    # 4e15 / 20 s = 200 TFLOP/s of 700 that were measured and of 989 by the maker
    assert table[1] == ["teacher", "20.00", "70.0", "24,000", "200.00 TFLOP/s, 29%, 20% of H200's"]
    assert table[2][-1] == "300.00 TFLOP/s, 43%, 30% of H200's"
