"""How is an action written, and what can a click name?

`parse_action` reads an action as the original does, `named` finds the label that a click means, `click_on` the action
that clicks a label. `pressable` says which of a product's options can be chosen at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

from turngym.envs.lookalikes import alike
from turngym.envs.spaces import printable
from turngym.envs.webshop.products import Product

SEARCH = "search"
CLICK = "click"
BACK_TO_SEARCH = "Back to Search"
NEXT_PAGE = "Next >"
PREV_PAGE = "< Prev"
BUY_NOW = "Buy Now"
SEARCH_BUTTON = "Search"
SubPage = Literal["Description", "Features", "Reviews", "Attributes"]
SUB_PAGES: tuple[SubPage, ...] = get_args(SubPage)
"""Labels of the buttons, as the pages show them; clicks name them in lower case."""
SEARCH_TEMPLATE = "search[<your keywords>]"
PER_PAGE = 10
"""Results on one page."""


# a step asks for its action several times
@lru_cache(16)
def parse_action(action: str) -> tuple[str, str] | None:
    """(name, lower-cased argument) of `name[argument]`, or None where the original reads no argument.

    Equal to matching `(.+)[(.+)]` greedily at the start of the text, in linear time: the last `]` of the first line
    closes, the last `[` that leaves at least one character opens, and what follows is ignored. So nothing is stripped,
    an opening bracket inside the argument spoils it, and an empty argument is none.
    """
    line = action.partition("\n")[0]
    close = line.rfind("]")
    start = line.rfind("[", 1, close - 1) if close > 2 else -1
    if start < 1:
        return None
    return line[:start], printable(line[start + 1 : close]).lower()


def click_action(label: str) -> str:
    return f"{CLICK}[{label.lower()}]"


def search_action(keywords: str) -> str:
    """The canonical action that searches for `keywords`, without the brackets and line ends that it cannot carry."""
    words = keywords.lower().replace("[", " ").replace("]", " ").split()
    return f"{SEARCH}[{' '.join(words)}]"


def canonical(action: str) -> str:
    """The action as the shop understands it: argument in lower case, text after the closing bracket dropped.

    Both are what the original does itself, so a canonical action never does anything else than the action did. What
    the original does not understand stays as it is: `Click[...]`, `click[ buy now]`, a name before the action.
    """
    parsed = parse_action(action)
    return action if parsed is None else f"{parsed[0]}[{parsed[1]}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quirks:
    """Behavior of the original that one might call a fault; `compat="webshop"` keeps it, `"repaired"` does not."""

    url_routing: bool = True
    """Next and Prev take the kind of page from the first name that occurs anywhere in the URL, keywords included."""
    nav_values: bool = True
    """An option value that reads like a button (`description`, `buy now`) acts as that button."""
    exact_labels: bool = True
    """A click names its label to the last character; otherwise one that looks like a single label names that one
    (`turngym.envs.lookalikes`): no-break spaces, double blanks and zero-width characters do not count."""
    endless_pages: bool = True
    """Next is there on the last page too and leads to empty pages."""
    backdoors: bool = False
    """The queries `<r>`, `<c> category`, `<q> query` return products by these keys. Off unless asked for."""


COMPAT: Mapping[str, Quirks] = {
    "webshop": Quirks(),
    "repaired": Quirks(url_routing=False, nav_values=False, exact_labels=False, endless_pages=False),
}


# --- labels: what stands on a page, and what a click on it means

Target = tuple[Literal["button", "link", "option"], str]
"""What a label on the page stands for: a button (its lower-cased label), a product (asin), an option (its name)."""
NAVIGATION: Mapping[str, Target] = {label.lower(): ("button", label.lower()) for label in (BACK_TO_SEARCH, PREV_PAGE)}
"""The labels that lead away from a product's page."""
RESULTS_ROUTE = "search_results"
"""Part of an address: with `Quirks.url_routing`, Next and Prev act as on a page of results wherever it occurs."""
_BUTTONS = frozenset(label.lower() for label in (BACK_TO_SEARCH, PREV_PAGE, BUY_NOW, SEARCH_BUTTON, *SUB_PAGES))


def item_buttons(show_attributes: bool) -> tuple[str, ...]:
    """The buttons of a product's page after the navigation."""
    return (*(SUB_PAGES if show_attributes else SUB_PAGES[:3]), BUY_NOW)


def item_clickables(product: Product, show_attributes: bool) -> dict[str, Target]:
    """The labels of a product's page besides the navigation. If two options share a value, it belongs to the last
    one."""
    labels: dict[str, Target] = {label.lower(): ("button", label.lower()) for label in item_buttons(show_attributes)}
    for name, values in product.options.items():
        for value in values:
            labels[value] = ("option", name)
    return labels


def named(argument: str, labels: Mapping[str, Target], quirks: Quirks) -> str | None:
    """The label that `click[argument]` means on a page with these labels; None if it means none."""
    # the original lists the search button among the labels, but takes no click on it
    if argument == SEARCH:
        return None
    if argument in labels or quirks.exact_labels:
        return argument if argument in labels else None
    same = alike(argument, (label for label in labels if label != SEARCH))
    return same[0] if len(same) == 1 else None


def click_on(label: str, labels: Mapping[str, Target], quirks: Quirks) -> str | None:
    """The action that clicks `label`; None where no action can, as with a bracket or a line end in it."""
    if label in labels and (action := _clicking(label)) is not None:
        return action
    if quirks.exact_labels:
        return None
    action = click_action(" ".join(printable(label).split()))
    parsed = parse_action(action)
    return action if parsed is not None and named(parsed[1], labels, quirks) == label else None


@lru_cache(1 << 16)
def _clicking(label: str) -> str | None:
    """The action that names `label` to the last character; None where none does. Pages with hundreds of options ask."""
    action = click_action(label)
    return action if label != SEARCH and parse_action(action) == (CLICK, label) else None


def clicks(labels: Mapping[str, Target], quirks: Quirks) -> tuple[str, ...]:
    """The actions for these labels; the search button and labels that no action can name are left out."""
    actions = (_clicking(label) or click_on(label, labels, quirks) for label in labels)
    return tuple(action for action in actions if action is not None)


def pressable(product: Product, quirks: Quirks, keywords: str = "") -> dict[str, tuple[str, ...]]:
    """The option values, by option, that clicks on the product's page can choose, each together with any others.

    Left out are values that no action can name, that act as a button, or that a later option has too. `keywords` is
    the query that found the product. A value called Next must come first: after another choice it may be the button.
    """
    labels = {**NAVIGATION, **item_clickables(product, False)}
    buttons = _BUTTONS if quirks.nav_values else frozenset()
    # Next means nothing on a product's page, so that an option may be called so, unless the page is taken for results
    if quirks.nav_values and quirks.url_routing and (RESULTS_ROUTE in keywords or RESULTS_ROUTE in product.asin):
        buttons |= {NEXT_PAGE.lower()}
    values_of: dict[str, tuple[str, ...]] = {}
    for name, values in product.options.items():
        values_of[name] = tuple(
            value
            for value in values
            if labels[value] == ("option", name)
            and value not in buttons
            and click_on(value, labels, quirks) is not None
        )
    return values_of


def can_buy(product: Product, quirks: Quirks) -> bool:
    """Whether its page has a button that buys: without `nav_values`, an option value of that name takes its place."""
    return quirks.nav_values or item_clickables(product, False)[BUY_NOW.lower()][0] == "button"
