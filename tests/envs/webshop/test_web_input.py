"""The shop's web pages against bad input: headers, cookies, tokens, unknown visits, huge forms, any text at all."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import web_tools as tools
from hypothesis import given, settings
from hypothesis import strategies as st

from turngym.envs.webshop.shop import Shop

pytest.importorskip("flask", reason="the web pages need turngym[serve]")

from turngym.envs.webshop.web import COOKIE, MAX_FORM, WebSettings, create_app, picture

Person = tools.Person


@pytest.fixture
def open_web(tiny_shop: Shop) -> Callable[[], Any]:
    return lambda: create_app(tiny_shop, WebSettings(split="eval", seed=0))


def test_every_page_forbids_scripts_and_frames(open_web: Callable[..., Any]) -> None:
    app = open_web()
    person = Person(app).begin(0)
    for path in ("/", "/shop", "/static/shop.css", "/nowhere"):
        headers = person.client.get(path).headers
        policy = dict(rule.strip().partition(" ")[::2] for rule in headers["Content-Security-Policy"].split(";"))
        assert policy["default-src"] == "'none'"
        assert policy["style-src"] == "'self'"
        assert "script-src" not in policy
        assert policy["frame-ancestors"] == policy["base-uri"] == "'none'"
        assert policy["form-action"] == "'self'"
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "same-origin"
        assert ("no-store" in headers["Cache-Control"]) == (path != "/static/shop.css")
    closed = create_app(app.extensions["webshop"].shop, WebSettings(split="eval", pictures=False))
    assert "https:" not in closed.test_client().get("/").headers["Content-Security-Policy"]


def test_the_cookie_is_random_and_out_of_reach(open_web: Callable[..., Any]) -> None:
    app = open_web()
    ids = set()
    for _ in range(3):
        cookie = app.test_client().get("/").headers["Set-Cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Lax" in cookie
        ids.add(cookie.partition(";")[0])
    assert len(ids) == 3
    assert all(len(cookie) == len(COOKIE) + 1 + 43 for cookie in ids)


@pytest.mark.parametrize("token", ["", "x", "é", "0" * 64, "a" * 9000])
def test_a_wrong_token_does_nothing(open_web: Callable[..., Any], token: str) -> None:
    app = open_web()
    person = Person(app).begin(0)
    for path, fields in (("/start", {"goal": "1"}), ("/act", {"turn": "0", "search": "mug"})):
        reply = person.client.post(path, data={"token": token, **fields})
        assert reply.status_code == 403
        assert "not made for your visit" in reply.text
    assert 'id="turns">0<' in person.client.get("/shop").text
    assert "goal 0" in person.client.get("/shop").text


def test_a_token_is_good_for_one_cookie_and_one_server(open_web: Callable[..., Any]) -> None:
    app = open_web()
    mine, theirs = Person(app).begin(0), Person(app).begin(0)
    fields = {"token": mine.field("token"), "turn": "0", "search": "mug"}
    assert theirs.client.post("/act", data=fields).status_code == 403
    assert app.test_client().post("/act", data=fields).status_code == 403
    again = open_web()
    client = again.test_client()
    client.set_cookie(COOKIE, mine.client.get_cookie(COOKIE).value)
    assert client.post("/act", data=fields).status_code == 403


@pytest.mark.parametrize("cookie", ["../../etc/passwd", "A" * 43 + "/", "", "é", "A" * 42])
def test_foreign_cookies_are_nobodys(open_web: Callable[..., Any], cookie: str) -> None:
    client = open_web().test_client()
    client.set_cookie(COOKIE, cookie)
    assert client.get("/shop").location == "/?note=none"
    assert len(re.findall(rf"{COOKIE}=([\w-]{{43}});", client.get("/").headers["Set-Cookie"])) == 1


def test_unknown_visits_and_goals(open_web: Callable[..., Any]) -> None:
    app = open_web()
    person = Person(app)
    assert person.client.get("/shop").location == "/?note=none"
    token = person.field("token")
    reply = person.client.post("/act", data={"token": token, "turn": "0", "search": "mug"})
    assert reply.location == "/?note=gone"
    assert "visit has ended" in person.client.get(reply.location).text
    for goal in ("99", "-1", "1.5", "abc", "tiny/x", "²", "٣", "\x00", "<b>", "9" * 400):
        reply = person.client.post("/start", data={"token": token, "goal": goal})
        assert reply.status_code == 404
        assert "goals have numbers from 0 to" in reply.text
        assert "'<b>" not in reply.text
    assert len(app.extensions["webshop"].visits) == 0
    assert person.client.post("/start", data={"token": token, "goal": " tiny/2 "}).location == "/shop"
    assert person.client.get("/act").status_code == 405
    assert person.client.get("/nowhere").status_code == 404
    assert person.client.get("/?note=<script>").status_code == 200


def test_huge_forms_are_refused(open_web: Callable[..., Any]) -> None:
    person = Person(open_web()).begin(0)
    reply = person.act(search="x" * MAX_FORM)
    assert reply.status_code == 413
    assert "too long" in reply.text
    token = Person(open_web()).field("token")
    many = "&".join(f"a{n}=1" for n in range(3000))
    kind = {"content_type": "application/x-www-form-urlencoded"}
    assert person.client.post("/act", data=f"token={token}&{many}&{'x' * MAX_FORM}", **kind).status_code == 413
    parts = {f"f{n}": "x" for n in range(40)}
    assert person.client.post("/act", data=parts, content_type="multipart/form-data").status_code == 413


@given(st.text(max_size=60) | st.binary(max_size=60))
@settings(max_examples=60, deadline=None)
def test_any_text_can_be_searched_and_clicked(any_web: Any, text: str | bytes) -> None:
    person = Person(any_web).begin(1)
    value = text.encode("utf-8", "replace") if isinstance(text, str) else text
    for name in ("search", "click", "turn", "token", "goal"):
        fields = {"token": person.field("token"), "turn": person.field("turn"), name: value}
        reply = person.client.post("/act" if name != "goal" else "/start", data=fields)
        assert reply.status_code in (303, 403, 404)
        person.page = person.client.get("/shop").text
        assert 'id="instruction"' in person.page


@pytest.fixture(scope="module")
def any_web(make_shop: Callable[..., Shop]) -> Any:
    return create_app(make_shop(), WebSettings(split="eval"))


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("https://a.org/b.jpg", True),
        ("HTTP://a.org/b.jpg", True),
        ("data:image/svg+xml,<svg>", True),
        ("data:text/html,<script>", False),
        ("javascript:alert(1)", False),
        (" https://a.org", False),
        ("file:///etc/passwd", False),
        ("//a.org/b.jpg", False),
        ("", False),
    ],
)
def test_only_pictures_are_shown(address: str, shown: bool) -> None:
    assert picture(address) == (address if shown else "")
