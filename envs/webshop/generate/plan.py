"""What is in a cluster of near-duplicates, before it is put into words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Literal, TypeVar

import numpy as np

from turngym.envs.webshop.generate.config import EVAL_EVERY, CatalogConfig, Part, part_of
from turngym.envs.webshop.generate.words import Leaf, Words
from turngym.envs.webshop.shop.prices import UNPRICED

T = TypeVar("T")
Place = Literal["title", "description", "first bullet", "bullet", "attributes"]
Options = tuple[tuple[str, tuple[str, ...]], ...]
"""(Option name, values) pairs in page order."""

_ASIN_DIGITS = "0123456789BCDFGHJKLMNPQRSTVWXYZ"
_PLACES: tuple[Place, ...] = ("title", "description", "first bullet", "bullet")


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """One product: everything that the reward and the search depend on."""

    asin: str
    leaf: Leaf
    brand: str
    material: str
    use: str
    is_: tuple[str, ...]
    """Features that follow `that is`; with `has` what a goal for this product asks for."""
    has: tuple[str, ...]
    places: tuple[Place, ...]
    """Where each of `is_ + has` can be read."""
    bait: tuple[str, ...] = ()
    """Features whose words the title holds, but never as a phrase: the product does not have them."""
    options: Options = ()
    price: tuple[float, ...] = ()
    """Nothing, one price, or the ends of a range."""
    wanted: bool = False
    """Whether there are goals for this product."""
    described: bool = True
    blank: bool = False
    """One of its bullets is blank."""

    @property
    def ceiling(self) -> float:
        """The highest cap that a goal for this product can name."""
        return max(self.price, default=UNPRICED) // 10 * 10 + 40


def plan_cluster(config: CatalogConfig, words: Words, leaf: Leaf, rng: np.random.Generator, first: int) -> list[Draft]:
    """Products that differ from each other in one feature, one option or the price; `first` numbers the first one.

    For every goal the others fail at something: the rival lacks a feature, the variant the option, the dear twin is
    above any cap, the decoy has only the words. Two features of a kind are held in reserve for decoy and filler.
    """
    department = leaf.department
    is_, has = _some(rng, department.is_, 4), _some(rng, department.has, 4)
    part: Part = "eval" if rng.integers(EVAL_EVERY) == 0 else "train"
    asins = _asins(rng, part, first)
    shared = is_[3:] if rng.random() < 0.3 else ()
    options, others = _options(config, words, leaf, rng)
    target = Draft(
        asin=next(asins),
        leaf=leaf,
        brand=_one(rng, words.brands),
        material=_one(rng, department.materials),
        use=_one(rng, department.uses),
        is_=(is_[0], *shared),
        has=(has[0],),
        places=(),
        options=options,
        wanted=True,
    )
    target = _dressed(config, target, rng)
    rival = _dressed(config, replace(target, asin=next(asins), has=(has[1],)), rng)
    if options:
        variant = _dressed(config, replace(target, asin=next(asins), options=others), rng)
    else:
        variant = _dressed(config, replace(target, asin=next(asins), is_=(is_[1], *shared)), rng)
    dear = float(target.ceiling + rng.integers(20, 90)) + 0.99
    cluster = [target, rival, variant, replace(target, asin=next(asins), price=(dear,), wanted=False)]
    spare = replace(target, is_=(is_[2],), has=(has[2],), wanted=False)
    if rng.random() < config.decoys:
        bait = (*target.is_, is_[1], *target.has, has[1])
        cluster.append(_dressed(config, replace(spare, asin=next(asins), bait=bait), rng))
    if rng.random() < 0.35:
        brand = _one(rng, words.brands)
        cluster.append(_dressed(config, replace(spare, asin=next(asins), brand=brand, has=(has[3],)), rng))
    return cluster


def _dressed(config: CatalogConfig, draft: Draft, rng: np.random.Generator) -> Draft:
    """`draft` with a price of its own, and its features put where they can be found."""
    low, high = draft.leaf.department.price
    described = bool(rng.random() >= config.no_description)
    open_places = _PLACES if described else tuple(place for place in _PLACES if place != "description")
    places: list[Place] = []
    for _ in draft.is_ + draft.has:
        places.append("attributes" if rng.random() < config.hidden else _one(rng, open_places))
    price = round(float(rng.integers(low, high)) + _one(rng, (0.0, 0.49, 0.5, 0.95, 0.99)), 2)
    kind = rng.random()
    prices: tuple[float, ...] = (price,)
    if kind < config.unpriced * 1.25:  # dear twins always have one price
        prices = ()
    elif kind < (config.unpriced + config.ranged) * 1.25:
        prices = (price, round(price + 2.0 + float(rng.integers(18)), 2))
    blank = bool(rng.random() < config.blank_bullet)
    return replace(draft, places=tuple(places), price=prices, described=described, blank=blank)


def _options(config: CatalogConfig, words: Words, leaf: Leaf, rng: np.random.Generator) -> tuple[Options, Options]:
    """Options of a cluster, and the same with other values for the first; both empty in a share of the clusters."""
    if rng.random() < config.plain:
        return (), ()
    keys = _some(rng, leaf.department.options, 1 if rng.random() < 0.3 else 2)
    pools = [words.options[key] for key in keys]
    names = [key.partition(":")[0].title() for key in keys]
    number = int(rng.integers(2, 5))
    values = _some(rng, pools[0], min(2 * number, len(pools[0])))
    half = len(values) // 2
    most = max(2, config.max_combinations // half)
    rest = tuple(
        (name, _some(rng, pool, int(rng.integers(2, min(most, 4) + 1))))
        for name, pool in zip(names[1:], pools[1:], strict=True)
    )
    mine, theirs = (names[0], values[:half]), (names[0], values[half:])
    return (mine, *rest), (theirs, *rest)


def _asins(rng: np.random.Generator, part: Part, first: int) -> Iterator[str]:
    """Ten characters, unlike a real shop's; the last five number the products, the others put them into `part`."""
    for number in count(first):
        tail = ""
        for _ in range(5):
            number, digit = divmod(number, len(_ASIN_DIGITS))
            tail = _ASIN_DIGITS[digit] + tail
        while True:
            asin = "G" + "".join(_ASIN_DIGITS[digit] for digit in rng.integers(len(_ASIN_DIGITS), size=4)) + tail
            if part_of(asin) == part:
                yield asin
                break


def _one(rng: np.random.Generator, items: Sequence[T]) -> T:
    return items[int(rng.integers(len(items)))]


def _some(rng: np.random.Generator, items: Sequence[T], number: int) -> tuple[T, ...]:
    """`number` different ones in random order."""
    return tuple(items[place] for place in rng.permutation(len(items))[:number].tolist())
