"""A small shop of few and repeated phrases, for models tiny enough to train on a laptop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import numpy as np

from turngym.envs.webshop.errors import ShopDataError
from turngym.envs.webshop.generate.config import CatalogConfig
from turngym.envs.webshop.generate.text import picture, pricing
from turngym.envs.webshop.generate.words import plural

KINDS = {
    "home": ("lamp", "chair", "rug", "clock", "pillow", "blanket"),
    "kitchen": ("mug", "kettle", "bowl", "tray", "jar", "spoon"),
    "travel": ("wallet", "scarf", "belt", "pouch", "umbrella", "bottle"),
    "office": ("shelf", "stool", "frame", "basket", "mirror", "vase"),
}
"""Department to kinds of products."""
LOOKS = (
    *("soft", "sturdy", "round", "folding", "striped", "vintage", "portable", "handmade"),
    *("cotton", "bamboo", "steel", "glass", "leather", "wool", "marble", "paper"),
)
COLORS = ("black", "white", "red", "blue", "green", "yellow", "pink", "brown")
SIZES = ("small", "medium", "large", "giant")
PRICES = (12, 18, 24, 36, 48)
DEAR_PRICES = (120, 150, 180, 240, 320)
"""Above any cap of a goal for a product of `PRICES`."""
ASK = "i am looking for a "
STORY = "a good choice"
"""Description of wanted products and of every second dear twin: twins without one are shorter and rank first."""
QUALITY = "quality"
TWINS = (1, 1, 2, 2, 3)
"""How many dear twins a wanted product has, where it has any. They share everything but price and last digit of the
asin.
"""
MOST_CLUSTERS = len(LOOKS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One place in the shop: which product, and whether goals ask for it."""

    look: str
    kind: str
    department: str
    options: dict[str, tuple[str, ...]]
    price: int
    number: int
    """0 for the wanted product, from 1 for its dear twins."""

    @property
    def wanted(self) -> bool:
        return self.number == 0

    @property
    def title(self) -> str:
        return f"{self.look} {self.kind}"


def terse_records(config: CatalogConfig) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """(item, attributes) pairs, kind by kind. Raises ShopDataError for a shop that the words do not suffice for."""
    kinds = terse_kinds(config)
    rng = np.random.default_rng([config.seed, config.version, crc32(config.name.encode())])
    # asins are codes of kind and look, 0 for what is wanted: tiny models learn such codes in 150 updates; with codes
    # drawn at random they learned by heart which product has which, and were lost where they had not been trained
    numbers = iter(rng.permutation(np.arange(1_000, 10_000)).tolist())
    look_codes = {look: next(numbers) for look in LOOKS}
    for department, kind in kinds:
        prefix = next(numbers) * 10
        for slot in _kind(config, department, kind, rng):
            asin = f"{prefix}{look_codes[slot.look]}{slot.number}"
            yield _item(slot, asin), _ins(slot)


def terse_kinds(config: CatalogConfig) -> list[tuple[str, str]]:
    """(department, kind) pairs of a terse shop, departments in turn."""
    kinds = [(department, row[turn]) for turn in range(len(KINDS["home"])) for department, row in KINDS.items()]
    if not 1 <= config.kinds <= len(kinds):
        raise ShopDataError(
            f"generated shop {config.name!r}: kinds is {config.kinds}; valid for style 'terse': 1 to {len(kinds)}"
        )
    if not 1 <= config.clusters <= MOST_CLUSTERS:
        raise ShopDataError(
            f"generated shop {config.name!r}: clusters is {config.clusters}; "
            f"valid for style 'terse': 1 to {MOST_CLUSTERS}"
        )
    return kinds[: config.kinds]


def _kind(config: CatalogConfig, department: str, kind: str, rng: np.random.Generator) -> Iterator[Slot]:
    """Products that differ in one word, and twins that share everything but the price."""
    for place in rng.permutation(len(LOOKS))[: config.clusters].tolist():
        options = {"Color": _some(rng, COLORS, int(rng.integers(2, 5)))}
        if rng.random() < 0.6:
            options["Size"] = _some(rng, SIZES, int(rng.integers(2, 4)))
        twins = TWINS[int(rng.integers(len(TWINS)))] if rng.random() < config.decoys else 0
        for number in range(1 + twins):
            row = DEAR_PRICES if number else PRICES
            yield Slot(
                look=LOOKS[place],
                kind=kind,
                department=department,
                options=options,
                price=row[int(rng.integers(len(row)))],
                number=number,
            )


def _item(slot: Slot, asin: str) -> dict[str, Any]:
    options = {name: [{"value": value} for value in values] for name, values in slot.options.items()}
    return {
        "name": slot.title,
        "full_description": STORY if slot.number % 2 == 0 else "",
        "pricing": pricing((float(slot.price),)),
        "images": [picture(slot.kind, asin)],
        "product_category": f"{slot.department.title()} › {plural(slot.kind).title()}",
        "average_rating": "",
        "small_description": [f"{slot.look} {QUALITY}"],
        "customization_options": options,
        "asin": asin,
        "category": slot.department,
        "query": slot.kind,
        "page": 1,
    }


def _ins(slot: Slot) -> dict[str, Any]:
    attributes = [slot.look, slot.kind]
    if not slot.wanted:
        return {"attributes": attributes}
    return {"attributes": attributes, "instruction": ASK + slot.title, "instruction_attributes": attributes}


def _some(rng: np.random.Generator, items: tuple[str, ...], number: int) -> tuple[str, ...]:
    return tuple(items[place] for place in rng.permutation(len(items))[:number].tolist())
