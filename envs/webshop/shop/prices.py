"""Prices: read from the files' texts, and drawn as the original draws them from its one global random stream."""

from __future__ import annotations

import random
import re
from bisect import bisect_right
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

import numpy as np

from turngym.envs.webshop.errors import ShopDataError

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
    if not text:
        return (UNPRICED,)
    try:
        prices = tuple(float(Decimal(_NOT_NUMBER.sub("", piece))) for piece in text.split("$")[1:])
    except (AttributeError, InvalidOperation):
        prices = ()
    if not prices:
        raise ShopDataError(f"{where}: pricing is {text!r:.60}; valid: '', '$9.99' or '$9.99 - $19.99'")
    return prices[:2]


def price_text(prices: Sequence[float]) -> str:
    """As pages show it, never with trailing zeros: `$877.8`, `$20.0`, `$8.5 to $9.99`."""
    return " to ".join(f"${price}" for price in prices)


def draw_prices(pricing: np.ndarray, rng: random.Random) -> np.ndarray:
    """What each product costs, float64 [N] dollars: its price, or one draw from its range.

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
