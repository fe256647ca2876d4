"""`turngym bench ahead`: its table by hand, and a run of the smallest size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from turngym.scripts.bench.ahead import AheadBench, Way, cells, command, main, ways


def row(step: int, seconds: float, waited: float, success: float) -> dict[str, Any]:
    times = {"time/step_s": seconds, "time/rollout_s": waited}
    return {"kind": "train", "step": step, "success": success, "staleness_mean": 1.0, "gap_mean": 0.25, **times}


def test_a_line_by_hand() -> None:
    """The first three of eight steps start the workers; quarters of the run are two steps each."""
    slow = [row(step, 9.0, 8.0, 0.2) for step in (1, 2, 3)]
    fast = [row(step, 2.0, 0.5, 0.6) for step in (4, 5, 6, 7, 8)]
    rows = [{"kind": "eval", "eval/avg": 0.3}, *slow, *fast, {"kind": "eval", "eval/avg": 0.45}]
    line, seconds = cells(Way(name="w", workers=1, staleness=1), rows, 4.0)
    assert seconds == 2.0
    assert line == ["w", "2.00", "0.50", "2.00x", "1", "2.5e-01", "20 -> 60", "30 -> 45"]
    assert cells(Way(name="w", workers=1, staleness=1), rows, None)[0][3] == "1.00x"


def test_ways_and_their_commands() -> None:
    bench = AheadBench(staleness=(1, 3), workers=2, eval_limit=0)
    assert [(way.workers, way.staleness) for way in ways(bench)] == [(0, 0), (2, 0), (2, 1), (2, 3)]
    words = command(bench, ways(bench)[-1], Path("x"))
    assert words[words.index("--staleness") + 1] == "3"
    assert words[words.index("--workers") + 1] == "2"
    assert "--panel" not in words


def test_the_table_of_all_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Training itself is left out: starting three runs and their workers is no test."""
    seconds = {"0 0": 4.0, "1 0": 3.0, "1 1": 2.0}

    def train(words: list[str]) -> int:
        kind = " ".join(words[words.index(flag) + 1] for flag in ("--workers", "--staleness"))
        out = Path(words[words.index("--out") + 1])
        out.mkdir(parents=True)
        rows = [row(step, seconds[kind], 0.5, 0.5) for step in (1, 2, 3, 4)]
        (out / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
        return 0

    monkeypatch.setattr("turngym.scripts.train.main", train)
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["--steps", "4", "--eval-limit", "0"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "x " in line]
    assert [ratio for line in lines for ratio in ("1.00x", "1.33x", "2.00x") if ratio in line] == [
        "1.00x",
        "1.33x",
        "2.00x",
    ]
    assert "the training process" in lines[0]
    assert "1 workers, 1 ahead" in lines[2]
