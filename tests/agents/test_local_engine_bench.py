"""`turngym bench rollout` on a toy size."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from turngym.scripts.bench.rollout import main


def test_bench_prints_a_ratio_and_equal_ids(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--turns 3 --batch 2 --vocab 50 --system 5 --observation 2 4 --response 1 3 --tiny.peer-turns 2"
    assert main(f"{sizes} --tiny.layers 1 --tiny.width 32 --larger.layers 0".split()) == 0
    out = capsys.readouterr().out
    assert "tiny (1 layers, width 32)" in out
    assert "larger" not in out
    assert "4/4 responses have the same ids" in out
    assert "target 5x" in out
