"""Actions are read exactly as the original's pattern reads them, in linear time."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turngym.envs.webshop.session import canonical, parse_action
from turngym.envs.webshop.session import click_action as click
from turngym.envs.webshop.session import search_action as search

PATTERN = re.compile(r"(.+)\[(.+)\]")


@pytest.mark.parametrize(
    ("action", "parsed"),
    [
        ("search[Red Shoes]", ("search", "red shoes")),
        ("click[Buy Now] and then some", ("click", "buy now")),
        ("click[ buy now]", ("click", " buy now")),
        ("Action: click[x]", ("Action: click", "x")),
        ("search[]", None),
        ("search[ ]", ("search", " ")),
        ("[x]", None),
        ("click[a[b]", ("click[a", "b")),
        ("click[a]\nclick[b]", ("click", "a")),
        ("click[\ud800]", ("click", "?")),
    ],
)
def test_reading(action: str, parsed: tuple[str, str] | None) -> None:
    assert parse_action(action) == parsed


@given(st.text(alphabet="ab[]\n C", max_size=14))
def test_reading_equals_the_pattern(action: str) -> None:
    match = PATTERN.match(action)
    assert parse_action(action) == (None if match is None else (match[1], match[2].lower()))


@given(st.text(alphabet="ab[]\n Cİ", max_size=14))
def test_the_canonical_form_is_read_the_same(action: str) -> None:
    assert parse_action(canonical(action)) == parse_action(action)
    assert canonical(canonical(action)) == canonical(action)


def test_long_texts_are_quick() -> None:
    assert parse_action("[" * 200_000) is None
    assert parse_action("x[" * 100_000) is None
    assert parse_action("a[" + "]" * 200_000) == ("a", "]" * 199_999)


def test_writing() -> None:
    assert click("Buy Now") == "click[buy now]"
    assert search("a [good]  deal\n for B") == "search[a good deal for b]"
    assert parse_action(search("Lamp [Pack of 2]")) == ("search", "lamp pack of 2")
