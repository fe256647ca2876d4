"""A shop of thirty products with everything in it that pages and sessions can trip over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from turngym.envs.webshop.catalog import MemoryCatalog, read_products
from turngym.envs.webshop.products import ShopProfile
from turngym.envs.webshop.shop import Shop

MUG = {
    "asin": "MUG0000001",
    "name": "Blue Mug & Saucer <Set>",
    "full_description": "",
    "small_description": ["", "Holds tea", " \n ", "Safe in a dishwasher "],
    "pricing": "$12.50",
    "images": ["https://example.org/mug.jpg"],
    "category": "kitchen",
    "query": "Mugs ",
    "product_category": "Home › Kitchen › Mugs",
    "customization_options": {
        "Color": [{"value": "Blue"}, {"value": 'Red "Deluxe"'}, {"value": "Grün"}],
        "Size": [{"value": "Small"}, {"value": "Large"}],
        "Gone": None,
    },
}
ODD = {
    **MUG,
    "asin": "ODD0000001",
    "name": "Odd Jug",
    "full_description": "A jug.\nTwo lines.",
    "small_description": "One feature",
    "pricing": "",
    "customization_options": {
        "Style": [{"value": value} for value in ("Description", "Buy Now", "Search", "Same", "", "a[b", "Next >")],
        "Finish": [{"value": "Same"}, {"value": "< Prev"}],
        "Empty": [],
    },
}


def lamp(number: int) -> dict[str, Any]:
    return {
        **MUG,
        "asin": f"LAMP{number:06d}",
        "name": f"Desk lamp {number}",
        "small_description": ["Bright"],
        "pricing": "$10 $20",
        "query": "lamps",
        "product_category": "Home › Light › Lamps",
        "customization_options": "",
    }


ITEMS = [MUG, ODD, *(lamp(number) for number in range(28))]
WANTED = {"attributes": ["tea", "dishwasher safe"], "instruction": "Find me a mug", "instruction_attributes": ["tea"]}
INS: dict[str, Any] = {item["asin"]: {"attributes": ["bright"]} for item in ITEMS} | {
    "MUG0000001": WANTED,
    "ODD0000001": WANTED,
    "LAMP000027": {"attributes": ["bright"], "instruction": "Find me a lamp", "instruction_attributes": ["bright"]},
}


def make_tiny_shop(items: list[dict[str, Any]] = ITEMS, ins: dict[str, Any] = INS) -> Shop:
    profile = ShopProfile(name="tiny", kind="synthetic", items="items.json", attributes="ins.json")
    catalog = MemoryCatalog(read_products(items, ins.get, None))
    return Shop(catalog, profile, price_seed=0, tagger="all-words")


@pytest.fixture
def tiny_shop() -> Shop:
    return make_tiny_shop()


@pytest.fixture(scope="session")
def make_shop() -> Callable[..., Shop]:
    return make_tiny_shop
