"""Bodies of requests: what is read from good ones and what is said about bad ones."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turngym.core.errors import SettingsError
from turngym.retrieval.http_format import BadRequest, RetrievalServerSettings, SearchRequest, read_request

SMALL = RetrievalServerSettings(max_queries=2, max_query_chars=10, max_topk=5, max_waiting=10)


def read(fields: Any) -> SearchRequest:
    return read_request(json.dumps(fields).encode(), SMALL)


def test_the_forms_of_search_r1() -> None:
    original = read({"queries": ["a", "b"], "topk": 4, "return_scores": True})
    assert original == SearchRequest(queries=("a", "b"), k=4, scores=True)
    assert read({"query": "a", "topk": None}) == SearchRequest(queries=("a",), k=3, scores=False)
    assert read({"queries": ["a"], "topk": 0}).k == 3
    # the original trainer asks this when no episode searches in a turn
    assert read({"queries": [], "topk": 3, "return_scores": True}).queries == ()
    assert read({"queries": [""]}).queries == ("",)


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        (b"", 400, None),
        (b'{"query": "\xff"}', 400, None),
        (b"[" * 100_000, 422, None),
        (b'["a"]', 422, None),
        (b'{"querys": ["a"]}', 422, "querys"),
        (b"{}", 422, "queries"),
        (b'{"query": "a", "queries": ["a"]}', 422, "queries"),
        (b'{"queries": "a"}', 422, "queries"),
        (b'{"queries": ["a", 3]}', 422, "queries[1]"),
        (b'{"query": "\\ud800"}', 400, None),
        (b'{"queries": ["a", "b", "c"]}', 422, "queries"),
        (b'{"query": "abcdefghijk"}', 422, "query"),
        (b'{"query": "a", "topk": 6}', 422, "topk"),
        (b'{"query": "a", "topk": true}', 422, "topk"),
        (b'{"query": "a", "topk": "3"}', 422, "topk"),
        (b'{"query": "a", "return_scores": 1}', 422, "return_scores"),
    ],
)
def test_bad_bodies_are_told_what_is_wrong(body: bytes, status: int, field: str | None) -> None:
    with pytest.raises(BadRequest) as caught:
        read_request(body, SMALL)
    assert (caught.value.status, caught.value.field) == (status, field)
    assert caught.value.as_json() == {"error": str(caught.value), "field": field, "valid": caught.value.valid}


def test_the_valid_range_is_named() -> None:
    with pytest.raises(BadRequest) as caught:
        read({"query": "a", "topk": 6})
    assert caught.value.valid == "1 to 5, or null for 3"
    with pytest.raises(BadRequest) as caught:
        read({"queries": ["a"] * 3})
    assert caught.value.valid.startswith("at most 2 queries")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.dictionaries(st.sampled_from(["queries", "query", "topk", "return_scores", "x"]), JSON, max_size=4)


@given(body=st.binary(max_size=60) | FIELDS.map(lambda fields: json.dumps(fields).encode()))
def test_any_body_is_read_or_refused(body: bytes) -> None:
    refused: BadRequest | None = None
    try:
        asked = read_request(body, SMALL)
    except BadRequest as error:
        refused = error
    if refused is None:
        assert len(asked.queries) <= 2
        assert 1 <= asked.k <= 5
    else:
        assert refused.status in (400, 422)
        json.dumps(refused.as_json())


def test_many_tiny_values_are_refused_before_they_are_made() -> None:
    """Short to write and large to hold; the commas and brackets of a query are no values."""
    defaults = RetrievalServerSettings()
    queries = ['who, "when", [where] and {why}\\ ' * 30] * 2000
    body = json.dumps({"queries": queries}).encode()
    assert len(body) > 1 << 20
    assert read_request(body, defaults).queries == tuple(queries)
    for tiny in (b"[]", b"{}", b"1000", b'"ab", ', b'{"a":1}'):
        with pytest.raises(BadRequest, match="too many values") as caught:
            read_request(b'{"queries": [' + (tiny + b",") * 500_000 + b"1]}", defaults)
        assert caught.value.status == 422


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"topk": 0}, "topk is 0"),
        ({"topk": "3"}, "topk is '3'"),
        ({"cache": -1}, "cache is -1"),
        ({"topk": 9, "max_topk": 5}, "topk is 9"),
        ({"deadline": 0.0}, "deadline is 0.0"),
        ({"window_ms": float("nan")}, "window_ms is nan"),
        ({"max_waiting": 5}, "max_waiting is 5"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(says)):
        RetrievalServerSettings(**settings)
