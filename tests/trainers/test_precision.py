"""Half precision: what stays float32, how near the numbers are, and what recomputing activations saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy_run as toy

from turngym.agents.models import load_model
from turngym.trainers.algorithm import Targets
from turngym.trainers.algorithm_spec import BuildContext
from turngym.trainers.algorithms import sft
from turngym.trainers.batch import RolloutBatch, pack
from turngym.trainers.checkpoint import latest_model
from turngym.trainers.critic import ValueCritic
from turngym.trainers.lm_head import project
from turngym.trainers.lm_loss import LmLoss
from turngym.trainers.metrics import read_metrics
from turngym.trainers.models import head, hidden_states
from turngym.trainers.optimizer_step import Forward, make_optimizer, update
from turngym.trainers.run_config import CriticConfig, LmLossConfig, OptimizerConfig

torch.set_num_threads(1)
LOSS = sft.build(sft.SftConfig(), BuildContext()).token_loss


def batch_of(count: int = 6) -> RolloutBatch:
    return pack(toy.demonstrations(count), origins=("demonstration",))


@pytest.mark.parametrize("autocast_head", [True, False])
def test_autocast_is_near_float32_and_keeps_float32_weights(autocast_head: bool) -> None:
    model, batch = toy.tiny(1, 6.0), batch_of()
    exact, slope = toy.gradient(model, batch, Forward())
    rough, near = toy.gradient(model, batch, Forward(autocast=True, autocast_head=autocast_head))
    error = np.abs(rough["logp"] - exact["logp"])
    assert 0 < error.max() < 0.15
    assert torch.nn.functional.cosine_similarity(near, slope, dim=0) > 0.995
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}


def test_a_head_in_float32_is_nearer() -> None:
    model, batch = toy.tiny(1, 12.0), batch_of(12)
    exact, _ = toy.gradient(model, batch, Forward())
    rough = [toy.gradient(model, batch, Forward(autocast=True, autocast_head=own))[0] for own in (True, False)]
    errors = [float(np.abs(columns["logp"] - exact["logp"]).mean()) for columns in rough]
    assert errors[1] < errors[0]


def test_log_probabilities_are_float32_of_bfloat16_logits() -> None:
    """A softmax in bfloat16 would be off by a hundredth; ours is that of the same logits in float64."""
    model = toy.tiny(1, 6.0).bfloat16()
    states = hidden_states(model, np.arange(12)[None])
    labels = torch.arange(12)
    found = project(states, head(model), labels, entropy=True)
    assert found.logp_N.dtype == torch.float32
    assert found.entropy_N is not None
    assert found.entropy_N.dtype == torch.float32
    exact = head(model)(states).double().log_softmax(-1)
    assert torch.allclose(found.logp_N.double(), exact[labels, labels], atol=1e-5)
    half = head(model)(states).log_softmax(-1)
    assert (half.double() - exact).abs().max() > 1e-3


def test_a_bfloat16_student_trains_and_is_saved_as_such(tmp_path: Path) -> None:
    model = toy.tiny(1).bfloat16()
    made = toy.trainer(tmp_path / "run", steps=3, model=model, source=toy.Sampled(model), evaluate=None)
    made.train()
    rows = read_metrics(tmp_path / "run")
    assert all(np.isfinite(row["loss"]) and not row["updates_skipped"] for row in rows)
    saved = load_model(latest_model(tmp_path / "run"), dtype="bfloat16")
    assert all(torch.equal(a, b) for a, b in zip(saved.parameters(), model.parameters(), strict=True))


def test_small_updates_survive_autocast_but_not_bfloat16_weights() -> None:
    """Why weights stay float32: the reference learning rate is below bfloat16's resolution."""
    moved = []
    for half in (False, True):
        model = toy.tiny(1).bfloat16() if half else toy.tiny(1)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        batch = batch_of()
        update(
            model,
            make_optimizer(model, OptimizerConfig(weight_decay=0.0)),
            batch,
            targets=Targets(),
            weight_N=np.full(batch.tokens, 1 / batch.tokens),
            token_loss=LOSS,
            forward=Forward(autocast=not half),
            lr=1e-6,
        )
        changed = [(a != b).float().mean() for a, b in zip(before, model.parameters(), strict=True)]
        moved.append(float(torch.stack(changed).mean()))
    assert moved[0] > 0.9
    assert moved[1] < 0.1


def kept_bytes(forward: Forward) -> int:
    """Bytes that autograd keeps for the backward pass."""
    model, total = toy.tiny(1), 0

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal total
        total += tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        toy.gradient(model, batch_of(12), forward)
    return total


def test_recomputing_activations_keeps_less() -> None:
    assert kept_bytes(Forward(gradient_checkpointing=True)) < 0.6 * kept_bytes(Forward())


class Dropping(torch.nn.Module):
    """A layer that drops out by itself, as OPT's do."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.dropout, self.layerdrop = inner, 0.5, 0.25
        self.gradient_checkpointing = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        states = self.inner(*args, **kwargs)
        states = torch.nn.functional.dropout(states, self.dropout, self.training)
        return torch.nn.functional.dropout(states, self.layerdrop, self.training)


def dropping() -> Any:
    """A model with dropout in its attention, in a module of its own, and in its layers."""
    model = toy.tiny(1, 6.0)
    for number, layer in enumerate(model.model.layers):
        layer.self_attn.attention_dropout = 0.5
        layer.mlp = torch.nn.Sequential(layer.mlp, torch.nn.Dropout(0.5))
        model.model.layers[number] = Dropping(layer)
    return model.eval()


def test_recomputing_activations_leaves_dropout_off() -> None:
    batch = batch_of()
    model = dropping()
    exact, slope = toy.gradient(model, batch, Forward())
    found, near = toy.gradient(model, batch, Forward(gradient_checkpointing=True))
    assert np.array_equal(found["logp"], exact["logp"])
    assert torch.allclose(near, slope, atol=1e-6)
    assert not any(module.training for module in model.modules())
    assert {(layer.dropout, layer.layerdrop) for layer in model.model.layers} == {(0.5, 0.25)}
    # a model that its owner left in training mode
    assert np.array_equal(toy.gradient(model.train(), batch, Forward())[0]["logp"], exact["logp"])


def test_the_critics_head_is_float32_under_autocast() -> None:
    critic = ValueCritic(toy.tiny(1), CriticConfig(kind="model"), autocast=True)
    seen = []
    for layer in critic.module.head:
        layer.register_forward_hook(lambda layer, given, out: seen.append((given[0].dtype, out.dtype)))
    critic.values(batch_of())
    assert set(seen) == {(torch.float32, torch.float32)}


@pytest.mark.parametrize("kind", ["model", "head"])
def test_the_critic_follows_precision_and_recomputation(kind: Any) -> None:
    batch, values = batch_of(), []
    target = np.linspace(-1, 1, batch.tokens).astype(np.float32)
    for changes in ({}, {"gradient_checkpointing": True}, {"autocast": True}):
        critic = ValueCritic(toy.tiny(1), CriticConfig(kind=kind, lr=1e-3, clip=None), **changes)
        for _ in range(3):
            critic.update(batch, target, np.zeros(batch.tokens, np.float32))
        values.append(critic.values(batch))
    assert np.abs(values[0]).max() > 0.01
    assert np.allclose(values[0], values[1], atol=1e-6)
    assert np.allclose(values[0], values[2], atol=0.02)
    assert not np.array_equal(values[0], values[2])


def test_language_modeling_beside_the_loss_follows_too(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("one two three four five six\n\nseven eight nine\n")
    config = LmLossConfig(files=(file,), documents=2)
    exact, rough = (
        LmLoss(config, lambda text: [len(word) for word in text.split()], autocast=on).backward(toy.tiny(1, 6.0), 1)
        for on in (False, True)
    )
    assert rough == pytest.approx(exact, abs=0.1)
    assert rough != exact
