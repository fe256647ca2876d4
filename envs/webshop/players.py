"""Who plays WebShop without a model: the oracle, the buyer of the first hit, random actions, plausible mistakes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from turngym.envs.webshop.goals import Goal
from turngym.envs.webshop.products import Product
from turngym.envs.webshop.session import (
    BACK_TO_SEARCH,
    BUY_NOW,
    NEXT_PAGE,
    PER_PAGE,
    PREV_PAGE,
    SEARCH_BUTTON,
    SUB_PAGES,
    State,
    Target,
    click_action,
    parse_action,
    search_action,
)
from turngym.envs.webshop.shop import Shop

OracleQuery = Literal["title", "instruction"]
_TITLE_WORDS = 12


@dataclass(frozen=True, slots=True)
class Scene:
    """What a player acts on: the hidden goal and shop, and the page."""

    shop: Shop
    goal: Goal
    state: State
    clickables: Mapping[str, Target]


def oracle_action(scene: Scene, query: OracleQuery) -> str | None:
    """The next action towards the best purchase that the goal allows, from any page; None after the purchase.

    `query`: search for the product's title (`title`) or for what the instruction asks for (`instruction`).
    """
    goal, state = scene.goal, scene.state
    if state.kind == "done":
        return None
    if state.kind == "search":
        return _search(scene, query)
    if state.asin == goal.asin:
        return click_action(PREV_PAGE) if state.kind == "sub" else _choose_or_buy(scene)
    if goal.asin not in state.found:
        return click_action(BACK_TO_SEARCH)
    if state.kind != "results":
        return click_action(PREV_PAGE)
    wanted = state.found.index(goal.asin) // PER_PAGE + 1
    if wanted == state.page:
        return click_action(goal.asin)
    return click_action(NEXT_PAGE if wanted > state.page else PREV_PAGE)


def _choose_or_buy(scene: Scene) -> str:
    chosen = dict(scene.state.options)
    for name, value in scene.shop.attainable(scene.goal)[1].items():
        action = click_action(value)
        reachable = scene.clickables.get(value) == ("option", name) and parse_action(action) == ("click", value)
        if reachable and chosen.get(name) != value and value not in _NAVIGATION:
            return action
    return click_action(BUY_NOW)


_NAVIGATION = frozenset(
    label.lower() for label in (BACK_TO_SEARCH, NEXT_PAGE, PREV_PAGE, BUY_NOW, SEARCH_BUTTON, *SUB_PAGES)
)
"""Values that would act as a button instead."""


def _search(scene: Scene, query: OracleQuery) -> str | None:
    """The first query that finds the product; each costs the shop a search."""
    for text in _title_queries(scene.goal) if query == "title" else _queries(scene.goal):
        action = search_action(text)
        parsed = parse_action(action)
        if parsed is not None and scene.goal.asin in scene.shop.search(parsed[1]):
            return action
    return None


def _title_queries(goal: Goal) -> Iterator[str]:
    yield goal.title
    yield " ".join(goal.title.split()[:_TITLE_WORDS])
    yield from _queries(goal, leak=False)
    yield goal.asin


def _queries(goal: Goal, leak: bool = True) -> Iterator[str]:
    """What a shopper who has only the instruction might type, fewest words first; then, with `leak`, the title."""
    wishes = [option if isinstance(option, str) else option[1] for option in goal.goal_options]
    yield " ".join([goal.query, *goal.attributes])
    yield " ".join([goal.query, *goal.attributes, *wishes])
    yield " ".join([*goal.attributes, *wishes])
    yield goal.query
    yield goal.request
    if leak:
        yield goal.title


def first_hit_action(scene: Scene) -> str | None:
    """Searches for the instruction, opens the first product, buys it without a look at its options."""
    state = scene.state
    if state.kind == "search":
        return search_action(scene.goal.instruction_text)
    if state.kind == "results":
        return click_action(state.on_page[0]) if state.on_page else click_action(BACK_TO_SEARCH)
    if state.kind == "item":
        return click_action(BUY_NOW)
    return click_action(PREV_PAGE) if state.kind == "sub" else None


def wandering_action(scene: Scene, query: OracleQuery) -> str | None:
    """The next step of a shopper who goes to and fro between two pages and never buys; searches as the oracle does."""
    state = scene.state
    if state.kind == "search":
        return _search(scene, query)
    if state.kind == "results":
        return click_action(NEXT_PAGE if state.page <= 1 else PREV_PAGE)
    if state.kind == "item":
        return click_action(SUB_PAGES[0])
    return click_action(PREV_PAGE) if state.kind == "sub" else None


def random_action(scene: Scene, admissible: Sequence[str], rng: np.random.Generator) -> str | None:
    """A search for one to six words of the instruction where there is a search bar, else any click."""
    if scene.state.has_search_bar:
        return search_action(_some_words(scene.goal.instruction_text, rng))
    return admissible[int(rng.integers(len(admissible)))] if admissible else None


def _some_words(text: str, rng: np.random.Generator) -> str:
    words = text.split() or ["shop"]
    count = int(rng.integers(1, 7))
    return " ".join(words[int(place)] for place in rng.integers(len(words), size=count))


def plausible_mistake(scene: Scene, rng: np.random.Generator) -> str:
    """A plausible mistake: a product or option that is not here, a search without a bar, a misspelt label."""
    kind = int(rng.integers(4))
    if kind == 0:
        return click_action(_product(scene.shop, rng).asin)
    if kind == 1 and not scene.state.has_search_bar:
        return search_action(_some_words(scene.goal.instruction_text, rng))
    if kind == 2:
        values = [value for values in _product(scene.shop, rng).options.values() for value in values]
        return click_action(values[int(rng.integers(len(values)))]) if values else click_action(BUY_NOW)
    labels = [label for label in scene.clickables if len(label) > 1] or [BUY_NOW.lower()]
    label = labels[int(rng.integers(len(labels)))]
    place = int(rng.integers(len(label)))
    return click_action(label[:place] + label[place + 1 :])


def _product(shop: Shop, rng: np.random.Generator) -> Product:
    return shop.products[int(rng.integers(len(shop.products)))]
