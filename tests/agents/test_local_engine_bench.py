"""`turngym bench rollout` on a toy size."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("transformers")

from turngym.scripts.bench.rollout.main import main
from turngym.scripts.bench.rollout.play import PlayedWay


def test_bench_prints_a_ratio_and_equal_ids(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--turns 3 --batch 2 --vocab 50 --system 5 --observation 2 4 --response 1 3 --tiny.peer-turns 2"
    assert main(f"{sizes} --tiny.layers 1 --tiny.width 32 --larger.layers 0 --play.episodes 0".split()) == 0
    out = capsys.readouterr().out
    assert "tiny (1 layers, width 32)" in out
    assert "larger" not in out
    assert "4/4 responses have the same ids" in out
    assert "target 5x" in out


def test_whole_rollouts_by_environments_turns_engine_and_processes(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--tiny.layers 0 --larger.layers 0 --play.episodes 3 --play.slots 1 3 --play.depths 1 3 --play.repeats 1"
    assert main(f"{sizes} --play.workers 1".split()) == 0
    out = capsys.readouterr().out
    assert "3 of 3 episodes have the ids of this process's" in out
    for line in ("kept keys and values, 3 environments, 3 turns", "kept keys and values, 1 environments, 3 turns"):
        assert line in out
    for line in (
        "kept keys and values, 3 environments, 1 turns",
        "recompute, 3",
        "expert (no model), 3",
        "1 processes, 3",
    ):
        assert line in out
    assert "1.00x" in out


def test_a_row_by_hand() -> None:
    base = PlayedWay(
        name="a", slots=4, depth=9, workers=0, seconds=2.0, tokens=60, turns=20, history=31.5, env_seconds=0.5
    )
    fast = PlayedWay(
        name="b", slots=4, depth=9, workers=2, seconds=0.5, tokens=30, turns=10, history=30.0, env_seconds=0.2
    )
    assert base.cells(base) == ["a", "4", "9", "32", "30", "10", "25 %", "1.00x"]
    assert fast.cells(base) == ["b", "4", "9", "30", "60", "20", "20 %", "2.00x"]
    assert replace(base, tokens=0).cells(base)[3:5] == ["-", "-"]
