"""Pages as data: the visible pieces of text of every page, and what can be clicked on it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from turngym.envs.webshop.pages.actions import (
    BACK_TO_SEARCH,
    BUY_NOW,
    NEXT_PAGE,
    PREV_PAGE,
    SEARCH,
    SEARCH_BUTTON,
    SUB_PAGES,
    click,
    parse_action,
)
from turngym.envs.webshop.pages.session import PER_PAGE, Kind, State, Target, url
from turngym.envs.webshop.shop.catalog import Product
from turngym.envs.webshop.shop.goals import Goal
from turngym.envs.webshop.shop.shop import Shop

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
    url: str
    keywords: tuple[str, ...] = ()
    number: int = 0
    total: int = 0
    has_next: bool = True
    products: tuple[Product, ...] = ()
    """On this page of results."""
    product: Product | None = None
    """Of item pages and sub-pages."""
    asin: str = ""
    options: Mapping[str, str]
    """Chosen so far."""
    sub: str = ""
    visited: frozenset[str] = frozenset()
    score: float = 0.0
    show_attributes: bool = False


def page_of(
    shop: Shop,
    goal: Goal,
    state: State,
    session: str,
    *,
    show_attributes: bool = False,
    endless_pages: bool = True,
) -> Page:
    """The page that `state` shows."""
    on_page = state.on_page if state.kind == "results" else ()
    return Page(
        kind=state.kind,
        instruction=goal.instruction_text,
        session=session,
        url=url(state, session),
        keywords=state.keywords,
        number=state.page,
        total=len(state.found),
        has_next=has_next(state, endless_pages),
        products=tuple(found for asin in on_page if (found := shop.product(asin)) is not None),
        product=shop.product(state.asin) if state.kind in ("item", "sub") and state.asin is not None else None,
        asin=state.asin or "",
        options=dict(state.options),
        sub=state.sub or "",
        visited=state.visited,
        score=state.reward.total if state.reward is not None else 0.0,
        show_attributes=show_attributes,
    )


def has_next(state: State, endless_pages: bool) -> bool:
    """Whether a page of results offers Next."""
    return endless_pages or state.page * PER_PAGE < len(state.found)


def nodes(page: Page) -> Iterator[Node]:
    """The visible pieces of text in page order, as an HTML parser finds them in the original's page."""
    if page.kind == "done":
        yield from _done_nodes(page)
        return
    yield from head_nodes(page)
    if page.kind == "results":
        for product in page.products:
            yield from result_nodes(product)
    elif page.product is not None:
        yield from (
            item_nodes(page.product, page.show_attributes) if page.kind == "item" else sub_nodes(page.product, page.sub)
        )


def head_nodes(page: Page) -> Iterator[Node]:
    """The instruction and the buttons that lead away."""
    if page.kind == "search":
        yield "text", "WebShop"
        yield "text", "Instruction: "
        yield from visible("text", page.instruction)
        yield "button", SEARCH_BUTTON
        return
    yield "text", "Instruction:"
    yield from visible("text", page.instruction)
    yield "button", BACK_TO_SEARCH
    if page.kind == "results":
        yield "text", f"Page {page.number} (Total results: {page.total})"
    if page.kind != "results" or page.number > 1:
        yield "button", PREV_PAGE
    if page.kind == "results" and page.has_next:
        yield "button", NEXT_PAGE


def result_nodes(product: Product) -> Iterator[Node]:
    """One product in the list of results."""
    yield from visible("link", product.asin)
    yield from visible("text", product.title)
    yield from visible("text", product.price_text)


def item_nodes(product: Product, show_attributes: bool) -> Iterator[Node]:
    """A product's own page below the navigation."""
    for name, values in product.options.items():
        yield from visible("text", name)
        for value in values:
            yield from visible("option", value)
    yield from visible("text", product.title)
    yield "text", f"Price: {product.price_text}"
    yield "text", RATING
    for label in item_buttons(show_attributes):
        yield "button", label


def item_buttons(show_attributes: bool) -> tuple[str, ...]:
    """The buttons of a product's page after the navigation."""
    return (*(SUB_PAGES if show_attributes else SUB_PAGES[:3]), BUY_NOW)


def sub_nodes(product: Product, sub: str) -> Iterator[Node]:
    """The body of a sub-page; Reviews has none."""
    for text in sub_texts(product, sub):
        yield from visible("text", text)


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


def _done_nodes(page: Page) -> Iterator[Node]:
    for text in done_texts(page.asin, page.options, page.score):
        yield "text", text


def done_texts(asin: str, options: Mapping[str, str], score: float) -> tuple[str, ...]:
    """The words of the last page; the fields that the original's text environment leaves empty are not there."""
    purchased = ("asin", asin, "options", options_json(options), "attrs", "None", "category", "None", "query", "None")
    # misspelt as on the original's page
    target = ("asin", "options", "attrs", "price upper", "instuction text", "category", "product category", "query")
    return (
        "Thank you for shopping with us!",
        "Your code: ",
        "None",
        " (Paste it in your MTurk interface.)",
        "Purchased",
        *purchased,
        "product category",
        "None",
        "Target",
        *target,
        "Goal ",
        "None",
        "Reward",
        "Your score (min 0.0, max 1.0)",
        str(score),
        "Reward Details ",
        "None",
    )


def options_json(options: Mapping[str, str]) -> str:
    """The chosen options as Flask writes JSON into a page: sorted, ASCII, safe between tags."""
    text = json.dumps(dict(options), sort_keys=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026").replace("'", "\\u0027")


def visible(role: Role, text: str) -> Iterator[Node]:
    """`text` as a parser of HTML gives it: nothing where it is empty or white space with a line end.

    Other white space stays as one blank, so a blank bullet is a piece of text and an empty description is none.
    """
    if text.strip(_BLANKS):
        yield role, text
    elif text and "\n" not in text:
        yield role, " "


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


def item_clickables(product: Product, show_attributes: bool) -> dict[str, Target]:
    """What a product's page offers besides the navigation."""
    found: dict[str, Target] = {label.lower(): ("button", label.lower()) for label in item_buttons(show_attributes)}
    for name, values in product.options.items():
        for value in values:
            found[value] = ("option", name)
    return found


def clicks(labels: Mapping[str, Target]) -> tuple[str, ...]:
    """The actions for these labels; the search button and labels that no action can name are left out."""
    return tuple(
        action for label in labels if label != SEARCH and parse_action(action := click(label)) == ("click", label)
    )
