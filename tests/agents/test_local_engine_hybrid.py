"""Hybrid models (linear attention or convolutions beside attention) on the local engine, against transformers."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from engine_requests import VOCAB, play, reference_ids, reference_logprobs, request, tiny
from late import late

from turngym.agents.local_engine.cache import CachedSession, HybridCache, StateRows, Step
from turngym.agents.local_engine.engine import LocalEngine

LINEAR = {
    "head_dim": 16,
    "full_attention_interval": 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "layer_types": ["mamba", "attention"] * 2}
LOCAL = {"num_local_experts": 2, "num_experts_per_tok": 1, "shared_intermediate_size": 32}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3.5": ("Qwen3_5Text", LINEAR),
    "qwen3-next": ("Qwen3Next", LINEAR | EXPERTS | {"shared_expert_intermediate_size": 16}),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention"] * 2}),
    "granite": ("GraniteMoeHybrid", MAMBA | LOCAL),
}


def build(kind: str) -> Any:
    """A random model of four layers, every other one attention; weights large enough that greedy choices are clear.

    Not larger: at a range of 0.1, changing every weight by its rounding moves some log-probabilities by 4e-5.
    """
    family, more = KINDS[kind]
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "initializer_range": 0.06}
    return tiny(family, **sizes | more)


@pytest.fixture(scope="module")
def qwen() -> Any:
    return build("qwen3.5")


@pytest.mark.parametrize("kind", late(KINDS, "qwen3.5", "lfm2"))
def test_greedy_equals_generate_on_the_whole_history(kind: str) -> None:
    model = build(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no falling back to recomputation
        engine = LocalEngine(model, max_batch=4)
    played = play(engine, turns=3, sessions=5, temperature=0.0)
    assert len(played) > 9
    for asked, generation in played:
        assert generation.ids.tolist() == reference_ids(model, asked)
        expected = reference_logprobs(model, asked.prompt_ids, generation.ids)
        np.testing.assert_allclose(generation.logprobs, expected, atol=1e-5, rtol=0)


def test_sampled_turns_are_those_of_recomputation(qwen: Any) -> None:
    kept = LocalEngine(qwen, max_batch=4, max_sessions=5)  # rows wait, join, leave, and sessions are evicted
    slow = LocalEngine(qwen, cache="recompute")
    one, other = (play(engine, turns=4, sessions=7, temperature=1.0) for engine in (kept, slow))
    for (_, a), (_, b) in zip(one, other, strict=True):
        assert (a.ids.tolist(), a.finish) == (b.ids.tolist(), b.finish)
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5, rtol=0)


def test_a_turn_feeds_only_what_is_new(qwen: Any) -> None:
    engine = LocalEngine(qwen)
    first = engine.generate([request("a", range(20))])[0]
    history = [*range(20), *first.ids.tolist(), 1, 2, 3]
    fed = [engine.fed_tokens]

    def ask(prompt: list[int]) -> int:
        asked = request("a", prompt)
        assert engine.generate([asked])[0].ids.tolist() == reference_ids(qwen, asked)
        fed.append(engine.fed_tokens)
        return fed[-1] - fed[-2]

    assert ask(history) == 4  # the last drawn id was never fed
    assert ask(history) == 1  # the same prompt again goes on from the state saved before its last id
    assert ask([*history, 9, 9]) == 3  # another answer than the drawn one: the same saved state
    assert ask([*history[:-1], 7, 7]) == len(history) + 1  # rewritten before it: from the start
    assert ask([7]) == 1
    assert ask([7, 8]) == 2


def test_an_answer_cut_in_the_middle_goes_on_from_its_prompt(qwen: Any) -> None:
    """As after a stop text, of which the ids behind it are dropped."""
    engine = LocalEngine(qwen)
    prompts = {name: list(range(start, start + 9)) for name, start in (("a", 0), ("b", 20), ("c", 40))}
    drawn = engine.generate([request(name, prompt) for name, prompt in prompts.items()])
    cut = [
        request(name, [*prompt, *generation.ids[:3].tolist(), 1, 2])
        for (name, prompt), generation in zip(prompts.items(), drawn, strict=True)
    ]
    before = engine.fed_tokens
    for asked, generation in zip(cut, engine.generate(cut), strict=True):
        assert generation.ids.tolist() == reference_ids(qwen, asked)
    assert engine.fed_tokens - before == 3 * 6


def test_long_prompts_are_fed_in_pieces(qwen: Any) -> None:
    rng = np.random.default_rng(2)
    asked = [request(f"s{i}", rng.integers(0, VOCAB, n)) for i, n in enumerate((90, 1, 40, 85, 3, 17))]
    pieces = LocalEngine(qwen, prefill_tokens=7).generate(asked)
    for one, generation in zip(asked, pieces, strict=True):
        assert generation.ids.tolist() == reference_ids(qwen, one)


def test_passes_of_a_turn_are_as_many_as_bits_of_its_longest_suffix(qwen: Any) -> None:
    engine, widths = LocalEngine(qwen), []
    hook = qwen.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    asked = [request(f"s{n}", range(n), max_new_tokens=1) for n in (1, 2, 6, 7, 12, 13)]
    engine.generate(asked)
    hook.remove()
    # bodies of 0, 1, 5, 6, 11 and 12 ids, then everybody's last
    assert widths == [(2, 8), (3, 4), (2, 2), (3, 1), (6, 1)]


def test_training_goes_on_around_generation() -> None:
    model = build("qwen3.5").train()
    engine = LocalEngine(model)
    asked = request("a", range(20))
    engine.generate([asked])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.arange(9)[None]).logits.square().mean().backward()
    optimizer.step()
    assert engine.generate([asked])[0].ids.tolist() == reference_ids(model.eval(), asked)


def test_where_a_session_goes_on() -> None:
    held = CachedSession(slot=0, ids=np.array([5, 6, 7, 8], np.int32), saved_at=2)
    for ids, keys, state in [
        ([5, 6, 7, 8, 9], 4, 4),
        ([5, 6, 7, 8], 3, 2),
        ([5, 6, 7, 9, 9], 3, 2),
        ([5, 6, 9], 2, 2),
        ([5, 6], 1, 0),
        ([5, 9, 7, 8], 1, 0),
        ([1], 0, 0),
    ]:
        prompt = np.array(ids, np.int32)
        assert (held.resume(prompt, recurrent=False), held.resume(prompt, recurrent=True)) == (keys, state)


def test_states_move_grow_and_are_resumed() -> None:
    cache = HybridCache(6, 64, ["linear_attention", "full_attention", "conv"])
    cache.reserve(2, 8)
    at = torch.zeros(2, 1, dtype=torch.int64)

    def step(rows: Any) -> None:
        cache.step = Step(rows=rows, write_rows=at, write_positions=at, length=1)

    step(slice(0, 2))
    assert cache.get_recurrent_state(0) is None
    cache.update_recurrent_state(torch.tensor([[[1.0]], [[2.0]]]), 0)
    first = cache.update_conv_state(torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]]), 2, conv_kernel_size=3)
    assert first.tolist() == [[[0, 0, 0, 1, 2]], [[0, 0, 0, 3, 4]]]
    cache.save([0, 1])
    step(torch.tensor([1]))
    changed = cache.get_conv_state(2)
    assert changed is not None
    changed += 10.0  # in place, on rows that are a copy
    cache.settle()
    step(slice(0, 2))
    conv = cache.get_conv_state(2)
    assert conv is not None
    assert conv.tolist() == [[[0, 1, 2]], [[10, 13, 14]]]
    cache.reserve(4, 8)
    cache.relocate(([0, 1], [1, 0]), 1)
    cache.resume(0, 5, 5)
    assert cache.get_conv_state(2).tolist() == [[[10, 13, 14]], [[0, 1, 2]]]  # type: ignore[union-attr]
    cache.resume(0, 3, 5)
    assert cache.get_conv_state(2).tolist() == [[[0, 3, 4]], [[0, 1, 2]]]  # type: ignore[union-attr]
    cache.resume(1, 0, 0)
    assert cache.get_recurrent_state(0).tolist() == [[[2]], [[0]]]  # type: ignore[union-attr]
    assert cache.nbytes() == 2 * 4 * (1 + 3) * 4  # live and saved, 4 slots, 1 and 3 numbers of 4 bytes; no keys yet
    with pytest.raises(ValueError, match="second state"):
        cache.get_conv_state(2, 1)
    cache.clear()
    assert cache.nbytes() == 0
    assert not cache.has_previous_state()


def test_states_read_by_slice_are_views() -> None:
    state = StateRows(torch.ones(1, 3), 4)
    state.read(slice(1, 3)).fill_(7)
    assert state.live.sum(1).tolist() == [0, 21, 21, 0]
