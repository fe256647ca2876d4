"""JSON from outside: what is read, and what is said about the rest."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from malformed import MALFORMED

from turngym.core.strict_json import MAX_DEPTH, MAX_VALUES, JsonError, strict_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(VALUES)
def test_what_can_be_written_is_read(value: object) -> None:
    assert strict_json(json.dumps(value).encode()) == value
    assert strict_json(json.dumps(value, ensure_ascii=False).encode()) == value


@given(st.binary(max_size=60))
def test_bytes_are_json_or_a_json_error(body: bytes) -> None:
    try:
        value = strict_json(body)
    except JsonError:
        return
    assert json.loads(json.dumps(value, allow_nan=False, ensure_ascii=False).encode()) == value


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ("empty", "the body is empty"),
        ("not UTF-8", "the body is not UTF-8: byte 0xff at offset 14"),
        ("surrogates in UTF-8", "not UTF-8: byte 0xed at offset 14"),
        ("half a pair", r"half a surrogate pair \(\\ud800\)"),
        ("NaN", "the body has NaN"),
        ("beyond floats", r"the number 1e999\.\.\., which is beyond"),
        ("many digits", "a number of 5000 digits; at most 400"),
        ("deep", "nested too deeply; at most 64 levels"),
        ("deeper than Python goes", "nested too deeply; at most 64 levels"),
        ("two values", "not JSON: Extra data"),
    ],
)
def test_what_is_wrong_is_said(form: str, said: str) -> None:
    with pytest.raises(JsonError, match=said):
        strict_json(MALFORMED[form])


def test_the_deepest_that_is_read() -> None:
    deepest = b"[" * MAX_DEPTH + b"]" * MAX_DEPTH
    assert strict_json(deepest)
    for open_, close in ((b"[", b"]"), (b'{"a":', b"}")):
        inner = b"1" if open_ != b"[" else b""
        with pytest.raises(JsonError, match="nested too deeply"):
            strict_json(open_ * (MAX_DEPTH + 1) + inner + close * (MAX_DEPTH + 1))


def test_many_tiny_values_are_refused_before_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short to write and large to hold; the commas and brackets of a text are no values."""
    assert len(strict_json(b"[" + b"[]," * (MAX_VALUES // 2 - 1) + b"[]]")) == MAX_VALUES // 2
    code = 'x = [{"a": [1, 2]}, "\\"]' * 60_000
    assert strict_json(json.dumps({"content": code}).encode()) == {"content": code}
    monkeypatch.setattr("json.loads", lambda *_, **__: pytest.fail("it was parsed"))
    for tiny in (b"[]", b"{}", b"1000", b'"ab"', b'{"a":1}'):
        with pytest.raises(JsonError, match="too many values; at most 250000"):
            strict_json(b"[" + (tiny + b",") * 300_000 + b"1]")
