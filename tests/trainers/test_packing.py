"""Packed rows compute what padded ones do: gradients, every position once, and models that cannot are refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy_run as toy
from hypothesis import given, settings
from hypothesis import strategies as st

from turngym.envs.core.settings import SettingsError, from_table
from turngym.trainers import train_loop
from turngym.trainers.algorithm import Targets
from turngym.trainers.algorithms import sft
from turngym.trainers.batch import BatchError, RolloutBatch, pack
from turngym.trainers.checkpoint import CheckpointError
from turngym.trainers.config import ConfigError, Packing, RunConfig
from turngym.trainers.metrics import read_metrics
from turngym.trainers.microbatch import (
    check_packing,
    in_one_line,
    packed_rows,
    pad_rows,
    resolved,
    split_packed,
)
from turngym.trainers.optimizer_step import Forward, accumulate
from turngym.trainers.run_folder import with_saved_settings
from turngym.trainers.scorer import LocalScorer

torch.set_num_threads(1)


def batch_of(count: int) -> RolloutBatch:
    """Rows of 10, 15, 20 and 30 tokens, over and over."""
    return pack(toy.demonstrations(count), origins=("demonstration",))


def test_rows_share_a_line_by_hand() -> None:
    assert packed_rows([10, 15, 20, 30, 10], 45) == [[3], [2, 1, 0], [4]]
    assert packed_rows([50, 7], 10) == [[0], [1]]
    assert packed_rows([], 10) == []
    batch = batch_of(5)  # 10 15 20 30 10
    first, second, _ = split_packed(batch, 45)
    assert [first.rows.tolist(), second.rows.tolist()] == [[3], [2, 1, 0]]
    assert pad_rows(batch, second).position_RL.tolist() == [[*range(20), *range(15), *range(10)]]  # type: ignore[union-attr]
    # some of the rows, as of one process of several
    (part,) = split_packed(batch, 45, np.array([1, 4]))
    assert part.rows.tolist() == [1, 4]
    assert [micro.rows.tolist() for micro in split_packed(batch, 1)] == [[3], [2], [1], [0], [4]]
    ids, positions = in_one_line([np.array([7, 8, 9], np.int32), np.array([4, 5], np.int32)])
    assert (ids.tolist(), positions.tolist()) == ([[7, 8, 9, 4, 5]], [[0, 1, 2, 0, 1]])


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 12), st.integers(1, 200))
def test_every_position_is_computed_once_and_predicts_its_label(count: int, budget: int) -> None:
    batch = batch_of(count)
    micros = split_packed(batch, budget)
    assert sorted(np.concatenate([m.rows for m in micros]).tolist()) == list(range(batch.rows))
    assert sorted(np.concatenate([m.tokens for m in micros]).tolist()) == list(range(batch.tokens))
    for micro in micros:
        rows = pad_rows(batch, micro, pad_id=-1)
        assert rows.input_ids_RL.size <= max(budget, 30)
        flat = rows.input_ids_RL.reshape(-1)
        assert (flat[rows.predictor_n + 1] == batch.label_N[micro.tokens]).all()
        assert ((flat == -1) == ~rows.attention_RL.reshape(-1)).all()
        assert rows.attention_RL.all(), "no padding is computed"


def gradient(model: Any, batch: RolloutBatch, forward: Forward) -> tuple[float, torch.Tensor]:
    model.zero_grad()
    weight_N = np.full(batch.tokens, 1 / batch.tokens)
    loss_ = sft.build(sft.SftConfig(), RunConfig()).token_loss
    loss, _ = accumulate(model, batch, targets=Targets(), weight_N=weight_N, token_loss=loss_, forward=forward)
    return loss, torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_packed_gradients_are_those_of_padded_rows(window: int | None, checkpointing: bool) -> None:
    model, batch = toy.tiny(1), batch_of(9)
    if window:
        settings = {"sliding_window": window, "use_sliding_window": True, "max_window_layers": 0, "layer_types": None}
        model = type(model)(type(model.config)(**model.config.to_dict() | settings, attn_implementation="sdpa")).eval()
        assert set(model.config.layer_types) == {"sliding_attention"}
    loss, padded = gradient(model, batch, Forward())
    for budget in (30, 70, 8192):
        forward = Forward(packing="on", micro_tokens=budget, gradient_checkpointing=checkpointing)
        again, packed = gradient(model, batch, forward)
        assert again == pytest.approx(loss, abs=1e-6)
        assert torch.allclose(packed, padded, atol=1e-6)
    assert padded.abs().max() > 1e-3
    assert model.config._attn_implementation == "sdpa"


def test_models_whose_rows_see_each_other_are_refused() -> None:
    model = toy.tiny(1)
    check_packing(model)
    check_packing(toy.tiny(2).bfloat16())
    model.set_attn_implementation("eager")
    with pytest.raises(ConfigError, match="has layers other than sdpa attention"):
        check_packing(model)
    model.set_attn_implementation("sdpa")
    inner, forward = model.model, model.model.forward
    inner.forward = lambda row_sizes=None, **more: forward(**more)
    with pytest.raises(ConfigError, match=r"--packing on: Qwen3ForCausalLM lets rows in one line see each other"):
        check_packing(model)
    with pytest.raises(BatchError, match="max_tokens is 0"):
        split_packed(batch_of(1), 0)


def test_a_packed_run_gives_the_numbers_of_a_padded_one(tmp_path: Path) -> None:
    rows = []
    for packing in ("off", "on"):
        made = toy.trainer(tmp_path / packing, steps=2)
        replace(made, run=replace(made.run, packing=packing, micro_tokens=64)).train()
        rows.append([row for row in read_metrics(tmp_path / packing) if row["kind"] == "train"])
    for padded, packed in zip(*rows, strict=True):
        assert packed["loss"] == pytest.approx(padded["loss"], abs=1e-5)
        assert packed["grad_norm"] == pytest.approx(padded["grad_norm"], abs=1e-4)


@pytest.mark.parametrize("packing", ["auto", "on"])
def test_packed_scores_are_those_of_padded_rows(packing: Packing) -> None:
    model, rng = toy.tiny(1, 6.0), np.random.default_rng(0)
    ids = [rng.integers(0, 40, size).astype(np.int32) for size in (7, 30, 12, 9, 21, 5)]
    positions = [np.arange(2, len(row)) for row in ids]
    plain = LocalScorer(model=model)
    for budget in (30, 70, 8192):
        scorer = LocalScorer(model=model, packing=packing, max_tokens=budget)
        for one, other in zip(scorer.logprobs(ids, positions), plain.logprobs(ids, positions), strict=True):
            assert np.allclose(one, other, atol=1e-5)


def test_auto_leaves_a_model_alone_that_cannot_have_it() -> None:
    model = toy.tiny(1)
    assert [resolved(name, model) for name in ("auto", "on", "off")] == ["auto", "on", "off"]
    inner, forward = model.model, model.model.forward
    inner.forward = lambda row_sizes=None, **more: forward(**more)
    assert [resolved(name, model) for name in ("auto", "off")] == ["off", "off"]
    with pytest.raises(ConfigError):
        resolved("on", model)
    inner.forward = lambda input_ids, use_cache: forward(input_ids=input_ids, use_cache=use_cache)
    assert resolved("auto", model) == "off"  # it knows no positions


def begun(folder: Path, packing: Any, *, resume: bool = False) -> list[dict[str, Any]]:
    """What three steps say, or the rest of them; times apart."""
    made = toy.trainer(folder, steps=3)
    run = replace(made.run, packing=packing, checkpoint_every=1, keep_checkpoints=9)
    replace(made, run=run).train(resume=resume)
    clock = ("time/", "tokens_per_s")
    return [{k: v for k, v in row.items() if not k.startswith(clock)} for row in read_metrics(folder)]


def test_a_run_that_was_begun_without_it_goes_on_without_it(tmp_path: Path) -> None:
    whole, folder = begun(tmp_path / "off", "off"), tmp_path / "off"
    for step in (2, 3):
        shutil.rmtree(folder / f"checkpoints/step_{step:06d}")
    with pytest.raises(CheckpointError, match=r"run\.packing: checkpoint 'off', now 'on'"):
        begun(folder, "on", resume=True)
    assert begun(folder, "auto", resume=True) == whole
    state = json.loads((folder / "checkpoints/step_000003/state.json").read_text())
    assert state["fingerprint"]["run.packing"] == "off"


def test_what_a_run_goes_on_with(tmp_path: Path) -> None:
    assert with_saved_settings(RunConfig(), tmp_path).packing == "auto"  # nothing began here
    begun(tmp_path / "run", "auto")
    assert with_saved_settings(RunConfig(), tmp_path / "run").packing == "auto"
    begun(tmp_path / "on", "on")
    assert with_saved_settings(RunConfig(), tmp_path / "on").packing == "on"
    assert with_saved_settings(RunConfig(packing="off"), tmp_path / "on").packing == "off"
    with pytest.raises(SettingsError, match="valid: auto, on, off"):
        from_table(RunConfig, {"packing": "yes"}, "test")


def test_the_loop_uses_what_the_model_can_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str]] = []

    class Loop(train_loop.TrainLoop):
        def run(self, interrupts: Any) -> None:
            seen.append((self._forward().packing, self._scorers().student.packing))  # type: ignore[attr-defined]

    monkeypatch.setattr(train_loop, "TrainLoop", Loop)
    for number, answer in enumerate(("auto", "off")):
        monkeypatch.setattr(train_loop, "resolved", lambda packing, model, answer=answer: answer)
        toy.trainer(tmp_path / str(number), steps=1).train()
    assert seen == [("auto", "auto"), ("off", "off")]
