"""Packed rows compute what padded ones do: gradients, every position once, and models that cannot are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy_run as toy
from hypothesis import given, settings
from hypothesis import strategies as st

from turngym.trainers.algorithm import Targets
from turngym.trainers.algorithms import sft
from turngym.trainers.batch import BatchError, RolloutBatch, pack
from turngym.trainers.config import ConfigError, RunConfig
from turngym.trainers.models.microbatch import pad_rows, split_rows
from turngym.trainers.models.packing import check_packing, padding, split_packed
from turngym.trainers.run.metrics import read_metrics
from turngym.trainers.run.optimizer_step import Forward, accumulate

torch.set_num_threads(1)


def batch_of(count: int) -> RolloutBatch:
    """Rows of 10, 15, 20 and 30 tokens, over and over."""
    return pack(toy.demonstrations(count), origins=("demonstration",))


def test_rows_share_lines_first_fit_by_hand() -> None:
    batch = batch_of(5)  # 10 15 20 30 10
    (micro,) = split_packed(batch, 90)
    assert micro.rows.tolist() == [3, 2, 1, 0, 4]
    assert micro.shape == (3, 30)
    assert micro.starts is not None
    assert micro.starts.tolist() == [0, 30, 60, 50, 75]
    rows = pad_rows(batch, micro)
    assert rows.position_RL is not None
    assert rows.position_RL[1].tolist() == [*range(20), *range(10)]
    assert rows.position_RL[2].tolist() == [*range(15), *range(10), 0, 0, 0, 0, 0]
    assert rows.attention_RL.sum(1).tolist() == [30, 30, 25]
    assert padding(batch, [micro]) == pytest.approx(5 / 90)
    assert padding(batch, split_rows(batch, 90)) > 0.2


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
    assert padding(batch, micros) <= padding(batch, split_rows(batch, budget)) + 1e-12


def gradient(model: Any, batch: RolloutBatch, forward: Forward) -> tuple[float, torch.Tensor]:
    model.zero_grad()
    weight_N = np.full(batch.tokens, 1 / batch.tokens)
    loss_ = sft.build(sft.SftConfig(), RunConfig()).token_loss
    loss, _ = accumulate(model, batch, targets=Targets(), weight_N=weight_N, token_loss=loss_, forward=forward)
    return loss, torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_packed_gradients_are_those_of_padded_rows(attention: str, checkpointing: bool) -> None:
    model, batch = toy.tiny(1), batch_of(9)
    model.set_attn_implementation(attention)
    loss, padded = gradient(model, batch, Forward())
    for budget in (30, 70, 8192):
        forward = Forward(packing=True, micro_tokens=budget, gradient_checkpointing=checkpointing)
        again, packed = gradient(model, batch, forward)
        assert again == pytest.approx(loss, abs=1e-6)
        assert torch.allclose(packed, padded, atol=1e-6)
    assert padded.abs().max() > 1e-3


def test_models_whose_rows_see_each_other_are_refused() -> None:
    model = toy.tiny(1)
    check_packing(model)
    check_packing(toy.tiny(2).bfloat16())
    inner, forward = model.model, model.model.forward
    inner.forward = lambda position_ids=None, **more: forward(**more)
    with pytest.raises(ConfigError, match=r"--run\.packing: Qwen3ForCausalLM lets rows in one line see each other"):
        check_packing(model)
    with pytest.raises(BatchError, match="max_tokens is 0"):
        split_packed(batch_of(1), 0)


def test_a_packed_run_gives_the_numbers_of_a_padded_one(tmp_path: Path) -> None:
    rows = []
    for packing in (False, True):
        made = toy.trainer(tmp_path / str(packing), steps=2)
        replace(made, run=replace(made.run, packing=packing, micro_tokens=64)).train()
        rows.append([row for row in read_metrics(tmp_path / str(packing)) if row["kind"] == "train"])
    for padded, packed in zip(*rows, strict=True):
        assert packed["loss"] == pytest.approx(padded["loss"], abs=1e-5)
        assert packed["grad_norm"] == pytest.approx(padded["grad_norm"], abs=1e-4)
