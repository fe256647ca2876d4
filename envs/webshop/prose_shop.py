"""A shop of real-looking listings.

Clusters of near-duplicates are planned (`plan_cluster`), then put into words (`write_item`, `write_ins`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import count
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import quote
from zlib import crc32

import msgspec
import numpy as np

from turngym.envs.webshop.catalog_config import EVAL_EVERY, CatalogConfig, Part, part_of
from turngym.envs.webshop.products import UNPRICED

# --- the word lists of prose shops


class Department(msgspec.Struct, frozen=True, rename={"is_": "is"}):
    """Products that share features, materials and options."""

    category: str
    name: str
    price: tuple[int, int]
    """Lowest and highest usual price in dollars."""
    materials: tuple[str, ...]
    uses: tuple[str, ...]
    options: tuple[str, ...]
    """Keys of `CatalogWords.options`."""
    is_: tuple[str, ...]
    """Features that follow `that is`."""
    has: tuple[str, ...]
    """Features that follow `with`."""
    groups: dict[str, tuple[str, ...]]
    """Kinds of things."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One leaf category: a kind of thing, as it is called in titles and instructions."""

    kind: str
    group: str
    department: Department

    @property
    def query(self) -> str:
        return plural(self.kind)

    @property
    def path(self) -> str:
        names = (self.department.name, self.group, self.query.title())
        return " › ".join(names)


class CatalogWords(msgspec.Struct, frozen=True, dict=True):
    departments: tuple[Department, ...]
    options: dict[str, tuple[str, ...]]
    """`color` or `size:clothes` to values; what stands before the colon is the option's name."""
    brands: tuple[str, ...]

    @cached_property
    def leaves(self) -> tuple[Leaf, ...]:
        """Leaves of all departments in turn, so that any prefix is mixed."""
        columns = [
            [
                Leaf(kind=kind, group=group, department=department)
                for group, kinds in department.groups.items()
                for kind in kinds
            ]
            for department in self.departments
        ]
        return tuple(leaf for turn in zip(*columns, strict=True) for leaf in turn)


def plural(kind: str) -> str:
    """The plural of a word of the word lists."""
    if kind.endswith(("s", "x", "ch", "sh")):
        return kind + "es"
    if kind.endswith("y") and kind[-2] not in "aeiou":
        return kind[:-1] + "ies"
    return kind + "s"


@cache
def load_words() -> CatalogWords:
    data = (Path(__file__).parent / "data" / "catalog_words.json").read_bytes()
    return msgspec.json.decode(data, type=CatalogWords)


# --- style prose: what is in a cluster of near-duplicates, before it is put into words

T = TypeVar("T")
Place = Literal["title", "description", "first bullet", "bullet", "attributes"]
Options = tuple[tuple[str, tuple[str, ...]], ...]
"""(Option name, values) pairs in page order."""
_ASIN_DIGITS = "0123456789BCDFGHJKLMNPQRSTVWXYZ"
_PLACES: tuple[Place, ...] = ("title", "description", "first bullet", "bullet")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductDraft:
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


def plan_cluster(
    config: CatalogConfig, words: CatalogWords, leaf: Leaf, rng: np.random.Generator, first: int
) -> list[ProductDraft]:
    """Products that differ from each other in one feature, one option or the price.

    For every goal the others fail at something: the rival lacks a feature, the variant the option, the dear twin is
    above any cap, the decoy has only the words. Two features of a kind are held in reserve for decoy and filler.
    """
    department = leaf.department
    is_, has = some_of(rng, department.is_, 4), some_of(rng, department.has, 4)
    part: Part = "eval" if rng.integers(EVAL_EVERY) == 0 else "train"
    asins = _asins(rng, part, first)
    shared = is_[3:] if rng.random() < 0.3 else ()
    options, variant_options = _options(config, words, leaf, rng)
    target = ProductDraft(
        asin=next(asins),
        leaf=leaf,
        brand=one_of(rng, words.brands),
        material=one_of(rng, department.materials),
        use=one_of(rng, department.uses),
        is_=(is_[0], *shared),
        has=(has[0],),
        places=(),
        options=options,
        wanted=True,
    )
    target = _dressed(config, target, rng)
    rival = _dressed(config, replace(target, asin=next(asins), has=(has[1],)), rng)
    if options:
        variant = _dressed(config, replace(target, asin=next(asins), options=variant_options), rng)
    else:
        variant = _dressed(config, replace(target, asin=next(asins), is_=(is_[1], *shared)), rng)
    dear = float(target.ceiling + rng.integers(20, 90)) + 0.99
    cluster = [target, rival, variant, replace(target, asin=next(asins), price=(dear,), wanted=False)]
    spare = replace(target, is_=(is_[2],), has=(has[2],), wanted=False)
    if rng.random() < config.decoys:
        bait = (*target.is_, is_[1], *target.has, has[1])
        cluster.append(_dressed(config, replace(spare, asin=next(asins), bait=bait), rng))
    if rng.random() < 0.35:
        brand = one_of(rng, words.brands)
        cluster.append(_dressed(config, replace(spare, asin=next(asins), brand=brand, has=(has[3],)), rng))
    return cluster


def _dressed(config: CatalogConfig, draft: ProductDraft, rng: np.random.Generator) -> ProductDraft:
    """`draft` with a price of its own, and with its features placed in texts of its page."""
    low, high = draft.leaf.department.price
    described = bool(rng.random() >= config.no_description)
    open_places = _PLACES if described else tuple(place for place in _PLACES if place != "description")
    places: list[Place] = []
    for _ in draft.is_ + draft.has:
        places.append("attributes" if rng.random() < config.hidden else one_of(rng, open_places))
    price = round(float(rng.integers(low, high)) + one_of(rng, (0.0, 0.49, 0.5, 0.95, 0.99)), 2)
    kind_of_price = rng.random()
    prices: tuple[float, ...] = (price,)
    # dear twins always have one price
    if kind_of_price < config.unpriced * 1.25:
        prices = ()
    elif kind_of_price < (config.unpriced + config.ranged) * 1.25:
        prices = (price, round(price + 2.0 + float(rng.integers(18)), 2))
    blank = bool(rng.random() < config.blank_bullet)
    return replace(draft, places=tuple(places), price=prices, described=described, blank=blank)


def _options(
    config: CatalogConfig, words: CatalogWords, leaf: Leaf, rng: np.random.Generator
) -> tuple[Options, Options]:
    """Options of a cluster, and the same with other values for the first; both empty in a share of the clusters."""
    if rng.random() < config.plain:
        return (), ()
    keys = some_of(rng, leaf.department.options, 1 if rng.random() < 0.3 else 2)
    pools = [words.options[key] for key in keys]
    names = [key.partition(":")[0].title() for key in keys]
    number = int(rng.integers(2, 5))
    values = some_of(rng, pools[0], min(2 * number, len(pools[0])))
    half = len(values) // 2
    most = max(2, config.max_combinations // half)
    shared = tuple(
        (name, some_of(rng, pool, int(rng.integers(2, min(most, 4) + 1))))
        for name, pool in zip(names[1:], pools[1:], strict=True)
    )
    mine, theirs = (names[0], values[:half]), (names[0], values[half:])
    return (mine, *shared), (theirs, *shared)


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


def one_of(rng: np.random.Generator, items: Sequence[T]) -> T:
    return items[int(rng.integers(len(items)))]


def some_of(rng: np.random.Generator, items: Sequence[T], number: int) -> tuple[T, ...]:
    """`number` different items in random order."""
    return tuple(items[index] for index in rng.permutation(len(items))[:number].tolist())


# --- style prose: title, description, bullets, pictures and instruction of a planned product

_TITLES = (
    "{brand} {model} {material} {kind}{features} for {use}",
    "{material} {kind} by {brand}{features}, {model}",
    "{brand} {kind} {model}, {material} Series{features}, Made for {use}",
    "{kind} in {material} Design{features} - {brand} {model}",
)
_STORIES = (
    "The {brand} {kind} {model} was drawn up with {use} in mind.",
    "Our {material} line is simple to look at and pleasant to own.",
    "People who bought one {kind} often come back for a second.",
    "It reaches you in a plain box with a short leaflet.",
    "Every {kind} is looked over twice before it leaves the workshop.",
    "A {kind} like this suits {use} and does not shout.",
    "We started {brand} because the {kind} we wanted did not exist.",
    "Keep the leaflet: it names the person who packed your order.",
)
_BULLETS = (
    "Good for {use} and wherever else you like it",
    "From the {material} line by {brand}",
    "Weight {n} g, box {a} x {b} cm",
    "Questions get an answer within {a} hours",
    "Bring it back within {n} days if you do not like it",
    "Model {model}, listed since {year}",
    "A present for somebody who has everything but a {kind}",
)
_IS = ("It is {f}, so there is less to think about.", "Because it is {f}, it stays in use.", "Yes, it is {f}.")
_HAS = ("It comes with {f}.", "Delivered with {f} as standard.", "The difference is in the detail: {f}.")
_BULLET_TAILS = ("tested in our own workshop", "as buyers asked for", "on every unit", "no extra charge")
_ASKS = (
    "i am looking for {a}{is}{kind} with {has}",
    "i am looking for a {kind} that is {and_is} and has {has}",
    "i need {a}{is}{kind} that comes with {has}",
    "find me a {kind} that is {and_is}, and it must have {has}",
    "show me {a}{is}{kind} with {has}",
    "i want to buy a {kind} with {has} that is {and_is}",
)


def write_item(draft: ProductDraft, rng: np.random.Generator) -> dict[str, Any]:
    """The record of the items file."""
    slots = {
        "brand": draft.brand,
        "material": draft.material,
        "kind": draft.leaf.kind,
        "use": draft.use,
        "model": f"{draft.brand[0]}{int(rng.integers(100, 1000))}",
        "year": str(int(rng.integers(2011, 2024))),
    }
    return {
        "name": _bait_title(draft, slots) if draft.bait else _title(draft, slots),
        "full_description": _description(draft, slots, rng) if draft.described else "",
        "pricing": pricing(draft.price),
        "images": [picture(draft.leaf.kind, draft.asin)],
        "product_category": draft.leaf.path,
        "average_rating": "",
        "small_description": _bullets(draft, slots, rng),
        "customization_options": choices(draft),
        "asin": draft.asin,
        "category": draft.leaf.department.category,
        "query": draft.leaf.query,
        "page": int(rng.integers(1, 400)),
    }


def write_ins(draft: ProductDraft, rng: np.random.Generator) -> dict[str, Any]:
    """The record of the attributes file; an instruction only where the product is wanted."""
    wanted = [draft.leaf.kind, *draft.is_, *draft.has]
    if not draft.wanted:
        return {"attributes": wanted}
    is_ = ", ".join(draft.is_)
    article = "an " if is_[0] in "aeio" else "a "
    text = one_of(rng, _ASKS).format(
        a=article,
        kind=draft.leaf.kind,
        has=" and ".join(draft.has),
        and_is=" and ".join(draft.is_),
        **{"is": is_ + " "},
    )
    return {"attributes": wanted, "instruction": text, "instruction_attributes": wanted}


def pricing(price: tuple[float, ...]) -> str:
    return " - ".join(f"${value:.2f}" for value in price)


def choices(draft: ProductDraft) -> Any:
    """`customization_options` of a product; the empty string if it has none."""
    if not draft.options:
        return ""
    return {
        name: [
            {"is_selected": index == 0, "is_available": True, "value": value.title() if value.isalpha() else value}
            for index, value in enumerate(values)
        ]
        for name, values in draft.options
    }


def picture(kind: str, asin: str) -> str:
    """A drawing as a data URL, so that no picture has to be fetched: initials on a colored ground."""
    hue = crc32(asin.encode()) % 360
    initials = "".join(word[0] for word in kind.split()).upper()
    svg = (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 60 60'><rect width='60' height='60' rx='8' "
        f"fill='hsl({hue},45%,72%)'/><text x='30' y='39' font-size='26' text-anchor='middle' "
        f"font-family='sans-serif' fill='hsl({hue},50%,24%)'>{initials}</text></svg>"
    )
    return "data:image/svg+xml," + quote(svg, safe="/:=' ,()")


def _shown(draft: ProductDraft, place: Place) -> list[tuple[str, bool]]:
    """(feature, whether it follows `is`) of the features that stand in `place`."""
    features = [(feature, True) for feature in draft.is_] + [(feature, False) for feature in draft.has]
    return [pair for pair, where in zip(features, draft.places, strict=True) if where == place]


def _title(draft: ProductDraft, slots: dict[str, str]) -> str:
    # the cluster's pattern, so that near-duplicates look alike
    pattern = _TITLES[crc32((draft.brand + draft.leaf.kind).encode()) % len(_TITLES)]
    texts = [feature.title() if is_ else f"with {feature.title()}" for feature, is_ in _shown(draft, "title")]
    features = "".join(f", {text}" for text in texts)
    return pattern.format(**{**slots, "kind": slots["kind"].title(), "features": features})


def _bait_title(draft: ProductDraft, slots: dict[str, str]) -> str:
    """Search words in a heap: each pair of words stands the wrong way round."""
    heap = " ".join(" ".join(reversed(feature.split())) for feature in draft.bait).title()
    kind = slots["kind"].title()
    return f"{kind} {slots['model']} {heap} {kind} {slots['brand']}"


def _description(draft: ProductDraft, slots: dict[str, str], rng: np.random.Generator) -> str:
    number = int(rng.integers(2, 5))
    lines = [_STORIES[index].format(**slots) for index in rng.permutation(len(_STORIES))[:number].tolist()]
    for feature, is_ in _shown(draft, "description"):
        line = one_of(rng, _IS if is_ else _HAS).format(f=feature)
        lines.insert(int(rng.integers(1, len(lines) + 1)), line)
    return " ".join(lines)


def _bullets(draft: ProductDraft, slots: dict[str, str], rng: np.random.Generator) -> list[str]:
    order = rng.permutation(len(_BULLETS))[: int(rng.integers(2, 6))].tolist()
    numbers = {"n": int(rng.integers(14, 900)), "a": int(rng.integers(4, 40)), "b": int(rng.integers(4, 60))}
    rows = [_BULLETS[index].format(**slots, **numbers) for index in order]
    rows[1:1] = [_feature_bullet(feature, rng) for feature, _ in _shown(draft, "bullet")]
    first = [_feature_bullet(feature, rng) for feature, _ in _shown(draft, "first bullet")]
    if draft.bait:
        values = " ".join(value for _, values in draft.options for value in values)
        heap = " ".join(" ".join(reversed(feature.split())) for feature in draft.bait)
        first = [f"Shoppers also type: {slots['kind']} {values}, {heap} {slots['kind']}"]
    if first:
        rows.insert(0, "; ".join(first))
    if draft.blank:
        rows.insert(int(rng.integers(1, len(rows) + 1)), " ")
    return rows


def _feature_bullet(feature: str, rng: np.random.Generator) -> str:
    return f"{feature.capitalize()}: {one_of(rng, _BULLET_TAILS)}"
