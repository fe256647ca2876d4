"""Every phrase that can occur in a terse generated shop, for phrase tokenizers of tiny models."""

from __future__ import annotations

from itertools import chain

from turngym.envs.webshop.errors import ShopDataError
from turngym.envs.webshop.generate import terse
from turngym.envs.webshop.generate.config import CatalogConfig
from turngym.envs.webshop.shop.prices import cap_text, price_text

SEP = " [SEP] "
_FRAME = (
    f"WebShop{SEP}Instruction:{SEP}{terse.ASK}",
    f"Instruction:{SEP}{terse.ASK}",
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
    f"{SEP}{terse.STORY}",
    terse.QUALITY,
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
    items = (item for item, _ in terse.terse_records(config))
    kinds = [kind for _, kind in terse.terse_kinds(config)]
    words = {*kinds, *terse.LOOKS, *terse.COLORS, *terse.SIZES, *_SEARCHED}
    prices = [price_text((float(price),)) for price in (*terse.PRICES, *terse.DEAR_PRICES)]
    priced = [
        (f"{SEP}{price}", f"{SEP}{price}{SEP}", f"{SEP}Price: {price}{SEP}Rating: N.A.{SEP}" + _LABELS)
        for price in prices
    ]
    caps = [float(cap) for cap in range(20, int(max(terse.PRICES)) // 10 * 10 + 50, 10)]
    return sorted(
        {half for item in items for half in (item["asin"][:5], item["asin"][5:])}
        | {f"{word}{end}" for word in words for end in ("", " ")}
        | {f"{SEP}{look} " for look in terse.LOOKS}
        | {*(cap_text(cap) for cap in caps), *(f"{cap:.2f}" for cap in caps), ", ", " "}
        | {str(number) for number in range(51)}
        | {*_FRAME, *_RESULTS, *_ITEM, *_DONE, *_ACTIONS, *chain.from_iterable(priced)}
    )


_LABELS = SEP.join(("Description", "Features", "Reviews", "Buy Now"))
