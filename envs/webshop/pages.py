"""What does a page of the shop show? Its visible pieces of text (`nodes`) and what can be clicked (`clickables`).

Both are as in the original, except where `Quirks` says otherwise. `observations.py` writes them as text and as HTML.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Literal

from turngym.envs.webshop.actions import (
    BACK_TO_SEARCH,
    NEXT_PAGE,
    PER_PAGE,
    PREV_PAGE,
    SEARCH_BUTTON,
    Target,
    item_buttons,
    item_clickables,
)
from turngym.envs.webshop.goals import Goal
from turngym.envs.webshop.products import Product
from turngym.envs.webshop.session import Kind, SessionState, url
from turngym.envs.webshop.shop import Shop

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
        products=tuple(product for asin in on_page if (product := shop.product(asin)) is not None),
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
    pieces = [head_nodes(page), *map(result_nodes, page.products)]
    if page.product is not None:
        pieces.append(product_nodes(page.product, page.sub if page.kind == "sub" else None, page.show_attributes))
    return pieces


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
    head: list[Node] = [("text", "Instruction:"), *visible("text", instruction), ("button", BACK_TO_SEARCH)]
    if kind == "results":
        head.append(("text", f"Page {number} (Total results: {total})"))
    if kind != "results" or number > 1:
        head.append(("button", PREV_PAGE))
    if kind == "results" and has_next:
        head.append(("button", NEXT_PAGE))
    return tuple(head)


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
    thanks = ("Thank you for shopping with us!", "Your code: ", "None", " (Paste it in your MTurk interface.)")
    return (
        *(*thanks, "Purchased", *purchased, "product category", "None", "Target", *target),
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
    targets: dict[str, Target] = {}
    for role, text in head_nodes(page):
        if role == "button":
            targets[text.lower()] = ("button", text.lower())
    for product in page.products:
        targets[product.asin.lower()] = ("link", product.asin)
    if page.kind == "item" and page.product is not None:
        targets |= item_clickables(page.product, page.show_attributes)
    return targets
