"""The Flask application: a goal to choose, the shop's pages, a score. Works without scripts in the browser.

GET only looks, POST acts and leads back to GET. Product text is hostile: templates escape everything. Who visits, and
what pages may load, is in `envs/visitors.py`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from turngym.core.episode import Episode, Status, Turn
from turngym.core.errors import TurngymError
from turngym.core.redaction import excerpt
from turngym.core.task import Verdict
from turngym.envs.spaces import printable
from turngym.envs.visitors import LEFT, MAX_FORM, Forms, Visitors, guard_pages
from turngym.envs.webshop.actions import click_action, click_on, search_action
from turngym.envs.webshop.env import WebShopEnv
from turngym.envs.webshop.pages import Page
from turngym.envs.webshop.players import ShopScene
from turngym.envs.webshop.reward import ProductFacts, Reward
from turngym.envs.webshop.shop import Shop

try:
    from flask import Flask, Response, make_response, redirect, render_template, request
except ImportError as error:
    raise TurngymError("the shop's web pages need Flask: pip install 'turngym[serve]'") from error

# What the templates show: labels of the page that is open, and what a purchase's score is made of.

_PICTURES = ("https://", "http://", "data:image/")


@dataclass(frozen=True, slots=True)
class OptionButton:
    """One value of an option as a button."""

    value: str
    chosen: bool
    possible: bool
    """False where no action can name the value, as with a bracket in it: agents cannot choose it either."""


@dataclass(frozen=True, slots=True)
class ScorePart:
    """One row of the score."""

    name: str
    share: float
    """How much of it was met, 0 to 1."""
    weight: float
    """What it counts, the rows adding up to 1."""
    wanted: str
    got: str


def chips(page: Page, scene: ShopScene) -> Iterator[tuple[str, list[OptionButton]]]:
    """(option name, its values) of a product's page."""
    if page.product is None:
        return
    for name, values in page.product.options.items():
        chosen, labels, quirks = page.options.get(name), scene.clickables, scene.quirks
        yield name, [OptionButton(v, chosen == v, click_on(v, labels, quirks) is not None) for v in values]


def picture(address: str) -> str:
    """`address` if a browser may load it as a picture, else nothing."""
    return address if address.lower().startswith(_PICTURES) else ""


def score_parts(env: WebShopEnv, reward: Reward) -> list[ScorePart]:
    """The rows of the score of the purchase that ended the episode."""
    scene = env.scene
    goal, bought = scene.goal, scene.shop.product(scene.state.asin or "")
    assert bought is not None
    facts = ProductFacts(bought, scene.shop.tagger)
    met = [wanted for wanted in goal.attributes if facts.has_attribute(wanted)]
    parts = [ScorePart("Attributes", reward.r_att, reward.w_att, ", ".join(goal.attributes), ", ".join(met) or "none")]
    if reward.r_option is not None:
        chosen = ", ".join(f"{name}: {value}" for name, value in scene.state.options)
        wishes = ", ".join(wish if isinstance(wish, str) else f"{wish[0]}: {wish[1]}" for wish in goal.goal_options)
        parts.append(ScorePart("Options", reward.r_option, reward.w_option, wishes, chosen or "none chosen"))
    cap = "any" if goal.price_upper >= 1_000_000 else f"at most ${goal.price_upper:.2f}"
    price = f"${scene.shop.price(bought.asin):.2f}"
    parts.append(ScorePart("Price", float(reward.r_price), reward.w_price, cap, price))
    return parts


# What belongs to a visitor: one environment and its turns, bounded in number.

Record = Callable[[Episode], None]


class Visit:
    """One person's shopping for one goal at a time, recorded turn by turn as an agent's is."""

    def __init__(self, env: WebShopEnv, most_turns: int, record: Record) -> None:
        self.env = env
        self.lock = threading.Lock()
        self.turns: list[Turn] = []
        self.status: Status | None = None
        """How the episode ended; None while it goes on."""
        self.begun = False
        """Whether there is a goal yet."""
        self._most_turns = most_turns
        self._record = record
        self._observation = ""
        self._admissible: tuple[str, ...] = ()

    @property
    def under_way(self) -> bool:
        """Whether actions can be played."""
        return self.begun and self.status is None

    def begin(self, task_id: str) -> None:
        """Shop for another goal; what was begun before is recorded as left. Raises TaskError for an unknown task."""
        self.leave()
        self._observation, _ = self.env.reset(options={"task": task_id})
        self._admissible = self.env.admissible()
        self.turns, self.status, self.begun = [], None, True

    def play(self, action: str) -> Verdict:
        """One action on the page that is open. Call only while `under_way`."""
        observation, reward, terminated, _, info = self.env.step(action)
        self.turns.append(
            Turn(
                index=len(self.turns),
                observation=self._observation,
                admissible=self._admissible,
                response=action,
                action=info["action"],
                verdict=Verdict(info["verdict"]),
                reward=reward,
                origin="demonstration",
            )
        )
        self._observation, self._admissible = observation, self.env.admissible()
        if terminated:
            self._end(Status.COMPLETED)
        elif len(self.turns) >= self._most_turns:
            self._end(Status.TRUNCATED_TURNS)
        return self.turns[-1].verdict

    def leave(self) -> None:
        """Ends the visit: one under way ends as `truncated_depth`, recorded if anything was done."""
        if self.status is None and self.turns:
            self._end(Status.TRUNCATED_DEPTH)
        elif self.status is None:
            self.status = Status.TRUNCATED_DEPTH

    def _end(self, status: Status) -> None:
        self.status = status
        env = self.env
        left = {"error": LEFT} if status is Status.TRUNCATED_DEPTH else {}
        self._record(
            Episode(
                task=env.task,
                seed=0,
                sample=0,
                group=0,
                segments=(),
                turns=tuple(self.turns),
                status=status,
                success=env.success,
                episode_return=sum(turn.reward for turn in self.turns),
                score=env.score,
                system=env.instructions,
                final_observation=self._observation,
                meta={"agent": "human", "interface": "web", **env.scoring, **left},
            )
        )


COOKIE = "turngym_shop"
_NOTES = {
    "gone": "Your visit has ended, or the shop was restarted. Choose a goal to begin again.",
    "none": "Choose a goal first.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WebSettings:
    """Settings of the web pages."""

    split: str | None = None
    """Which goals are drawn at random, `train` or `eval`; any goal can be chosen by its number."""
    compat: str = "webshop"
    """Behavior of the pages: `webshop` (the original's faults included) or `repaired`."""
    attributes: bool = False
    """Products have a page Attributes, which agents do not see by default."""
    pictures: bool = True
    """Load pictures from where the shop's data says; without it only pictures that are part of the data."""
    seed: int | None = None
    """Fixes the goals drawn at random; by default another order every time."""
    visits: int = 256
    """Most visitors at a time. A new one takes the place of the one away longest."""
    idle: float = 3600.0
    """Seconds without a click after which a visit ends."""
    turns: int = 300
    """Clicks and searches per goal."""


def create_app(shop: Shop, settings: WebSettings | None = None, record: Record | None = None) -> Flask:
    """A WSGI application over an open shop; `app.extensions["webshop"]` is its `ShopPages`.

    `record` gets every finished episode. Raises TurngymError for a setting that is unknown.
    """
    folder = Path(__file__).parent
    # both paths said, because Flask cannot find them for a package inside a namespace
    app = Flask("turngym.envs.webshop.web", root_path=str(folder), instance_path=str(folder))
    app.config.update(SEND_FILE_MAX_AGE_DEFAULT=300)
    settings = settings or WebSettings()
    web = ShopPages(shop, settings, record or (lambda episode: None))
    sources = "data: https: http:" if settings.pictures else "data:"
    guard_pages(app, f"img-src 'self' {sources}; style-src 'self'", web.error)
    app.jinja_env.filters["picture"] = picture
    app.extensions["webshop"] = web
    app.add_url_rule("/", view_func=web.start, methods=["GET"])
    app.add_url_rule("/start", view_func=web.begin, methods=["POST"])
    app.add_url_rule("/shop", view_func=web.look, methods=["GET"])
    app.add_url_rule("/act", view_func=web.act, methods=["POST"])
    return app


class ShopPages:
    """The pages over one shop. `record` gets every episode that ends, but for those without a turn."""

    def __init__(
        self, shop: Shop, settings: WebSettings, record: Record, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.shop, self.settings, self.record = shop, settings, record
        probe = self._env()
        self._ids = probe.task_ids()
        probe.close()
        self._rng = np.random.default_rng(settings.seed)
        self._lock = threading.Lock()
        self._forms = Forms(COOKIE)
        self.visits = Visitors[Visit](most=settings.visits, idle=settings.idle, dismiss=self._dismiss, clock=clock)

    def _env(self) -> WebShopEnv:
        settings = self.settings
        return WebShopEnv(
            shop=self.shop, split=settings.split, compat=settings.compat, show_attributes=settings.attributes
        )

    def visit(self, name: str) -> Visit:
        """The visit of that visitor, a new one if need be."""
        return self.visits.enter(name, lambda: Visit(self._env(), self.settings.turns, self.record))

    @staticmethod
    def _dismiss(visit: Visit) -> None:
        """Those that end without a purchase are recorded as left."""
        with visit.lock:
            visit.leave()
            visit.env.close()

    # --- pages

    def start(self) -> Response:
        """GET /: choose a goal."""
        return self._start(_NOTES.get(request.args.get("note", ""), ""))

    def begin(self) -> Any:
        """POST /start: shop for the goal of that number, or for any."""
        name = self._forms.sender()
        if name is None:
            return self.error(403)
        wish = request.form.get("goal", "").strip().removeprefix(f"{self.shop.profile.name}/")
        with self._lock:
            drawn = self._ids[int(self._rng.integers(len(self._ids)))]
        task_id = f"{self.shop.profile.name}/{wish}" if wish else drawn
        if task_id not in self._ids:
            last = len(self.shop.goals) - 1
            return self._start(f"There is no goal {excerpt(wish, 40)!r}: goals have numbers from 0 to {last}."), 404
        visit = self.visit(name)
        with visit.lock:
            visit.begin(task_id)
        return redirect("/shop", 303)

    def look(self) -> Any:
        """GET /shop: the page that is open."""
        name = self._forms.visitor()
        visit = None if name is None else self.visits.get(name)
        if visit is None or name is None or not visit.begun:
            return redirect("/?note=none", 303)
        with visit.lock:
            return self._page(name, visit)

    def act(self) -> Any:
        """POST /act: a search or a click, then the page that it leads to."""
        name = self._forms.sender()
        if name is None:
            return self.error(403)
        visit = self.visits.get(name)
        if visit is None:
            return redirect("/?note=gone", 303)
        with visit.lock:
            # a second click on a button, or a page from before: what it meant is over
            if visit.under_way and request.form.get("turn") == str(len(visit.turns)):
                words = printable(request.form.get("search", ""))
                if "click" in request.form:
                    label, scene = printable(request.form["click"]), visit.env.scene
                    visit.play(click_on(label, scene.clickables, scene.quirks) or click_action(label))
                elif words.strip():
                    visit.play(search_action(words))
        return redirect("/shop", 303)

    def error(self, status: int) -> tuple[str, int]:
        texts = {
            400: "The browser sent something that cannot be read.",
            403: "This page was not made for your visit, or the shop was restarted since.",
            404: "There is no such page.",
            405: "This address cannot be used like that.",
            413: f"That was too long: forms may have {MAX_FORM:,} bytes.",
        }
        text = texts.get(status, "Something went wrong in the shop. It has been noted.")
        return render_template("error.html", text=text, status=status), status

    # --- pieces

    def _start(self, note: str) -> Response:
        name = self._forms.visitor_or_new()
        visit = self.visits.get(name)
        page = render_template(
            "start.html",
            token=self._forms.token(name),
            note=note,
            shop=self.shop,
            under_way=visit.env.task.task_id if visit is not None and visit.under_way else "",
        )
        reply = make_response(page)
        self._forms.remember(reply, name)
        return reply

    def _page(self, name: str, visit: Visit) -> str:
        env, state = visit.env, visit.env.scene.state
        page = env.page
        values: dict[str, Any] = {"token": self._forms.token(name), "visit": visit, "page": page, "goal": env.goal}
        if state.kind == "done":
            assert state.reward is not None
            values |= {"reward": state.reward, "parts_of_score": score_parts(env, state.reward), "best": env.describe()}
            values["approximate"] = self.shop.scoring.get("approximate")
            values |= {"bought": self.shop.product(page.asin), "target": self.shop.product(env.goal.asin)}
        elif state.kind == "item":
            values["chips"] = list(chips(page, env.scene))
        return render_template(f"{state.kind}.html", **values)
