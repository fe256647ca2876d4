"""What does an action do in the shop? A session is a small state; each search and click makes the next one.

`play` gives the state after an action, `page_of` what the state shows: the visible pieces of text (`nodes`) and what
can be clicked (`clickables`). All of it is as in the original, except where `Quirks` says otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
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
    SEARCH_BUTTON,
    SUB_PAGES,
    Quirks,
    SubPage,
    Target,
    item_buttons,
    item_clickables,
    named,
)
from turngym.envs.webshop.goals import Goal
from turngym.envs.webshop.products import Product
from turngym.envs.webshop.reward import Reward
from turngym.envs.webshop.shop import Shop

Kind = Literal["search", "results", "item", "sub", "done"]
BASE_URL = "http://127.0.0.1:3000"
MOST_RESULTS = 50
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
        for known in (*state.found, *state.visited, *(() if state.asin is None else (state.asin,))):
            if shop.products.row(known) is None:
                raise ValueError(f"product {known!r} is not in the shop")
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
    key, rest = keywords[0], keywords[1:]
    if key == "<r>":
        products = shop.products
        # a str as seed goes through SHA-512: the same draw in every process
        rows = Random(f"{goal.index}:{state.searches}").sample(range(len(products)), min(MOST_RESULTS, len(products)))
        return tuple(products[row].asin for row in rows)
    if key == "<c>":
        wanted = rest[0].strip() if rest else None
        return tuple(product.asin for product in shop.products if product.category == wanted)
    if key == "<q>":
        wanted = " ".join(rest).strip()
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


# --- pages as data

Role = Literal["text", "button", "option", "link"]
Node = tuple[Role, str]
"""One visible piece of text and what it is: plain, a button's label, an option's value, an asin to click."""
RATING = "Rating: N.A."
"""The original has no ratings and no reviews."""
# white space of HTML, less than str.strip() takes: a no-break space is text
_BLANKS = " \t\n\f\r"


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Everything a page shows, ready for any renderer."""

    kind: Kind
    instruction: str
    session: str
    state: SessionState
    keywords: tuple[str, ...] = ()
    number: int = 0
    total: int = 0
    has_next: bool = True
    products: tuple[Product, ...] = ()
    """Products on this page of results."""
    product: Product | None = None
    """Product of item pages and sub-pages."""
    asin: str = ""
    options: Mapping[str, str]
    """Chosen so far."""
    sub: str = ""
    visited: frozenset[str] = frozenset()
    score: float = 0.0
    show_attributes: bool = False

    @property
    def url(self) -> str:
        return url(self.state, self.session)


def page_of(
    shop: Shop,
    goal: Goal,
    state: SessionState,
    session: str,
    *,
    show_attributes: bool = False,
    endless_pages: bool = True,
) -> Page:
    """The page that `state` shows.

    Args:
        session: the session's id, which is part of the page's address.
        endless_pages: whether Next is there on the last page of results, too (`Quirks.endless_pages`).
    """
    on_page = state.on_page if state.kind == "results" else ()
    return Page(
        kind=state.kind,
        instruction=goal.instruction_text,
        session=session,
        state=state,
        keywords=state.keywords,
        number=state.page,
        total=len(state.found),
        has_next=endless_pages or state.page * PER_PAGE < len(state.found),
        products=tuple(found for asin in on_page if (found := shop.product(asin)) is not None),
        product=shop.product(state.asin) if state.kind in ("item", "sub") and state.asin is not None else None,
        asin=state.asin or "",
        options=dict(state.options),
        sub=state.sub or "",
        visited=state.visited,
        score=state.reward.total if state.reward is not None else 0.0,
        show_attributes=show_attributes,
    )


def nodes(page: Page) -> Iterator[Node]:
    """The visible pieces of text in page order, as an HTML parser finds them in the original's page."""
    return chain.from_iterable(parts(page))


def parts(page: Page) -> list[tuple[Node, ...]]:
    """`nodes` as what changes from page to page, and what is shown of each product."""
    if page.kind == "done":
        return [tuple(("text", text) for text in done_texts(page.asin, page.options, page.score))]
    found = [head_nodes(page), *map(result_nodes, page.products)]
    if page.product is not None:
        found.append(product_nodes(page.product, page.sub if page.kind == "sub" else None, page.show_attributes))
    return found


# of products, which are shown again and again


@lru_cache(maxsize=4096)
def result_nodes(product: Product) -> tuple[Node, ...]:
    """One product in the list of results."""
    return (*visible("link", product.asin), *visible("text", product.title), *visible("text", product.price_text))


@lru_cache(maxsize=4096)
def product_nodes(product: Product, sub: str | None, show_attributes: bool) -> tuple[Node, ...]:
    """A product's own page below the navigation, or the body of its sub-page; Reviews has none."""
    if sub is not None:
        return tuple(node for text in sub_texts(product, sub) for node in visible("text", text))
    options: list[Node] = []
    for name, values in product.options.items():
        options += [*visible("text", name), *(node for value in values for node in visible("option", value))]
    buttons: list[Node] = [("button", label) for label in item_buttons(show_attributes)]
    price = f"Price: {product.price_text}"
    return (*options, *visible("text", product.title), ("text", price), ("text", RATING), *buttons)


def head_nodes(page: Page) -> tuple[Node, ...]:
    """The instruction and the buttons that lead away."""
    return _head(page.kind, page.instruction, page.number, page.total, page.has_next)


# what is seen and what can be clicked both begin with it
@lru_cache(maxsize=1024)
def _head(kind: Kind, instruction: str, number: int, total: int, has_next: bool) -> tuple[Node, ...]:
    if kind == "search":
        start: tuple[Node, ...] = (("text", "WebShop"), ("text", "Instruction: "))
        return (*start, *visible("text", instruction), ("button", SEARCH_BUTTON))
    found: list[Node] = [("text", "Instruction:"), *visible("text", instruction), ("button", BACK_TO_SEARCH)]
    if kind == "results":
        found.append(("text", f"Page {number} (Total results: {total})"))
    if kind != "results" or number > 1:
        found.append(("button", PREV_PAGE))
    if kind == "results" and has_next:
        found.append(("button", NEXT_PAGE))
    return tuple(found)


def sub_texts(product: Product, sub: str) -> tuple[str, ...]:
    """The body of a sub-page as it stands between its tags; items of lists begin with a blank there."""
    if sub == "Description":
        return (product.description,)
    if sub == "Features":
        return tuple(f" {bullet}" for bullet in product.bullets)
    if sub == "Attributes":
        listed = tuple(f" {attribute}" for attribute in product.attributes)
        return (*listed, product.category, product.query, product.product_category)
    return ()


def done_texts(asin: str, options: Mapping[str, str], score: float) -> tuple[str, ...]:
    """The words of the last page; the fields that the original's text environment leaves empty are not there."""
    purchased = ("asin", asin, "options", options_json(options), "attrs", "None", "category", "None", "query", "None")
    # misspelt as on the original's page
    target = ("asin", "options", "attrs", "price upper", "instuction text", "category", "product category", "query")
    return (
        *(
            "Thank you for shopping with us!",
            "Your code: ",
            "None",
            " (Paste it in your MTurk interface.)",
            "Purchased",
        ),
        *(*purchased, "product category", "None", "Target", *target),
        *("Goal ", "None", "Reward", "Your score (min 0.0, max 1.0)", str(score), "Reward Details ", "None"),
    )


def options_json(options: Mapping[str, str]) -> str:
    """The chosen options as Flask writes JSON into a page: sorted, ASCII, safe between tags."""
    text = json.dumps(dict(options), sort_keys=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026").replace("'", "\\u0027")


def visible(role: Role, text: str) -> tuple[Node, ...]:
    """`text` as a parser of HTML gives it: nothing where it is empty or white space with a line end.

    Other white space stays as one blank, so a blank bullet is a piece of text and an empty description is none.
    """
    if text.strip(_BLANKS):
        return ((role, text),)
    return ((role, " "),) if text and "\n" not in text else ()


def clickables(page: Page) -> dict[str, Target]:
    """What each label stands for, in the original's order: buttons, then products or option values.

    Where labels coincide, the first keeps the place and the last is what is clicked.
    """
    if page.kind == "done":
        return {}
    found: dict[str, Target] = {}
    for role, text in head_nodes(page):
        if role == "button":
            found[text.lower()] = ("button", text.lower())
    for product in page.products:
        found[product.asin.lower()] = ("link", product.asin)
    if page.kind == "item" and page.product is not None:
        found |= item_clickables(page.product, page.show_attributes)
    return found
