"""What does an action do in the shop? A session is a small state; each search and click makes the next one.

`play` gives the state after an action; what it shows is in `pages.py`. All of it is as in the original, except where
`Quirks` says otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import chain
from random import Random
from typing import Any, Literal

import msgspec
from msgspec import Struct, structs

from turngym.core.numbers import Number
from turngym.envs.webshop.actions import (
    BACK_TO_SEARCH,
    BUY_NOW,
    CLICK,
    NEXT_PAGE,
    PER_PAGE,
    PREV_PAGE,
    RESULTS_ROUTE,
    SEARCH,
    SUB_PAGES,
    Quirks,
    SubPage,
    Target,
    named,
)
from turngym.envs.webshop.goals import Goal
from turngym.envs.webshop.reward import Reward
from turngym.envs.webshop.shop import RESULTS, Shop

Kind = Literal["search", "results", "item", "sub", "done"]
BASE_URL = "http://127.0.0.1:3000"
_SUB_PAGES: Mapping[str, SubPage] = {name.lower(): name for name in SUB_PAGES}
_ROUTES = ((RESULTS_ROUTE, "results"), ("item_page", "item"), ("item_sub_page", "sub"), ("done", "done"))


class SessionState(Struct, frozen=True, kw_only=True):
    """The state of a session. It is immutable, so it is its own snapshot."""

    kind: Kind = "search"
    keywords: tuple[str, ...] = ()
    """The query, split at single blanks; empty after Back to Search."""
    found: tuple[str, ...] = ()
    """Asins that the query found, best first."""
    page: Number = 0
    """1-based number of the page of results."""
    asin: str | None = None
    options: tuple[tuple[str, str], ...] = ()
    """(name, value) pairs in the order in which the names were first chosen."""
    sub: SubPage | None = None
    """Label of the sub-page that is open."""
    visited: frozenset[str] = frozenset()
    """Asins opened since the last Back to Search."""
    searches: Number = 0
    """Searches so far: the stream of `<r>`."""
    reward: Reward | None = None
    """Reward of the last purchase."""

    @property
    def has_search_bar(self) -> bool:
        return self.kind == "search"

    @property
    def on_page(self) -> tuple[str, ...]:
        """The asins on this page of results. Page 0, which url_routing can reach, is empty as in the original."""
        return self.found[(self.page - 1) * PER_PAGE : self.page * PER_PAGE] if self.page > 0 else ()

    def record(self) -> dict[str, Any]:
        """The state in types of JSON."""
        record: dict[str, Any] = msgspec.to_builtins(self, order="deterministic")
        return record

    @classmethod
    def read(cls, record: Any, shop: Shop) -> SessionState:
        """The state that `record` wrote. Raises a ValueError for one that no play in `shop` leads to."""
        state = msgspec.convert(record, cls)
        lacks_product = state.kind in ("item", "sub", "done") and state.asin is None
        if lacks_product or (state.kind == "sub" and not state.sub) or (state.kind == "done" and not state.reward):
            raise ValueError(f"the page {state.kind!r} lacks its product, its sub-page or its reward")
        for asin in (*state.found, *state.visited, *(() if state.asin is None else (state.asin,))):
            if shop.products.row(asin) is None:
                raise ValueError(f"product {asin!r} is not in the shop")
        return state


def play(
    shop: Shop,
    goal: Goal,
    quirks: Quirks,
    state: SessionState,
    parsed: tuple[str, str] | None,
    clickables: Mapping[str, Target],
    session: str = "",
) -> SessionState | None:
    """The state after one action; None if it changes nothing. As in the original, searches work on every page.

    Args:
        parsed: verb and argument; None: no action was found.
        clickables: label on the page, in lower case -> what a click on it means.
        session: part of the page's address, in which Next and Prev look for the kind of page (`Quirks.url_routing`).
    """
    if parsed is None:
        return None
    name, argument = parsed
    if name == SEARCH:
        keywords = tuple(argument.split(" "))
        found = _backdoor(shop, goal, state, keywords) if quirks.backdoors else None
        if found is None:
            found = shop.search(argument)
        return structs.replace(_results(state, 1), keywords=keywords, found=found, searches=state.searches + 1)
    if name == CLICK and (label := named(argument, clickables, quirks)) is not None:
        return _click(shop, goal, quirks, state, label, clickables[label], session)
    return None


def _click(
    shop: Shop, goal: Goal, quirks: Quirks, state: SessionState, label: str, target: Target, session: str
) -> SessionState:
    """The state after a click on `label`, which stands for `target`."""
    if target[0] == "link":
        return structs.replace(state, kind="item", asin=target[1], visited=state.visited | {target[1]})
    # with nav_values the label decides first, so an option value that reads like a button acts as that button
    if target[0] == "option" and not quirks.nav_values:
        return _choose(state, target[1], label)
    if label == BUY_NOW.lower():
        assert state.asin is not None
        return structs.replace(state, kind="done", reward=shop.reward(goal, state.asin, dict(state.options)))
    if label == BACK_TO_SEARCH.lower():
        return SessionState(searches=state.searches, reward=state.reward)
    if label in (NEXT_PAGE.lower(), PREV_PAGE.lower()):
        forward = label == NEXT_PAGE.lower()
        kind = route(state, session) if quirks.url_routing else state.kind
        if kind == "results":
            return _results(state, state.page + (1 if forward else -1))
        if kind == "sub" and not forward:
            return structs.replace(state, kind="item", sub=None)
        if kind == "item" and not forward:
            return _results(state, state.page)
        # elsewhere Next and Prev mean nothing; the label may still be an option's value
    if label in _SUB_PAGES:
        return structs.replace(state, kind="sub", sub=_SUB_PAGES[label])
    return _choose(state, target[1], label) if target[0] == "option" else structs.replace(state, kind="item", sub=None)


def _results(state: SessionState, page: int) -> SessionState:
    return structs.replace(state, kind="results", page=page, asin=None, options=(), sub=None)


def _choose(state: SessionState, name: str, value: str) -> SessionState:
    options = {**dict(state.options), name: value}
    return structs.replace(state, kind="item", options=tuple(options.items()))


def _backdoor(shop: Shop, goal: Goal, state: SessionState, keywords: tuple[str, ...]) -> tuple[str, ...] | None:
    """The products that a backdoor query asks for; None for an ordinary query.

    `<r>` draws from a stream of its own (goal and number of the search), not from a global one; `<a>` and a `<c>`
    without category, which are exceptions in the original, find nothing.
    """
    key, others = keywords[0], keywords[1:]
    if key == "<r>":
        products = shop.products
        # a str as seed goes through SHA-512: the same draw in every process
        rows = Random(f"{goal.index}:{state.searches}").sample(range(len(products)), min(RESULTS, len(products)))
        return tuple(products[row].asin for row in rows)
    if key == "<c>":
        wanted = others[0].strip() if others else None
        return tuple(product.asin for product in shop.products if product.category == wanted)
    if key == "<q>":
        wanted = " ".join(others).strip()
        return tuple(product.asin for product in shop.products if product.query == wanted)
    return () if key == "<a>" else None


def url(state: SessionState, session: str) -> str:
    """The address of the page in the original's scheme."""
    if state.kind == "search":
        return f"{BASE_URL}/{session}"
    options = dict(state.options)
    if state.kind == "done":
        return f"{BASE_URL}/done/{session}/{state.asin}/{options}"
    words = "+".join(state.keywords)
    if state.kind == "results":
        return f"{BASE_URL}/search_results/{session}/{words}/{state.page}"
    if state.kind == "sub":
        return f"{BASE_URL}/item_sub_page/{session}/{state.asin}/{words}/{state.page}/{state.sub}/{options}"
    # JSON here and str() above, as in the original: text_rich looks for chosen options between double quotes
    return f"{BASE_URL}/item_page/{session}/{state.asin}/{words}/{state.page}/{json.dumps(options)}"


def route(state: SessionState, session: str) -> str:
    """The kind of page that the original takes this one for: the first of its names that occurs in the URL.

    None of the names has a character that joins the parts of a URL, so the parts are searched instead.
    """
    if state.kind == "search":
        return state.kind
    parts = (session, state.asin or "", *state.keywords, *chain.from_iterable(state.options))
    for name, kind in _ROUTES:
        if kind == state.kind or any(name in part for part in parts):
            return kind
    return state.kind
