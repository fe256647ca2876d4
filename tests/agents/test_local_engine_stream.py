"""The local engine says what it draws while it draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the local engine needs turngym[train]")
transformers = pytest.importorskip("transformers", reason="the local engine needs turngym[train]")

from turngym.agents.local_engine.engine import LocalEngine  # noqa: E402
from turngym.envs.core.protocols import GenerateRequest, Sampling, StreamingPolicy  # noqa: E402


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(1)
    size = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.25}
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**size, **heads, eos_token_id=None)).eval()


def request(session: str, room: int, temperature: float = 1.0) -> GenerateRequest:
    sampling = Sampling(temperature=temperature, max_new_tokens=room)
    return GenerateRequest(
        session=session, prompt_ids=np.array([3, 1, 4], np.int32), sampling=sampling, stream=(7, len(session))
    )


def hearing(log: list[tuple[str, int, float]], name: str, enough: int = 99) -> Callable[[int, float], bool]:
    def watch(token: int, logprob: float) -> bool:
        log.append((name, token, logprob))
        return sum(heard == name for heard, _, _ in log) < enough

    return watch


@pytest.mark.parametrize("cache", ["ragged", "recompute"])
def test_watches_hear_every_id_in_order_and_change_nothing(model: Any, cache: Any) -> None:
    engine = LocalEngine(model, cache=cache)
    assert isinstance(engine, StreamingPolicy)
    requests = [request("a", 5), request("bb", 9), request("ccc", 3, temperature=0.0)]
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


def test_rows_of_a_batch_are_heard_side_by_side(model: Any) -> None:
    log: list[tuple[str, int, float]] = []
    LocalEngine(model).stream([request("a", 3), request("bb", 3)], [hearing(log, "a"), hearing(log, "bb")])
    assert [name for name, _, _ in log] == ["a", "bb"] * 3


def test_a_watch_that_wants_no_more_ends_its_row_alone(model: Any) -> None:
    engine = LocalEngine(model)
    requests = [request("a", 8), request("bb", 8)]
    whole = engine.generate(requests)
    log: list[tuple[str, int, float]] = []
    cut, other = engine.stream(requests, [hearing(log, "a", enough=3), None])
    assert (cut.finish, cut.ids.tolist()) == ("aborted", whole[0].ids[:3].tolist())
    assert (other.finish, other.ids.tolist()) == ("length", whole[1].ids.tolist())
    again = engine.generate([requests[0]])[0]  # what is cached of an aborted row is right
    assert again.ids.tolist() == whole[0].ids.tolist()


def test_a_row_that_ends_by_itself_is_not_aborted(model: Any) -> None:
    engine = LocalEngine(model)
    (found,) = engine.stream([request("a", 2)], [hearing([], "a", enough=2)])
    assert found.finish == "length"


def test_one_watch_per_request(model: Any) -> None:
    with pytest.raises(ValueError, match="zip"):
        LocalEngine(model).stream([request("a", 2)], [])
