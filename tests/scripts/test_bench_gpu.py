"""`turngym bench gpu` with tiny shapes on the CPU: the whole path, the server beside it, and checks that can fail."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs turngym[train]")

from sglang_model import ModelServer  # noqa: E402

from turngym.envs.core.errors import TurngymError  # noqa: E402
from turngym.scripts.bench_gpu import GpuBench, Phase, StepFigures, as_ids, checks, main, planned, table_rows  # noqa: E402
from turngym.trainers.plan import (  # noqa: E402
    chip_named,
    shape_named,
)

TINY = [
    *("--device", "cpu", "--student", "tiny", "--teacher", "tiny", "--episodes", "2", "--turns", "2"),
    *("--response", "5", "--system", "80", "--micro-tokens", "512", "--threads", "1"),
]


def figures() -> StepFigures:
    """Of a GPU that nobody has seen."""
    return StepFigures(
        rollout=Phase(50.0, 60e9),
        served=None,
        teacher=Phase(20.0, 70e9),
        update=Phase(20.0, 72e9),
        episodes=64,
        turns=64 * 30,
        tokens=64 * 7500,
        sampled=64 * 3000,
        fed=64 * 4500,
        gap=0.01,
        served_gap=0.0,
        loss=0.5,
        moved=True,
        matmul=700e12,
        teacher_flops=4e15,
        update_flops=6e15,
    )


@pytest.mark.long
def test_the_whole_path_on_a_cpu_and_a_server_beside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = tmp_path / "student", tmp_path / "gpu.json"
    assert main([*TINY, "--save", str(folder), "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    step = found["step"]
    assert (step["turns"], step["sampled"], step["served"]) == (4, 20, None)
    # the system prompt is read once for both; of what is said, only the last id of a first response is read to go on
    assert 80 < step["fed"] <= step["tokens"] - 80 - 2 * (4 + 5)
    assert step["gap"] < 1e-4
    assert [check["holds"] for check in found["checks"]] == [True] * 4
    assert found["plan"] is None
    with ModelServer(folder=folder) as server:
        assert main([*TINY, "--save", str(folder), "--policy-server", server.url, "--json", str(out)]) == 0
    again = json.loads(out.read_text())["step"]
    assert again["served"]["seconds"] > 0
    assert 0 < again["served_gap"] < 1e-3
    assert (again["tokens"], again["gap"]) == (step["tokens"], pytest.approx(step["gap"], abs=1e-5))
    assert "rollout, server" in capsys.readouterr().out


def test_a_server_without_its_folder_and_a_gpu_that_is_not_there() -> None:
    with pytest.raises(TurngymError, match="--policy-server needs --save"):
        main([*TINY, "--policy-server", "127.0.0.1:1"])
    if not torch.cuda.is_available():
        with pytest.raises(TurngymError, match="--device cuda: torch sees no GPU here; valid: cpu"):
            main(["--episodes", "1"])


def test_the_plan_is_made_of_what_was_played() -> None:
    plan = planned(GpuBench(), figures())
    # 16 bytes of the student's states, 2 of its copy that plays, 2 of the teacher's
    student, teacher = shape_named("1.7B").parameters, shape_named("8B").parameters
    assert plan.states == 18 * student + 2 * teacher
    # 7,500 tokens an episode, 100 of 250 a turn said: 64 caches in bfloat16
    assert plan.rollout == 64 * shape_named("1.7B").episode_bytes(7500, "bfloat16")


def test_every_check_can_fail() -> None:
    good, bench = figures(), GpuBench()
    plan = planned(bench, good)
    assert all(check.holds for check in checks(good, bench, plan))
    bad = {
        "gap": replace(good, gap=0.07),
        "no number": replace(good, gap=float("nan")),
        "loss": replace(good, loss=float("nan")),
        "weights": replace(good, moved=False),
        "turns": replace(good, turns=5),
        "server": replace(good, served=Phase(1.0, float("nan")), served_gap=0.6),
        "memory": replace(good, update=Phase(20.0, plan.peak + 1)),
    }
    for what, found in bad.items():
        assert sum(not check.holds for check in checks(found, bench, plan)) == 1, what


def test_shares_by_hand() -> None:
    good = figures()
    table = table_rows(good, planned(GpuBench(), good), chip_named("H200"))
    assert table[0] == ["rollout", "50.00", "60.0", "3,840", "-"]
    # 4e15 / 20 s = 200 TFLOP/s of 700 that were measured and of 989 by the maker
    assert table[1] == ["teacher", "20.00", "70.0", "24,000", "200.00 TFLOP/s, 29%, 20% of H200's"]
    assert table[2][-1] == "300.00 TFLOP/s, 43%, 30% of H200's"


def test_ids_of_an_observation_are_its_characters_by_four() -> None:
    assert as_ids("aaaabbbbc", 2**31).tolist() == [0x61616161, 0x62626262, 0x63]
    assert as_ids("", 7).tolist() == [0x20 % 7]
