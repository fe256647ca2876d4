"""Prefixes that sessions share: fed once, copied to the others, and nothing is said otherwise for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from engine_requests import TINY, VOCAB, reference_ids, request  # noqa: E402

from turngym.agents.local_engine.cache import (  # noqa: E402
    MIN_SECOND_WAVE,
    MIN_SHARED,
    CachedSession,
    SharedPrefix,
    find_shared_prefixes,
)
from turngym.agents.local_engine.engine import LocalEngine  # noqa: E402

SYSTEM = [(7 * n + 3) % VOCAB for n in range(40)]


def build(config: str = "Qwen3", causal: str = "Qwen3", **more: Any) -> Any:
    torch.manual_seed(3)
    sizes = TINY | {"head_dim": 8, "max_position_embeddings": 512}
    made = getattr(transformers, f"{config}Config")(**sizes | more)
    model = getattr(transformers, f"{causal}ForCausalLM")(made).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    return model


def sliding() -> Any:
    """A model that is run with its modules, one layer of which looks back eight ids."""
    return build("Gemma3Text", "Gemma3", sliding_window=8, layer_types=["sliding_attention", "full_attention"])


def ids(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, count).tolist()


def newcomer(slot: int, *prompt: int) -> dict[int, Any]:
    return {slot: np.array(prompt, np.int32)}


@pytest.mark.parametrize("made", [build, sliding])
def test_a_system_prompt_is_fed_once_and_the_answers_are_the_same(made: Callable[[], Any]) -> None:
    model = made()
    engine = LocalEngine(model, max_batch=8)
    asked = [request(str(row), [*SYSTEM, row, *ids(4 + row, row)], max_new_tokens=6) for row in range(6)]
    answers = engine.generate(asked)
    assert engine.fed_tokens == 40 + sum(5 + row for row in range(6))
    for one, answer in zip(asked, answers, strict=True):
        assert answer.ids.tolist() == reference_ids(model, one)
    # sessions that come later take it from any that is still there
    late = request("late", [*SYSTEM, *ids(9, 99)], max_new_tokens=6)
    before = engine.fed_tokens
    assert engine.generate([late])[0].ids.tolist() == reference_ids(model, late)
    assert engine.fed_tokens - before == 9


def test_samples_of_one_task_share_its_whole_prompt_but_its_last_id() -> None:
    model = build()
    engine = LocalEngine(model, max_batch=8)
    prompt = [*SYSTEM, *ids(20, 1)]
    asked = [request(str(row), prompt, (row,), max_new_tokens=8, temperature=1.0) for row in range(8)]
    together = engine.generate(asked)
    assert engine.fed_tokens == 60 + 7
    for one, answer in zip(asked, together, strict=True):
        alone = LocalEngine(model).generate([one])[0]
        assert answer.ids.tolist() == alone.ids.tolist()
        np.testing.assert_allclose(answer.logprobs, alone.logprobs, atol=1e-5)


def test_a_row_that_is_being_decoded_lends_its_prompt() -> None:
    model = build()
    engine = LocalEngine(model, max_batch=2)
    asked = [
        request("long", [*SYSTEM, 1], max_new_tokens=40),
        request("short", ids(5, 2), max_new_tokens=1),
        request("next", [*SYSTEM, 2], max_new_tokens=5),
    ]
    answers = engine.generate(asked)
    assert engine.fed_tokens == 41 + 5 + 1
    assert [answer.ids.tolist() for answer in answers] == [reference_ids(model, one) for one in asked]


def test_nothing_is_taken_from_weights_that_have_changed() -> None:
    model = build()
    engine = LocalEngine(model, max_batch=4)
    engine.generate([request("old", [*SYSTEM, 1])])
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(1.5)
    asked = request("new", [*SYSTEM, 2])
    before = engine.fed_tokens
    assert engine.generate([asked])[0].ids.tolist() == reference_ids(model, asked)
    assert engine.fed_tokens - before == 41


def test_loans_by_hand() -> None:
    far, near = list(range(MIN_SHARED + 4)), list(range(MIN_SHARED + 10))
    held = [CachedSession(7, np.array([*far, 99], np.int32)), CachedSession(9, np.array([*near, 98], np.int32))]
    # the longest of those that hold it, never the last id of the prompt
    assert find_shared_prefixes(newcomer(1, *near, 50), held).now == {1: SharedPrefix(9, MIN_SHARED + 10)}
    assert find_shared_prefixes(newcomer(1, *near), held).now == {1: SharedPrefix(9, MIN_SHARED + 9)}
    # fewer ids than MIN_SHARED are fed
    assert not find_shared_prefixes(newcomer(1, *far[: MIN_SHARED - 1], 50, 51, 52), held).now
    assert not find_shared_prefixes(newcomer(1, *far[:MIN_SHARED]), held).now


def test_one_newcomer_goes_first_and_the_others_wait_where_that_saves_enough() -> None:
    many = {slot: np.array([*range(30), 40 + slot], np.int32) for slot in range(5)}
    assert find_shared_prefixes(many, []).later == {slot: SharedPrefix(0, 30) for slot in range(1, 5)}
    assert MIN_SECOND_WAVE > 2 * 30
    assert not find_shared_prefixes({slot: many[slot] for slot in range(3)}, []).later
    # nobody waits for one who waits, and not for what is held already
    held = [CachedSession(9, np.arange(30, dtype=np.int32))]
    loans = find_shared_prefixes(many, held)
    assert loans.now == {slot: SharedPrefix(9, 30) for slot in range(5)}
    assert not loans.later
