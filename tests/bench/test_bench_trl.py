"""The bench against TRL on a model of one layer: both sides play and train on the same ids."""

from __future__ import annotations

import math
from pathlib import Path

import bench_trl as bench
import pytest

pytest.importorskip("trl", reason="needs the extra turngym[trl]")
pytest.importorskip("datasets", reason="needs the extra turngym[trl]")
pytestmark = pytest.mark.long

SMALL = bench.TrlBench(layers=1, width=64, vocabulary=2100, turns=2, micro_tokens=4096)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("bench")
    bench.make_model(SMALL, place / "model")
    bench.make_rows(SMALL, place)
    return place


def test_the_call_has_different_pieces() -> None:
    assert "".join(bench.pieces()) == bench.CALL
    assert len(set(bench.pieces())) == bench.PIECES


@pytest.mark.parametrize("what", ["grpo", "sft", "opd"])
def test_both_sides_train_on_the_same_ids(what: str, folder: Path) -> None:
    ours, theirs = (bench.SIDES[what, side](SMALL, folder) for side in ("turngym", "TRL"))
    turns = SMALL.episodes * SMALL.turns
    # ours stops where the call is closed; TRL's turns have an id more, and the model speaks once more after the last
    assert ours.ids == turns * bench.PIECES
    assert theirs.ids == ((turns + SMALL.episodes) * (bench.PIECES + 1) if what == "grpo" else ours.ids)
    for one in (ours, theirs):
        assert 0 < one.updated < math.inf
        assert (one.played > 0) == (what == "grpo")
