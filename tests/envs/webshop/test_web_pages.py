"""The shop's web pages through Flask's test client: what an agent gets, hostile product texts, limits."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import web_tools as tools
from hypothesis import given
from hypothesis import strategies as st

from turngym.core.episode import Episode, Status
from turngym.envs.webshop.env import WebShopEnv
from turngym.envs.webshop.shop import Shop, open_shop
from turngym.envs.webshop.web import COOKIE, MAX_FORM, WebSettings, create_app, picture

Person = tools.Person

EVIL = "\"><script>alert(1)</script>'{{7*7}} </button><img src=x onerror=alert(2)>"


def play(person: Any, action: str) -> None:
    name, _, argument = action.removesuffix("]").partition("[")
    assert person.act(**{name: argument}).status_code == 200


@pytest.fixture
def episodes() -> list[Episode]:
    return []


@pytest.fixture
def open_web(tiny_shop: Shop, episodes: list[Episode]) -> Callable[..., Any]:
    def make(shop: Shop = tiny_shop, **options: Any) -> Any:
        chosen = {"split": "eval", "seed": 0} | options
        return create_app(shop, WebSettings(**chosen), episodes.append)

    return make


@pytest.mark.parametrize("attributes", [False, True])
def test_the_same_clicks_as_an_agent_give_the_same_episode(
    open_web: Callable[..., Any], episodes: list[Episode], attributes: bool
) -> None:
    """Random play on the generated shop: the page offers what the environment offers, turn by turn, to the score."""
    shop = open_shop("embedded")
    person = Person(open_web(shop, attributes=attributes))
    env = WebShopEnv(shop=shop, split="eval", show_attributes=attributes)
    rng = np.random.default_rng(3)
    for goal in (5, 77, 1234):
        person.begin(goal)
        observation, _ = env.reset(options={"task": f"embedded/{goal}"})
        observations, rewards, over = [observation], [], False
        while not over:
            clicks = {f"click[{value}]" for value in person.offered}
            assert clicks == set() if env.scene.state.has_search_bar else clicks == set(env.admissible())
            action = env.expert_action() if len(rewards) > 12 else env.sample_action(rng)
            assert action is not None
            play(person, action)
            observation, reward, over, _, _ = env.step(action)
            observations.append(observation)
            rewards.append(reward)
        episode = episodes.pop()
        assert [turn.observation for turn in episode.turns] + [episode.final_observation] == observations
        assert [turn.reward for turn in episode.turns] == rewards
        assert (episode.score, episode.success, episode.status) == (env.score, env.success, Status.COMPLETED)
        assert (episode.task, episode.episode_return) == (env.task, env.score)
        assert f'id="score">{env.score:.2f}<' in person.page
    env.close()
    shop.close()


def test_what_a_person_sees(open_web: Callable[..., Any], tiny_shop: Shop, episodes: list[Episode]) -> None:
    goal = next(g for g in tiny_shop.goals if dict(g.goal_options).get("color") == "grün")
    person = Person(open_web(compat="repaired"))
    person.begin(goal.index)
    instruction = html.escape(goal.instruction_text)
    assert instruction in person.page
    person.act(search="Mug  [set]")
    assert instruction in person.page
    assert "“mug set”" in person.page
    assert "Blue Mug &amp; Saucer &lt;Set&gt;" in person.page
    assert 'src="https://example.org/mug.jpg"' in person.page
    assert 'referrerpolicy="no-referrer"' in person.page
    person.act(click="mug0000001")
    assert 'value="red &#34;deluxe&#34;"' in person.page
    assert "aria-pressed" not in person.page
    person.act(click='red "deluxe"')
    person.act(click="grün")
    assert re.findall(r'value="([^"]*)" aria-pressed="true"', person.page) == ["grün"]
    person.act(click="features")
    assert "Safe in a dishwasher" in person.page
    assert "Attributes" not in person.page
    person.act(click="< prev")
    assert re.findall(r'value="([^"]*)" aria-pressed="true"', person.page) == ["grün"]
    person.act(click="buy now")
    assert instruction in person.page
    assert "Thank you for shopping" in person.page
    assert "the same product" in person.page
    assert "grün" in person.page
    assert [turn.action for turn in episodes[0].turns][:2] == ["search[mug set]", "click[mug0000001]"]
    assert person.send("/start", goal="").status_code == 200


def hostile_shop(make_shop: Callable[..., Shop]) -> Shop:
    item = {
        "asin": "EVIL000001",
        "name": f"Mug {EVIL}",
        "full_description": EVIL,
        "small_description": [EVIL, "another"],
        "pricing": "$5",
        "images": ["javascript:alert(3)"],
        "category": EVIL,
        "query": EVIL,
        "product_category": f"{EVIL} › x",
        "customization_options": {EVIL: [{"value": EVIL}, {"value": "plain"}, {"value": "a[b"}]},
    }
    wanted = {"attributes": [EVIL], "instruction": EVIL, "instruction_attributes": [EVIL]}
    return make_shop([item], {"EVIL000001": wanted})


def test_hostile_product_texts_stay_texts(open_web: Callable[..., Any], make_shop: Callable[..., Shop]) -> None:
    person = Person(open_web(hostile_shop(make_shop), attributes=True))
    pages = [person.begin(1).page]
    for step in ({"search": f"mug {EVIL}"}, {"click": "evil000001"}, {"click": "plain"}):
        person.act(**step)
        pages.append(person.page)
    for sub in ("description", "features", "reviews", "attributes"):
        person.act(click=sub)
        pages.append(person.page)
        person.act(click="< prev")
    person.act(click="buy now")
    pages.append(person.page)
    assert "Your score" in pages[-1]
    for page in pages:
        tags, texts = tools.parsed(page)
        assert {name for name, _ in tags}.isdisjoint({"script", "img", "iframe", "object", "base"})
        assert not [name for _, names in tags for name in names if name.startswith("on") or name == "style"]
        assert EVIL in texts
    assert EVIL.lower() in tools.parsed(pages[2])[1]


def test_what_no_action_can_name_is_shown_but_cannot_be_clicked(open_web: Callable[..., Any]) -> None:
    person = Person(open_web()).begin(0)
    person.act(search="odd jug")
    person.act(click="odd0000001")
    assert 'value="a[b" disabled' in person.page
    assert "a[b" not in person.offered
    # a value that reads like a button acts as that button, as it does for agents
    assert {"description", "buy now", "same"} <= person.offered


def test_a_second_click_and_an_old_page_do_nothing(open_web: Callable[..., Any], episodes: list[Episode]) -> None:
    person = Person(open_web()).begin(0)
    old = {"token": person.field("token"), "turn": "0", "search": "mug"}
    for _ in range(3):
        assert person.client.post("/act", data=old).location == "/shop"
    assert 'id="turns">1<' in person.client.get("/shop").text
    person.page = person.client.get("/shop").text
    person.act(search="   ")
    assert 'id="turns">1<' in person.page


def test_steps_are_limited(open_web: Callable[..., Any], episodes: list[Episode]) -> None:
    person = Person(open_web(turns=3)).begin(0)
    person.act(search="mug")
    person.act(click="next >")
    person.act(click="back to search")
    assert episodes[0].status is Status.TRUNCATED_TURNS
    assert "All 3 steps" in person.page
    person.act(search="mug")
    assert len(episodes[0].turns) == 3
    assert 'id="turns">3<' in person.page
    person.begin(1)
    assert 'id="turns">0<' in person.page


# --- bad input: headers, cookies, tokens, unknown visits, huge forms, any text at all


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
        ("data:image/svg+xml,<svg>", True),
        ("javascript:alert(1)", False),
        ("//a.org/b.jpg", False),
        ("", False),
    ],
)
def test_only_pictures_are_shown(address: str, shown: bool) -> None:
    assert picture(address) == (address if shown else "")
