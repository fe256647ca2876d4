"""The decoder without modules: the same numbers as transformers' own, with the weights as they are now."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from engine_requests import VOCAB, reference_ids, request, tiny

from turngym.agents import load_world
from turngym.agents.local_engine import decoder as dense_weights
from turngym.agents.local_engine.cache import KeyGroup, make_key_groups
from turngym.agents.local_engine.decoder import Linear, attention, dense_problem
from turngym.agents.local_engine.engine import LocalEngine
from turngym.agents.models import load_policy
from turngym.core.protocols import Generation
from turngym.trainers.models import final_states, head

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "qwen3 with biases": ("Qwen3", {"head_dim": 8, "attention_bias": True}),
    "qwen2": ("Qwen2", {}),
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "llama with biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, one key head": ("Llama", {"num_key_value_heads": 1}),
    "llama 3 positions": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "mistral": ("Mistral", {"sliding_window": 9}),
}


def build(kind: str = "qwen3", seed: int = 1) -> Any:
    """A random model; every weight is random, those of norms and biases too."""
    family, changes = KINDS[kind]
    model = tiny(family, seed, **changes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    return model


def listen(model: Any) -> list[int]:
    """A hook on the first layer, which also makes the engine take the modules' way; grows with every pass."""
    heard: list[int] = []
    model.model.layers[0].register_forward_hook(lambda *_: heard.append(1))
    return heard


def turns(engine: LocalEngine, temperature: float = 0.0) -> list[Generation]:
    """Four sessions of unequal lengths, three turns, every response of another length."""
    rng, drawn = np.random.default_rng(0), []
    history = [rng.integers(0, VOCAB, count) for count in (60, 3, 41, 9)]
    for turn in range(3):
        asked = [
            request(str(row), ids, (row, turn), max_new_tokens=4 + 3 * row, temperature=temperature)
            for row, ids in enumerate(history)
        ]
        drawn += engine.generate(asked)
        history = [
            np.concatenate((h, d.ids, rng.integers(0, VOCAB, 5))) for h, d in zip(history, drawn[-4:], strict=True)
        ]
    return drawn


@pytest.mark.parametrize(("kind", "fuse"), [("llama with biases", False), *((kind, True) for kind in KINDS)])
def test_the_same_as_the_modules(kind: str, fuse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense_weights, "FUSE_BYTES", 1 << 28 if fuse else 0)
    model = build(kind)
    assert dense_problem(model) is None
    ours = turns(LocalEngine(model, cache="ragged"), 0.8)
    heard = listen(model)
    theirs = turns(LocalEngine(model, cache="ragged"), 0.8)
    assert heard
    for one, other in zip(ours, theirs, strict=True):
        assert one.ids.tolist() == other.ids.tolist()
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


def test_modules_are_not_called_and_a_hook_takes_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    engine = LocalEngine(model)
    with monkeypatch.context() as patch:
        patch.setattr(type(model.model.layers[0].mlp), "forward", None)
        first = engine.generate([request("a", range(20))])[0]
    history = [*range(20), *first.ids.tolist(), 1, 2, 3]
    heard = listen(model)
    # the cache that the decoder without modules wrote is read by the modules
    assert engine.generate([request("a", history)])[0].ids.tolist() == reference_ids(model, request("a", history))
    assert heard
    assert engine.fed_tokens == 20 + 4


def step(model: Any) -> None:
    """One update of every weight."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.arange(9)[None]).logits.square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("part", "fuse"), [("optimizer", True), ("load", False), ("one norm", True), ("data", True), ("data", False)]
)
def test_new_weights_are_followed(part: str, fuse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense_weights, "FUSE_BYTES", 1 << 28 if fuse else 0)
    model, other = build(), build(seed=2)
    engine, asked = LocalEngine(model), request("a", range(20))
    before = engine.generate([asked])[0].ids.tolist()
    if part == "optimizer":
        step(model)
    elif part == "load":
        model.load_state_dict(other.state_dict())
    elif part == "one norm":
        with torch.no_grad():
            model.model.layers[1].input_layernorm.weight.mul_(-1.0)
    else:
        # what does not count as a change must be announced
        for parameter, new in zip(model.parameters(), other.parameters(), strict=True):
            parameter.data.copy_(new.data)
        engine.weights_changed(1)
    after = engine.generate([asked])[0].ids.tolist()
    assert after == reference_ids(model, asked) != before


def test_modules_that_are_exchanged_are_noticed() -> None:
    class Doubled(torch.nn.Linear):
        def forward(self, values: Any) -> Any:
            return 2.0 * super().forward(values)

    model = build()
    engine, asked = LocalEngine(model), request("a", range(20))
    before = engine.generate([asked])[0].ids.tolist()
    old = model.model.layers[0].self_attn.v_proj
    model.model.layers[0].self_attn.v_proj = Doubled(old.in_features, old.out_features, bias=False)
    assert "Doubled" in str(dense_problem(model))
    assert engine.generate([asked])[0].ids.tolist() == reference_ids(model, asked) != before


@pytest.mark.parametrize("what", ["another model", "two types", "another activation", "a forward of its own"])
def test_other_models_keep_their_modules(what: str) -> None:
    model = build("llama")
    if what == "another model":
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=9))
    elif what == "two types":
        model.model.norm.half()
    elif what == "another activation":
        model.config.hidden_act = "gelu"
    else:
        model.model.layers[1].forward = model.model.layers[1].forward
    assert dense_problem(model)


def test_logprobs_are_the_trainers_to_five_digits() -> None:
    model, _ = load_policy(str(load_world("alfworld").checkpoint("student")), "auto", "float32")
    assert dense_problem(model) is None
    rng = np.random.default_rng(0)
    asked = [request(str(row), rng.integers(2, 400, 30 + 90 * row), (row,), temperature=1.0) for row in range(4)]
    for one, drawn in zip(asked, LocalEngine(model, max_length=1024).generate(asked), strict=True):
        full = torch.tensor(np.concatenate((one.prompt_ids, drawn.ids))).long()
        with torch.no_grad():
            logp = head(model)(final_states(model, full[None])[0]).float().log_softmax(-1)
        expected = logp[torch.arange(len(one.prompt_ids) - 1, len(full) - 1), torch.tensor(drawn.ids).long()]
        np.testing.assert_allclose(drawn.logprobs, expected.numpy(), atol=1e-5)


def test_sessions_stay_in_their_slots_while_others_decode() -> None:
    engine = LocalEngine(build())
    engine.generate([request(str(row), range(5 + row), max_new_tokens=2 + row % 2) for row in range(6)])
    slots = {name: held.slot for name, held in engine._table.held.items()}
    engine.generate([request(str(row), [*range(5 + row), 1, 2], max_new_tokens=3 - row % 2) for row in range(6)])
    assert {name: held.slot for name, held in engine._table.held.items()} == slots
    # alone for long: rows that have finished are left out of every pass, so nobody has to move
    asked = [request(str(row), [*range(5 + row), 1], max_new_tokens=40 if row == 5 else 2) for row in range(6)]
    with counted_products(engine) as rows:
        engine.generate(asked)
    assert engine._table.held["5"].slot == 5
    assert rows[-30:] == [1] * 30


def test_with_modules_a_long_row_takes_the_slots_of_those_that_have_finished() -> None:
    engine = LocalEngine(build())
    engine._model.dense.ready = lambda: False  # type: ignore[method-assign]
    engine.generate([request(str(row), [*range(5 + row), 1], max_new_tokens=40 if row == 5 else 2) for row in range(6)])
    assert engine._table.held["5"].slot == 0


def test_padding_costs_no_product() -> None:
    engine = LocalEngine(build())
    asked = [request(str(row), range(5 + 9 * row), max_new_tokens=1) for row in range(3)]
    with counted_products(engine) as rows:
        engine.generate(asked)
    assert rows == [5 + 14 + 23]


@contextmanager
def counted_products(engine: LocalEngine) -> Iterator[list[int]]:
    """How many rows of numbers go through the last layer in each pass."""
    with engine._model.evaluating():
        weights = engine._model.dense._weights
    assert weights is not None
    layer, found = weights.layers[-1], []

    @dataclass(frozen=True)
    class Counting:
        inner: Linear

        def __call__(self, values: torch.Tensor) -> torch.Tensor:
            found.append(len(values))
            return self.inner(values)

    layers = (*weights.layers[:-1], replace(layer, qkv=Counting(layer.qkv)))  # type: ignore[arg-type]
    engine._model.dense._weights = replace(weights, layers=layers)
    yield found
    engine._model.dense._weights = weights


def test_segments_by_hand() -> None:
    assert make_key_groups([5, 5, 5], 0) == (KeyGroup(0, 3, 5, True),)
    assert make_key_groups([5, 4, 5], 0) == (KeyGroup(0, 1, 5, True), KeyGroup(1, 2, 4, True), KeyGroup(2, 3, 5, True))
    assert make_key_groups([5, 4, 5], 1) == (KeyGroup(0, 3, 5, False),)
    assert make_key_groups([9, 0, 9, 2], 8) == (KeyGroup(0, 1, 9, True), KeyGroup(2, 4, 9, False))
    assert make_key_groups([9, 0, 9, 2], 9) == (KeyGroup(0, 4, 9, False),)
    assert make_key_groups([9, 0, 9, 2], 6) == (
        KeyGroup(0, 1, 9, True),
        KeyGroup(2, 3, 9, True),
        KeyGroup(3, 4, 2, True),
    )
    assert make_key_groups([0, 3, 0], 99) == (KeyGroup(1, 2, 3, True),)
    assert make_key_groups([1, 9], float("inf")) == (KeyGroup(0, 2, 9, False),)
    assert KeyGroup(1, 2, 3, True).grown(4) == KeyGroup(1, 2, 7, True)


def test_attention_by_segments_is_attention_by_rows() -> None:
    torch.manual_seed(0)
    lengths = [7, 0, 3, 4, 9, 0, 9]
    asked, keys, values = torch.randn(7, 1, 4, 8), torch.randn(7, 2, 9, 8), torch.randn(7, 2, 9, 8)
    mask = torch.zeros(7, 1, 1, 9)
    for row, length in enumerate(lengths):
        mask[row, :, :, length:] = -torch.inf
    for call in (0, 3, 1000):
        told = attention(asked, keys, values, mask, 0.3, make_key_groups(lengths, call))
        for row, length in enumerate(lengths):
            if not length:
                continue
            for query in range(4):
                weight = (keys[row, query // 2, :length] @ asked[row, 0, query] * 0.3).softmax(-1)
                torch.testing.assert_close(told[row, 0, query], weight @ values[row, query // 2, :length])
