"""Playing in the browser: acting, watching, taking over; hostile texts, limits, and one way through a real Chromium."""

from __future__ import annotations

import html
import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import web_browser
import web_tools

from turngym.agents import load_world, play_web
from turngym.agents.play_web import COOKIE, MAX_FORM, Games, create_app
from turngym.agents.serving import DrainingServer, page_front
from turngym.core.episode import Episode, Status

WORLDS: Any = {
    "household": ("turngym/ALFWorld-v0", {}),
    "shop": ("turngym/WebShop-v0", {"profile": "embedded-small"}),
    "search": ("turngym/Search-v0", {"config": "tiny"}),
}
TASK = "generated/small/train/3"
EVIL = "</pre><script>alert(1)</script>{{7*7}}\"'><img src=x onerror=alert(2)>"


class Player(web_tools.Person):
    def begin(self, world: str = "household", task: str = TASK, agent: str = "expert") -> Player:  # type: ignore[override]
        assert self.send("/begin", world=world, task=task, agent=agent).status_code == 200, self.page
        return self

    def shows(self, name: str) -> str:
        found = re.search(rf'id="{name}"[^>]*>([^<]*)<', self.page)
        return html.unescape(found[1]) if found else ""


@pytest.fixture
def episodes() -> list[Episode]:
    return []


@pytest.fixture
def app(episodes: list[Episode]) -> Any:
    return create_app(Games(episodes.append, environments=WORLDS, seed=0))


@pytest.mark.long
@pytest.mark.parametrize(("world", "task"), [("household", TASK), ("shop", ""), ("search", "")])
def test_the_expert_is_watched_to_the_end(app: Any, episodes: list[Episode], world: str, task: str) -> None:
    player = Player(app).begin(world, task)
    while not player.shows("won"):
        player.act(step="1")
        assert int(player.shows("turns")) < 40
    assert (player.shows("won"), player.shows("reward")) == ("solved", "1.00")
    assert 'id="step"' not in player.page
    assert (episodes[0].success, episodes[0].status) == (True, Status.COMPLETED)


@pytest.mark.parametrize("agent", ["expert", "searching"])
def test_a_person_acts_takes_over_and_hands_back(app: Any, episodes: list[Episode], agent: str) -> None:
    player = Player(app).begin(agent=agent)
    player.act(step="1")
    player.act(action="look")
    assert "&gt; look" in player.page
    assert '<p id="statement"><b>Your task is to: ' in player.page, "the task is out of sight after the first page"
    player.act(action="fly to the moon")
    assert "Invalid action" in player.page
    while not player.shows("won"):
        player.act(step="1")
        assert int(player.shows("turns")) < 50
    (episode,) = episodes
    assert episode.meta["turns_by_person"] == [1, 2]
    assert [turn.action for turn in episode.turns[1:3]] == ["look", "fly to the moon"]
    assert [turn.verdict.value for turn in episode.turns[1:3]] == ["ok", "inadmissible"]


def test_words_fill_the_slot_of_a_template(app: Any, episodes: list[Episode]) -> None:
    player = Player(app).begin("shop", "")
    assert 'name="before" value="search["' in player.page
    player.act(before="search[", after="]", action="lamp")
    assert "Total results" in player.page
    player.begin("search", "")
    player.act(before="<answer>", after="</answer>", action="nobody")
    assert "over" in player.page
    assert [episode.turns[0].action for episode in episodes] == ["search[lamp]", "<answer>nobody</answer>"]
    assert episodes[0].meta["error"] == "the player left"


def test_a_model_is_watched_and_relieved() -> None:
    model = f"model:{load_world('alfworld').checkpoint('student')}"
    episodes: list[Episode] = []
    app = create_app(Games(episodes.append, environments={"household": WORLDS["household"]}, models=(model,)))
    player = Player(app).begin(agent=model)
    player.act(step="1")
    player.act(action="look")
    player.act(step="1")
    assert player.shows("turns") == "3"
    app.extensions["play"].close()
    (episode,) = episodes
    assert episode.turns[1].response == "<action>look</action>"
    assert [turn.logprobs is None for turn in episode.turns] == [False, True, False]


def test_what_is_said_stays_text(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    player = Player(app).begin()
    player.act(action=EVIL)
    game, _ = next(iter(app.extensions["play"]._open.values()))
    game.runner.conversation.observation = f"A room. {EVIL} \ud800"
    game.runner.conversation.admissible = (EVIL,)
    game.note = EVIL
    page = player.client.get("/game").text
    tags, texts = web_tools.parsed(page)
    assert [names for tag, names in tags if tag == "script"] == [["src"]]
    assert "img" not in {tag for tag, _ in tags}
    assert not [name for _, names in tags for name in names if name.startswith("on")]
    assert texts.count(EVIL) >= 3
    policy = player.client.get("/game").headers["Content-Security-Policy"]
    assert "script-src 'self'; " in policy
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy


def test_forms_of_others_do_nothing(app: Any) -> None:
    mine, theirs = Player(app).begin(), Player(app).begin()
    for token in ("", "é", theirs.field("token")):
        assert mine.client.post("/act", data={"token": token, "turn": "0", "step": "1"}).status_code == 403
    assert mine.client.post("/begin", data={"world": "shop"}).status_code == 403
    old = {"token": mine.field("token"), "turn": "0", "action": "look"}
    for _ in range(3):
        assert mine.client.post("/act", data=old).location == "/game"
    mine.page = mine.client.get("/game").text
    assert mine.shows("turns") == "1"
    cookie = app.test_client().get("/").headers["Set-Cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Lax" in cookie
    assert len(cookie.partition(";")[0]) == len(COOKIE) + 1 + 43


def test_what_is_not_there_is_said(app: Any) -> None:
    player = Player(app)
    for fields, said in (
        ({"world": "houshold"}, "Did you mean"),
        ({"world": "household", "agent": "model:/etc"}, "nobody here is called"),
        ({"world": "household", "task": "<b>"}, "unknown task"),
    ):
        reply = player.send("/begin", **fields)
        assert reply.status_code == 404
        assert said in html.unescape(reply.text)
        assert "<b>'" not in reply.text
    assert player.client.get("/game").location == "/"
    assert player.client.get("/nowhere").status_code == 404
    assert player.client.get("/act").status_code == 405
    assert player.send("/begin", world="household", task="x" * MAX_FORM).status_code == 413


def test_games_are_limited_in_number_and_age() -> None:
    now = [0.0]
    episodes: list[Episode] = []
    games = Games(episodes.append, environments=WORLDS, games=2, idle=100.0, clock=lambda: now[0])
    for name in "abc":
        games.begin(name, "household", TASK, "expert").act("look")
    assert [games.get(name) is None for name in "abc"] == [True, False, False]
    assert (len(episodes), episodes[0].status) == (1, Status.TRUNCATED_DEPTH)
    now[0] += 101
    assert games.get("c") is None
    assert (len(games), len(episodes)) == (0, 3)


@pytest.mark.long
def test_watched_and_played_in_a_real_browser(tmp_path: Path) -> None:
    path = web_browser.find_browser()
    if path is None:
        if os.environ.get("TURNGYM_REQUIRE_BROWSER") == "1":
            pytest.fail("TURNGYM_REQUIRE_BROWSER is 1, but there is no browser")
        pytest.skip("no Chromium is installed")
    server = DrainingServer(page_front(create_app(Games(environments=WORLDS, seed=0)), threads=4))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        with web_browser.Browser(path) as browser:
            browser.call("Emulation.setDeviceMetricsOverride", width=390, height=844, deviceScaleFactor=1, mobile=True)
            browser.open(server.url)
            browser.click("#household button")
            browser.click("button[value=look]")
            assert browser.text("#turns") == "1"
            assert browser.value("document.documentElement.scrollWidth") <= 390
            browser.click("#watch", navigates=False)
            browser.wait_for("document.querySelector('#won') !== null")
            assert browser.text("#reward") == "1.00"
            browser.screenshot(tmp_path / "play.png")
            if (out := os.environ.get("TURNGYM_SCREENSHOT")) is not None:
                Path(out).write_bytes((tmp_path / "play.png").read_bytes())
    finally:
        server.stop()
        thread.join()


def test_the_script_is_the_only_one() -> None:
    page = (Path(play_web.__file__).parent / "play_page.html").read_text(encoding="utf-8")
    assert re.findall(r"<script[^>]*>", page) == ['<script src="/play.js">']
    assert "|safe" not in page
