"""One shopper with the interface of the original's text environment, for its transcripts and the tests of its pages.

No action is refused and the episode never ends; an action that is not understood shows the same page again.
"""

from __future__ import annotations

from typing import Any

from turngym.envs.webshop.actions import COMPAT, Quirks, parse_action
from turngym.envs.webshop.observations import Mode, PageView, view
from turngym.envs.webshop.pages import Page, page_of
from turngym.envs.webshop.session import SessionState, play
from turngym.envs.webshop.shop import Shop


class ShopSession:
    def __init__(
        self,
        shop: Shop,
        mode: Mode = "text",
        *,
        quirks: Quirks = COMPAT["webshop"],
        show_attributes: bool = False,
        goal: int = 0,
    ) -> None:
        self.shop, self.mode, self.quirks, self.show_attributes = shop, mode, quirks, show_attributes
        self.reset(goal)

    def reset(self, goal: int) -> str:
        self.goal, self.state = self.shop.goals[goal], SessionState()
        return self.view.observation

    @property
    def page(self) -> Page:
        attributes, endless = self.show_attributes, self.quirks.endless_pages
        session = str(self.goal.index)
        return page_of(self.shop, self.goal, self.state, session, show_attributes=attributes, endless_pages=endless)

    @property
    def view(self) -> PageView:
        return view(self.page, self.mode, self.quirks)

    def step(self, action: str) -> tuple[str, float, bool]:
        """(observation, reward, done)."""
        parsed, labels, session = parse_action(action), self.view.clickables, str(self.goal.index)
        after = play(self.shop, self.goal, self.quirks, self.state, parsed, labels, session)
        self.state = after or self.state
        bought = after is not None and after.kind == "done"
        return self.view.observation, self.state.reward.total if bought and self.state.reward else 0.0, bought

    def available(self) -> dict[str, Any]:
        return {"has_search_bar": self.state.has_search_bar, "clickables": list(self.view.clickables)}
