"""What strangers send is bounded before work is done: no text takes more than linear time, no list has no end."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from turngym.agents.proxy.api_errors import ApiError
from turngym.agents.proxy.config import ProxySettings
from turngym.agents.proxy.openai_api import MAX_STOP, read_request
from turngym.agents.proxy.turn_records import tool_calls
from turngym.core.redaction import redacted
from turngym.core.strict_json import MAX_VALUES, JsonError, strict_json
from turngym.core.tools import ToolSpec
from turngym.core.user_files import too_many_values
from turngym.envs.channels import make_channel
from turngym.envs.dialects import DIALECTS

SOON = 20.0
"""Seconds that a busy machine may take for what takes one tenth of a second; a quadratic pattern takes hours."""


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ('{"a": [1, 2, {"b": "c, d"}]}', 4),
        (r'["\"", "\\", ",[{", "\\\",", "a"]', 5),
        ('["a', 1),
        ('["\\', 1),
        (r'["\\\\", 1]', 2),
        ('"' * 7 + ",", 0),
        ("", 0),
    ],
)
def test_values_are_counted_outside_of_texts(text: str, values: int) -> None:
    marks = values if text.startswith(("{", "[")) else 0
    count = next(most for most in range(99) if not too_many_values(text.encode(), most))
    assert abs(count - marks) <= 1
    with_strings = json.dumps({"x": ["," * 99, "[{" * 99, '"\\' * 50]})
    assert not too_many_values(with_strings.encode(), 4)


BODIES = {
    "a text without an end": b'["' + b"," * (MAX_VALUES + 1) + b'\\"' * 3_000_000,
    "quotes": b'"' * 8_000_000,
    "backslashes": b'["' + b"," * (MAX_VALUES + 1) + b"\\" * 8_000_001,
    "brackets": b"[" * 8_000_000,
    "empty texts": b'"",' * 2_600_000,
}


@pytest.mark.parametrize("kind", BODIES)
def test_the_largest_body_is_refused_at_once(kind: str) -> None:
    begun = time.process_time()
    with pytest.raises(JsonError):
        strict_json(BODIES[kind])
    assert time.process_time() - begun < SOON


PIECES = [
    "://",
    "a://",
    "a-",
    "w_",
    '"key":"\\',
    '"key":"',
    '"key"',
    "'",
    '"',
    "\\",
    '\\"',
    ":",
    "@",
    "://a:",
    "a://a?",
]
PIECES += [" ", "\n", "a=", "sk-", "key=", "://u:p", "token ", "[", "{", ",", "<", "\t:"]


@pytest.mark.parametrize("piece", PIECES)
def test_no_text_makes_the_redactor_slow(piece: str) -> None:
    begun = time.process_time()
    for before in ("", '"', '"key":"', "://", '\\"token\\": \\"'):
        redacted("." + before + piece * (60_000 // len(piece)) + "!")
    assert time.process_time() - begun < SOON


TOOL = ToolSpec(name="act", description="d", argument="action", argument_description="d", examples=("look",))


@pytest.mark.parametrize("channel", ["text", "tool", *(f"tool:{name}" for name in DIALECTS)])
def test_no_answer_makes_a_channel_slow(channel: str) -> None:
    read = make_channel(channel, TOOL)
    starts = [
        "<tool_call>",
        "<|tool_call>call:",
        "<start_function_call>call:",
        "[TOOL_CALLS]",
        "[",
        "<|channel|>",
        "<action>",
    ]
    begun = time.process_time()
    for start in ["", *starts]:
        for piece in (" ", "\n", "<", "{", "[", '"', "\\", "a", "(", "<think>", "call:", "</", "to=", "a.", ", "):
            read.parse(start + piece * (20_000 // len(piece)) + "!")
    assert time.process_time() - begun < 4 * SOON


def request(**fields: Any) -> Any:
    given = {"messages": [{"role": "user", "content": "a"}], **fields}
    return read_request(given, {}, ProxySettings(), "m")


def test_stop_texts_are_short() -> None:
    assert request(stop=["a" * MAX_STOP]).stop == ("a" * MAX_STOP,)
    for stop in ("a" * (MAX_STOP + 1), ["b", "a" * 30_000]):
        with pytest.raises(ApiError, match="stop"):
            request(stop=stop)


def called(arguments: Any, name: str = "f") -> Any:
    call = {"id": "x", "type": "function", "function": {"name": name, "arguments": arguments}}
    return request(
        messages=[{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "user", "content": "b"}]
    )


@pytest.mark.parametrize(
    "arguments",
    [
        '{"a": "\\ud800"}',
        "[" * 500 + "]" * 500,
        '{"a":' * 940 + "1" + "}" * 940,
        "[" * 5000 + "]" * 5000,
        '["\\udfff"]',
    ],
)
def test_json_inside_a_text_is_read_as_strictly_as_the_body(arguments: str) -> None:
    with pytest.raises(ApiError) as found:
        called(arguments)
    assert (found.value.status, found.value.param) == (400, "messages[0].tool_calls[0].function.arguments")


@pytest.mark.parametrize("arguments", ['{"a": "\\u00e9"}', "no JSON {", "", "{'a': 1}", "[1, 2", '"text"', "12"])
def test_what_models_write_stays_as_it_is(arguments: str) -> None:
    assert called(arguments).messages[0].tool_calls[0].arguments == arguments
    assert tool_calls(f"<tool_call>{arguments}</tool_call>", "salt", 0) == []
