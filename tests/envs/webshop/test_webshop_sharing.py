"""A shop that environments share: who closes it, who moves it to another process, and what it remembers."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import pytest

from turngym.envs.guard import ActionGuard, guard_of
from turngym.envs.webshop.env import WebShopEnv
from turngym.envs.webshop.shop import Shop, open_shop

PROFILE = "embedded-small"


def made(**options: Any) -> ActionGuard:
    return guard_of(gym.make("turngym/WebShop-v0", **{"profile": PROFILE, **options}))


def bought(guard: ActionGuard, seed: int) -> float:
    guard.reset(seed=seed)
    over = False
    while not over:
        _, _, over, _, info = guard.step(guard.expert_action() or "")
    return float(info["score"])


def test_close_reset_close_leaves_the_neighbors_their_shop() -> None:
    guard, neighbor = made(), made()
    shop = neighbor.base.shop
    users = shop.users
    for _ in range(3):
        guard.close()
        guard.close()
        assert shop.users == users - 1
        assert bought(guard, 0) == 1.0
        assert (shop.users, guard.base.shop) == (users, shop)
    guard.close()
    assert bought(neighbor, 1) == 1.0
    neighbor.close()


def test_the_last_one_frees_the_shop_and_gets_another() -> None:
    guard = made(price_seed=77)
    shop = guard.base.shop
    task = guard.reset(seed=3)[1]["task_sha"]
    guard.close()
    assert len(shop.products) == 0
    assert guard.reset(seed=3)[1]["task_sha"] == task
    assert guard.base.shop is not shop
    assert guard.base.shop.price_seed == 77
    guard.close()


def test_a_shop_that_was_given_is_its_owners(tiny_shop: Shop) -> None:
    env = WebShopEnv(shop=tiny_shop)
    env.reset(seed=0)
    env.close()
    env.reset(seed=0)
    env.close()
    assert len(tiny_shop.products) > 0
    assert tiny_shop.search("mug")


def test_a_split_that_is_unknown_keeps_no_shop_open() -> None:
    guard = made()
    users = guard.base.shop.users
    with pytest.raises(Exception, match="split is 'valid'"):
        made(split="valid")
    assert guard.base.shop.users == users
    guard.close()


def test_pickled_environments_have_a_use_of_the_shop_each() -> None:
    guard = made()
    shop, users = guard.base.shop, guard.base.shop.users
    guard.reset(seed=1)
    guard.step("search[blue mug]")
    one, two = pickle.loads(pickle.dumps([guard, guard.base]))
    assert one.base is two
    assert (one.base.shop, shop.users) == (shop, users + 1)
    one.close()
    assert shop.users == users
    assert guard.step("click[back to search]")[4]["verdict"] == "ok"
    guard.close()


def test_pickled_environments_go_on_in_another_process() -> None:
    guard = made(channel="text")
    guard.reset(seed=1)
    guard.step("<action>search[blue mug]</action>")
    read = (
        "import pickle, sys; env = pickle.load(sys.stdin.buffer); sys.stdout.buffer.write(pickle.dumps(env.step(%r)))"
    )
    action = f"<action>{guard.admissible()[-1]}</action>"  # type: ignore[index]
    command = [sys.executable, "-c", read % action]
    done = subprocess.run(command, input=pickle.dumps(guard), capture_output=True, check=True, timeout=120)
    assert pickle.loads(done.stdout) == guard.step(action)
    guard.close()


def test_shops_travel_themselves(tiny_shop: Shop) -> None:
    moved = pickle.loads(pickle.dumps(tiny_shop))
    assert moved.fingerprint == tiny_shop.fingerprint
    assert moved.search("mug") == tiny_shop.search("mug") != ()
    opened = open_shop(PROFILE, price_seed=5)
    again = pickle.loads(pickle.dumps(opened))
    assert again is opened
    assert opened.users == 2
    again.close()
    opened.close()


def test_the_memo_of_searches_is_bounded_in_bytes_and_in_number(
    tiny_shop: Shop, make_shop: Callable[..., Shop], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("turngym.envs.webshop.shop.MEMO_BYTES", 64_000)
    monkeypatch.setattr("turngym.envs.webshop.shop.MEMO", 100)
    asked: list[str] = []

    class Index:
        def search(self, query: str, k: int) -> list[tuple[str, float]]:
            asked.append(query)
            return [(query[:10], 1.0)]

    catalog = make_shop().products
    monkeypatch.setattr(catalog, "engine", Index)
    shop = Shop(catalog, tiny_shop.profile, tagger="all-words")
    memo = shop._search.cache
    for number in range(200):
        assert shop.search(f"{number} " + "x" * 1000) == ((f"{number} " + "x" * 1000)[:10],)
        assert memo.currsize <= 64_000
    assert 40 < len(memo) < 64
    count = len(asked)
    shop.search("199 " + "x" * 1000)
    assert len(asked) == count, "what was asked last is forgotten"
    shop.search("0 " + "x" * 1000)
    assert len(asked) == count + 1
    kept, held = len(memo), memo.currsize
    shop.search("y" * 10_000)
    assert (len(memo), memo.currsize) == (kept, held), "one long query drove out others"

    monkeypatch.setattr("turngym.envs.webshop.shop.MEMO", 3)
    few = Shop(catalog, tiny_shop.profile, tagger="all-words")
    for number in range(9):
        few.search(str(number))
    assert len(few._search.cache) == 3
    few.close()
    assert (len(few._search.cache), few._search.cache.currsize) == (0, 0)
