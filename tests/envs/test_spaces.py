"""The Unicode text space: membership, seeded samples, batching, pickling."""

from __future__ import annotations

import copy
import pickle

import gymnasium as gym
import pytest
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate
from gymnasium.wrappers.utils import create_zero_array
from hypothesis import given
from hypothesis import strategies as st

from turngym.envs.spaces import UnicodeText, printable

ANY_TEXT = st.text(st.characters(codec=None), max_size=50)
"""Lone surrogates included."""


@given(ANY_TEXT)
def test_every_string_is_inside(text: str) -> None:
    assert text in UnicodeText()


@pytest.mark.parametrize("other", [None, 3, b"bytes", ["list"], ("tuple",)])
def test_nothing_else_is_inside(other: object) -> None:
    assert other not in UnicodeText()


@given(st.integers(0, 2**32 - 1), st.integers(1, 80))
def test_samples_follow_the_seed_and_can_be_encoded(seed: int, length: int) -> None:
    first, second = UnicodeText(length, seed=seed), UnicodeText(length, seed=seed)
    texts = [first.sample() for _ in range(5)]
    assert texts == [second.sample() for _ in range(5)]
    assert all(len(text) <= length for text in texts)
    assert all(text.encode("utf-8") for text in texts if text)


def test_samples_are_varied() -> None:
    space = UnicodeText(seed=0)
    texts = [space.sample() for _ in range(200)]
    assert len(set(texts)) > 150
    letters = set("".join(texts))
    assert {" ", "\n"} & letters, "blanks must occur"
    assert any(ord(letter) > 0xFFFF for letter in letters), "characters beyond the basic plane must occur"


def test_equality_is_by_class_and_sample_length() -> None:
    assert UnicodeText(8) == UnicodeText(8, seed=3)
    assert UnicodeText(8) != UnicodeText(9)
    assert UnicodeText(8) != gym.spaces.Text(8)
    assert hash(UnicodeText(8)) == hash(UnicodeText(8))


def test_pickles_and_copies_continue_the_random_stream() -> None:
    space = UnicodeText(seed=5)
    space.sample()
    for twin in (pickle.loads(pickle.dumps(space)), copy.deepcopy(space)):
        assert twin == space
        assert twin.sample() == copy.deepcopy(space).sample()


def test_batches_are_tuples_of_strings() -> None:
    batch = batch_space(UnicodeText(seed=1), 3)
    assert isinstance(batch, gym.spaces.Tuple)
    sample = batch.sample()
    assert len(sample) == 3
    assert len(set(sample)) == 3, "each place must have a random stream of its own"
    assert list(iterate(batch, ("a", "b", "c"))) == ["a", "b", "c"]
    assert create_empty_array(UnicodeText(), 3) == ("", "", "")
    assert create_zero_array(UnicodeText()) == ""
    assert concatenate(UnicodeText(), ["a", "long " * 100], ("", "")) == ("a", "long " * 100)


def test_bad_arguments_are_errors() -> None:
    with pytest.raises(ValueError, match="sample_length is 0"):
        UnicodeText(0)
    with pytest.raises(ValueError, match="no mask"):
        UnicodeText().sample(mask=(3, None))


@given(ANY_TEXT)
def test_printable_can_be_encoded_and_keeps_sound_text(text: str) -> None:
    result = printable(text)
    result.encode("utf-8")
    assert len(result) == len(text)
    if not any(0xD800 <= ord(letter) <= 0xDFFF for letter in text):
        assert result == text
