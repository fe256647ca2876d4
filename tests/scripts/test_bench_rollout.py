"""`turngym bench rollout` on a toy size."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from turngym.scripts import bench_rollout as bench
from turngym.scripts.bench_rollout import (
    HEADER,
    SMALL_SHAPE,
    KeptCache,
    Side,
    Tally,
    cells,
    generate,
    left_padded,
    main,
    new_ids,
    played_row,
)
from turngym.trainers.model_shapes import random_model

TOY = replace(SMALL_SHAPE, layers=1, width=32, vocab=50)


@pytest.mark.long
def test_bench_prints_ratios_and_equal_ids(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(bench.MODELS, "tiny", (TOY, (2, 3), (2,)))
    sizes = "--system 5 --observation 2 4 --response 1 3 --play.episodes 0"
    assert main(f"--models tiny {sizes}".split()) == 0
    out = capsys.readouterr().out
    assert "tiny (1 layers, width 32), tokens per CPU second" in out
    assert "4/4" in out
    assert "6/6" in out


def test_the_peer_that_keeps_its_cache_feeds_only_what_is_new() -> None:
    model: Any = random_model(TOY, dtype=torch.float32)
    fed: list[tuple[int, ...]] = []
    model.model.embed_tokens.register_forward_pre_hook(lambda module, inputs: fed.append(tuple(inputs[0].shape)))
    peer, rng = KeptCache(model, 2), np.random.default_rng(0)
    history = [np.empty(0, np.int32)] * 2
    for turn, (counts, limits) in enumerate((((9, 4), (2, 5)), ((3, 5), (4, 1)), ((2, 2), (3, 3)))):
        new = [rng.integers(0, 50, count).astype(np.int32) for count in counts]
        fed.clear()
        answers = peer.answer(new, limits)
        # the id that was drawn last has not been fed
        assert fed == [(2, max(counts) + bool(turn)), *[(2, 1)] * (max(limits) - 1)]
        history = [np.concatenate(pair) for pair in zip(history, new, strict=True)]
        ids, mask = left_padded(history)
        whole = new_ids(generate(model, ids, mask, limits), ids.shape[1], limits)
        assert [row.tolist() for row in answers] == [row.tolist() for row in whole]
        history = [np.concatenate(pair) for pair in zip(history, answers, strict=True)]


def test_cells_by_hand() -> None:
    tally = Tally(3, 8, engine=Side(100, 2.0), kept=Side(100, 5.0), responses=9, equal=9)
    assert cells(tally) == ["3", "8", "50", "20", "2.50x", "9/9"]
    assert len(cells(tally)) == len(HEADER)
    tally.equal, tally.gap = 8, 2e-7
    assert cells(tally)[-1] == "8/9 (gap 2e-07)"


@pytest.mark.long
def test_whole_rollouts_by_processes(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["--models", "--play.episodes", "3", "--play.slots", "3", "--play.depth", "3", "--play.workers", "1"]) == 0
    )
    out = capsys.readouterr().out
    for name in ("this process", "1 processes"):
        assert re.search(rf"{name}: .* s; 3 of 3 episodes have the ids of this process's", out)
    assert "1.00x" in out


def test_a_row_by_hand() -> None:
    """Two episodes of 2 and 1 turns with 2 ids each; histories of 6 and 1 ids; 0.5 s in environments of 2 workers."""
    turns = [SimpleNamespace(response_length=2, prompt_span=(0, end)) for end in (1, 6, 1)]
    played: list[Any] = [SimpleNamespace(turns=turns[:2], timings={"env": 0.5})]
    played.append(SimpleNamespace(turns=turns[2:], timings={}))
    base, speed = played_row("a", 2.0, played, None)
    assert ([*base.values()], speed) == (["a", "4", "3", "2", "25 %", "1.00x"], 1.5)
    assert [*played_row("b", 0.5, played, speed, workers=2)[0].values()][2:] == ["12", "6", "50 %", "4.00x"]
