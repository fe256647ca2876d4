"""WebShop as a Gymnasium environment: options, refusals, score, players, memory."""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest

from turngym.core.errors import TaskError, TurngymError
from turngym.envs.guard import ActionGuard, guard_of
from turngym.envs.registration import make_env
from turngym.envs.testing import EnvContract
from turngym.envs.webshop.actions import SEARCH_TEMPLATE
from turngym.envs.webshop.env import WebShopEnv
from turngym.envs.webshop.shop import Shop, open_shop


def made(shop: Shop, **options: Any) -> ActionGuard:
    return make_env(WebShopEnv, shop=shop, split="eval", **options)


def goal_of(shop: Shop, asin: str) -> str:
    """Id of a goal for this product."""
    return next(f"tiny/{goal.index}" for goal in shop.goals if goal.asin == asin)


def play(env: ActionGuard, *actions: str) -> Any:
    step: Any = None
    for action in actions:
        step = env.step(action)
    return step


def test_an_episode(tiny_shop: Shop) -> None:
    env = made(tiny_shop)
    task = next(f"tiny/{goal.index}" for goal in tiny_shop.goals if dict(goal.goal_options).get("color") == "grün")
    text, info = env.reset(seed=1, options={"task": task})
    assert text == f"WebShop [SEP] Instruction: [SEP] {env.base.goal.instruction_text} [SEP] Search"
    assert info["admissible_actions"] == info["admissible_templates"] == [SEARCH_TEMPLATE]
    assert (info["r_type"], info["r_price"], info["profile"], info["tagger"]) == (None, None, "tiny", "all-words")
    _, _, _, _, info = env.step("search[MUG]  please")
    assert (info["action"], info["verdict"], info["admissible_templates"]) == ("search[mug]", "ok", [])
    assert info["admissible_actions"][0] == "click[back to search]"
    _, reward, terminated, _, info = play(env, "click[mug0000001]", "click[Grün]", "click[small]")
    assert (reward, terminated, info["score"]) == (0.0, False, 0.0)
    assert env.step("click[small]")[4]["verdict"] == "no_effect"
    text, reward, terminated, truncated, info = env.step("click[buy now]")
    assert (terminated, truncated, info["success"]) == (True, False, reward == 1.0)
    assert reward == info["score"] > 0
    assert (info["r_type"], info["r_att"], info["r_price"]) == (1.0, 1.0, 1.0)
    assert text.endswith(f"\n[WEBSHOP_FINAL_SCORE={reward:.6f}]")
    assert env.get_state()["env"]["phase"] == "over"


def test_gym_make_takes_an_open_shop(tiny_shop: Shop) -> None:
    env = gym.make("turngym/WebShop-v0", shop=tiny_shop, split="eval")
    base: Any = env.unwrapped
    assert base.shop is tiny_shop
    assert env.reset(seed=0)[0].startswith("WebShop [SEP] ")
    env.close()


@pytest.mark.parametrize(
    ("actions", "reason"),
    [
        (("click[search]",), "there is nothing to click on this page but the search bar"),
        (("click[buy now]",), "there is nothing to click on this page but the search bar"),
        (("search[mug]", "search[lamp]"), "there is no search bar on this page"),
        (("search[mug]", "click[blue]"), 'nothing on this page is called "blue"'),
        (("search[mug]", "Click[mug0000001]"), "begins with Click, which must be in lower case: click[...]"),
        (("search[mug]", "click[ mug0000001]"), "is not possible now"),
        (("buy the mug",), '"buy the mug" is neither search[keywords] nor click[label]'),
    ],
)
def test_the_page_decides_what_is_possible(tiny_shop: Shop, actions: tuple[str, ...], reason: str) -> None:
    env = made(tiny_shop)
    env.reset(seed=0)
    before = play(env, *actions[:-1])
    state = env.base.get_state()["inner"]
    text, reward, terminated, _, info = env.step(actions[-1])
    assert (info["verdict"], reward, terminated) == ("inadmissible", 0.0, False)
    assert reason in text
    assert env.base.get_state()["inner"] == state
    bare = env.base.step(actions[-1])
    assert bare[4]["verdict"] == "inadmissible"
    assert bare[0] == (before[0] if before else env.base.reset(seed=0)[0])


def test_without_strict_admissible_the_shop_takes_everything(tiny_shop: Shop) -> None:
    env = made(tiny_shop, strict_admissible=False)
    env.reset(seed=0)
    before = play(env, "search[mug]", "click[mug0000001]")[0]
    text, _, _, _, info = env.step("click[nonsense]")
    assert (text, info["verdict"], info["env_steps"]) == (before, "inadmissible", 3)
    text, _, _, _, info = env.step("search[lamp]")
    assert (info["verdict"], "Total results: 28" in text) == ("ok", True)


def test_tasks(tiny_shop: Shop) -> None:
    env = made(tiny_shop)
    ids = env.task_ids()
    assert list(ids) == [f"tiny/{number}" for number in range(len(tiny_shop.goals))]
    assert (ids[-1], ids[1:3]) == (f"tiny/{len(ids) - 1}", ["tiny/1", "tiny/2"])
    for wrong in ("tiny/99", "tiny/01", "tiny/-1", "tiny/\u0661", "tiny/", "other/1", "1", f"tiny/{'9' * 5000}"):
        assert wrong not in ids
        with pytest.raises(TaskError, match="unknown task"):
            env.reset(options={"task": wrong})
    lamp, mug = goal_of(tiny_shop, "LAMP000027"), goal_of(tiny_shop, "MUG0000001")
    tasks = {}
    for task in (lamp, mug):
        env.reset(options={"task": task})
        tasks[task] = env.task
    assert tasks[lamp].sha256 != tasks[mug].sha256
    assert (tasks[lamp].split, tasks[lamp].category) == ("eval", "kitchen")


@pytest.mark.parametrize("query", ["title", "instruction"])
def test_the_oracle_finds_home_from_anywhere(query: str) -> None:
    env = guard_of(gym.make("turngym/WebShop-v0", profile="embedded", oracle_query=query, max_turns=None))
    rng = np.random.default_rng(3)
    ids = env.task_ids()
    for number in range(25):
        _, info = env.reset(options={"task": ids[number * 37 % len(ids)]})
        while not info["success"]:
            action = None
            if rng.random() < 0.5 and info["env_steps"] < 12:
                action = env.base.sample_action(rng) if rng.random() < 0.5 else env.base.plausible_mistake(rng)
            if action is None or action == "click[buy now]":
                action = env.expert_action()
            assert action is not None
            _, _, terminated, _, info = env.step(action)
            assert not terminated or info["score"] == info["attainable_max"] == 1.0
            assert info["turn"] < 60, "the oracle is lost"
    env.close()


def test_the_oracle_with_a_goal_that_cannot_be_met_fully(webshop_data: Path) -> None:
    shop = open_shop("1k-synthetic", webshop_data, price_seed=7)
    low = [goal.index for goal in shop.goals[:400] if shop.attainable(goal)[0] < 1.0]
    assert len(low) > 10
    env = made(shop)
    for goal in low[:8]:
        _, info = env.reset(options={"task": f"1k-synthetic/{goal}"})
        terminated = False
        while not terminated:
            _, _, terminated, _, info = env.step(env.expert_action() or "")
        assert 0.0 < info["score"] == info["attainable_max"] < 1.0
        assert info["success"] is False
    shop.close()


def test_the_title_finds_every_goal_product_on_the_first_page(webshop_data: Path) -> None:
    shop = open_shop("1k-synthetic", webshop_data, price_seed=7)
    env = WebShopEnv(shop=shop)
    first = {goal.asin: goal.index for goal in shop.goals}
    found = 0
    for asin, goal in sorted(first.items()):
        env.reset(options={"task": f"1k-synthetic/{goal}"})
        env.step(env.expert_action() or "")
        found += asin in env.scene.state.on_page
    assert (found, len(first)) == (415, 415)
    shop.close()


@pytest.mark.parametrize(
    ("steps", "pages"), [(1, ["click[next >]", "click[< prev]"]), (2, ["click[description]", "click[< prev]"])]
)
def test_who_wanders_goes_to_and_fro_and_never_buys(tiny_shop: Shop, steps: int, pages: list[str]) -> None:
    env = made(tiny_shop, max_turns=None)
    env.reset(options={"task": goal_of(tiny_shop, "LAMP000027")})
    player = env.base.make_player("wander")
    assert player.act() == env.expert_action()  # a search
    for _ in range(steps):
        env.step(env.expert_action() or "")
    shown = []
    for turn in range(6):
        action = player.act()
        assert action == pages[turn % 2]
        observation, *_, info = env.step(action or "")
        assert info["verdict"] == "ok"
        shown.append(observation)
    assert shown[:2] * 2 == shown[2:]
    assert shown[0] != shown[1]


@pytest.mark.parametrize(
    ("text", "clicked"),
    [
        (None, ["color"]),
        ("search[lamp], click[red], click[buy now]", ["color"]),
        ("search[lamp], click[red], click[small], click[buy now]", ["color", "size"]),
        ("search[lamp], click[red], click[small], click[tall], click[buy now]", ["color", "size"]),
        ("search[lamp], click[buy now]", []),
        ("buy a lamp", []),
    ],
)
def test_who_reads_chooses_as_many_options_as_the_text_shows(text: str | None, clicked: list[str]) -> None:
    env = gym.make("turngym/WebShop-v0", profile="embedded-small", oracle_query="instruction", split="train").unwrapped
    env.reset(seed=0)
    wanted = env.shop.attainable(env.goal, env.quirks)[1]
    assert sorted(wanted) == ["color", "size"]
    player, found, over = env.make_player("reading"), [], False
    if text is not None:
        player.read(text)
    while not over:
        found.append(player.act())
        _, _, over, _, info = env.step(found[-1])
        player.observe(found[-1])
    assert player.act() is None
    kinds = {f"click[{value}]": name for name, value in wanted.items()}
    assert [kinds[action] for action in found if action in kinds] == clicked
    assert found[-1] == "click[buy now]"
    assert (info["score"] == 1.0) == (len(clicked) == 2)


def test_players(tiny_shop: Shop) -> None:
    env = made(tiny_shop, max_turns=None)
    rng = np.random.default_rng(0)
    for name in ("first-hit", "oracle-title", "oracle-instruction"):
        env.reset(options={"task": goal_of(tiny_shop, "LAMP000027")})
        player, actions, done = env.base.make_player(name), [], False
        while not done:
            actions.append(player.act() or "")
            _, _, done, truncated, info = env.step(actions[-1])
            assert (info["verdict"], truncated) == ("ok", False), actions
            player.observe(actions[-1])
        assert player.act() is None
        assert info["score"] == 1.0 or name == "first-hit"
        if name == "first-hit":
            assert actions[0].startswith("search[find me a lamp")
            assert actions[2:] == ["click[buy now]"]
    with pytest.raises(TurngymError, match=r"no player 'fist-hit'.*first-hit"):
        env.base.make_player("fist-hit")
    env.reset(seed=0)
    kinds = set()
    for _ in range(300):
        plausible_mistake = env.base.plausible_mistake(rng)
        assert plausible_mistake is not None
        kinds.add((env.step(plausible_mistake)[4]["verdict"], plausible_mistake.split("[")[0]))
        if env.base.scene.state.kind == "done":
            env.reset()
        elif rng.random() < 0.3:
            _, _, done, _, info = env.step(env.base.sample_action(rng) or "")
            assert info["verdict"] in ("ok", "no_effect")
            if done:
                env.reset()
    assert {("inadmissible", "click"), ("inadmissible", "search"), ("ok", "click")} <= kinds


def test_wrong_options_are_errors(tiny_shop: Shop) -> None:
    for options, text in (
        ({"compat": "original"}, "compat is 'original'"),
        ({"observation_mode": "image"}, "observation_mode is 'image'"),
        ({"oracle_query": "titel"}, "Did you mean 'title'"),
        ({"shop": None, "profile": "1k", "split": None}, "profile is '1k'; valid: embedded"),
        ({"split": "test"}, "split is 'test'"),
    ):
        with pytest.raises(TurngymError, match=text):
            make_env(WebShopEnv, **({"shop": tiny_shop, "split": "eval"} | options))


def test_a_shop_is_shared_and_freed() -> None:
    first = gym.make("turngym/WebShop-v0", profile="embedded-small", price_seed=12)
    second = gym.make("turngym/WebShop-v0", profile="embedded-small", price_seed=12)
    other = gym.make("turngym/WebShop-v0", profile="embedded-small", price_seed=13)
    shop = guard_of(first).base.shop
    assert shop is guard_of(second).base.shop is not guard_of(other).base.shop
    first.reset(seed=0)
    first.close()
    second.reset(seed=0)
    second.step("search[pan]")
    gone = weakref.ref(shop)
    for env in (second, other):
        env.close()
    del first, second, other, env, shop
    gc.collect()
    assert gone() is None, "a closed shop is still held"


@pytest.mark.long
def test_a_further_environment_costs_little(tiny_shop: Shop) -> None:
    def one(number: int) -> WebShopEnv:
        env = WebShopEnv(shop=tiny_shop, split="eval", num_prev_obs=1)
        env.reset(seed=number)
        for action in ("search[lamp]", "click[lamp000003]", "click[description]"):
            env.step(action)
        return env

    envs = [one(number) for number in range(100)]
    gc.collect()
    tracemalloc.start()
    envs += [one(number) for number in range(100)]
    gc.collect()
    each = tracemalloc.get_traced_memory()[0] / 100
    tracemalloc.stop()
    assert each < 50_000, f"an environment costs {each:.0f} bytes"
    print(f"{each:.0f} bytes for each environment")


# --- the environment contract, on the generated shops


class WebShopContract(EnvContract):
    env_id = "turngym/WebShop-v0"

    def choose(self, guard: ActionGuard, rng: np.random.Generator) -> str:
        """Real searches instead of the template, and the expert's way now and then, so that episodes end."""
        if rng.random() < 0.4:
            return guard.expert_action() or "search[nothing]"
        return guard.base.sample_action(rng) or "search[nothing]"


class TestGenerated(WebShopContract):
    pass


class TestGeneratedSmallRich(WebShopContract):
    make_kwargs: ClassVar[Mapping[str, Any]] = {
        "profile": "embedded-small",
        "split": "eval",
        "observation_mode": "text_rich",
        "num_prev_obs": 1,
        "num_prev_actions": 2,
        "show_attributes": True,
        "oracle_query": "instruction",
    }
