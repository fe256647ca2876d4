"""The quarter of an hour on a GPU is rehearsed here: every stage, its order, its formulas, and what a cut leaves."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import quarter_hour
from quarter_hour import REHEARSAL, STAGES, Record, decode_bytes, main, run, update_flops
from recorded_graph import record as stand_in

from turngym.agents.local_engine import graphs
from turngym.trainers.model_shapes import ModelShape

SMALL = ModelShape(layers=2, width=8, heads=2, kv_heads=1, head_dim=4, mlp=16, vocab=100, tied=True)
LAYER = 8 * 8 + 8 * 8 + 2 * 8 * 4 + 3 * 8 * 16 + 2 * 8 + 2 * 4
"""Weights of one layer of SMALL: queries, output, keys and values, the three of the MLP, the four norms."""


def stages_of(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["stages"]
    return found


def test_bytes_of_a_decoded_token() -> None:
    # keys and values of 3 rows of 10 ids: 2 layers x (4 + 4) numbers each
    assert decode_bytes(SMALL, 3, 10, "bfloat16") == 2 * (2 * LAYER + 100 * 8) + 3 * 10 * 2 * 2 * 8
    assert decode_bytes(SMALL, 3, 10, "float32") == 2 * decode_bytes(SMALL, 3, 10, "bfloat16")


def test_operations_of_an_update() -> None:
    # rows of 1 and 3 ids: 1 + (1 + 2 + 3) pairs of a query and a key, each 2 operations times 8 in both products
    pairs = 1 + 6
    forward = 4 * 2 * 2 * LAYER + 2 * pairs * 2 * 2 * 8 + 2 * 2 * 100 * 8
    assert math.isclose(update_flops(SMALL, [1, 3], predicted=2), 3 * forward)


def test_a_stage_that_fails_and_time_that_is_over_are_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(sizes: Any, record: Record) -> None:
        record.add("decode", {"ms": 1.0})
        raise ValueError("no such kernel")

    def slow(sizes: Any, record: Record) -> None:
        record.end = 0.0

    for name, stage in (("decode", fails), ("rollout", slow)):
        monkeypatch.setitem(STAGES, name, stage)
    record = Record(tmp_path / "gpu.json", 60.0, {})
    assert not run(REHEARSAL, record, ["decode", "rollout", "update"], None)
    record.close()
    assert stages_of(tmp_path / "gpu.json") == {
        "decode": [{"ms": 1.0}],
        "failed": [{"stage": "decode", "error": "ValueError: no such kernel"}],
        "left out": [{"stage": "update", "why": "the time is over"}],
    }


def test_a_cut_leaves_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(sizes: Any, record: Record) -> None:
        record.add("rollout", {"ids/s": 2.0})
        raise KeyboardInterrupt

    monkeypatch.setitem(STAGES, "decode", lambda sizes, record: record.add("decode", {"ms": 1.0}))
    monkeypatch.setitem(STAGES, "rollout", cut)
    with pytest.raises(KeyboardInterrupt):
        main(["--tiny", "--out", str(tmp_path / "new" / "gpu.json")])
    assert stages_of(tmp_path / "new" / "gpu.json") == {"decode": [{"ms": 1.0}], "rollout": [{"ids/s": 2.0}]}


@pytest.mark.parametrize("minutes", ["nan", "0", "-1", "inf"])
def test_a_time_that_would_not_end_is_refused(minutes: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--tiny", f"--minutes={minutes}", "--out", str(tmp_path / "gpu.json")])
    assert "valid: above 0" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(quarter_hour.torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path / "gpu.json")]) == 2
    assert "no GPU" in capsys.readouterr().err


@pytest.mark.long
def test_all_stages_are_rehearsed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "capture", stand_in)
    monkeypatch.setattr(graphs, "can_capture", lambda device: True)
    assert main(["--tiny", "--minutes", "20", "--out", str(tmp_path / "gpu.json")]) == 0
    assert "decode tiny, 2 rows" in capsys.readouterr().out
    found = stages_of(tmp_path / "gpu.json")
    assert list(found) == list(STAGES)
    assert [row["graphs"] for row in found["decode"]] == [0, 1] * 2 * len(REHEARSAL.lengths)
    assert all(row["refused"] is None for row in found["decode"][1::2])
    assert all(row["ms"] > 0 and row["launches"] > 0 for row in found["decode"])
    peers = {row["who"]: row for row in found["rollout"]}
    assert peers["generate"]["same"] == peers["generate"]["responses"] == 4
    assert peers["engine"]["same"] == 4
    assert found["update"][0]["flops/s"] > 0
    assert found["teacher"][0]["tokens"] == found["update"][0]["tokens"]
    assert [row["algorithm"] for row in found["steps"]] == ["opd", "turnopd", "grpo"]
    assert all(math.isfinite(row["loss on cpu"]) and row["seconds"] > 0 for row in found["steps"])
