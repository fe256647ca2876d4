"""The session's transitions and the original's quirks, each with its switch."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shop_session import ShopSession

from turngym.core.errors import TurngymError
from turngym.envs.webshop.actions import COMPAT, Quirks, canonical, parse_action
from turngym.envs.webshop.actions import click_action as click
from turngym.envs.webshop.actions import search_action as search
from turngym.envs.webshop.env import History, WebShopEnv
from turngym.envs.webshop.session import Kind, SessionState, route, url
from turngym.envs.webshop.shop import Shop


def walk(shop: Shop, *actions: str, quirks: Quirks = COMPAT["webshop"]) -> ShopSession:
    session = ShopSession(shop, quirks=quirks)
    for action in actions:
        session.step(action)
    return session


def labels(session: ShopSession) -> list[str]:
    return list(session.available()["clickables"])


def test_the_pages_offer_what_the_original_offers(tiny_shop: Shop) -> None:
    session = walk(tiny_shop)
    assert session.available() == {"has_search_bar": True, "clickables": ["search"]}
    session.step("search[lamp]")
    assert labels(session)[:3] == ["back to search", "next >", session.state.found[0].lower()]
    assert (len(labels(session)), len(session.state.found)) == (12, 28)
    session.step("click[next >]")
    assert labels(session)[:3] == ["back to search", "< prev", "next >"]
    session.step(f"click[{session.state.on_page[0].lower()}]")
    pages = ["description", "features", "reviews", "buy now"]
    assert labels(session) == ["back to search", "< prev", *pages]
    session.step("click[reviews]")
    assert labels(session) == ["back to search", "< prev"]
    session.step("click[back to search]")
    session.step("search[mug]")
    session.step("click[mug0000001]")
    assert labels(session)[2:] == [*pages, "blue", 'red "deluxe"', "grün", "small", "large"]
    session.step("click[buy now]")
    assert session.available() == {"has_search_bar": False, "clickables": []}


def test_prev_keeps_options_from_a_sub_page_and_loses_them_to_the_results(tiny_shop: Shop) -> None:
    session = walk(tiny_shop, "search[mug]", "click[mug0000001]", "click[blue]", "click[grün]", "click[small]")
    assert dict(session.state.options) == {"color": "grün", "size": "small"}
    session.step("click[features]")
    session.step("click[< prev]")
    assert (session.state.kind, dict(session.state.options)) == ("item", {"color": "grün", "size": "small"})
    session.step("click[< prev]")
    assert (session.state.kind, session.state.options, session.state.page) == ("results", (), 1)
    assert session.state.visited == {"MUG0000001"}
    session.step("search[lamp]")
    assert session.state.visited == {"MUG0000001"}
    session.step("click[back to search]")
    assert (session.state.visited, session.state.keywords) == (frozenset(), ())


def test_prev_from_a_product_returns_to_its_page_of_results(tiny_shop: Shop) -> None:
    session = walk(tiny_shop, "search[lamp]", "click[next >]")
    before = session.view.observation
    session.step(f"click[{session.state.on_page[3].lower()}]")
    assert session.step("click[< prev]")[0] == before


@pytest.mark.parametrize(
    "action", ["", "click[nonsense]", "Click[blue]", "say: click[blue]", "search[]", "click[search]"]
)
def test_what_is_not_understood_changes_nothing(tiny_shop: Shop, action: str) -> None:
    session = walk(tiny_shop, "search[jug]", "click[odd0000001]")
    before = session.state
    assert session.step(action) == (session.view.observation, 0.0, False)
    assert session.state == before


def test_search_works_on_every_page_and_after_the_end(tiny_shop: Shop) -> None:
    session = walk(tiny_shop, "search[mug]", "click[mug0000001]", "click[blue]", "search[lamp]")
    assert (session.state.kind, session.state.asin, session.state.options) == ("results", None, ())
    session.step(f"click[{session.state.on_page[0].lower()}]")
    assert session.step("click[buy now]")[2] is True
    assert session.step("click[back to search]")[2] is False
    assert session.state.kind == "done"
    assert session.step("search[mug]")[1:] == (0.0, False)
    assert session.state.kind == "results"
    assert session.step("search[ ]")[0].endswith("Back to Search [SEP] Page 1 (Total results: 0) [SEP] Next >")


def test_a_value_that_reads_like_a_button_is_one(tiny_shop: Shop) -> None:
    start = ("search[jug]", "click[odd0000001]")
    assert walk(tiny_shop, *start, "click[description]").state.sub == "Description"
    assert walk(tiny_shop, *start, "click[< prev]").state.kind == "results"
    assert walk(tiny_shop, *start, "click[buy now]").state.kind == "done"
    assert dict(walk(tiny_shop, *start, "click[next >]").state.options) == {"style": "next >"}
    plain = COMPAT["repaired"]
    assert dict(walk(tiny_shop, *start, "click[buy now]", quirks=plain).state.options) == {"style": "buy now"}
    assert dict(walk(tiny_shop, *start, "click[< prev]", quirks=plain).state.options) == {"finish": "< prev"}


def test_of_two_options_with_the_same_value_the_last_gets_it(tiny_shop: Shop) -> None:
    session = walk(tiny_shop, "search[jug]", "click[odd0000001]", "click[same]")
    assert dict(session.state.options) == {"finish": "same"}
    assert labels(session) == [
        *("back to search", "< prev", "description", "features", "reviews", "buy now"),
        *("search", "same", "", "a[b", "next >"),
    ]
    assert session.view.admissible == (
        *("click[back to search]", "click[< prev]", "click[description]", "click[features]", "click[reviews]"),
        *("click[buy now]", "click[same]", "click[next >]"),
    )


def test_a_query_that_names_a_page_misroutes_prev(tiny_shop: Shop) -> None:
    item = ("search[mug search_results]", "click[mug0000001]")
    session = walk(tiny_shop, *item, "click[< prev]")
    assert session.view.observation.endswith("Back to Search [SEP] Page 0 (Total results: 1) [SEP] Next >")
    assert walk(tiny_shop, *item, "click[< prev]", "click[next >]").state.on_page == ("MUG0000001",)
    assert walk(tiny_shop, *item, "click[features]", "click[< prev]").state.page == 0
    assert walk(tiny_shop, "search[mug item_page]", item[1], "click[features]", "click[< prev]").state.kind == "results"
    odd = walk(tiny_shop, "search[jug search_results]", "click[odd0000001]", "click[next >]")
    assert (odd.state.kind, odd.state.page) == ("results", 2)
    plain = COMPAT["repaired"]
    assert walk(tiny_shop, *item, "click[< prev]", quirks=plain).state.page == 1
    assert walk(tiny_shop, *item, "click[features]", "click[< prev]", quirks=plain).state.kind == "item"


def test_next_leads_beyond_the_end(tiny_shop: Shop) -> None:
    session = walk(tiny_shop, "search[lamp]", *["click[next >]"] * 4)
    assert session.view.observation.endswith("Page 5 (Total results: 28) [SEP] < Prev [SEP] Next >")
    last = walk(tiny_shop, "search[lamp]", "click[next >]", "click[next >]", quirks=COMPAT["repaired"])
    assert (len(last.state.on_page), "next >" in labels(last)) == (8, False)


def test_backdoors_only_when_asked_for(tiny_shop: Shop) -> None:
    assert walk(tiny_shop, "search[<q> lamps]").state.found == walk(tiny_shop, "search[q lamps]").state.found
    open_door = replace(COMPAT["webshop"], backdoors=True)
    assert len(walk(tiny_shop, "search[<q> lamps]", quirks=open_door).state.found) == 28
    assert len(walk(tiny_shop, "search[<c> kitchen]", quirks=open_door).state.found) == 30
    drawn = walk(tiny_shop, "search[<r>]", quirks=open_door).state.found
    assert (len(set(drawn)), drawn) == (30, walk(tiny_shop, "search[<r>]", quirks=open_door).state.found)
    assert drawn != walk(tiny_shop, "search[<r>]", "search[<r>]", quirks=open_door).state.found
    for query in ("<a> tea", "<c>"):
        assert walk(tiny_shop, f"search[{query}]", quirks=open_door).state.found == ()


def test_history_stands_in_front_oldest_first(tiny_shop: Shop) -> None:
    env = WebShopEnv(shop=tiny_shop, num_prev_obs=1, num_prev_actions=2, strict_admissible=False)
    alone = ShopSession(tiny_shop)
    first, _ = env.reset(options={"task": f"{tiny_shop.profile.name}/0"})
    second, third = (alone.step(action)[0] for action in ("search[mug]", "click[mug0000001]"))
    assert env.step("search[Mug]")[0] == f"{first} [SEP] search[mug] [SEP] {second}"
    assert env.step("click[mug0000001]")[0] == f"search[mug] [SEP] {second} [SEP] click[mug0000001] [SEP] {third}"
    assert env.step("nonsense")[0] == f"click[mug0000001] [SEP] {third} [SEP] nonsense [SEP] {third}"
    longer = History(3, 1)
    longer.begin("a")
    assert [longer.step(str(number), text) for number, text in enumerate("bcd")] == [
        "a [SEP] 0 [SEP] b",
        "a [SEP] b [SEP] 1 [SEP] c",
        "a [SEP] b [SEP] c [SEP] 2 [SEP] d",
    ]


def test_wrong_settings_are_errors(tiny_shop: Shop) -> None:
    with pytest.raises(TurngymError, match=r"compat is 'webshpo'; .*Did you mean 'webshop'"):
        WebShopEnv(shop=tiny_shop, compat="webshpo")
    with pytest.raises(TurngymError, match="observation_mode is 'rich'"):
        WebShopEnv(shop=tiny_shop, observation_mode="rich")
    with pytest.raises(TurngymError, match="num_prev_obs is -1"):
        WebShopEnv(shop=tiny_shop, num_prev_obs=-1)


WORDS = st.sampled_from(["mug", "search_results", "item_page", "xitem_sub_pagex", "done", "search", "results", "a/b"])


@given(
    kind=st.sampled_from(["results", "item", "sub"]),  # no other page asks for its route
    keywords=st.lists(WORDS, max_size=3),
    options=st.dictionaries(WORDS, WORDS, max_size=2),
    session=WORDS,
)
def test_routes_are_what_the_url_says(kind: Kind, keywords: list[str], options: dict[str, str], session: str) -> None:
    state = SessionState(
        kind=kind,
        keywords=tuple(keywords),
        page=1,
        asin=None if kind == "results" else "MUG0000001",
        options=tuple(options.items()) if kind != "results" else (),
        sub="Reviews" if kind == "sub" else None,
    )
    names = {"search_results": "results", "item_page": "item", "item_sub_page": "sub", "done": "done"}
    address = url(state, session)
    assert route(state, session) == next(kind for name, kind in names.items() if name in address)


# --- actions are read exactly as the original's pattern reads them, in linear time

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
