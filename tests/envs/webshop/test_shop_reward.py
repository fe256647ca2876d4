"""The reward with its quirks, and the best that can be had."""

from __future__ import annotations

import itertools
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turngym.envs.webshop.goals import Goal
from turngym.envs.webshop.nouns import NounTagger
from turngym.envs.webshop.products import Product
from turngym.envs.webshop.reward import (
    COLORS,
    ProductFacts,
    Reward,
    best_purchase,
    compute_reward,
    matches,
    processed,
    simplify_pair,
    simplify_value,
    wanted_options,
)

WORDS = NounTagger(name="split", nouns=lambda text: tuple(text.lower().split()))


def product(**changes: object) -> Product:
    plain: dict[str, object] = {
        "asin": "A",
        "title": "oak side table",
        "description": "A light wooden thing.",
        "bullets": ("Easy to clean ", "Solid build "),
        "category": "garden",
        "query": "tables",
        "product_category": "Home › Furniture › Tables",
        "attributes": ("solid oak", "long lasting"),
        "options": {"color": ("white", "dark brown"), "size": ("small", "x-large")},
        "main_image": "",
        "price_text": "$20.0",
        "prices": (20.0,),
    }
    return Product(**(plain | changes))  # type: ignore[arg-type]


def goal(**changes: object) -> Goal:
    plain: dict[str, object] = {
        "index": 0,
        "asin": "A",
        "instruction_text": "buy it",
        "attributes": ("solid oak",),
        "goal_options": (("color", "white"), ("size", "small")),
        "price_upper": 30.0,
        "category": "garden",
        "query": "tables",
        "product_category": "Home › Furniture › Tables",
        "title": "oak side table",
        "kind": "synthetic",
    }
    return Goal(**(plain | changes))  # type: ignore[arg-type]


def buy(wanted: Goal, bought: Product, *options: str, price: float = 20.0) -> Reward:
    return compute_reward(wanted, ProductFacts(bought, WORDS), price, options, WORDS)


def test_everything_right() -> None:
    reward = buy(goal(), product(), "white", "small")
    assert asdict(reward) == {
        "total": 1.0,
        "tagger": "split",
        "r_type": 1.0,
        "r_att": 1.0,
        "w_att": 0.25,
        "query_match": True,
        "category_match": True,
        "title_score": 1.0,
        "r_option": 1.0,
        "w_option": 0.5,
        "r_price": True,
        "w_price": 0.25,
    }


@pytest.mark.parametrize(
    ("options", "price", "total"),
    [
        (("white",), 20.0, 0.75),
        ((), 20.0, 0.5),
        (("white", "small"), 30.0, 1.0),
        (("white", "small"), 30.01, 0.75),
        (("dark brown", "small"), 20.0, 0.75),
    ],
)
def test_parts_count_alike(options: tuple[str, ...], price: float, total: float) -> None:
    assert buy(goal(), product(), *options, price=price).total == total


def test_without_options_the_option_part_is_missing() -> None:
    reward = buy(goal(goal_options=()), product())
    assert reward.total == 1.0
    assert reward.r_option is None


@pytest.mark.parametrize(
    ("attribute", "found"),
    [
        ("oak solid", True),  # word order does not count among the attributes
        ("lasting", True),  # one set of words within the other
        ("easy to clean", True),  # in the bullets
        ("clean  solid", True),  # across bullets, which end in a blank
        ("side table", True),  # in the title
        ("light wooden", True),  # in the description
        ("Light wooden", False),  # only the product's side is lower-cased
        ("solid pine", False),
    ],
)
def test_attributes(attribute: str, found: bool) -> None:
    assert buy(goal(attributes=(attribute,)), product()).r_att == float(found)


@pytest.mark.parametrize(
    ("title", "query", "category", "r_type"),
    [
        ("oak side table", "other", "Toys", 1.0),
        ("oak lamp", "other", "Toys", 1.0),  # 1 of 3 nouns
        ("pine lamp", "tables", "Home › Furniture › Lamps", 0.0),  # no noun overrules query and category
    ],
)
def test_type(title: str, query: str, category: str, r_type: float) -> None:
    assert buy(goal(), product(title=title, query=query, product_category=category)).r_type == r_type


def test_type_between() -> None:
    title = " ".join(f"w{number}" for number in range(20))
    wanted = goal(title=title)
    assert buy(wanted, product(title="w1 x", query="o", product_category="T")).r_type == 0.1  # 1 of 20
    assert buy(wanted, product(title="w1 w2 w3", query="o", product_category="T")).r_type == 0.5  # 3 of 20
    assert buy(wanted, product(title="w1 w2 w3", query="tables", product_category="T")).r_type == 1.0
    two = "Furniture › Home › Else"
    assert buy(wanted, product(title="w1 w2 w3", query="o", product_category=two)).category_match
    assert not buy(wanted, product(title="w1 w2 w3", query="o", product_category="Home › Home")).category_match
    assert buy(goal(title=""), product(title="x", query="o", product_category="T")).title_score == 0.2


def test_repeated_nouns_keep_a_title_from_matching_itself() -> None:
    title = "table oak table legs"
    assert buy(goal(title=title), product(title=title)).title_score == 0.75


def test_colors() -> None:
    assert len(COLORS) == 102
    assert list(COLORS) == sorted(COLORS)
    assert simplify_value("graywash") == "ash"
    assert simplify_value("green2") == "green"
    assert simplify_value("sunflowers") == "sunflower"
    assert simplify_value("dark brown") == "brown"
    assert simplify_value("xl") == "xl"
    assert simplify_pair("color", "white") == "white"
    assert simplify_pair("gold", "black") == "black"
    assert simplify_pair("color", "graywash") == "('color', 'graywash')"
    assert simplify_pair("size", "5' wide") == "('size', \"5' wide\")"


def test_quirk_a_a_synthetic_goal_may_not_be_met_by_its_own_option() -> None:
    options = {"color": ("graywash", "plum")}
    wanted = goal(goal_options=(("color", "graywash"),))
    assert buy(wanted, product(options=options), "graywash").r_option == 0.0
    assert buy(goal(goal_options=("graywash",), kind="human"), product(options=options), "graywash").r_option == 1.0


def test_quirk_b_one_value_within_the_other_matches() -> None:
    human = goal(goal_options=("large", "10", "queen"), kind="human")
    assert buy(human, product(), "x-large", "10.5 wide", "queen size").r_option == 1.0
    assert matches(processed("10"), processed("10 wide"))


def test_one_value_may_meet_several_wishes() -> None:
    assert buy(goal(goal_options=("red", "large"), kind="human"), product(), "large in stock").r_option == 0.5
    assert buy(goal(goal_options=("big", "large"), kind="human"), product(), "big large").r_option == 1.0


def test_how_texts_are_compared() -> None:
    assert processed(" Café_N°5 / XL ") == "caf n5   xl"
    assert not matches("", "")
    assert not matches("a", "")
    assert not matches("abcdef", "abcdeg")  # 83
    assert matches("abcdefg", "abcdefh")  # 86


VALUES = st.sampled_from(["red", "dark red", "10", "10 wide", "large", "x-large", "graywash", "queen size", "a b", "b"])


@given(
    st.dictionaries(st.sampled_from(["color", "size", "fit"]), st.lists(VALUES, max_size=4).map(tuple), max_size=3),
    st.lists(VALUES, max_size=4).map(tuple) | st.lists(st.tuples(st.just("color"), VALUES), max_size=3).map(tuple),
)
def test_no_purchase_beats_the_best(
    options: dict[str, tuple[str, ...]], wanted: tuple[str, ...] | tuple[tuple[str, str], ...]
) -> None:
    one = product(options=options)
    facts = ProductFacts(one, WORDS)
    kind = "human" if wanted and isinstance(wanted[0], str) else "synthetic"
    asked = goal(goal_options=wanted, kind=kind)
    best, chosen = best_purchase(asked, one, facts, 20.0, WORDS)
    assert buy(asked, one, *chosen.values()) == best
    assert all(value in options[name] for name, value in chosen.items())
    for bought in itertools.product(*((None, *values) for values in options.values())):
        assert buy(asked, one, *(value for value in bought if value is not None)).total <= best.total


def test_the_best_purchase_is_literal_where_it_can_be() -> None:
    one = product(options={"size": ("x-large", "large"), "color": ("red", "blue")})
    facts = ProductFacts(one, WORDS)
    human = goal(goal_options=("large",), kind="human")
    assert best_purchase(human, one, facts, 20.0, WORDS)[1] == {"size": "large", "color": "red"}
    pair = goal(goal_options=(("color", "blue"), ("size", "large")))
    assert best_purchase(pair, one, facts, 20.0, WORDS)[1] == {"size": "large", "color": "blue"}


def test_wanted_options() -> None:
    assert wanted_options(goal()) == ("white", "size    small")
