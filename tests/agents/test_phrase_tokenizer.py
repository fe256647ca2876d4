"""The phrase tokenizer: one token per phrase, bytes for the rest, nothing lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turngym.agents.worlds.phrase_tokenizer import build_phrase_tokenizer
from turngym.core.errors import TurngymError

PHRASES = ["You arrive at ", "cabinet 1", "cabinet 12", ". ", "The ", " is closed.", "go to "]
TOKENIZER = build_phrase_tokenizer(PHRASES)


def encode(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False).input_ids


def test_known_text_takes_one_token_per_phrase() -> None:
    tokens = TOKENIZER.convert_ids_to_tokens(encode("You arrive at cabinet 12. The cabinet 12 is closed."))
    assert tokens == ["You arrive at ", "cabinet 12", ". ", "The ", "cabinet 12", " is closed."]


@given(st.text(st.characters(codec="utf-8"), max_size=40).filter(lambda text: "<0x" not in text and "<|" not in text))
def test_any_text_survives(text: str) -> None:
    assert TOKENIZER.decode(encode(text)) == text


def test_the_chat_template_costs_two_tokens_a_message() -> None:
    messages = [{"role": "user", "content": "The "}, {"role": "assistant", "content": "go to cabinet 1"}]
    ids = TOKENIZER.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert TOKENIZER.convert_ids_to_tokens(ids) == [
        *("<|user|>", "The ", "<|end|>"),
        *("<|assistant|>", "go to ", "cabinet 1", "<|end|>"),
        "<|assistant|>",
    ]


def test_the_order_of_phrases_does_not_matter() -> None:
    assert build_phrase_tokenizer(reversed(PHRASES)).get_vocab() == TOKENIZER.get_vocab()


@pytest.mark.parametrize("phrases", [[], ["a", "<|end|>"]])
def test_bad_phrases_are_refused(phrases: list[str]) -> None:
    with pytest.raises(TurngymError, match="phrases"):
        build_phrase_tokenizer(phrases)
