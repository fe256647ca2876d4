"""A small shop of few and repeated phrases, for models tiny enough to train on a laptop.

`vocabulary` lists every phrase that can occur in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any
from zlib import crc32

import numpy as np

from turngym.envs.webshop.catalog_config import CatalogConfig
from turngym.envs.webshop.products import ShopDataError, cap_text, price_text
from turngym.envs.webshop.prose_shop import one_of, picture, plural, pricing, some_of

PRODUCT_KINDS = {
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
        # products that differ in one word, and twins that share everything but the price
        for index in rng.permutation(len(LOOKS))[: config.clusters].tolist():
            look, title = LOOKS[index], f"{LOOKS[index]} {kind}"
            options = {"Color": some_of(rng, COLORS, int(rng.integers(2, 5)))}
            if rng.random() < 0.6:
                options["Size"] = some_of(rng, SIZES, int(rng.integers(2, 4)))
            twins = one_of(rng, TWINS) if rng.random() < config.decoys else 0
            # 0 for the wanted product, from 1 for its dear twins
            for number in range(1 + twins):
                asin = f"{prefix}{look_codes[look]}{number}"
                entry: dict[str, Any] = {"attributes": [look, kind]}
                if number == 0:
                    entry |= {"instruction": ASK + title, "instruction_attributes": entry["attributes"]}
                item = {
                    "name": title,
                    "full_description": STORY if number % 2 == 0 else "",
                    "pricing": pricing((float(one_of(rng, DEAR_PRICES if number else PRICES)),)),
                    "images": [picture(kind, asin)],
                    "product_category": f"{department.title()} › {plural(kind).title()}",
                    "average_rating": "",
                    "small_description": [f"{look} {QUALITY}"],
                    "customization_options": {
                        name: [{"value": value} for value in values] for name, values in options.items()
                    },
                    "asin": asin,
                    "category": department,
                    "query": kind,
                    "page": 1,
                }
                yield item, entry


def terse_kinds(config: CatalogConfig) -> list[tuple[str, str]]:
    """(department, kind) pairs of a terse shop, departments in turn."""
    kinds = [
        (department, kinds_of[turn])
        for turn in range(len(PRODUCT_KINDS["home"]))
        for department, kinds_of in PRODUCT_KINDS.items()
    ]
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


# --- every phrase that can occur in a terse shop, for phrase tokenizers of tiny models

SEP = " [SEP] "
_FRAME = (
    f"WebShop{SEP}Instruction:{SEP}{ASK}",
    f"Instruction:{SEP}{ASK}",
    f"{SEP}Search",
    *(SEP, " with color: ", ", and size: "),
)
_RESULTS = (
    f"{SEP}Back to Search{SEP}Page 1 (Total results: ",
    f"{SEP}Back to Search{SEP}Page ",
    " (Total results: ",
    f"){SEP}Next >{SEP}",
    f"){SEP}Next >",
    f"){SEP}< Prev{SEP}Next >{SEP}",
    f"){SEP}< Prev{SEP}Next >",
)
_ITEM = (
    f"{SEP}Back to Search{SEP}< Prev{SEP}color{SEP}",
    f"{SEP}Back to Search{SEP}< Prev{SEP}size{SEP}",
    f"{SEP}color{SEP}",
    f"{SEP}size{SEP}",
    f"{SEP}Back to Search{SEP}< Prev",
    f"{SEP}{STORY}",
    QUALITY,
)
_DONE = (
    f"Thank you for shopping with us!{SEP}Your code:{SEP}None{SEP}(Paste it in your MTurk interface.){SEP}Purchased"
    f"{SEP}asin{SEP}",
    f"{SEP}options{SEP}",
    *('{"color": "', '", "size": "', '{"size": "', '", "color": "', '"}', "{}"),
    f"{SEP}attrs{SEP}None{SEP}category{SEP}None{SEP}query{SEP}None{SEP}product category{SEP}None{SEP}Target{SEP}asin"
    f"{SEP}options{SEP}attrs{SEP}price upper{SEP}instuction text{SEP}category{SEP}product category{SEP}query{SEP}Goal"
    f"{SEP}None{SEP}Reward{SEP}Your score (min 0.0, max 1.0){SEP}",
    f"{SEP}Reward Details{SEP}None\n[WEBSHOP_FINAL_SCORE=",
    *("0.", "1.0", "]"),
)
_BUTTONS = ("back to search", "< prev", "next >", "description", "features", "reviews", "buy now")
_ACTIONS = ("search[", "click[", "]", *(f"click[{label}]" for label in _BUTTONS))
_SEARCHED = ("i", "am", "looking", "for", "a", "with", "color:", "and", "size:", "price", "lower", "than", "dollars")
"""Words of the instruction that only random searches contain."""


def vocabulary(config: CatalogConfig) -> list[str]:
    """Sorted phrases into which every page and sensible action of `config`'s shop can be cut, a score's digits aside.

    Half an asin, an option value, a word of a title, a price and a price cap are one phrase each, the same wherever
    they stand. Raises ShopDataError for a shop of real-looking texts.
    """
    if config.style != "terse":
        raise ShopDataError(f"generated shop {config.name!r} has texts of style {config.style!r}; valid: 'terse'")
    items = (item for item, _ in terse_records(config))
    kinds = [kind for _, kind in terse_kinds(config)]
    words = {*kinds, *LOOKS, *COLORS, *SIZES, *_SEARCHED}
    prices = [price_text((float(price),)) for price in (*PRICES, *DEAR_PRICES)]
    priced = [
        (f"{SEP}{price}", f"{SEP}{price}{SEP}", f"{SEP}Price: {price}{SEP}Rating: N.A.{SEP}" + _LABELS)
        for price in prices
    ]
    caps = [float(cap) for cap in range(20, int(max(PRICES)) // 10 * 10 + 50, 10)]
    return sorted(
        {half for item in items for half in (item["asin"][:5], item["asin"][5:])}
        | {f"{word}{end}" for word in words for end in ("", " ")}
        | {f"{SEP}{look} " for look in LOOKS}
        | {*(cap_text(cap) for cap in caps), *(f"{cap:.2f}" for cap in caps), ", ", " "}
        | {str(number) for number in range(51)}
        | {*_FRAME, *_RESULTS, *_ITEM, *_DONE, *_ACTIONS, *chain.from_iterable(priced)}
    )


_LABELS = SEP.join(("Description", "Features", "Reviews", "Buy Now"))
