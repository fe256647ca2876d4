"""Packed rows compute what padded ones do: gradients, every position once, and models that cannot are refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy_run as toy
from hypothesis import given
from hypothesis import strategies as st
from tiny_runs import untimed

from turngym.core.errors import SettingsError
from turngym.core.spec import changed, read
from turngym.trainers import train_loop
from turngym.trainers.batch import RolloutBatch, pack
from turngym.trainers.checkpoint import CheckpointError
from turngym.trainers.metrics import read_metrics
from turngym.trainers.microbatch import check_packing, micro_batches, packing_for, passes, shared_tokens
from turngym.trainers.models import tiny_qwen3
from turngym.trainers.optimizer_step import Forward
from turngym.trainers.ranks import SINGLE
from turngym.trainers.run_config import RunConfig
from turngym.trainers.run_folder import with_saved_settings
from turngym.trainers.scorer import LocalScorer

torch.set_num_threads(1)
packed = partial(passes, packed=True)


def batch_of(count: int) -> RolloutBatch:
    """Rows of 10, 15, 20 and 30 tokens, over and over."""
    return pack(toy.demonstrations(count), origins=("demonstration",))


def rows_of(*rows: list[int]) -> list[Any]:
    return [np.array(row, np.int32) for row in rows]


def hinted_episode(turns: int, seed: int = 0, history: int = 30) -> tuple[list[Any], list[Any]]:
    """What a hinted teacher reads: the history so far, a hint, the response; and where the responses are."""
    rng = np.random.default_rng(seed)
    past, rows, places = list(rng.integers(1, 40, history)), [], []
    for _ in range(turns):
        past += list(rng.integers(1, 40, 6))
        response = list(rng.integers(1, 40, int(rng.integers(1, 5))))
        row = past + list(rng.integers(1, 40, 4)) + response
        rows.append(np.array(row, np.int32))
        places.append(np.arange(len(row) - len(response), len(row)))
        past += response
    return rows, places


def test_three_rows_by_hand() -> None:
    rows = rows_of([1, 2, 9], [1, 2, 3, 4], [1, 2, 3])
    (part,) = packed(rows, 100)
    assert part.rows == (1, 2, 0)
    assert part.line == [(4, 0), (1, 2), (1, 2)]
    assert part.ids_RL.tolist() == [[1, 2, 3, 4, 3, 9]]
    assert part.position_RL.tolist() == [[0, 1, 2, 3, 2, 2]]
    assert part.places(2, np.array([0, 1, 2])).tolist() == [0, 1, 5]
    strangers = rows_of([1, 2, 3, 4], [5, 2, 3, 4])
    assert packed(strangers, 100)[0].line == [(4, 0), (4, 0)]


def test_rows_are_cut_into_lines() -> None:
    alike = rows_of([1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 6])
    assert [part.rows for part in packed(alike, 100)] == [(0, 1, 2)]
    assert [part.rows for part in packed(alike, 5)] == [(0, 1), (2,)]
    assert [part.rows for part in packed(alike, 1)] == [(0,), (1,), (2,)]
    assert packed([], 100) == []


def test_rows_that_begin_alike_are_neighbors() -> None:
    """Two tasks in turn: each line holds one of them, and its beginning once."""
    one, two = list(range(1, 21)), list(range(21, 41))
    rows = rows_of(*([*start, number] for number in (50, 51, 52) for start in (one, two)))
    found = packed(rows, 30)
    assert sorted(sorted(part.rows) for part in found) == [[0, 2, 4], [1, 3, 5]]
    assert [part.ids_RL.size for part in found] == [23, 23]


@given(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=9), min_size=1, max_size=8), st.integers(1, 40))
def test_every_token_of_every_row_has_its_place(lists: list[list[int]], budget: int) -> None:
    rows = rows_of(*lists)
    found = packed(rows, budget)
    assert sorted(row for part in found for row in part.rows) == list(range(len(rows)))
    for part in found:
        ids, positions = part.ids_RL[0], part.position_RL[0]
        assert len(ids) == len(positions) <= max(budget, len(rows[part.rows[0]]))
        for member, row in enumerate(part.rows):
            own = np.arange(len(rows[row]))
            assert ids[part.places(member, own)].tolist() == rows[row].tolist()
            assert positions[part.places(member, own)].tolist() == own.tolist()


def test_tokens_in_common() -> None:
    one, two = rows_of([1, 2, 3], [1, 2, 4, 5])
    pairs = (one, two), (one, one), (one, one[:2]), (one, two[1:])
    assert [shared_tokens(*pair) for pair in pairs] == [2, 3, 2, 0]


def test_a_teacher_reads_the_history_once() -> None:
    rows, _ = hinted_episode(24, history=100)
    (part,) = packed(rows, 4096)
    assert sum(len(row) for row in rows) > 9 * part.ids_RL.size


@given(st.integers(1, 12), st.integers(1, 200))
def test_every_position_is_computed_once_and_predicts_its_label(count: int, budget: int) -> None:
    batch = batch_of(count)
    micros = micro_batches(batch, budget, SINGLE, packed=True)
    assert sorted(row for micro in micros for row in micro.passed.rows) == list(range(batch.rows))
    assert sorted(np.concatenate([m.tokens for m in micros]).tolist()) == list(range(batch.tokens))
    for micro in micros:
        flat, positions = micro.passed.ids_RL[0], micro.passed.position_RL[0]
        assert flat.size == sum(size for size, _ in micro.passed.line) <= max(budget, 30), "no padding is computed"
        predictor_M = batch.predictor_N[micro.tokens]
        assert (flat[micro.predictor_n] == batch.input_ids_M[predictor_M]).all()
        assert (positions[micro.predictor_n] == batch.position_M[predictor_M]).all()


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_packed_gradients_are_those_of_padded_rows(window: int | None, checkpointing: bool) -> None:
    model, batch = toy.tiny(1), batch_of(9)
    if window:
        settings = {"sliding_window": window, "use_sliding_window": True, "max_window_layers": 0, "layer_types": None}
        model = type(model)(type(model.config)(**model.config.to_dict() | settings, attn_implementation="sdpa")).eval()
        assert set(model.config.layer_types) == {"sliding_attention"}
    columns, padded = toy.gradient(model, batch, Forward())
    for budget in (30, 70, 8192):
        forward = Forward(packing="on", micro_tokens=budget, gradient_checkpointing=checkpointing)
        again, slope = toy.gradient(model, batch, forward)
        assert again["loss"].mean() == pytest.approx(columns["loss"].mean(), abs=1e-6)
        assert torch.allclose(slope, padded, atol=1e-6)
    assert padded.abs().max() > 1e-3
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_a_row_of_one_token_behind_a_shared_beginning(kv_heads: int) -> None:
    """As a decoding step: where query heads share keys and values, transformers attends it in a way of its own."""
    model = tiny_qwen3(40, width=32, heads=4, kv_heads=kv_heads)
    rows, places = rows_of([1, 2, 3, 4], [1, 2, 3, 9], [1, 2, 3]), [np.array([3]), np.array([3]), np.array([2])]
    (part,) = packed(rows, 100)
    assert (1, 3) in part.line
    plain, together = (LocalScorer(model=model, packing=packing) for packing in ("off", "on"))
    for one, two in zip(plain.logprobs(rows, places), together.logprobs(rows, places), strict=True):
        np.testing.assert_allclose(two, one, atol=2e-5)


def test_models_whose_rows_see_each_other_are_refused() -> None:
    model = toy.tiny(1)
    check_packing(model)
    check_packing(toy.tiny(2).bfloat16())
    model.set_attn_implementation("eager")
    with pytest.raises(SettingsError, match="has layers other than sdpa attention"):
        check_packing(model)
    model.set_attn_implementation("sdpa")
    inner, forward = model.model, model.model.forward
    inner.forward = lambda line=None, **more: forward(**more)
    with pytest.raises(SettingsError, match="--packing on: Qwen3ForCausalLM"):
        check_packing(model)


def test_a_packed_run_gives_the_numbers_of_a_padded_one(tmp_path: Path) -> None:
    rows = []
    for packing in ("off", "on"):
        made = toy.trainer(tmp_path / packing, steps=2)
        replace(made, run=changed(made.run, packing=packing, micro_tokens=64)).train()
        rows.append([row for row in read_metrics(tmp_path / packing) if row["kind"] == "train"])
    for padded, packed in zip(*rows, strict=True):
        assert packed["loss"] == pytest.approx(padded["loss"], abs=1e-5)
        assert packed["grad_norm"] == pytest.approx(padded["grad_norm"], abs=1e-4)


@pytest.mark.parametrize("max_tokens", [1, 60, 150, 4096])
def test_packed_scores_are_those_of_padded_rows(max_tokens: int) -> None:
    model = toy.tiny(1, 6.0)
    rows, places = [], []
    for seed, turns in enumerate((5, 1, 7)):
        more = hinted_episode(turns, seed)
        rows += more[0]
        places += more[1]
    plain = LocalScorer(model=model, max_tokens=max_tokens)
    packed = LocalScorer(model=model, max_tokens=max_tokens, packing="on")
    for one, two in zip(plain.logprobs(rows, places), packed.logprobs(rows, places), strict=True):
        np.testing.assert_allclose(two, one, atol=2e-5)
    for one, two in zip(plain.topk(rows, places, 3), packed.topk(rows, places, 3), strict=True):
        assert two.ids.tolist() == one.ids.tolist()
        np.testing.assert_allclose(two.logp, one.logp, atol=2e-5)


def test_auto_leaves_a_model_alone_that_cannot_have_it() -> None:
    model = toy.tiny(1)
    assert [packing_for(name, model) for name in ("auto", "on", "off")] == ["auto", "on", "off"]
    inner, forward = model.model, model.model.forward
    inner.forward = lambda line=None, **more: forward(**more)
    assert [packing_for(name, model) for name in ("auto", "off")] == ["off", "off"]
    with pytest.raises(SettingsError):
        packing_for("on", model)
    inner.forward = lambda input_ids, use_cache: forward(input_ids=input_ids, use_cache=use_cache)
    assert packing_for("auto", model) == "off"  # it knows no positions


def begun(folder: Path, packing: Any, *, resume: bool = False) -> list[dict[str, Any]]:
    """What three steps say, or the rest of them; times apart."""
    made = toy.trainer(folder, steps=3)
    run = changed(made.run, packing=packing, checkpoint_every=1, keep_checkpoints=9)
    replace(made, run=run).train(resume=resume)
    return untimed(folder)


def test_a_run_that_was_begun_without_it_goes_on_without_it(tmp_path: Path) -> None:
    whole, folder = begun(tmp_path / "off", "off"), tmp_path / "off"
    for step in (2, 3):
        shutil.rmtree(folder / f"checkpoints/step_{step:06d}")
    with pytest.raises(CheckpointError, match=r"run\.packing: checkpoint 'off', now 'on'"):
        begun(folder, "on", resume=True)
    assert begun(folder, "auto", resume=True) == whole
    state = json.loads((folder / "checkpoints/step_000003/state.json").read_text())
    assert state["spec"]["run"]["packing"] == "off"


def test_what_a_run_goes_on_with(tmp_path: Path) -> None:
    assert with_saved_settings(RunConfig(), tmp_path).packing == "auto"  # nothing began here
    begun(tmp_path / "run", "auto")
    assert with_saved_settings(RunConfig(), tmp_path / "run").packing == "auto"
    begun(tmp_path / "on", "on")
    assert with_saved_settings(RunConfig(), tmp_path / "on").packing == "on"
    assert with_saved_settings(RunConfig(packing="off"), tmp_path / "on").packing == "off"
    with pytest.raises(SettingsError, match="valid: auto, on, off"):
        read(RunConfig, {"packing": "yes"}, "test")


def test_the_loop_uses_what_the_model_can_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str]] = []

    class Loop(train_loop.TrainLoop):
        def run(self, interrupts: Any) -> None:
            seen.append((self._forward().packing, self._scorers().student.packing))  # type: ignore[attr-defined]

    monkeypatch.setattr(train_loop, "TrainLoop", Loop)
    for number, answer in enumerate(("auto", "off")):
        monkeypatch.setattr(train_loop, "packing_for", lambda packing, model, answer=answer: answer)
        toy.trainer(tmp_path / str(number), steps=1).train()
    assert seen == [("auto", "auto"), ("off", "off")]
