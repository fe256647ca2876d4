"""The original's 1,000-product shop: prices and goals against what the original recorded."""

from __future__ import annotations

import hashlib
import json
import lzma
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from turngym.envs.panels import load_panel, verify_panel
from turngym.envs.webshop.goals import PER_PRODUCT
from turngym.envs.webshop.shop import Shop, goal_task, open_shop

PARTS = {0: "1k-synthetic", 1: "1k-human"}


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@pytest.fixture(scope="module")
def transcripts(webshop_data: Path) -> list[dict[str, Any]]:
    with lzma.open(webshop_data / "transcripts.jsonl.xz", "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


@pytest.fixture(scope="module")
def shops(webshop_data: Path) -> Iterator[dict[int, Shop]]:
    opened = {human: open_shop(name, webshop_data, price_seed=7) for human, name in PARTS.items()}
    yield opened
    for shop in opened.values():
        shop.close()


@pytest.mark.parametrize("human", [0, 1])
def test_prices_and_goals_are_the_recorded_ones(
    shops: dict[int, Shop], transcripts: list[dict[str, Any]], human: int
) -> None:
    shop = shops[human]
    head = next(line for line in transcripts if line["kind"] == "head" and line["human_goals"] == human)
    prices = {product.asin: round(shop.price(product.asin), 6) for product in shop.products}
    assert digest(json.dumps(prices, sort_keys=True)) == head["prices_sha"]
    assert len(shop.goals) == head["n_goals"] == (13 if human else 6910)
    goals = []
    for goal in shop.goals[: len(head["goals"])]:
        options = list(goal.goal_options) if human else dict(goal.goal_options)  # type: ignore[arg-type]
        text = digest(json.dumps(options, sort_keys=True))
        goals.append([goal.asin, digest(goal.instruction_text), goal.price_upper, text])
    assert goals == head["goals"]
    assert len(goals) == (13 if human else 600)


def test_evaluation_by_product_shares_no_product_with_training(shops: dict[int, Shop]) -> None:
    """And what its sibling shares: the figure that the documentation gives."""
    shop = shops[0]
    shared = {}
    for scheme in ("turnopd", "products"):
        splits = shop.splits(scheme)
        trained = {shop.goals[goal].asin for goal in splits["train"]}
        asked = [shop.goals[goal].asin for goal in splits["eval"]]
        shared[scheme] = sum(asin in trained for asin in asked), len(asked), len(splits["train"])
        if scheme == "products":
            assert len(set(asked)) == 84
            assert max(Counter(asked).values()) == PER_PRODUCT
    assert shared == {"turnopd": (193, 200, 2997), "products": (0, 200, 2997)}


def test_the_papers_test_goals_are_the_first_500(webshop_data: Path) -> None:
    panel = load_panel("webshop-papers-test")
    assert panel.task_ids == tuple(f"1k-synthetic/{number}" for number in range(500))
    env: Any = panel.make_env(data=webshop_data)
    assert verify_panel(panel, env) == []
    assert (env.max_turns, env.on_invalid, env.unwrapped.strict_admissible) == (15, "noop", False)
    # the original's rules: what is not understood shows the page again, and a search works on every page
    page, _ = env.reset(options={"task": panel.task_ids[0]})
    assert env.step("dance")[0] == page
    env.step("search[mug]")
    assert "Page 1 (Total results" in env.step("search[red mug]")[0]
    env.close()


def test_the_panel_by_product_is_the_split(webshop_data: Path) -> None:
    panel = load_panel("webshop-1k-products-eval")
    env = panel.make_env(data=webshop_data)
    assert list(env.get_wrapper_attr("task_ids")()) == list(panel.task_ids)
    assert verify_panel(panel, env) == []
    train = panel.make_env(data=webshop_data, split="train")
    assert not set(train.get_wrapper_attr("task_ids")()) & set(panel.task_ids)
    for opened in (env, train):
        opened.close()


def test_counts_of_the_synthetic_goals(shops: dict[int, Shop]) -> None:
    shop = shops[0]
    by_product = Counter(goal.asin for goal in shop.goals)
    assert len(by_product) == 415
    assert (sorted(by_product.values())[207], max(by_product.values())) == (2, 558)
    options = Counter(len(goal.goal_options) for goal in shop.goals)
    assert options == {0: 185, 1: 538, 2: 4729, 3: 1458}
    assert sum(goal.price_upper == 1_000_000 for goal in shop.goals) == 15


@pytest.mark.long
def test_goals_that_cannot_be_met(shops: dict[int, Shop]) -> None:
    """Quirk A: 458 of 6,910 goals; no other choice of the same product does better than the literal one."""
    shop = shops[0]
    below, lowest = 0, 1.0
    for goal in shop.goals:
        exact = shop.reward(goal, goal.asin, dict(goal.goal_options)).total  # type: ignore[arg-type]
        best, options = shop.attainable(goal)
        assert best >= exact
        below += best < 1.0
        lowest = min(lowest, best)
        assert shop.reward(goal, goal.asin, options).total == best
    assert below == 458
    assert lowest == pytest.approx(2 / 3)


def test_splits_of_the_real_shop(shops: dict[int, Shop]) -> None:
    splits = shops[0].splits()
    assert {name: len(goals) for name, goals in splits.parts.items()} == {"eval": 200, "train": 2997}
    assert splits.dropped == 3
    assert shops[1].splits("papers").parts == {"test": tuple(range(13)), "dev": (), "train": ()}
    assert goal_task(shops[0], shops[0].goals[199]).split == "eval"


def test_goals_do_not_depend_on_prices(shops: dict[int, Shop], webshop_data: Path) -> None:
    other = open_shop("1k-synthetic", webshop_data)
    assert all(one.request == two.request for one, two in zip(other.goals, shops[0].goals, strict=True))
    other.close()
