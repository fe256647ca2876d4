"""The local engine against transformers itself: same greedy ids, same log-probabilities, whatever the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from engine_requests import EOS, VOCAB, play, reference_ids, reference_logprobs, request, tiny

from turngym.agents.local_engine import model as prefill
from turngym.agents.local_engine.engine import LocalEngine
from turngym.core.protocols import GenerateRequest, Generation, StreamingPolicy

GROUPED = {"head_dim": 8}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", GROUPED),
    "llama": ("Llama", GROUPED),
    "gpt2": ("GPT2", {}),
    "qwen3-mixed": ("Qwen3", GROUPED | SLIDING | {"use_sliding_window": True, "max_window_layers": 1}),
    "mistral": ("Mistral", GROUPED | {"sliding_window": 9}),
    "gemma2": ("Gemma2", GROUPED | SLIDING | {"attn_implementation": "eager"}),
    "mixtral": ("Mixtral", GROUPED | {"num_local_experts": 3, "num_experts_per_tok": 2}),
}


def build(kind: str, **changes: Any) -> Any:
    """A random model of two layers; weights large enough that greedy choices are clear."""
    family, more = MODELS[kind]
    return tiny(family, 1, **{"initializer_range": 0.25} | more | changes)


@pytest.fixture(scope="module")
def qwen3() -> Any:
    return build("qwen3")


def same(one: Sequence[Generation], other: Sequence[Generation]) -> None:
    for a, b in zip(one, other, strict=True):
        assert a.ids.tolist() == b.ids.tolist()
        assert a.finish == b.finish
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gpt2", "qwen3-mixed", "mistral", "gemma2", "mixtral"])
def test_greedy_equals_generate_on_the_whole_history(kind: str) -> None:
    model = build(kind)
    played = play(LocalEngine(model, max_batch=4, cache="ragged"), turns=3, sessions=5, temperature=0.0)
    assert len(played) > 9
    for asked, generation in played:
        assert generation.ids.tolist() == reference_ids(model, asked)
        expected = reference_logprobs(model, asked.prompt_ids, generation.ids)
        np.testing.assert_allclose(generation.logprobs, expected, atol=1e-4)
        ended = generation.ids[-1] in EOS
        assert generation.finish == ("stop" if ended else "length")
        assert ended or len(generation.ids) == asked.sampling.max_new_tokens


def test_logprobs_are_those_of_the_sampled_ids_at_their_temperature(qwen3: Any) -> None:
    for asked, generation in play(LocalEngine(qwen3, max_batch=4), turns=3, sessions=6, temperature=0.7):
        expected = reference_logprobs(qwen3, asked.prompt_ids, generation.ids, 0.7)
        np.testing.assert_allclose(generation.logprobs, expected, atol=1e-4)


def test_results_depend_on_the_request_alone(qwen3: Any) -> None:
    played = play(LocalEngine(qwen3, max_batch=16), turns=4, sessions=7, temperature=1.0)
    asked, expected = [one for one, _ in played], [generation for _, generation in played]
    alone = LocalEngine(qwen3, max_batch=1)
    same([alone.generate([one])[0] for one in asked], expected)
    fresh = LocalEngine(qwen3, max_batch=3, max_sessions=4)
    order = np.random.default_rng(5).permutation(len(asked))
    shuffled = fresh.generate([asked[i] for i in order])
    same(shuffled, [expected[i] for i in order])


def test_mixed_temperatures_in_one_batch(qwen3: Any) -> None:
    asked = [request(f"s{i}", [1 + i, 2, 3], (i,), temperature=t) for i, t in enumerate((0.0, 1.0, 0.0, 0.3))]
    same(LocalEngine(qwen3).generate(asked), [LocalEngine(qwen3).generate([one])[0] for one in asked])


def test_a_turn_feeds_only_what_is_new(qwen3: Any) -> None:
    engine = LocalEngine(qwen3)
    first = engine.generate([request("a", range(20))])[0]
    assert engine.fed_tokens == 20
    history = [*range(20), *first.ids.tolist(), 1, 2, 3]
    engine.generate([request("a", history)])
    assert engine.fed_tokens == 20 + 4  # the last drawn id was never fed
    engine.generate([request("a", history)])
    assert engine.fed_tokens == 20 + 4 + 1  # the same prompt again: only its last id, for its logits
    engine.generate([request("a", [*range(10), 7, 7])])
    assert engine.fed_tokens == 20 + 4 + 1 + 2  # rewritten history: from where it differs


def test_rewritten_history_is_right(qwen3: Any) -> None:
    engine = LocalEngine(qwen3)
    engine.generate([request("a", range(30)), request("b", range(5))])
    for prompt in ([*range(12), 50, 51, *range(9)], [9], [*range(30)], [9, 9, 9, 9]):
        asked = request("a", prompt)
        assert engine.generate([asked])[0].ids.tolist() == reference_ids(qwen3, asked)


def test_two_requests_of_one_session_in_a_batch(qwen3: Any) -> None:
    asked = [request("a", [1, 2, 3]), request("a", [1, 2, 3, 4, 5]), request("a", [9]), request("b", [8, 8])]
    for one, generation in zip(asked, LocalEngine(qwen3).generate(asked), strict=True):
        assert generation.ids.tolist() == reference_ids(qwen3, one)


def test_least_recently_used_session_is_evicted_and_recomputed(qwen3: Any) -> None:
    engine = LocalEngine(qwen3, max_batch=2, max_sessions=3)
    for name in ("a", "b", "c", "a", "d"):
        engine.generate([request(name, [1, 2, 3])])
    assert set(engine.sessions) == {"a", "c", "d"}
    fed = engine.fed_tokens
    asked = request("b", [1, 2, 3, 4, 5, 6])
    assert engine.generate([asked])[0].ids.tolist() == reference_ids(qwen3, asked)
    assert engine.fed_tokens == fed + 6
    engine.release("b")
    engine.release("never seen")
    assert "b" not in engine.sessions


def test_long_prompts_are_fed_in_pieces(qwen3: Any) -> None:
    rng = np.random.default_rng(2)
    asked = [request(f"s{i}", rng.integers(0, VOCAB, n)) for i, n in enumerate((90, 1, 40, 85, 3, 17))]
    same(LocalEngine(qwen3, prefill_tokens=7).generate(asked), LocalEngine(qwen3).generate(asked))


def test_long_histories_are_fed_in_pieces_that_see_few_keys(qwen3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [request(f"s{i}", np.random.default_rng(i).integers(0, VOCAB, n)) for i, n in enumerate((90, 88, 60))]
    whole = LocalEngine(qwen3).generate(asked)
    monkeypatch.setattr(prefill, "CELLS", 2000)
    engine = LocalEngine(qwen3)
    seen: list[int] = []

    def watched(cache: Any, ids: Any, positions: Any, step: Any) -> Any:
        seen.append(ids.numel() * step.length if ids.shape[1] > 1 else 0)
        return forward(cache, ids, positions, step)

    forward = engine._model.forward
    monkeypatch.setattr(engine._model, "forward", watched)
    same(engine.generate(asked), whole)
    assert 1000 < max(seen) <= 2000


def test_changed_weights_drop_the_cache() -> None:
    model = build("qwen3")
    engine = LocalEngine(model, policy_version=4)
    asked = request("a", range(20))
    before = engine.generate([asked])[0]
    assert before.policy_version == 4
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.mul_(-1.0)
    engine.weights_changed(5)
    assert engine.sessions == ()
    after = engine.generate([asked])[0]
    assert after.policy_version == 5
    assert after.ids.tolist() == reference_ids(model, asked) != before.ids.tolist()


def test_training_goes_on_around_generation() -> None:
    model = build("llama", attention_dropout=0.5).train()
    model.model.layers[1].eval()
    engine = LocalEngine(model)
    asked = request("a", range(20))
    drawn = engine.generate([asked])[0]
    assert model.training
    assert not model.model.layers[1].training
    model(torch.arange(9)[None]).logits.sum().backward()
    assert drawn.ids.tolist() == reference_ids(model.eval(), asked)


def test_context_limit(qwen3: Any) -> None:
    engine = LocalEngine(qwen3, max_length=24)
    full, over, nearly = engine.generate([request(n, range(k)) for n, k in (("a", 24), ("b", 30), ("c", 21))])
    for generation in (full, over):
        assert generation.ids.tolist() == []
        assert generation.ids.dtype == np.int32
        assert generation.finish == "length"
    assert len(nearly.ids) == 3
    assert nearly.finish == "length"
    whole = LocalEngine(qwen3).generate([request("c", np.arange(250) % VOCAB)])[0]
    assert len(whole.ids) == 6
    assert whole.ids.tolist() == reference_ids(qwen3, request("c", np.arange(250) % VOCAB, max_new_tokens=6))


def drawn_by(session: str, room: int, temperature: float = 1.0) -> GenerateRequest:
    return request(session, [3, 1, 4], (7, len(session)), max_new_tokens=room, temperature=temperature)


def hearing(log: list[tuple[str, int, float]], name: str, enough: int = 99) -> Callable[[int, float], bool]:
    def watch(token: int, logprob: float) -> bool:
        log.append((name, token, logprob))
        return sum(heard == name for heard, _, _ in log) < enough

    return watch


@pytest.mark.parametrize("cache", ["ragged", "recompute"])
def test_watches_hear_every_id_in_order_and_change_nothing(qwen3: Any, cache: Any) -> None:
    engine = LocalEngine(qwen3, cache=cache)
    assert isinstance(engine, StreamingPolicy)
    requests = [drawn_by("a", 5), drawn_by("bb", 9), drawn_by("ccc", 3, temperature=0.0)]
    plain = engine.generate(requests)
    for name in ("a", "bb", "ccc"):
        engine.release(name)
    log: list[tuple[str, int, float]] = []
    watched = engine.stream(requests, [hearing(log, "a"), None, hearing(log, "ccc")])
    for before, now in zip(plain, watched, strict=True):
        assert now.ids.tolist() == before.ids.tolist()
        assert now.finish == before.finish
    for name, generation in (("a", watched[0]), ("ccc", watched[2])):
        heard = [(token, logprob) for one, token, logprob in log if one == name]
        assert [token for token, _ in heard] == generation.ids.tolist()
        assert np.array([logprob for _, logprob in heard], np.float32).tolist() == generation.logprobs.tolist()


def test_rows_of_a_batch_are_heard_side_by_side(qwen3: Any) -> None:
    log: list[tuple[str, int, float]] = []
    LocalEngine(qwen3).stream([drawn_by("a", 3), drawn_by("bb", 3)], [hearing(log, "a"), hearing(log, "bb")])
    assert [name for name, _, _ in log] == ["a", "bb"] * 3


def test_a_watch_that_wants_no_more_ends_its_row_alone(qwen3: Any) -> None:
    engine = LocalEngine(qwen3)
    requests = [drawn_by("a", 8), drawn_by("bb", 8)]
    whole = engine.generate(requests)
    log: list[tuple[str, int, float]] = []
    cut, other = engine.stream(requests, [hearing(log, "a", enough=3), None])
    assert (cut.finish, cut.ids.tolist()) == ("aborted", whole[0].ids[:3].tolist())
    assert (other.finish, other.ids.tolist()) == ("length", whole[1].ids.tolist())
    again = engine.generate([requests[0]])[0]  # what is cached of an aborted row is right
    assert again.ids.tolist() == whole[0].ids.tolist()


def test_a_row_that_ends_by_itself_is_not_aborted(qwen3: Any) -> None:
    engine = LocalEngine(qwen3)
    (found,) = engine.stream([drawn_by("a", 2)], [hearing([], "a", enough=2)])
    assert found.finish == "length"
