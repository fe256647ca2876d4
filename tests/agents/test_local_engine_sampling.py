"""Draws, random streams and stop rules of the local engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from turngym.agents.local_engine.sampling import draw, greedy, uniforms
from turngym.agents.rendering.stop_text import StopText


def test_inverse_cdf_by_hand() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.2, 0.3]])).expand(6, 3)
    uniform = torch.tensor([0.0, 0.499, 0.501, 0.699, 0.701, 0.999], dtype=torch.float64)
    ids, logprobs = draw(logits, torch.ones(6), uniform)
    assert ids.tolist() == [0, 0, 1, 1, 2, 2]
    np.testing.assert_allclose(logprobs.exp().numpy(), [0.5, 0.5, 0.2, 0.2, 0.3, 0.3], atol=1e-6)
    assert logprobs.dtype == torch.float32


def test_temperature_is_in_the_logprob_and_zero_is_greedy() -> None:
    logits = torch.tensor([[0.0, 2.0], [0.0, 2.0], [2.0, 0.0]], dtype=torch.bfloat16)
    ids, logprobs = draw(logits, torch.tensor([0.5, 2.0, 0.0]), torch.full((3,), 0.5, dtype=torch.float64))
    assert ids.tolist() == [1, 1, 0]
    expected = [-np.log1p(np.exp(-4.0)), -np.log1p(np.exp(-1.0)), -np.log1p(np.exp(-2.0))]
    np.testing.assert_allclose(logprobs.numpy(), expected, atol=1e-6)
    assert greedy(logits)[0].tolist() == [1, 1, 0]
    np.testing.assert_allclose(greedy(logits)[1].numpy(), [-np.log1p(np.exp(-2.0))] * 3, atol=1e-6)


def test_impossible_ids_are_never_drawn() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]]).expand(3, 5)
    edges = torch.tensor([0.0, 0.5, 1.0 - 2.0**-40], dtype=torch.float64)
    ids, logprobs = draw(logits, torch.ones(3), edges)
    assert ids.tolist() == [1, 3, 3]
    np.testing.assert_allclose(logprobs.numpy(), np.log(0.5), atol=1e-6)


def test_frequencies_follow_the_distribution() -> None:
    count, vocab = 40_000, 12
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(3)) * 2
    uniform = torch.from_numpy(np.concatenate([uniforms((11, i), 10) for i in range(count // 10)]))
    ids, _ = draw(logits.expand(count, vocab), torch.full((count,), 1.5), uniform)
    expected = (logits / 1.5).softmax(-1).double().numpy() * count
    observed = np.bincount(ids.numpy(), minlength=vocab)
    chi2 = float(((observed - expected) ** 2 / expected).sum())
    assert chi2 < 31.3  # 0.999 quantile of chi-square with 11 degrees of freedom


@given(st.lists(st.integers(0, 2**40), max_size=5), st.integers(0, 40), st.integers(0, 40))
def test_streams_are_prefixes_and_their_own(stream: list[int], short: int, more: int) -> None:
    long = uniforms(stream, short + more)
    np.testing.assert_array_equal(long[:short], uniforms(stream, short))
    assert ((long >= 0) & (long < 1)).all()
    if short:
        assert uniforms([*stream, 1], short)[0] != long[0]


def test_negative_streams_are_an_error() -> None:
    with pytest.raises(ValueError, match="negative"):
        uniforms((3, -1), 2)


def stops_at(tokenizer: Any, text: str, stops: tuple[str, ...]) -> tuple[str, str]:
    """The response up to the first id that completes a stop text, and the rest."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    checker = StopText(tokenizer)
    for count in range(1, len(ids) + 1):
        if checker.hit(ids[:count], stops):
            return tokenizer.decode(ids[:count]), tokenizer.decode(ids[count:])
    return text, ""


def test_stop_text_ends_exactly_where_it_is_complete(make_tokenizer: Any) -> None:
    tokenizer = make_tokenizer()
    for text, stops, head in [
        ("<action>go</action> more", ("</action>",), "<action>go</action>"),
        ("a > b </action", ("</action>",), "a > b </action"),
        ("x</tool_call>y</action>", ("</action>", "</tool_call>"), "x</tool_call>"),
        ("eins … zwei", ("…",), "eins …"),
        ("one\n\ntwo", ("\n\n",), "one\n\n"),
    ]:
        assert stops_at(tokenizer, text, stops)[0] == head


@given(st.text(alphabet="ab<>é ", max_size=30), st.text(alphabet="ab<>é ", min_size=1, max_size=4))
def test_stop_text_equals_decoding_everything(make_tokenizer: Any, text: str, stop: str) -> None:
    tokenizer = make_tokenizer()
    at = text.find(stop)
    assert stops_at(tokenizer, text, (stop,))[0] == (text if at < 0 else text[: at + len(stop)])


def test_stop_text_over_several_ids_and_only_new_text(make_tokenizer: Any) -> None:
    tokenizer = make_tokenizer()
    decoded: list[list[int]] = []

    class Counting:
        def decode(self, ids: Any, **kwargs: Any) -> Any:
            decoded.append(list(ids))
            return tokenizer.decode(ids, **kwargs)

    checker = StopText(Counting())
    ids = tokenizer("x" * 300, add_special_tokens=False)["input_ids"]
    assert not any(checker.hit(ids[:count], ("</action>",)) for count in range(1, 301))
    assert decoded == [[ids[0]]]  # one look at the piece; no id could end the stop text
