"""Products of a shop: what is known of each, and its one-line form on disk."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

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
    """As the pages show it: `$34.0` or `$19.99 to $27.99`."""
    prices: tuple[float, ...]
    """One price in dollars, or the two ends of a range from which the price to pay is drawn."""
    instructions: tuple[Instruction, ...] = ()

    @property
    def combinations(self) -> int:
        """Number of ways to choose one value for every option (1 without options, 0 if an option has no values)."""
        return math.prod(len(values) for values in self.options.values())


_PLAIN = (
    "asin",
    "title",
    "description",
    "bullets",
    "category",
    "query",
    "product_category",
    "attributes",
    "main_image",
    "price_text",
    "prices",
)


def encode_product(product: Product) -> bytes:
    """One line of JSON that `decode_product` reads back; equal products have equal bytes."""
    orders = [[order.text, order.attributes, order.options] for order in product.instructions]
    values = [getattr(product, name) for name in _PLAIN]
    return json.dumps([*values, list(product.options.items()), orders], ensure_ascii=False).encode(
        "utf-8", "surrogatepass"
    )


def decode_product(record: bytes) -> Product:
    """The inverse of `encode_product`."""
    *values, options, orders = json.loads(record.decode("utf-8", "surrogatepass"))
    plain: dict[str, Any] = {
        name: tuple(v) if isinstance(v, list) else v for name, v in zip(_PLAIN, values, strict=True)
    }
    instructions = tuple(
        Instruction(text=text, attributes=tuple(wanted), options=None if values is None else tuple(values))
        for text, wanted, values in orders
    )
    return Product(**plain, options={name: tuple(v) for name, v in options}, instructions=instructions)
