"""Goals, prices and caps come from the random streams that the original uses, in its order."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turngym.envs.webshop.catalog import MemoryCatalog
from turngym.envs.webshop.goals import make_splits, shuffled
from turngym.envs.webshop.products import (
    Instruction,
    Kind,
    Product,
    ShopDataError,
    cap_text,
    draw_cap,
    draw_prices,
    find_profile,
)
from turngym.envs.webshop.shop import Shop


def product(asin: str, *, instructions: tuple[Instruction, ...] = (), **changes: object) -> Product:
    plain: dict[str, object] = {
        "title": "Oak Table",
        "description": "",
        "bullets": ("solid",),
        "category": "garden",
        "query": "tables",
        "product_category": "Home › Tables",
        "attributes": ("solid oak",),
        "options": {},
        "main_image": "",
        "price_text": "$20.0",
        "prices": (20.0,),
    }
    return Product(asin=asin, instructions=instructions, **(plain | changes))  # type: ignore[arg-type]


def shop(products: list[Product], kind: Kind = "synthetic", price_seed: int = 0) -> Shop:
    profile = find_profile("1k-synthetic" if kind == "synthetic" else "1k-human")
    return Shop(MemoryCatalog(products), profile, price_seed=price_seed)


def wish(*attributes: str, text: str = "Find me a table", options: tuple[str, ...] | None = None) -> Instruction:
    return Instruction(text=text, attributes=attributes, options=options)


@given(st.floats(0.01, 1200), st.integers(0, 99))
def test_a_cap_is_the_larger_of_two_among_the_next_four(price: float, seed: int) -> None:
    above = [10.0 * step for step in range(1, 100) if 10.0 * step > price][:4]
    expected = sorted(random.Random(seed).sample(above, 2))[1] if len(above) >= 2 else 1_000_000
    assert draw_cap(price, random.Random(seed)) == expected


def test_cap_texts() -> None:
    assert cap_text(40.0) == ", and price lower than 40.00 dollars"
    assert cap_text(1_000_000.0) == ""
    assert draw_cap(979.99, random.Random(0)) == 990.0
    assert draw_cap(980.0, random.Random(0)) == 1_000_000.0


def test_only_ranges_draw_a_price() -> None:
    pricing = np.array([[5.0, np.nan], [10.0, 20.0], [7.0, np.nan], [1.0, 2.0]])
    rng, same = random.Random(7), random.Random(7)
    prices = draw_prices(pricing, rng)
    assert prices.tolist() == [5.0, same.uniform(10, 20), 7.0, same.uniform(1, 2)]
    assert rng.random() == same.random()


def test_synthetic_goals_are_all_combinations_in_the_shuffled_order() -> None:
    options = {"size": ("small", "large", "huge"), "color": ("red", "blue")}
    made = shop([product("A", options=options, instructions=(wish("solid oak"),)), product("B")])
    combinations = list(itertools.product(("red", "blue"), ("small", "large", "huge")))
    order = list(range(6))
    random.Random(233).shuffle(order)
    assert [goal.goal_options for goal in made.goals] == [
        (("color", combinations[place][0]), ("size", combinations[place][1])) for place in order
    ]
    cap = draw_cap(20.0, random.Random(0))
    color, size = combinations[order[0]]
    assert made.goals[0].instruction_text == f"Find me a table with color: {color}, and size: {size}{cap_text(cap)}"
    assert made.goals[0].request == f"Find me a table with color: {color}, and size: {size}"
    assert {goal.price_upper for goal in made.goals} == {cap}


def test_prices_come_before_caps_in_one_stream() -> None:
    orders = (wish("solid oak"),)
    ranged = product("A", prices=(10.0, 90.0), instructions=orders)
    made = shop([ranged, product("B", prices=(30.0, 50.0), instructions=orders)], price_seed=5)
    rng = random.Random(5)
    first, second = rng.uniform(10, 90), rng.uniform(30, 50)
    caps = {"A": draw_cap(first, rng), "B": draw_cap(second, rng)}
    assert (made.price("A"), made.price("B")) == (first, second)
    assert {goal.asin: goal.price_upper for goal in made.goals} == caps


def test_an_option_without_values_makes_no_goal_but_draws_a_cap() -> None:
    empty = product("A", options={"size": ()}, instructions=(wish("solid oak"),))
    made = shop([empty, product("B", instructions=(wish("solid oak"),))], price_seed=3)
    rng = random.Random(3)
    draw_cap(20.0, rng)
    assert [goal.asin for goal in made.goals] == ["B"]
    assert made.goals[0].price_upper == draw_cap(20.0, rng)


def test_human_goals() -> None:
    orders = (wish("solid oak", text="I want a table...", options=("white",)), wish("a", text="b", options=()))
    made = shop([product("A", instructions=orders)], "human")
    texts = {goal.request: goal.goal_options for goal in made.goals}
    assert texts == {"I want a table": ("white",), "b": ()}


def test_shuffle_is_the_originals() -> None:
    order = shuffled(1000)
    expected = list(range(1000))
    random.seed(233)
    random.shuffle(expected)
    assert order.tolist() == expected


def test_goals_behave_like_a_sequence() -> None:
    made = shop([product("A", options={"size": tuple("abcdefgh")}, instructions=(wish("solid oak"),))])
    goals = list(made.goals)
    assert len(goals) == 8
    assert [goal.index for goal in goals] == list(range(8))
    assert made.goals[2:4] == goals[2:4]
    assert made.goals[-1] == goals[7]
    with pytest.raises(IndexError):
        made.goals[8]
    empty = shop([product("A")])
    assert list(empty.goals) == []


@pytest.mark.parametrize("options", [9, 20, 6000])
def test_more_combinations_of_options_than_can_be_kept_are_refused(options: int) -> None:
    values = tuple(map(str, range(10)))
    many = {f"option {number}": values for number in range(options)}
    with pytest.raises(ShopDataError, match=rf"product 'B': every combination of its {options} options"):
        shop([product("A", instructions=(wish("oak"),)), product("B", options=many, instructions=(wish("oak"),))])
    # without an instruction it makes no goals
    assert len(shop([product("A", instructions=(wish("oak"),)), product("B", options=many)]).goals) == 1


@pytest.mark.parametrize("products", [[], [product("A")]])
def test_a_shop_without_goals_has_no_splits(products: list[Product]) -> None:
    with pytest.raises(ShopDataError, match="'1k-synthetic': the shop has no goals"):
        shop(products).splits()


def many(texts: list[str], options: tuple[str, ...] = ()) -> list[Product]:
    return [
        product(f"A{number}", instructions=(wish("solid oak", text=text, options=options),))
        for number, text in enumerate(texts)
    ]


def test_turnopd_splits_drop_training_goals_with_an_evaluation_text() -> None:
    # a tenth of all goals ask in the same words
    texts = ["the same" if number % 10 == 0 else f"wish {number}" for number in range(4000)]
    made = shop(many(texts), "human")
    splits = make_splits(made.goals, made.profile)
    assert splits.parts["eval"] == tuple(range(200))
    assert "the same" in {made.goals[goal].request for goal in splits["eval"]}
    expected = [goal for goal in range(200, 3200) if made.goals[goal].request != "the same"]
    assert list(splits["train"]) == expected
    assert splits.dropped == 3000 - len(expected) > 200
    assert splits.name_of(7) == "eval"
    assert splits.name_of(3999) == "unused"
    with pytest.raises(ShopDataError, match=r"valid: eval, train\. Did you mean 'train'"):
        splits["trian"]


def test_papers_splits_need_a_real_shop() -> None:
    made = shop(many([f"wish {number}" for number in range(1800)]), "human")
    splits = make_splits(made.goals, made.profile, "papers")
    assert {name: (goals[0], goals[-1]) for name, goals in splits.parts.items()} == {
        "test": (0, 499),
        "dev": (500, 1499),
        "train": (1500, 1799),
    }
    with pytest.raises(ShopDataError, match="valid: turnopd, generated"):
        make_splits(made.goals, made.profile, "papers", part_of=lambda asin: "eval")
    with pytest.raises(ShopDataError, match="splits is 'nonsense'"):
        make_splits(made.goals, made.profile, "nonsense")


def test_small_shops_have_what_they_have() -> None:
    made = shop(many(["a", "b"]), "human")
    assert {name: len(goals) for name, goals in made.splits().parts.items()} == {"eval": 2, "train": 0}
