"""A person's way through the shop in a real headless Chromium, with scripts switched off, to the agent's score."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import web_browser
from servers import running

from turngym.agents.serving import DrainingServer, page_front
from turngym.core.episode import Episode
from turngym.envs.webshop.env import WebShopEnv
from turngym.envs.webshop.shop import Shop, open_shop
from turngym.envs.webshop.web import WebSettings, create_app

pytestmark = pytest.mark.long
WIDTH, HEIGHT = 1000, 800
EVIL = "\"><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\"><svg onload=owned()>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = web_browser.find_browser()
    if path is None:
        reason = f"no browser found; looked for {', '.join(web_browser.NAMES)}"
        if os.environ.get("TURNGYM_REQUIRE_BROWSER") == "1":
            pytest.fail(f"TURNGYM_REQUIRE_BROWSER is 1, but there is {reason}")
        pytest.skip(reason)
    with web_browser.Browser(path, WIDTH, HEIGHT) as found:
        found.call("Emulation.setScriptExecutionDisabled", value=True)
        found.call("Emulation.setDeviceMetricsOverride", width=WIDTH, height=HEIGHT, deviceScaleFactor=1, mobile=False)
        yield found


@pytest.fixture
def site(request: pytest.FixtureRequest, make_shop: Callable[..., Shop]) -> Iterator[Any]:
    """(address, shop, episodes) of a running shop: the embedded one, or one with the product that is the parameter."""
    item = getattr(request, "param", None)
    wanted = {"attributes": ["mug"], "instruction": f"find a mug {EVIL}", "instruction_attributes": ["mug"]}
    shop = open_shop() if item is None else make_shop([item], {item["asin"]: wanted})
    episodes: list[Episode] = []
    server = DrainingServer(page_front(create_app(shop, WebSettings(seed=0), episodes.append), threads=8))
    with running(server) as address:
        yield address, shop, episodes
    shop.close()


def begin(browser: Any, address: str, goal: int) -> None:
    browser.open(address)
    browser.click("#goal", navigates=False)
    browser.type(str(goal))
    browser.press_enter()
    # the browser gives the search box the focus when it first draws the page, which may be after loading
    browser.wait_for("document.activeElement.id == 'search'")


def chosen(browser: Any) -> list[str]:
    return list(browser.value("[...document.querySelectorAll('[aria-pressed=true]')].map(e => e.value)"))


def test_a_goal_is_bought_by_mouse_and_keyboard(browser: Any, site: Any, tmp_path: Path) -> None:
    address, shop, episodes = site
    goal = next(g for g in shop.goals if len(g.goal_options) == 2 and shop.attainable(g)[0] == 1.0)
    begin(browser, address, goal.index)
    assert goal.instruction_text in browser.text("#instruction")
    browser.type(goal.title)
    browser.press_enter()
    assert browser.value("document.querySelectorAll('.card').length") == 10
    # the instruction stays in sight however far one scrolls
    browser.value("window.scrollTo(0, 1e6)")
    assert browser.value("document.querySelector('#instruction').getBoundingClientRect().top >= 0")
    browser.click(f"button[value='{goal.asin.lower()}']")
    assert goal.title in browser.text("h1")
    assert browser.value("document.querySelector('.tile img').naturalWidth") > 0
    for sub in ("description", "features", "reviews"):
        browser.click(f"button[value={sub}]")
        assert browser.text("h1").lower() == sub
        browser.click("button[value='< prev']")
    for name, value in goal.goal_options:
        assert value not in chosen(browser)
        browser.click(f"button.chip[value='{value}']")
        assert value in chosen(browser), name
    browser.screenshot(tmp_path / "item.png")
    assert (tmp_path / "item.png").stat().st_size > 10_000
    browser.click(".buy")
    assert browser.text("#score") == "1.00"
    assert goal.instruction_text in browser.text("#instruction")
    (episode,) = episodes
    assert episode.score == replayed(shop, episode) == 1.0
    browser.click("form.inline .primary")
    assert browser.text("#turns") == "0"


def replayed(shop: Shop, episode: Episode) -> float:
    """The score that an agent gets for the recorded actions; observations must agree on the way."""
    env = WebShopEnv(shop=shop)
    observation, _ = env.reset(options={"task": episode.task.task_id})
    for turn in episode.turns:
        assert turn.observation == observation
        observation = env.step(turn.response)[0]
    assert observation == episode.final_observation
    return env.score


def test_going_back_in_the_browser_shows_the_present_page(browser: Any, site: Any) -> None:
    address, _, episodes = site
    begin(browser, address, 3)
    browser.type("lamp")
    browser.press_enter()
    browser.click(".card")
    title = browser.text("h1")
    browser.back()
    browser.open(f"{address}shop")
    assert browser.text("h1") == title
    assert browser.text("#turns") == "2"
    browser.open(address)
    assert "You are shopping for embedded/3" in browser.text("main")
    browser.click(".note a")
    assert browser.text("h1") == title
    assert episodes == []


HOSTILE = {
    "asin": "EVIL000001",
    "name": f"Mug {EVIL}",
    "small_description": [EVIL],
    "pricing": "$5",
    "images": ["https://pictures.invalid/x.jpg"],
    "customization_options": {EVIL: [{"value": EVIL}, {"value": "plain"}]},
    **dict.fromkeys(("full_description", "category", "query", "product_category"), EVIL),
}


@pytest.mark.parametrize("site", [HOSTILE], indirect=True)
def test_hostile_products_run_nothing(browser: Any, site: Any) -> None:
    """With scripts switched on: what the texts try to run neither gets into the page nor past its policy."""
    address, _shop, episodes = site
    browser.call("Emulation.setScriptExecutionDisabled", value=False)
    try:
        begin(browser, address, 0)
        browser.type("mug")
        browser.press_enter()
        for selector in (
            ".card",
            "button.chip[value=plain]",
            "button[value=features]",
            "button[value='< prev']",
            ".buy",
        ):
            assert browser.value("document.title") != "owned"
            assert browser.value("document.querySelectorAll('script, svg[onload], img[onerror]').length") == 0
            browser.click(selector)
        # and if one did get in, the policy would stop it
        browser.value("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"document.title=1\">')")
        browser.value(
            "{ let s = document.createElement('script'); s.text = 'document.title = 1'; document.body.append(s) }"
        )
        assert browser.value("document.title") == "Thank you · turngym"
        assert browser.text("#score") == f"{episodes[0].score:.2f}"
        assert "<script>" in browser.text(".title")
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=True)
