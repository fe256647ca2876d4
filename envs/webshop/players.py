"""Who plays WebShop without a model: the oracle, the buyer of the first hit, one that chooses as many options as
it is told to, random actions, plausible mistakes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from turngym.envs.webshop.actions import (
    BACK_TO_SEARCH,
    BUY_NOW,
    NEXT_PAGE,
    PER_PAGE,
    PREV_PAGE,
    SUB_PAGES,
    Quirks,
    Target,
    can_buy,
    click_action,
    click_on,
    search_action,
)
from turngym.envs.webshop.goals import Goal
from turngym.envs.webshop.products import Product
from turngym.envs.webshop.session import SessionState
from turngym.envs.webshop.shop import OracleQuery, Shop, opens


@dataclass(frozen=True, slots=True)
class ShopScene:
    """What a player acts on: the hidden goal and shop, and the page."""

    shop: Shop
    goal: Goal
    state: SessionState
    clickables: Mapping[str, Target]
    quirks: Quirks


def oracle_action(scene: ShopScene, query: OracleQuery) -> str | None:
    """The next action towards the best purchase that the goal allows, from any page; None after the purchase, and where
    the goal's product cannot be bought.

    `query`: search for the product's title (`title`) or for what the instruction asks for (`instruction`).
    """
    goal, state = scene.goal, scene.state
    if state.kind == "done":
        return None
    if state.kind == "search":
        return scene.shop.way_to(goal, query) if scene.shop.attainable(goal, scene.quirks)[0] else None
    if state.asin == goal.asin:
        return click_action(PREV_PAGE) if state.kind == "sub" else _choose_or_buy(scene)
    if not opens(goal.asin, state.found):
        return click_action(BACK_TO_SEARCH)
    if state.kind != "results":
        return click_action(PREV_PAGE)
    wanted = state.found.index(goal.asin) // PER_PAGE + 1
    if wanted == state.page:
        return click_action(goal.asin)
    return click_action(NEXT_PAGE if wanted > state.page else PREV_PAGE)


def _choose_or_buy(scene: ShopScene) -> str | None:
    product, chosen = scene.shop.product(scene.goal.asin), dict(scene.state.options)
    if product is None or not can_buy(product, scene.quirks):
        return None
    best = scene.shop.attainable(scene.goal, scene.quirks)[1]
    # a value called Next is one only while no other choice makes the page look like results (see `pressable`)
    for name, value in sorted(best.items(), key=lambda choice: choice[1] != NEXT_PAGE.lower()):
        if chosen.get(name) != value:
            action = click_on(value, scene.clickables, scene.quirks)
            assert action is not None, f"option {name!r} {value!r} cannot be pressed"
            return action
    return click_action(BUY_NOW)


class ReadingShopPlayer:
    """The oracle, but it does not know how many options matter: it chooses one, or as many as a text shows.

    A text shows what is clicked, `buy now` last. A model that imitates this player learns to read such texts, and
    nothing about which instructions want a second option.
    """

    def __init__(self, look: Callable[[], ShopScene], query: OracleQuery) -> None:
        self._look, self._query = look, query
        self._options = 1

    def read(self, text: str) -> None:
        """Choose as many options as this text from now on."""
        self._options = max(text.count("click[") - 1, 0)

    def observe(self, action: str) -> None:
        """Does nothing: the state says what to do next."""

    def act(self) -> str | None:
        """The next action; None after the purchase, and where the goal's product cannot be bought."""
        scene = self._look()
        action, state = oracle_action(scene, self._query), scene.state
        at_goal = action is not None and state.kind == "item" and state.asin == scene.goal.asin
        return click_action(BUY_NOW) if at_goal and len(state.options) >= self._options else action


def first_hit_action(scene: ShopScene) -> str | None:
    """Searches for the instruction, opens the first product, buys it without a look at its options."""
    state = scene.state
    if state.kind == "search":
        return search_action(scene.goal.instruction_text)
    if state.kind == "results":
        return click_action(state.on_page[0]) if state.on_page else click_action(BACK_TO_SEARCH)
    if state.kind == "item":
        return click_action(BUY_NOW)
    return click_action(PREV_PAGE) if state.kind == "sub" else None


def wandering_action(scene: ShopScene, query: OracleQuery) -> str | None:
    """The next step of a shopper who goes to and fro between two pages and never buys; searches as the oracle does."""
    state = scene.state
    if state.kind == "search":
        return scene.shop.way_to(scene.goal, query)
    if state.kind == "results":
        return click_action(NEXT_PAGE if state.page <= 1 else PREV_PAGE)
    if state.kind == "item":
        return click_action(SUB_PAGES[0])
    return click_action(PREV_PAGE) if state.kind == "sub" else None


def random_action(scene: ShopScene, admissible: Sequence[str], rng: np.random.Generator) -> str | None:
    """A search for one to six words of the instruction where there is a search bar, else any click."""
    if scene.state.has_search_bar:
        return search_action(_some_words(scene.goal.instruction_text, rng))
    return admissible[int(rng.integers(len(admissible)))] if admissible else None


def _some_words(text: str, rng: np.random.Generator) -> str:
    words = text.split() or ["shop"]
    count = int(rng.integers(1, 7))
    return " ".join(words[int(index)] for index in rng.integers(len(words), size=count))


def plausible_mistake(scene: ShopScene, rng: np.random.Generator) -> str:
    """A product or option that is not on the page, a search where there is no search bar, or a misspelt label."""
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
    position = int(rng.integers(len(label)))
    return click_action(label[:position] + label[position + 1 :])


def _product(shop: Shop, rng: np.random.Generator) -> Product:
    return shop.products[int(rng.integers(len(shop.products)))]
