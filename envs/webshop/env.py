"""The WebShop environment: find and buy what an instruction asks for, in a shop that all environments share."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, get_args

import msgspec
import numpy as np

from turngym.core.errors import TaskError, checked_choice, checked_int
from turngym.core.task import Task, Verdict
from turngym.core.tools import ToolSpec
from turngym.envs.base import ActingPlayer, Outcome, Player, TextEnv, quote
from turngym.envs.webshop.actions import (
    CLICK,
    COMPAT,
    SEARCH,
    SEARCH_TEMPLATE,
    canonical,
    click_on,
    named,
    parse_action,
)
from turngym.envs.webshop.goals import Goal, GoalIds, listed_goals
from turngym.envs.webshop.observations import SEPARATOR, Mode, PageView, view
from turngym.envs.webshop.pages import Page, page_of
from turngym.envs.webshop.players import (
    ReadingShopPlayer,
    ShopScene,
    first_hit_action,
    oracle_action,
    plausible_mistake,
    random_action,
    wandering_action,
)
from turngym.envs.webshop.session import SessionState, play
from turngym.envs.webshop.shop import OracleQuery, Shop, goal_task, open_shop

INSTRUCTIONS = """You shop in a web store: an instruction says what to buy, with which features and options and at \
what price.
Actions:
- search[keywords]: search the store; only on the page with the search bar
- click[label]: click what is on the page: a product's code such as click[b08xyz1234], an option such as click[blue], \
click[description], click[features], click[reviews], click[< prev], click[next >], click[back to search], \
click[buy now]
A search finds up to 50 products, ten to a page. Choose the options that are asked for before you buy. The purchase \
ends the episode; the score from 0 to 1 says how well it fits: kind of product, features, options, price."""


class WebShopEnv(TextEnv):
    """One shopper: reward is the score of the purchase, which ends the episode; all other actions bring 0.0.

    A task's id is `PROFILE/GOAL`. `PROFILE/GOAL@SEED` is the same goal with prices and price caps as `price_seed=SEED`
    draws them.

    Args:
        profile: `embedded`, `embedded-small` (generated, without data), `1k-synthetic`, `1k-human`, `full-synthetic`,
            `full-human`.
        split: which goals are listed, `train` or `eval`; None is `train`, or `eval` in a shop too small for training
            goals (`1k-human`). Goals of other splits can be chosen by id.
        splits: `turnopd`, `products` (evaluation asks for products that training never asks for) or `papers` (real
            shops, with `test` and `dev`); None: `turnopd` for real shops.
        compat: `webshop` keeps the original's faults, `repaired` does not (see `actions.Quirks`).
        price_seed: draws prices and price caps as the original does after `random.seed(price_seed)`.
        data: folder of the original's files; None: `$WEBSHOP_DATA`, else where `turngym data get webshop` puts them.
        shop: a shop that is open already, instead of `profile`, `price_seed`, `data` and `tagger`; its owner closes it.
        observation_mode: `text`, `text_rich`, `html` or `url`.
        strict_admissible: refuse what the page does not offer. Without it search works on every page, as in the
            original, and what the shop does not understand shows the same page again.
        backdoors: the queries `<r>`, `<c> category`, `<q> query` of the original.
        tagger: what finds nouns in titles for the reward, see `open_shop`; None takes the recorded ones of the
            original's model, and where a shop's are not recorded the built-in list, which is approximate.
        num_prev_obs, num_prev_actions: how many earlier observations and actions stand in front of each observation.
        reward: `score` pays the score of the purchase, `success` 1.0 for a purchase that scores 1.0 and else 0.0.
        oracle_query: whether `expert_action` searches for the product's title or for what the instruction says.
        render_mode: `ansi`: `render()` gives the last action and observation; `human`: both are printed; None: neither.
    """

    env_id: ClassVar[str] = "turngym/WebShop-v0"
    tool: ClassVar[ToolSpec] = ToolSpec(
        name="webshop_step",
        description="Do one action in the web store and read the page that it leads to.",
        argument="action",
        argument_description="search[keywords] or click[label], for example: click[buy now]",
        examples=("search[red running shoes]", "click[b08xyz1234]", "click[buy now]"),
        tail=20,
    )
    instructions: ClassVar[str] = INSTRUCTIONS
    players: ClassVar[tuple[str, ...]] = ("first-hit", "reading", "wander", "oracle-title", "oracle-instruction")
    told_by = frozenset({"observation_mode", "num_prev_obs", "num_prev_actions", "show_attributes", "oracle_query"})
    scored_by = frozenset({"compat", "backdoors", "strict_admissible", "reward"})

    def __init__(
        self,
        *,
        profile: str = "embedded",
        split: str | None = None,
        splits: str | None = None,
        compat: str = "webshop",
        price_seed: int | None = None,
        data: str | os.PathLike[str] | None = None,
        shop: Shop | None = None,
        observation_mode: str = "text",
        strict_admissible: bool = True,
        backdoors: bool = False,
        tagger: str | None = None,
        num_prev_obs: int = 0,
        num_prev_actions: int = 0,
        show_attributes: bool = False,
        reward: Literal["score", "success"] = "score",
        oracle_query: OracleQuery = "title",
        render_mode: str | None = None,
    ) -> None:
        super().__init__(render_mode=render_mode)
        self.mode: Mode = checked_choice("observation_mode", observation_mode, get_args(Mode))
        self.quirks = replace(COMPAT[checked_choice("compat", compat, COMPAT)], backdoors=backdoors)
        self.strict_admissible = strict_admissible
        self._pays = checked_choice("reward", reward, ("score", "success"))
        self.oracle_query: OracleQuery = checked_choice("oracle_query", oracle_query, get_args(OracleQuery))
        self._history = History(num_prev_obs, num_prev_actions)
        self._goal: Goal | None = None
        self._given = shop
        self._profile, self._data, self._price_seed, self._tagger = profile, data, price_seed, tagger
        self._chosen_splits, self._split, self._show_attributes = splits, split, show_attributes
        self._listed: GoalIds
        self._reopen()
        self._task: Task | None = None
        self._state = SessionState()
        self._view = PageView("", {}, ())
        self._attainable = 0.0

    def task_ids(self) -> Sequence[str]:
        return self._listed

    @property
    def task(self) -> Task:
        if self._task is None:
            raise TaskError(f"{self.env_id}: there is no task before reset()")
        return self._task

    @property
    def goal(self) -> Goal:
        """The goal of the episode. Agents read only its text."""
        if self._goal is None:
            raise TaskError(f"{self.env_id}: there is no goal before reset()")
        return self._goal

    @property
    def scene(self) -> ShopScene:
        """The state that scripted players act on."""
        return ShopScene(self.shop, self.goal, self._state, self._view.clickables, self.quirks)

    @property
    def page(self) -> Page:
        """The content of the page that is open."""
        attributes, endless = self._show_attributes, self.quirks.endless_pages
        return page_of(
            self.shop, self.goal, self._state, self._session, show_attributes=attributes, endless_pages=endless
        )

    @property
    def statement(self) -> str:
        return f"Instruction: {self.goal.instruction_text}"

    @property
    def success(self) -> bool:
        return self.score == 1.0

    @property
    def score(self) -> float:
        """Score of the purchase, 0.0 before it."""
        reward = self._state.reward
        return float(reward.total) if reward is not None and self._state.kind == "done" else 0.0

    @property
    def scoring(self) -> dict[str, str]:
        return self.shop.scoring

    @property
    def invalid_observation(self) -> str:  # type: ignore[override]
        """The shop answers what it does not understand with the page that is open."""
        return self._view.observation

    def admissible(self) -> tuple[str, ...]:
        """Every click that the page offers, and the template of searches where there is a search bar."""
        return (SEARCH_TEMPLATE,) if self._state.has_search_bar else self._view.admissible

    def canonical(self, action: str) -> str:
        text = canonical(action.strip())
        parsed = parse_action(text)
        if self.quirks.exact_labels or parsed is None or parsed[0] != CLICK:
            return text
        # a click that looks like one on this page is that one
        label = named(parsed[1], self._view.clickables, self.quirks)
        return text if label is None else click_on(label, self._view.clickables, self.quirks) or text

    def check(self, action: str) -> str | None:
        return self._refusal(action) if self.strict_admissible else None

    def suggestion(self, action: str) -> str | None:
        # the template of searches is nothing that can be done
        near = action.lower() if self._refusal(action.lower()) is None else super().suggestion(action)
        return None if near == SEARCH_TEMPLATE else near

    def expert_action(self) -> str | None:
        return oracle_action(self.scene, self.oracle_query)

    def sample_action(self, rng: np.random.Generator) -> str | None:
        """Searches for some words of the instruction where there is a search bar, else clicks anything."""
        return random_action(self.scene, self._view.admissible, rng)

    def plausible_mistake(self, rng: np.random.Generator) -> str | None:
        return plausible_mistake(self.scene, rng)

    def make_player(self, name: str) -> Player:
        """`first-hit` buys the first product that a search for the instruction finds; `wander` goes to and fro between
        two pages; `reading` chooses as many options as hints name; `oracle-...` is the expert with that query."""
        if name not in self.players:
            return super().make_player(name)
        if name == "first-hit":
            return ActingPlayer(lambda: first_hit_action(self.scene))
        if name == "reading":
            return ReadingShopPlayer(lambda: self.scene, self.oracle_query)
        if name == "wander":
            return ActingPlayer(lambda: wandering_action(self.scene, self.oracle_query))
        return ActingPlayer(lambda: oracle_action(self.scene, "title" if name == "oracle-title" else "instruction"))

    def describe(self, verdict: Verdict = Verdict.OK, action: str | None = None) -> dict[str, Any]:
        info = super().describe(verdict, action)
        reward = self._state.reward if self._state.kind == "done" else None
        parts = {name: getattr(reward, name, None) for name in ("r_type", "r_att", "r_option", "r_price")}
        return info | {
            "admissible_templates": [SEARCH_TEMPLATE] if self._state.has_search_bar else [],
            **{name: None if share is None else float(share) for name, share in parts.items()},
            "attainable_max": self._attainable,
            "tagger": self.shop.tagger.name,
            "profile": self.shop.profile.name,
        }

    def _begin(self, task_id: str) -> str:
        number, price_seed = self._listed.goal_of(task_id)
        self.shop = self._opened if price_seed is None else self._opened.drawn_with(price_seed)
        goal = self.shop.goals[number]
        # hash and best purchase are worked out once for all samples of a task that are played in a row
        if goal is not self._goal or self._task is None or self._task.task_id != task_id:
            self._task = goal_task(self.shop, goal, self._splits.name_of(goal.index), task_id)
            self._attainable = float(self.shop.attainable(goal, self.quirks)[0])
        self._goal = goal
        self._show(SessionState())
        self._history.begin(self._view.observation)
        return self._view.observation

    def _show(self, state: SessionState) -> None:
        self._state = state
        self._view = view(self.page, self.mode, self.quirks)

    @property
    def _session(self) -> str:
        return str(self.goal.index)

    def _apply(self, action: str) -> Outcome:
        if self.check(action) is not None:
            return Outcome(observation=self._view.observation, verdict=Verdict.INADMISSIBLE)
        before, parsed, labels = self._state, parse_action(action), self._view.clickables
        after = play(self.shop, self.goal, self.quirks, before, parsed, labels, self._session)
        if after is not None and after != before:
            self._show(after)
        observation = self._history.step(action, self._view.observation)
        if after is None:
            return Outcome(observation=observation, verdict=Verdict.INADMISSIBLE)
        if after.kind == "done":
            marked = f"{observation}\n[WEBSHOP_FINAL_SCORE={self.score:.6f}]"
            paid = self.score if self._pays == "score" else float(self.success)
            return Outcome(observation=marked, reward=paid, terminated=True)
        return Outcome(observation=observation, verdict=Verdict.NO_EFFECT if after == before else Verdict.OK)

    def _refusal(self, action: str) -> str | None:
        """Says why the page does not offer a canonical action."""
        parsed = parse_action(action)
        if parsed is not None and parsed[0] not in (SEARCH, CLICK) and parsed[0].lower() in (SEARCH, CLICK):
            return f"{quote(action)} begins with {parsed[0]}, which must be in lower case: {parsed[0].lower()}[...]"
        if parsed is None or parsed[0] not in (SEARCH, CLICK):
            return f"{quote(action)} is neither search[keywords] nor click[label]"
        name, argument = parsed
        if name == SEARCH:
            return None if self._state.has_search_bar else "there is no search bar on this page"
        if named(argument, self._view.clickables, self.quirks) is not None:
            return None
        if self._state.has_search_bar:
            return f"there is nothing to click on this page but the search bar; {quote(action)} is not possible now"
        return f"{quote(action)} is not possible now: nothing on this page is called {quote(argument)}"

    def _get_state(self) -> Any:
        return [self._state.record(), self._history.get_state()]

    def _set_state(self, state: Any) -> None:
        session, history = state
        history = msgspec.convert(history, tuple[list[str], list[str]])
        self._show(SessionState.read(session, self.shop))
        self._history.set_state(history)

    def _close(self) -> None:
        if self._given is None:
            self._opened.close()

    def _reopen(self) -> None:
        """Take a shop: one use of it, which `_close` gives back, or the caller's."""
        opened = self._given
        if opened is None:
            arguments: dict[str, Any] = {"price_seed": self._price_seed, "tagger": self._tagger}
            # left out where not given: the default itself belongs to the key under which a shop is shared
            given = {name: value for name, value in arguments.items() if value is not None}
            opened = open_shop(self._profile, self._data, **given)
        try:
            self._splits = opened.splits(self._chosen_splits)
            listed = listed_goals(self._splits, self._split)
        except BaseException:
            if self._given is None:
                opened.close()
            raise
        self._opened = opened
        self.shop = opened
        self._listed = GoalIds(opened.profile.name, listed, len(opened.goals))
        self._goal = None


class History:
    """Earlier observations and actions in front of the present one, oldest first."""

    __slots__ = ("_actions", "_observations", "actions", "observations")

    def __init__(self, observations: int, actions: int) -> None:
        """How many of each are shown."""
        for name, value in (("num_prev_obs", observations), ("num_prev_actions", actions)):
            checked_int(name, value, 0)
        self.observations = observations
        self.actions = actions
        self.begin("")

    def begin(self, observation: str) -> None:
        """An episode begins with `observation`."""
        self._observations: tuple[str, ...] = (observation,) if self.observations else ()
        self._actions: tuple[str, ...] = ()

    def step(self, action: str, observation: str) -> str:
        """The observation after `action` with its history in front; the next history contains both."""
        if not self.observations and not self.actions:
            return observation
        self._actions = (*self._actions, action)[-self.actions :] if self.actions else ()
        pieces = [observation]
        for back in range(1, 1 + max(self.observations, self.actions)):
            pieces += self._actions[-back : len(self._actions) - back + 1] if back <= len(self._actions) else ()
            if back <= len(self._observations):
                pieces.append(self._observations[-back])
        observations = (*self._observations, observation)
        self._observations = observations[-self.observations :] if self.observations else ()
        return SEPARATOR.join(reversed(pieces))

    def get_state(self) -> list[list[str]]:
        return [list(self._observations), list(self._actions)]

    def set_state(self, state: Sequence[Sequence[str]]) -> None:
        observations, actions = state
        self._observations, self._actions = tuple(observations), tuple(actions)
