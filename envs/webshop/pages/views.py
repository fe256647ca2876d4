"""What a session sees: the observation in its mode, and what can be clicked; pieces per product are made once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args
from weakref import WeakKeyDictionary

from turngym.envs.core import TurngymError
from turngym.envs.suggest import did_you_mean
from turngym.envs.webshop.pages.actions import BACK_TO_SEARCH, NEXT_PAGE, PREV_PAGE, click
from turngym.envs.webshop.pages.pages import (
    Page,
    clickables,
    clicks,
    has_next,
    item_clickables,
    item_nodes,
    page_of,
    result_nodes,
    sub_nodes,
    visible,
)
from turngym.envs.webshop.pages.render_html import render_html
from turngym.envs.webshop.pages.render_rich import render_rich
from turngym.envs.webshop.pages.render_text import SEPARATOR, join, render_text
from turngym.envs.webshop.pages.session import State, Target, url
from turngym.envs.webshop.shop.goals import Goal
from turngym.envs.webshop.shop.shop import Shop

Mode = Literal["text", "text_rich", "html", "url"]
_RENDERERS: Mapping[str, Callable[[Page], str]] = {
    "text": render_text,
    "text_rich": render_rich,
    "html": render_html,
    "url": lambda page: page.url,
}
_KEPT = 2048
_NAVIGATION: dict[str, Target] = {label.lower(): ("button", label.lower()) for label in (BACK_TO_SEARCH, PREV_PAGE)}
_NAVIGATION_CLICKS = clicks(_NAVIGATION)


@dataclass(frozen=True, slots=True)
class View:
    """One page as the session sees it."""

    observation: str
    clickables: Mapping[str, Target]
    """In the original's order; never changed."""
    admissible: tuple[str, ...]
    """The clicks among them that an action can name."""


@dataclass(frozen=True, slots=True)
class _Item:
    text: str
    clickables: Mapping[str, Target]
    admissible: tuple[str, ...]


class Views:
    """Makes views for all sessions of one shop with the same settings, and keeps the pieces of 2,048 products."""

    def __init__(self, *, show_attributes: bool = False, endless_pages: bool = True) -> None:
        self.show_attributes = show_attributes
        self.endless_pages = endless_pages
        self._results: dict[str, tuple[str, str, str]] = {}
        self._items: dict[str, _Item] = {}

    def page(self, shop: Shop, goal: Goal, state: State, session: str) -> Page:
        """The page as data."""
        return page_of(
            shop, goal, state, session, show_attributes=self.show_attributes, endless_pages=self.endless_pages
        )

    def view(self, shop: Shop, goal: Goal, state: State, session: str, mode: Mode) -> View:
        """What the session sees in `mode`."""
        if state.kind == "results":
            lines, labels, admissible = self._list(shop, state)
            text = _lead(goal, lines) if mode == "text" else self._render(shop, goal, state, session, mode)
            return View(text, labels, admissible)
        if state.kind == "item":
            item = self._item(shop, state.asin or "")
            text = _lead(goal, [item.text]) if mode == "text" else self._render(shop, goal, state, session, mode)
            return View(text, item.clickables, item.admissible)
        if state.kind == "sub":
            text = self._sub(shop, goal, state) if mode == "text" else self._render(shop, goal, state, session, mode)
            return View(text, _NAVIGATION, _NAVIGATION_CLICKS)
        page = self.page(shop, goal, state, session)
        labels = clickables(page)
        return View(_RENDERERS[mode](page), labels, clicks(labels))

    def _sub(self, shop: Shop, goal: Goal, state: State) -> str:
        product = shop.product(state.asin or "")
        assert product is not None, f"{state.asin!r} is not in the shop"
        body = [text.strip() for _, text in sub_nodes(product, state.sub or "")]
        return _lead(goal, [BACK_TO_SEARCH, PREV_PAGE, *body])

    def _render(self, shop: Shop, goal: Goal, state: State, session: str, mode: Mode) -> str:
        if mode == "url":
            return url(state, session)
        return _RENDERERS[mode](self.page(shop, goal, state, session))

    def _list(self, shop: Shop, state: State) -> tuple[list[str], dict[str, Target], tuple[str, ...]]:
        """(text after the instruction, labels, actions) of a page of results."""
        lines = [BACK_TO_SEARCH, f"Page {state.page} (Total results: {len(state.found)})"]
        labels = {BACK_TO_SEARCH.lower(): _NAVIGATION[BACK_TO_SEARCH.lower()]}
        buttons = [PREV_PAGE] if state.page > 1 else []
        buttons += [NEXT_PAGE] if has_next(state, self.endless_pages) else []
        for label in buttons:
            lines.append(label)
            labels[label.lower()] = ("button", label.lower())
        actions = [click(label) for label in labels]
        for asin in state.on_page:
            piece = self._results.get(asin) or self._result(shop, asin)
            lines.append(piece[0])
            labels[piece[1]] = ("link", asin)
            actions.append(piece[2])
        return lines, labels, tuple(actions)

    def _result(self, shop: Shop, asin: str) -> tuple[str, str, str]:
        product = shop.product(asin)
        assert product is not None, f"the search found {asin!r}, which is not in the shop"
        if len(self._results) >= _KEPT:
            self._results.clear()
        piece = self._results[asin] = (join(result_nodes(product)), asin.lower(), click(asin))
        return piece

    def _item(self, shop: Shop, asin: str) -> _Item:
        item = self._items.get(asin)
        if item is None:
            product = shop.product(asin)
            assert product is not None, f"{asin!r} is not in the shop"
            labels = _NAVIGATION | item_clickables(product, self.show_attributes)
            text = SEPARATOR.join([BACK_TO_SEARCH, PREV_PAGE, join(item_nodes(product, self.show_attributes))])
            if len(self._items) >= _KEPT:
                self._items.clear()
            item = self._items[asin] = _Item(text, labels, clicks(labels))
        return item


def _lead(goal: Goal, rest: list[str]) -> str:
    pieces = [text.strip() for _, text in visible("text", goal.instruction_text)]
    return SEPARATOR.join(["Instruction:", *pieces, *rest])


_SHARED: WeakKeyDictionary[Shop, dict[tuple[bool, bool], Views]] = WeakKeyDictionary()


def views_of(shop: Shop, *, show_attributes: bool = False, endless_pages: bool = True) -> Views:
    """The views that all sessions on `shop` with these settings share; they go when the shop goes."""
    shared = _SHARED.setdefault(shop, {})
    key = (show_attributes, endless_pages)
    if key not in shared:
        shared[key] = Views(show_attributes=show_attributes, endless_pages=endless_pages)
    return shared[key]


def checked_mode(mode: str) -> Mode:
    """`mode` if it is an observation mode; TurngymError lists them."""
    modes = get_args(Mode)
    if mode not in modes:
        hint = did_you_mean(str(mode), modes)
        raise TurngymError(f"observation_mode is {mode!r}; it must be one of {', '.join(modes)}.{hint}")
    return mode  # type: ignore[return-value]
