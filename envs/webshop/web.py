"""The Flask application: a goal to choose, the shop's pages, a score. Works without scripts in the browser.

GET only looks, POST acts and leads back to GET. Product text is hostile: templates escape everything, and no page may
run scripts, load styles from elsewhere or be framed. A cookie carries a random id and nothing else; forms carry a token
that only the holder of that cookie can have been given.
"""

from __future__ import annotations

import hmac
import logging
import re
import secrets
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from turngym.envs.core.episode import Episode, Status, Turn
from turngym.envs.core.errors import TurngymError
from turngym.envs.core.task import Verdict
from turngym.envs.core.trace import TraceError, TraceWriter, iter_trace
from turngym.envs.spaces import printable
from turngym.envs.webshop.env import WebShopEnv
from turngym.envs.webshop.reward import ProductFacts, Reward
from turngym.envs.webshop.session import Page, click_action, page_of, parse_action, search_action
from turngym.envs.webshop.shop import Shop

try:
    from flask import Flask, Response, make_response, redirect, render_template, request
except ImportError as error:
    raise TurngymError("the shop's web pages need Flask: pip install 'turngym[serve]'") from error

# What the templates show: labels of the page that is open, and what a purchase's score is made of.

_PICTURES = ("https://", "http://", "data:image/")


@dataclass(frozen=True, slots=True)
class Chip:
    """One value of an option as a button."""

    value: str
    chosen: bool
    possible: bool
    """False where no action can name the value, as with a bracket in it: agents cannot choose it either."""


@dataclass(frozen=True, slots=True)
class Part:
    """One row of the score."""

    name: str
    share: float
    """How much of it was met, 0 to 1."""
    weight: float
    """What it counts, the rows adding up to 1."""
    wanted: str
    got: str


def chips(page: Page) -> Iterator[tuple[str, list[Chip]]]:
    """(option name, its values) of a product's page."""
    if page.product is None:
        return
    for name, values in page.product.options.items():
        chosen = page.options.get(name)
        yield name, [Chip(v, chosen == v, parse_action(click_action(v)) == ("click", v)) for v in values]


def picture(address: str) -> str:
    """`address` if a browser may load it as a picture, else nothing."""
    return address if address.lower().startswith(_PICTURES) else ""


def score_parts(env: WebShopEnv, reward: Reward) -> list[Part]:
    """The rows of the score of the purchase that ended the episode."""
    scene = env.scene
    goal, bought = scene.goal, scene.shop.product(scene.state.asin or "")
    assert bought is not None
    facts = ProductFacts(bought, scene.shop.tagger)
    met = [wanted for wanted in goal.attributes if facts.has_attribute(wanted)]
    parts = [Part("Attributes", reward.r_att, reward.w_att, ", ".join(goal.attributes), ", ".join(met) or "none")]
    if reward.r_option is not None:
        chosen = ", ".join(f"{name}: {value}" for name, value in scene.state.options)
        wishes = ", ".join(wish if isinstance(wish, str) else f"{wish[0]}: {wish[1]}" for wish in goal.goal_options)
        parts.append(Part("Options", reward.r_option, reward.w_option, wishes, chosen or "none chosen"))
    cap = "any" if goal.price_upper >= 1_000_000 else f"at most ${goal.price_upper:.2f}"
    price = f"${scene.shop.price(bought.asin):.2f}"
    parts.append(Part("Price", float(reward.r_price), reward.w_price, cap, price))
    return parts


# Who is in the shop: one environment and its turns per browser, bounded in number, idle time and turns.

Record = Callable[[Episode], None]
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class VisitLimits:
    """Limits on visits, on their idle time and on their length."""

    visits: int = 256
    """Visits at a time; who was away longest makes room."""
    idle: float = 3600.0
    """Seconds without a click after which a visit ends."""
    turns: int = 300
    """Clicks and searches per goal."""


class Visit:
    """One person's shopping for one goal at a time, recorded turn by turn as an agent's is."""

    def __init__(self, env: WebShopEnv, limits: VisitLimits, record: Record, now: float) -> None:
        self.env = env
        self.lock = threading.Lock()
        self.turns: list[Turn] = []
        self.status: Status | None = None
        """How the episode ended; None while it goes on."""
        self.begun = False
        """Whether there is a goal yet."""
        self.seen = now
        """When it was last used, on the clock of its `Visits`."""
        self._limits = limits
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
        elif len(self.turns) >= self._limits.turns:
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
        left = {"error": "the player left"} if status is Status.TRUNCATED_DEPTH else {}
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
                meta={"agent": "human", "interface": "web", **left},
            )
        )


@dataclass(slots=True)
class Visits:
    """All visits by the random id in the person's cookie. Safe across threads."""

    shop: Shop
    make_env: Callable[[], WebShopEnv]
    record: Record
    limits: VisitLimits = field(default_factory=VisitLimits)
    clock: Clock = time.monotonic
    _open: OrderedDict[str, Visit] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __len__(self) -> int:
        return len(self._open)

    def get(self, name: str) -> Visit | None:
        """The visit with that id, now the most recent; None if there is none or it was idle too long."""
        with self._lock:
            gone = self._expired()
            visit = self._open.get(name)
            if visit is not None:
                visit.seen = self.clock()
                self._open.move_to_end(name)
        # without the lock: whoever plays in one of them may hold it for a while
        self._dismiss(gone)
        return visit

    def enter(self, name: str) -> Visit:
        """The visit with that id, a new one if need be; the one away longest makes room."""
        visit = self.get(name)
        if visit is not None:
            return visit
        # made without the lock; another request of the same browser may still be first
        fresh = Visit(self.make_env(), self.limits, self.record, self.clock())
        gone = []
        with self._lock:
            visit = self._open.setdefault(name, fresh)
            while len(self._open) > self.limits.visits:
                gone.append(self._open.popitem(last=False)[1])
        self._dismiss(gone)
        return visit

    def close(self) -> None:
        """End all visits; those under way are recorded."""
        with self._lock:
            gone = list(self._open.values())
            self._open.clear()
        self._dismiss(gone)

    def _expired(self) -> list[Visit]:
        gone, now = [], self.clock()
        while self._open:
            name, oldest = next(iter(self._open.items()))
            # in the order of their last use: behind the first that is recent all are
            if now - oldest.seen <= self.limits.idle:
                break
            gone.append(self._open.pop(name))
        return gone

    @staticmethod
    def _dismiss(gone: list[Visit]) -> None:
        for visit in gone:
            with visit.lock:
                visit.leave()
                visit.env.close()


COOKIE = "turngym_shop"
MAX_FORM = 16 << 10
"""Bytes of a form."""
# the form of secrets.token_urlsafe(32)
_ID = re.compile(r"[A-Za-z0-9_-]{43}")
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
    """Of the goals drawn at random; by default another order every time."""
    limits: VisitLimits = field(default_factory=VisitLimits)


def create_app(shop: Shop, settings: WebSettings | None = None, record: Record | None = None) -> Flask:
    """A WSGI application over an open shop; `app.extensions["webshop"]` is its `Web`.

    `record` gets every finished episode. Raises TurngymError for a setting that is unknown.
    """
    here = Path(__file__).parent
    # both paths said, because Flask cannot find them for a package inside a namespace
    app = Flask("turngym.envs.webshop.web", root_path=str(here), instance_path=str(here))
    app.config.update(
        MAX_CONTENT_LENGTH=MAX_FORM, MAX_FORM_MEMORY_SIZE=MAX_FORM, MAX_FORM_PARTS=16, SEND_FILE_MAX_AGE_DEFAULT=300
    )
    # a lone surrogate in a product's text could not be sent
    app.jinja_options = {"finalize": lambda value: printable(value) if type(value) is str else value}
    app.jinja_env.filters["picture"] = picture
    web = Web(shop, settings or WebSettings(), record or (lambda episode: None))
    app.extensions["webshop"] = web
    app.add_url_rule("/", view_func=web.start, methods=["GET"])
    app.add_url_rule("/start", view_func=web.begin, methods=["POST"])
    app.add_url_rule("/shop", view_func=web.look, methods=["GET"])
    app.add_url_rule("/act", view_func=web.act, methods=["POST"])

    @app.after_request
    def guard(reply: Response) -> Response:
        reply.headers.update(web.headers)
        if request.endpoint != "static":
            reply.headers["Cache-Control"] = "no-store"
        return reply

    @app.errorhandler(Exception)
    def refused(error: Exception) -> tuple[str, int]:
        status = getattr(error, "code", None)
        if not isinstance(status, int):
            app.logger.exception("request failed", exc_info=error)
            status = 500
        return web.error(status)

    return app


class Web:
    """The pages over one shop."""

    def __init__(self, shop: Shop, settings: WebSettings, record: Record) -> None:
        self.shop = shop
        self.settings = settings
        probe = self._env()
        self._ids = probe.task_ids()
        probe.close()
        self._rng = np.random.default_rng(settings.seed)
        self._lock = threading.Lock()
        self._secret = secrets.token_bytes(32)
        self.visits = Visits(shop, self._env, record, settings.limits)
        sources = "data: https: http:" if settings.pictures else "data:"
        self.headers: Mapping[str, str] = {
            "Content-Security-Policy": (
                f"default-src 'none'; img-src 'self' {sources}; style-src 'self'; form-action 'self'; "
                "base-uri 'none'; frame-ancestors 'none'"
            ),
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            # with no-referrer a browser sends `Origin: null` with our own forms, which a server would refuse
            "Referrer-Policy": "same-origin",
        }

    def _env(self) -> WebShopEnv:
        settings = self.settings
        return WebShopEnv(
            shop=self.shop, split=settings.split, compat=settings.compat, show_attributes=settings.attributes
        )

    # --- pages

    def start(self) -> Response:
        """GET /: choose a goal."""
        return self._start(_NOTES.get(request.args.get("note", ""), ""))

    def begin(self) -> Any:
        """POST /start: shop for the goal of that number, or for any."""
        name = self._checked()
        if name is None:
            return self.error(403)
        wish = request.form.get("goal", "").strip().removeprefix(f"{self.shop.profile.name}/")
        task_id = f"{self.shop.profile.name}/{wish}" if wish else self._draw()
        if task_id not in self._ids:
            last = len(self.shop.goals) - 1
            return self._start(f"There is no goal {wish[:40]!r}: goals have numbers from 0 to {last}."), 404
        visit = self.visits.enter(name)
        with visit.lock:
            visit.begin(task_id)
        return redirect("/shop", 303)

    def look(self) -> Any:
        """GET /shop: the page that is open."""
        name = self._cookie()
        visit = None if name is None else self.visits.get(name)
        if visit is None or name is None or not visit.begun:
            return redirect("/?note=none", 303)
        with visit.lock:
            return self._page(name, visit)

    def act(self) -> Any:
        """POST /act: a search or a click, then the page that it leads to."""
        name = self._checked()
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
                    visit.play(click_action(printable(request.form["click"])))
                elif words.strip():
                    visit.play(search_action(words))
        return redirect("/shop", 303)

    def error(self, status: int) -> tuple[str, int]:
        """A page that says what went wrong."""
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
        name = self._cookie() or secrets.token_urlsafe(32)
        visit = self.visits.get(name)
        page = render_template(
            "start.html",
            token=self._token(name),
            note=note,
            shop=self.shop,
            under_way=visit.env.task.task_id if visit is not None and visit.under_way else "",
        )
        reply = make_response(page)
        reply.set_cookie(COOKIE, name, httponly=True, samesite="Lax")
        return reply

    def _page(self, name: str, visit: Visit) -> str:
        env, state = visit.env, visit.env.scene.state
        session, endless = str(env.goal.index), env.quirks.endless_pages
        attributes = self.settings.attributes
        page = page_of(self.shop, env.goal, state, session, show_attributes=attributes, endless_pages=endless)
        shown: dict[str, Any] = {"token": self._token(name), "visit": visit, "page": page, "goal": env.goal}
        if state.kind == "done":
            assert state.reward is not None
            shown |= {"reward": state.reward, "parts_of_score": score_parts(env, state.reward), "best": env.describe()}
            shown |= {"bought": self.shop.product(page.asin), "target": self.shop.product(env.goal.asin)}
        elif state.kind == "item":
            shown["chips"] = list(chips(page))
        return render_template(f"{state.kind}.html", **shown)

    def _draw(self) -> str:
        with self._lock:
            return self._ids[int(self._rng.integers(len(self._ids)))]

    def _cookie(self) -> str | None:
        """The id in the cookie, if it has the form of one of ours."""
        name = request.cookies.get(COOKIE, "")
        return name if _ID.fullmatch(name) else None

    def _checked(self) -> str | None:
        """The id in the cookie, if the form carries its token."""
        name = self._cookie()
        # bytes, because compare_digest refuses text beyond ASCII
        given = request.form.get("token", "").encode()
        return name if name is not None and hmac.compare_digest(given, self._token(name).encode()) else None

    def _token(self, name: str) -> str:
        return hmac.digest(self._secret, name.encode(), "sha256").hex()


# People's episodes in a trace file, numbered so that a task and a sample name one episode.

log = logging.getLogger(__name__)


class Recorder:
    """Appends episodes to a file; sample numbers go on from those that are in it. Safe across threads."""

    def __init__(self, path: Path) -> None:
        """Raises TraceError where the file cannot be written or is of a newer version."""
        self.path = path
        self.failed = 0
        """Episodes that could not be written."""
        self._samples: Counter[str] = Counter()
        if path.is_file():
            for item in iter_trace(path):
                if isinstance(item, Episode):
                    self._samples[item.task.task_id] = max(self._samples[item.task.task_id], item.sample + 1)
        self._writer = TraceWriter(path)
        self._lock = threading.Lock()

    def __call__(self, episode: Episode) -> None:
        """Append one episode. A full disk costs the record, not the person's purchase: it is logged."""
        with self._lock:
            sample = self._samples[episode.task.task_id]
            try:
                self._writer.write(replace(episode, sample=sample))
            except (OSError, ValueError, TraceError) as error:
                self.failed += 1
                log.error("an episode of %s could not be written to %s: %s", episode.task.task_id, self.path, error)
                return
            self._samples[episode.task.task_id] = sample + 1

    def close(self) -> None:
        with self._lock:
            self._writer.close()
