"""An answer read as it comes: any cut of it into pieces gives the client the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turngym.agents.proxy.conversation import UNKNOWN, AnswerReader, IncrementalDecoder, reply_of, text_of
from turngym.agents.proxy.turn_records import ChatMessage
from turngym.agents.rendering.chat_settings import build_phrase_tokenizer

CONTROL = ("<|im_end|>", "<|im_start|>", "<s>", "<s>x")


def read(pieces: Sequence[str], **options: Any) -> ChatMessage:
    options = {"control": CONTROL, "salt": "salt", "tools": True} | options
    reader = AnswerReader(**options)
    return reply_of([delta for piece in pieces for delta in reader.feed(piece)] + reader.end())


@pytest.mark.parametrize(
    ("text", "content", "names"),
    [
        ('<tool_call>{"name": "f", "arguments": {}}</tool_call>', "", ["f"]),
        ('a <tool_call>{"name": "f"}</tool_call> b <tool_call>{"name": "g"}</tool_call>', "a  b", ["f", "g"]),
        ('\n a <tool_call>{"name": "f"}</tool_call>\n', "\n a", ["f"]),
        ('<tool_call>{"name": "f", "arguments": {}}', "", ["f"]),  # cut at a stop text
        ("<tool_call>{bad}</tool_call> \n", "<tool_call>{bad}</tool_call> \n", []),
        ('<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', []),
        ('<tool_call>{bad}</tool_call><tool_call>{"name": "f"}', "<tool_call>{bad}</tool_call>", ["f"]),
        ('<think><tool_call>{"name": "f"}</tool_call></think>no', None, []),
        ('<think>hm</think><tool_call>{"name": "f"}</tool_call>', "<think>hm</think>", ["f"]),
        ('<think>open <tool_call>{"name": "f"}</tool_call>', None, []),
        ("2 < 3 <tool", None, []),
        ("plain ", None, []),
    ],
)
def test_calls_in_text(text: str, content: str | None, names: list[str]) -> None:
    for pieces in ([text], list(text)):
        found = read(pieces)
        assert found.content == (text if content is None else content)
        assert [call.name for call in found.tool_calls] == names
        assert len({call.id for call in found.tool_calls}) == len(names)


def test_an_answer_that_begins_inside_a_thought() -> None:
    text = '<tool_call>{"name": "f"}</tool_call></think><tool_call>{"name": "g"}</tool_call>'
    assert [call.name for call in read([text], thinking=True).tool_calls] == ["g"]
    assert [call.name for call in read([text]).tool_calls] == ["f", "g"]


@pytest.mark.parametrize(
    ("text", "stops", "shown"),
    [
        ("one STOP two STOP", ["STOP"], "one "),
        ("one STO", ["STOP"], "one STO"),
        ("abc", ["b", "abc"], "a"),  # the first to be complete, as engines do
        ("xabcd", ["bc", "abc"], "x"),
        ("a<|im_end|>b", [], "ab"),
        ("a<|im_<|im_end|>end|>b", [], "a<|im_end|>b"),
        ("a<s>xb<s>y", [], "aby"),
        ("say <|im_end|>>", [">>"], "say <|im_end|"),
        ("say <|im_end|>> y", [">> x"], "say > y"),
    ],
)
def test_stop_texts_and_control_tokens(text: str, stops: list[str], shown: str) -> None:
    for pieces in ([text], list(text)):
        assert read(pieces, stops=stops, tools=False).content == shown


def test_what_is_certain_comes_at_once() -> None:
    reader = AnswerReader(stops=["STOP"], control=CONTROL, tools=True)
    assert [reader.feed(piece) for piece in ("Let", " me", " S", "it ", "<", "b> ", "<tool_")] == [
        *(["Let"], [" me"], [], [" Sit"], [], [" <b>"], [])
    ]
    assert AnswerReader(control=CONTROL).feed("blank ") == ["blank "]


TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_end|>", "<s>")
PARTS = st.sampled_from((*TAGS, '{"name": "f"}', " ", "a", "<", "<|im_", "STOP", "ST", "OP", "x", "é", "\n", "end|>"))


@settings(max_examples=300, deadline=None)
@given(
    parts=st.lists(PARTS, max_size=12),
    cuts=st.lists(st.integers(0, 80), max_size=8),
    stops=st.sampled_from([(), ("STOP",), ("OP", "STOP"), (">", "a<")]),
    tools=st.booleans(),
    thinking=st.booleans(),
)
def test_any_cut_gives_the_same(
    parts: list[str], cuts: list[int], stops: tuple[str, ...], tools: bool, thinking: bool
) -> None:
    text = "".join(parts)
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in pairwise(places)]
    options: dict[str, Any] = {"stops": stops, "tools": tools, "thinking": thinking}
    whole = read([text], **options)
    assert read(pieces, **options) == read(list(text), **options) == whole
    assert not tools or thinking or whole.tool_calls or read([text], **options | {"tools": False}) == whole


@pytest.fixture(scope="module")
def tokenizers(make_tokenizer: Callable[..., Any]) -> list[Any]:
    return [make_tokenizer(), build_phrase_tokenizer(["go to ", "cabinet 3", "é"])]


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_growing_text_is_the_text_and_never_ends_in_half_a_character(tokenizers: list[Any], data: Any) -> None:
    tokenizer = data.draw(st.sampled_from(tokenizers))
    if data.draw(st.booleans()):
        ids = tokenizer(data.draw(st.text(max_size=20)), add_special_tokens=False)["input_ids"]
        valid = True
    else:
        ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=20))
        valid = False

    def decode(some: list[int]) -> str:
        return str(tokenizer.decode(some, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    incremental_decoder = IncrementalDecoder(decode)
    parts = [*map(incremental_decoder.feed, ids), incremental_decoder.end()]
    assert "".join(parts) == incremental_decoder.text == text_of(ids, decode)
    if valid:
        assert incremental_decoder.text == decode(ids)
        if UNKNOWN not in incremental_decoder.text:
            assert not any(UNKNOWN in part for part in parts)


def test_a_character_of_four_bytes_comes_with_its_last(make_tokenizer: Callable[..., Any]) -> None:
    tokenizer = make_tokenizer()
    incremental_decoder = IncrementalDecoder(tokenizer.decode)
    ids = tokenizer("a😀b", add_special_tokens=False)["input_ids"]
    assert [incremental_decoder.feed(token) for token in ids] == ["a", "", "", "", "😀", "b"]


def test_bytes_that_are_no_character_do_not_wait_for_ever(make_tokenizer: Callable[..., Any]) -> None:
    tokenizer = make_tokenizer()
    stray = tokenizer("é", add_special_tokens=False)["input_ids"][1]
    incremental_decoder = IncrementalDecoder(tokenizer.decode)
    assert [incremental_decoder.feed(stray) for _ in range(8)] == [""] * 7 + [UNKNOWN * 8]
