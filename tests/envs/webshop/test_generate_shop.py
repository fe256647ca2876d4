"""The gates of the generated shops: formats, mixture, goals that one purchase alone fulfils, the oracle."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable
from functools import cache, partial

import gymnasium as gym
import numpy as np
import pytest

import turngym.envs  # noqa: F401  (registers the ids)
from turngym.envs.testing import expect
from turngym.envs.webshop.catalog_config import FULL, SMALL, CatalogConfig, find_config, part_of
from turngym.envs.webshop.env import WebShopEnv
from turngym.envs.webshop.generate import generate_catalog
from turngym.envs.webshop.goals import Goal
from turngym.envs.webshop.products import ShopDataError
from turngym.envs.webshop.prose_shop import load_words
from turngym.envs.webshop.reward import (
    ProductFacts,
    best_purchase,
    compute_reward,
    matches,
    processed,
    simplify_value,
    wanted_options,
)
from turngym.envs.webshop.shop import Shop, open_shop
from turngym.envs.webshop.terse_shop import LOOKS, PRODUCT_KINDS, vocabulary

PROFILES = ("embedded", "embedded-small")


full_catalog = cache(partial(generate_catalog, FULL))


@cache
def shop_of(profile: str, price_seed: int = 0) -> Shop:
    return open_shop(profile, price_seed=price_seed)


def share(rows: list[dict], test) -> float:
    return sum(bool(test(row)) for row in rows) / len(rows)


def test_the_same_settings_give_the_same_bytes_and_another_seed_another_shop():
    first, again = (json.dumps(generate_catalog(FULL)) for _ in range(2))
    assert first == again
    other = CatalogConfig(name="full", seed=1)
    assert json.dumps(generate_catalog(other)) != first


def test_the_full_shop_is_mixed_as_a_real_one_is():
    items, ins = full_catalog()
    assert len(items) >= 1000
    assert len({item["product_category"] for item in items}) == 200
    assert len({item["asin"] for item in items}) == len(items) == len(ins)
    assert all(len(item["asin"]) == 10 for item in items)
    assert 0.06 < share(items, lambda item: not item["pricing"]) < 0.12
    assert 0.06 < share(items, lambda item: item["pricing"].count("$") == 2) < 0.13
    assert 0.03 < share(items, lambda item: any(not text.strip() for text in item["small_description"])) < 0.12
    assert 0.1 < share(items, lambda item: not item["full_description"]) < 0.3
    assert 0.5 < share(items, lambda item: "instruction" in ins[item["asin"]]) < 0.65
    sizes = Counter(itertools.chain.from_iterable([len(item["customization_options"] or {})] for item in items))
    assert set(sizes) == {0, 1, 2}


@pytest.mark.parametrize("profile", PROFILES)
def test_no_product_has_more_than_twelve_option_combinations(profile: str):
    most = max(product.combinations for product in shop_of(profile).products)
    assert 2 <= most <= 12


def test_some_wanted_features_can_be_read_on_one_sub_page_only():
    """Shares of the features that goals of the full shop ask for."""
    items, ins = full_catalog()
    seen: Counter[tuple[str, ...]] = Counter()
    for item in items:
        record = ins[item["asin"]]
        for feature in record.get("instruction_attributes", [])[1:]:
            texts = {"title": item["name"], "description": item["full_description"]}
            texts["features"] = " ".join(item["small_description"])
            seen[tuple(name for name, text in texts.items() if feature in text.lower())] += 1
    total = seen.total()
    assert all(len(places) <= 1 for places in seen)
    assert seen["title",] / total > 0.15
    assert seen["description",] / total > 0.1
    assert seen["features",] / total > 0.3
    assert 0.04 < seen[()] / total < 0.14


@pytest.mark.parametrize(
    ("profile", "price_seed"),
    [
        ("embedded-small", 0),
        *(
            pytest.param(*one, marks=pytest.mark.long)
            for one in (("embedded", 0), ("embedded", 1), ("embedded-small", 1))
        ),
    ],
)
def test_every_goal_is_met_by_one_purchase_and_no_other(profile: str, price_seed: int):
    """Among all products with all their option choices, whatever their type: stricter than the reward."""
    shop = shop_of(profile, price_seed)
    facts = {product.asin: ProductFacts(product, shop.tagger) for product in shop.products}
    wanted = {attribute for goal in shop.goals for attribute in goal.attributes}
    having = {text: {asin for asin, fact in facts.items() if fact.has_attribute(text)} for text in wanted}
    for goal in shop.goals:
        assert shop.attainable(goal)[0] == 1.0, goal
        fits = set.intersection(*(having[text] for text in goal.attributes))
        affordable = {asin for asin in fits if shop.price(asin) <= goal.price_upper}
        assert [asin for asin in affordable if _options_met(shop, goal, asin)] == [goal.asin], goal
        assert _choices_that_score(shop, goal, facts[goal.asin]) == [dict(goal.goal_options)], goal


def _options_met(shop: Shop, goal: Goal, asin: str) -> bool:
    product = shop.product(asin)
    assert product is not None
    offered = [processed(simplify_value(value)) for values in product.options.values() for value in values]
    return all(any(matches(value, option) for value in offered) for option in wanted_options(goal))


def _choices_that_score(shop: Shop, goal: Goal, facts: ProductFacts) -> list[dict[str, str]]:
    product = shop.product(goal.asin)
    assert product is not None
    found = []
    price = shop.price(goal.asin)
    for number in range(1, len(product.options) + 1) if product.options else [0]:
        for names in itertools.combinations(sorted(product.options), number):
            for values in itertools.product(*(product.options[name] for name in names)):
                if compute_reward(goal, facts, price, values, shop.tagger).total == 1.0:
                    found.append(dict(zip(names, values, strict=True)))
    return found


@pytest.mark.parametrize("profile", PROFILES)
def test_training_and_evaluation_share_no_product_and_no_text(profile: str):
    shop = shop_of(profile)
    parts: dict[str, set[str]] = {"train": set(), "eval": set()}
    for goal in shop.goals:
        parts[part_of(goal.asin)].add(goal.request)
    assert len(parts["train"]) + len(parts["eval"]) == len(shop.goals)
    assert not parts["train"] & parts["eval"]
    assert len(parts["eval"]) >= {"embedded": 200, "embedded-small": 100}[profile]


def test_in_the_full_shop_whole_leaf_categories_are_for_evaluation():
    parts: dict[str, set[str]] = {}
    for item in full_catalog()[0]:
        parts.setdefault(item["product_category"], set()).add(part_of(item["asin"]))
    assert {len(found) for found in parts.values()} == {1}
    assert sum("eval" in found for found in parts.values()) >= 25


def test_the_part_does_not_depend_on_the_case_of_an_asin():
    assert part_of("G1G8D0003C") == part_of("g1g8d0003c")
    assert {part_of(str(number)) for number in range(30)} == {"train", "eval"}


@pytest.mark.parametrize("profile", PROFILES)
def test_the_title_finds_the_product_on_the_first_page(profile: str):
    shop = shop_of(profile)
    titles = {goal.asin: goal.title for goal in shop.goals}
    assert [asin for asin, title in titles.items() if asin not in shop.search(title)[:10]] == []


@pytest.mark.parametrize("profile", PROFILES)
def test_the_first_hit_for_the_instruction_is_hardly_ever_right(profile: str):
    """Even if all the right options were chosen afterwards."""
    shop = shop_of(profile)
    scores = []
    for goal in shop.goals[:: 4 if profile == "embedded" else 1]:
        asin = shop.search(goal.request)[0]
        product = shop.product(asin)
        assert product is not None
        facts = ProductFacts(product, shop.tagger)
        scores.append(best_purchase(goal, product, facts, shop.price(asin), shop.tagger)[0].total)
    assert sum(score == 1.0 for score in scores) / len(scores) < 0.15


def test_words_that_goals_ask_for_cannot_be_taken_for_each_other():
    words = load_words()
    terms = [leaf.kind for leaf in words.leaves]
    terms += [text for leaf in words.leaves[:8] for text in leaf.department.is_ + leaf.department.has]
    assert len(terms) == len(set(terms)) == 328
    for left, right in itertools.combinations(terms, 2):
        assert not matches(left, right), (left, right)
        assert left not in right, (left, right)
        assert right not in left, (left, right)
    terse = [*LOOKS, *itertools.chain.from_iterable(PRODUCT_KINDS.values())]
    assert len(terse) == len(set(terse)) == 40
    assert not [pair for pair in itertools.permutations(terse, 2) if pair[0] in pair[1] or matches(*pair)]


def test_an_unknown_preset_and_impossible_settings_are_explained():
    assert find_config("small") is SMALL
    assert "the generated shop is 'smal'; valid: full, small" in expect(ShopDataError, find_config, "smal")
    for settings, text in (
        ({"kinds": 201}, "kinds is 201, clusters is 1; valid: 1 to 200"),
        ({"style": "terse", "kinds": 25}, "kinds is 25; valid for style 'terse': 1 to 24"),
        ({"style": "terse", "kinds": 24, "clusters": 17}, "clusters is 17; valid for style 'terse': 1 to 16"),
    ):
        assert text in expect(ShopDataError, generate_catalog, CatalogConfig(name="own", **settings))


# --- what shoppers earn, and the phrases of the small shop

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


def test_the_oracle_that_searches_for_the_instruction_earns_its_goals():
    """With the title test_attainable says so, of every goal in its long form."""
    env = env_of("embedded-small", "instruction")
    missed = [task for task in env.task_ids()[::4] if score_of(env, task, WebShopEnv.expert_action) != 1.0]
    assert missed == []


@pytest.mark.parametrize("profile", PROFILES)
def test_random_shoppers_earn_little(profile: str):
    rng, env = np.random.default_rng(0), env_of(profile)
    found = [
        score_of(env, task, lambda env: env.sample_action(rng), seed=number)
        for number, task in enumerate(env.task_ids()[::4])
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
    with pytest.raises(ShopDataError, match="'full' has texts of style 'prose'"):
        vocabulary(FULL)
