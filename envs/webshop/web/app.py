"""The Flask application: a goal to choose, the shop's pages, a score. Works without scripts in the browser.

GET only looks, POST acts and leads back to GET. Product text is hostile: templates escape everything, and no page may
run scripts, load styles from elsewhere or be framed. A cookie carries a random id and nothing else; forms carry a token
that only the holder of that cookie can have been given.
"""

from __future__ import annotations

import hmac
import re
import secrets
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from flask import Flask, Response

from turngym.envs.core import TurngymError
from turngym.envs.spaces import printable
from turngym.envs.webshop.env import WebShopEnv
from turngym.envs.webshop.pages.actions import click, search
from turngym.envs.webshop.shop.shop import Shop
from turngym.envs.webshop.web.content import chips, picture, present, score_parts
from turngym.envs.webshop.web.visits import Record, Visit, VisitLimits, Visits

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
    """How the shop is shown to people."""

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

    `record` gets every finished episode. Raises TurngymError where Flask is not installed or a setting is unknown.
    """
    try:
        from flask import Flask, request
    except ImportError as error:
        raise TurngymError("the shop's web pages need Flask: pip install 'turngym[serve]'") from error
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

    def start(self) -> Response | str:
        """GET /: choose a goal."""
        from flask import request

        return self._start(_NOTES.get(request.args.get("note", ""), ""))

    def begin(self) -> Any:
        """POST /start: shop for the goal of that number, or for any."""
        from flask import redirect, request

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
        from flask import redirect

        name = self._cookie()
        visit = None if name is None else self.visits.get(name)
        if visit is None or name is None or not visit.begun:
            return redirect("/?note=none", 303)
        with visit.lock:
            return self._page(name, visit)

    def act(self) -> Any:
        """POST /act: a search or a click, then the page that it leads to."""
        from flask import redirect, request

        name = self._checked()
        if name is None:
            return self.error(403)
        visit = self.visits.get(name)
        if visit is None:
            return redirect("/?note=gone", 303)
        with visit.lock:
            # a second click on a button, or a page from before: what it meant is over
            if visit.under_way and request.form.get("turn") == str(len(visit.turns)):
                action = _action(request.form)
                if action is not None:
                    visit.play(action)
        return redirect("/shop", 303)

    def error(self, status: int) -> tuple[str, int]:
        """A page that says what went wrong."""
        from flask import render_template

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
        from flask import make_response, render_template

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
        from flask import render_template

        env, state = visit.env, visit.env.scene.state
        page = present(env, self.settings.attributes)
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
        from flask import request

        name = request.cookies.get(COOKIE, "")
        return name if _ID.fullmatch(name) else None

    def _checked(self) -> str | None:
        """The id in the cookie, if the form carries its token."""
        from flask import request

        name = self._cookie()
        # bytes, because compare_digest refuses text beyond ASCII
        given = request.form.get("token", "").encode()
        return name if name is not None and hmac.compare_digest(given, self._token(name).encode()) else None

    def _token(self, name: str) -> str:
        return hmac.digest(self._secret, name.encode(), "sha256").hex()


def _action(form: Mapping[str, str]) -> str | None:
    """The action that a form stands for; None for one without content."""
    if "click" in form:
        return click(printable(form["click"]))
    words = printable(form.get("search", ""))
    return search(words) if words.strip() else None
