"""Records of the original's files become products, and damaged ones an error that names them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turngym.envs.webshop.catalog import read_products
from turngym.envs.webshop.products import (
    Instruction,
    Product,
    ShopDataError,
    decode_product,
    encode_product,
    parse_pricing,
    price_text,
)


def item(asin: str = "B000000001", **changes: Any) -> dict[str, Any]:
    return {
        "asin": asin,
        "name": "Oak Side Table with Drawer",
        "full_description": "A small table.",
        "small_description": ["Solid oak ", "Easy to clean "],
        "pricing": "$34.00",
        "images": ["https://example.org/a.jpg"],
        "category": "garden",
        "query": " Side Tables ",
        "product_category": "Home & Kitchen › Furniture › Tables",
        "customization_options": {"Color": [{"value": " Dark/Brown "}, {"value": "White"}], "Style": None, "Size": []},
        **changes,
    }


INS: dict[str, Any] = {
    "B000000001": {
        "attributes": ["solid oak"],
        "instruction": "Find me a side table",
        "instruction_attributes": ["easy clean"],
    },
    "B000000002": {"attributes": []},
}


def load(items: list[Any], ins: Any = INS, human: Any = None) -> list[Product]:
    return list(read_products(items, ins.get, human))


def test_a_record_becomes_a_product() -> None:
    (product,) = load([item()])
    assert product.query == "side tables"
    assert product.options == {"color": ("dark | brown", "white"), "size": ()}
    assert product.combinations == 0
    assert (product.price_text, product.prices) == ("$34.0", (34.0,))
    assert product.main_image == "https://example.org/a.jpg"
    assert product.instructions == (Instruction(text="Find me a side table", attributes=("easy clean",)),)


def test_a_single_text_is_one_bullet_and_names_that_fall_together_keep_the_last() -> None:
    options = {"Color": [{"value": "Red"}], "COLOR": [{"value": "Blue"}]}
    (product,) = load([item(small_description="Just one", customization_options=options)])
    assert product.bullets == ("Just one",)
    assert product.options == {"color": ("blue",)}


def test_what_the_original_skips_is_left_out() -> None:
    items = [item(), item("nan"), item("B0000000011"), item(name="another"), item("B000000002", pricing="")]
    products = load(items)
    assert [product.asin for product in products] == ["B000000001", "B000000002"]
    assert products[0].title == "Oak Side Table with Drawer"
    assert products[1].prices == (100.0,)


def without(key: str) -> dict[str, Any]:
    record = item()
    del record[key]
    return record


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("a text", "Expected `object`, got `str`"),
        (without("name"), "'B000000001': .*`name`"),
        (item(full_description=None), "full_description"),
        (item(small_description=["a", 3]), r"small_description\[1\]"),
        (item(customization_options=["red"]), "customization_options is"),
        (item(customization_options={"Color": ["red"]}), "customization_options"),
        (item(pricing="from 3 to 4"), "pricing is 'from 3 to 4'"),
        (item(pricing=12.5), "pricing is 12.5"),
        *((item(pricing=text), f"pricing is '{text}'") for text in ("nan", "x")),
        (item(pricing=0), "pricing is 0; valid"),
        (item(customization_options={"Color": {}}), "customization_options"),
        (item(customization_options={"\ud800": [{"value": "red"}]}), "surrogates"),
        (item(customization_options={"Color": [{"value": "\ud800"}]}), "surrogates"),
        (item("B000000009"), "'B000000009' is not in the attributes file"),
    ],
)
def test_a_damaged_record_is_named(wrong: Any, words: str) -> None:
    with pytest.raises(ShopDataError, match=words) as error:
        load([wrong])
    assert "record" in str(error.value)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ([], "Expected `object`"),
        ({"attributes": "a"}, "attributes"),
        ({"attributes": [], "instruction": "x"}, "instruction_attributes is empty"),
        ({"attributes": [], "instruction": "x", "instruction_attributes": []}, "instruction_attributes is empty"),
    ],
)
def test_a_damaged_attributes_entry_is_named(entry: Any, words: str) -> None:
    with pytest.raises(ShopDataError, match=words) as error:
        load([item()], {"B000000001": entry})
    assert "B000000001" in str(error.value)


def test_human_instructions_without_attributes_are_left_out() -> None:
    one = {"instruction": "a table.", "instruction_attributes": ["solid oak"], "instruction_options": ["white"]}
    two = {"instruction": "any table", "instruction_attributes": []}
    product, other = load([item(), item("B000000003")], {}, {"B000000001": [two, one]})
    assert product.instructions == (Instruction(text="a table.", attributes=("solid oak",), options=("white",)),)
    assert product.attributes == ("DUMMY_ATTR",)
    assert other.instructions == ()


@pytest.mark.parametrize(
    ("text", "prices", "shown"),
    [
        (None, (100.0,), "$100.0"),
        ("", (100.0,), "$100.0"),
        ("$877.80", (877.8,), "$877.8"),
        ("$1,847.00", (1847.0,), "$1847.0"),
        ("$19.99 - $27.99", (19.99, 27.99), "$19.99 to $27.99"),
        ("$8.50 - $9.99 - $12", (8.5, 9.99), "$8.5 to $9.99"),
    ],
)
def test_prices(text: str | None, prices: tuple[float, ...], shown: str) -> None:
    assert parse_pricing(text, "here") == prices
    assert price_text(prices) == shown


@pytest.mark.parametrize("people", ["a text", ["a text"], [{"instruction": 3, "instruction_attributes": ["oak"]}]])
def test_damaged_instructions_of_people_are_named(people: Any) -> None:
    with pytest.raises(ShopDataError, match="B000000001"):
        load([item()], human={"B000000001": people})


def test_one_image_and_no_price() -> None:
    (product,) = load([item(images="https://example.org/a.jpg", pricing=None)])
    assert (product.main_image, product.prices) == ("https://example.org/a.jpg", (100.0,))


TEXTS = st.text(max_size=12)
MANY = st.lists(TEXTS, max_size=3).map(tuple)


@given(
    st.builds(
        Product,
        **dict.fromkeys(["asin", "title", "description", "category", "query"], TEXTS),
        **dict.fromkeys(["product_category", "main_image", "price_text"], TEXTS),
        bullets=MANY,
        attributes=MANY,
        options=st.dictionaries(TEXTS, MANY, max_size=3),
        prices=st.tuples(st.floats(0, 1e6), st.floats(0, 1e6)),
        instructions=st.lists(
            st.builds(Instruction, text=TEXTS, attributes=MANY, options=st.none() | MANY), max_size=2
        ).map(tuple),
    )
)
def test_a_product_survives_its_record(product: Product) -> None:
    assert decode_product(encode_product(product)) == product
    assert list(decode_product(encode_product(product)).options) == list(product.options)
