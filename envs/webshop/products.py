"""What is in a shop? Products, their prices, and the named shops (profiles) with the files that they need."""

from __future__ import annotations

import json
import math
import os
import random
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, Literal

import numpy as np

from turngym.core.errors import TurngymError, checked_choice
from turngym.core.redaction import brief
from turngym.core.user_files import json_of, user_path


class ShopDataError(TurngymError):
    """Shop data that cannot be used: missing, damaged or foreign files, products or goals; the text names which."""


Kind = Literal["human", "synthetic"]
"""Who wrote the instructions: people, or a template over attributes and options."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One request to buy a product, before its price clause."""

    text: str
    attributes: tuple[str, ...]
    options: tuple[str, ...] | None = None
    """Wanted option values of a human instruction; None: one goal for each combination of the product's options."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """One product of the shop. Texts are as in the files; option names and values are lower case, in page order."""

    asin: str
    title: str
    description: str
    bullets: tuple[str, ...]
    category: str
    query: str
    product_category: str
    """Path joined with ' › '."""
    attributes: tuple[str, ...]
    options: Mapping[str, tuple[str, ...]]
    main_image: str
    """URL, or empty."""
    price_text: str
    """The price that pages show: `$34.0` or `$19.99 to $27.99`."""
    prices: tuple[float, ...]
    """One price in dollars, or the two ends of a range from which the price to pay is drawn."""
    instructions: tuple[Instruction, ...] = ()

    def __hash__(self) -> int:
        return hash(self.asin)

    @property
    def combinations(self) -> int:
        """Number of ways to choose one value for every option (1 without options, 0 if an option has no values)."""
        return math.prod(len(values) for values in self.options.values())


_PLAIN = (
    *("asin", "title", "description", "bullets", "category", "query", "product_category"),
    *("attributes", "main_image", "price_text", "prices"),
)
"""Fields that JSON holds as they are, in the order of a record on disk."""


def encode_product(product: Product) -> bytes:
    """One line of JSON that `decode_product` reads back; equal products have equal bytes."""
    orders = [[order.text, order.attributes, order.options] for order in product.instructions]
    values = [getattr(product, name) for name in _PLAIN]
    record = json.dumps([*values, list(product.options.items()), orders], ensure_ascii=False)
    return record.encode("utf-8", "surrogatepass")


def decode_product(record: bytes) -> Product:
    """The inverse of `encode_product`."""
    *values, options, orders = json_of(record.decode("utf-8", "surrogatepass"))
    plain: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in zip(_PLAIN, values, strict=True)
    }
    instructions = tuple(
        Instruction(text=text, attributes=tuple(wanted), options=None if chosen is None else tuple(chosen))
        for text, wanted, chosen in orders
    )
    values_of = {name: tuple(values) for name, values in options}
    return Product(**plain, options=values_of, instructions=instructions)


# --- prices: read from the files' texts, and drawn as the original draws them from its one global random stream

UNPRICED = 100.0
"""Dollars that a product without a price costs."""
CAPS = tuple(10.0 * step for step in range(1, 100))
"""Price caps that a goal can name: 10, 20, ..., 990 dollars."""
NO_CAP = 1_000_000.0
"""Cap of a goal whose product is too dear for two of them; its text names none."""
DEFAULT_PRICE_SEED = 0
"""`random.seed(0)` before loading the original gives these prices and caps."""
_NOT_NUMBER = re.compile(r"[^\d.]")


def parse_pricing(text: Any, where: str) -> tuple[float, ...]:
    """`'$19.99 - $27.99'` as (19.99, 27.99), `'$1,847.00'` as (1847.0,), nothing as (100.0,); more than 2 are cut.

    Raises ShopDataError for a text in which the original finds no price.
    """
    if text in (None, "", []):
        return (UNPRICED,)
    try:
        prices = tuple(float(Decimal(_NOT_NUMBER.sub("", piece))) for piece in text.split("$")[1:])
    except (AttributeError, InvalidOperation):
        prices = ()
    if not prices or not all(map(math.isfinite, prices)):
        raise ShopDataError(f"{where}: pricing is {brief(text, 60)}; valid: '', '$9.99' or '$9.99 - $19.99'")
    return prices[:2]


def price_text(prices: Sequence[float]) -> str:
    """The price that pages show, never with trailing zeros: `$877.8`, `$20.0`, `$8.5 to $9.99`."""
    return " to ".join(f"${price}" for price in prices)


def draw_prices(pricing: np.ndarray, rng: random.Random) -> np.ndarray:
    """The price of each product, float64 [N] dollars: its own, or one draw from its range.

    `pricing` is float64 [N, 2], NaN in the second column where there is one price. Only ranges advance `rng`.
    """
    prices = pricing[:, 0].copy()
    for row in np.flatnonzero(~np.isnan(pricing[:, 1])).tolist():
        prices[row] = rng.uniform(float(pricing[row, 0]), float(pricing[row, 1]))
    return prices


def draw_cap(price: float, rng: random.Random) -> float:
    """A goal's price cap in dollars: the larger of two of the four lowest caps above `price`, or NO_CAP."""
    first = bisect_right(CAPS, price)
    candidates = CAPS[first : first + 4]
    return max(rng.sample(candidates, 2)) if len(candidates) >= 2 else NO_CAP


def cap_text(cap: float) -> str:
    """The end of an instruction that names the cap; empty without one."""
    return "" if cap == NO_CAP else f", and price lower than {cap:.2f} dollars"


# --- named shops: which files or which generated catalog, and who wrote the goals

DATA_VARIABLE = "WEBSHOP_DATA"
SHOP_HOME = "~/.cache/turngym/webshop"
"""Where `turngym data get webshop` puts the files, and where they are looked for unless the variable is set."""
HUMAN_FILE = "items_human_ins.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShopProfile:
    """A named shop: which files or which generated catalog it is made of."""

    name: str
    kind: Kind
    items: str = ""
    """File of products in the original's format; empty for a generated shop."""
    attributes: str = ""
    """File of attributes and synthetic instructions."""
    preset: str = ""
    """Configuration of a generated shop."""

    @property
    def generated(self) -> bool:
        return bool(self.preset)

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the files it needs, the items first."""
        return (self.items, self.attributes, *((HUMAN_FILE,) if self.kind == "human" else ()))


def _real(name: str, kind: Kind, suffix: str) -> ShopProfile:
    return ShopProfile(
        name=name, kind=kind, items=f"items_shuffle{suffix}.json", attributes=f"items_ins_v2{suffix}.json"
    )


PROFILES = {
    profile.name: profile
    for profile in (
        ShopProfile(name="embedded", kind="synthetic", preset="full"),
        ShopProfile(name="embedded-small", kind="synthetic", preset="small"),
        _real("1k-synthetic", "synthetic", "_1000"),
        _real("1k-human", "human", "_1000"),
        _real("full-synthetic", "synthetic", ""),
        _real("full-human", "human", ""),
    )
}


def find_profile(name: str) -> ShopProfile:
    """The profile called `name`; ShopDataError lists the valid names."""
    return PROFILES[checked_choice("profile", name, PROFILES, ShopDataError)]


def shop_folder(data: str | os.PathLike[str] | None) -> str:
    """The folder of the original's files: `data`, else `$WEBSHOP_DATA`, else the home folder if there is one; or ""."""
    named = os.environ.get(DATA_VARIABLE) if data is None else data
    if named or data is not None:
        return str(named)
    home = user_path(SHOP_HOME)
    return str(home) if home.is_dir() else ""


def find_files(profile: ShopProfile, data: str | os.PathLike[str] | None) -> tuple[Path, ...]:
    """Paths of `profile.files` in the folder `data`, else `$WEBSHOP_DATA`; ShopDataError says what is missing."""
    chosen = shop_folder(data)
    size = "small" if "_1000" in profile.items else "all"
    advice = f"`./setup.sh -d {size}` of princeton-nlp/WebShop downloads them into its folder `data`"
    advice = f"`turngym data get webshop` fetches them, or {advice}" if size == "small" else advice
    if not chosen:
        raise ShopDataError(
            f"profile {profile.name!r} needs {', '.join(profile.files)}: give their folder as data= or ${DATA_VARIABLE}"
            f" ({advice}); profile 'embedded' needs no files"
        )
    paths = tuple(user_path(chosen) / name for name in profile.files)
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise ShopDataError(
            f"profile {profile.name!r}: {', '.join(missing)} not found in {str(chosen)!r}"
            f" (from {'data=' if data is not None else '$' + DATA_VARIABLE}); {advice}"
        )
    return paths
