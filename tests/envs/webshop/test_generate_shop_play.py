"""The gates of the generated shops that need a shopper: oracle, random; and the phrases of the small one."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import gymnasium as gym
import numpy as np
import pytest

import turngym.envs  # noqa: F401  (registers the ids)
from turngym.envs.webshop.env import WebShopEnv
from turngym.envs.webshop.generate import FULL, SMALL, vocabulary
from turngym.envs.webshop.products import ShopDataError

PROFILES = ("embedded", "embedded-small")
Choose = Callable[[WebShopEnv], str | None]


@cache
def env_of(profile: str, query: str = "title") -> WebShopEnv:
    env = gym.make("turngym/WebShop-v0", profile=profile, split="eval", oracle_query=query).unwrapped
    assert isinstance(env, WebShopEnv)
    return env


def score_of(env: WebShopEnv, task: str, choose: Choose, turns: int = 20, seed: int = 0) -> float:
    env.reset(seed=seed, options={"task": task})
    for _ in range(turns):
        action = choose(env)
        assert action is not None
        if env.step(action)[2]:
            break
    return env.score


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("query", ["title", "instruction"])
def test_the_oracle_earns_every_goal(profile: str, query: str):
    env = env_of(profile, query)
    missed = [task for task in env.task_ids() if score_of(env, task, WebShopEnv.expert_action) != 1.0]
    assert missed == []


@pytest.mark.parametrize("profile", PROFILES)
def test_random_shoppers_earn_little(profile: str):
    rng, env = np.random.default_rng(0), env_of(profile)
    found = [
        score_of(env, task, lambda env: env.sample_action(rng), seed=number)
        for number, task in enumerate(env.task_ids()[::2])
    ]
    assert sum(found) / len(found) < 0.2


@cache
def phrases() -> frozenset[str]:
    return frozenset(vocabulary(SMALL))


def cut(text: str) -> int | None:
    """Fewest phrases of which `text` consists; None where it cannot be cut."""
    known, longest = phrases(), max(map(len, phrases()))
    best: list[int | None] = [0] + [None] * len(text)
    for end in range(1, len(text) + 1):
        options = [
            before + 1
            for start in range(max(0, end - longest), end)
            if (before := best[start]) is not None and text[start:end] in known
        ]
        best[end] = min(options, default=None)
    return best[-1]


def test_pages_and_actions_of_the_small_shop_are_a_few_phrases_each():
    env = env_of("embedded-small", "instruction")
    rng = np.random.default_rng(1)
    most = {"page": 0, "action": 0}
    for task in env.task_ids()[:6]:
        pages = [env.reset(options={"task": task})[0]]
        for turn in range(14):
            expert = env.expert_action()
            assert expert is not None
            most["action"] = max(most["action"], cut(expert) or 99)
            action = expert if turn % 2 or env.scene.state.kind == "search" else env.sample_action(rng)
            page, _, over, _, _ = env.step(action or "")
            if over:
                break
            pages.append(page)
        lengths = [cut(page) for page in pages]
        assert None not in lengths, pages[lengths.index(None)]
        most["page"] = max(most["page"], *(length for length in lengths if length))
    assert most["page"] <= 70
    assert most["action"] <= 6


def test_the_receipt_can_be_cut_too_up_to_the_digits_of_a_lower_score():
    env = env_of("embedded-small")
    task = env.task_ids()[0]
    env.reset(options={"task": task})
    player, receipt, over = env.make_player("oracle-instruction"), "", False
    while not over:
        receipt, _, over, _, _ = env.step(player.act() or "")
    assert cut(receipt.replace("1.000000]", "1.0]")) is not None


def test_a_shop_of_real_looking_texts_has_no_vocabulary():
    with pytest.raises(ShopDataError, match=r"'full' has texts of style 'prose'; valid: 'terse'"):
        vocabulary(FULL)
