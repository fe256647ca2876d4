"""How are shops generated? From a seed, in the original's file formats, with text of its own.

`generate_catalog` makes the files. Style `prose` plans clusters of near-duplicates (`plan_cluster`) and then puts them
into words (`write_item`, `write_ins`). Style `terse` makes a small shop of few and repeated phrases, for models tiny
enough to train on a laptop; `vocabulary` lists every phrase that can occur in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import chain, count
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import quote
from zlib import crc32

import msgspec
import numpy as np

from turngym.core.errors import checked_choice
from turngym.envs.webshop.products import UNPRICED, ShopDataError, cap_text, price_text

Part = Literal["train", "eval"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogConfig:
    """What kind of shop is generated. The same settings give the same files, byte for byte."""

    name: str
    """Part of the task ids; a configuration of your own needs a name of its own."""
    version: int = 1
    """Counts changes of the generator; part of the seed."""
    seed: int = 0
    """Another seed gives another shop of the same kind."""
    style: Literal["prose", "terse"] = "prose"
    """Real-looking listings, or texts of few and repeated phrases for models tiny enough to train on a laptop."""
    kinds: int = 200
    """Leaf categories; from 1 to 200 (prose) or to the length of the terse list."""
    clusters: int = 1
    """Clusters of near-duplicates in each leaf category; with more than one, a prose shop's goals may fit two products.
    In a terse shop, how many products of each kind are wanted.
    """
    max_combinations: int = 12
    """Most option combinations of one product; each makes a goal."""
    plain: float = 0.35
    """Share of clusters without options."""
    unpriced: float = 0.09
    """Share of products without a price."""
    ranged: float = 0.09
    """Share of products with a price range."""
    no_description: float = 0.2
    """Share of products without a description."""
    blank_bullet: float = 0.07
    """Share of products with a blank bullet."""
    hidden: float = 0.08
    """Share of wanted features that only the attributes page shows."""
    decoys: float = 0.95
    """Share of clusters with a product that is stuffed with search words (prose), or of products with a dearer twin
    that ranks before them (terse).
    """


FULL = CatalogConfig(name="full")
SMALL = CatalogConfig(
    name="small", style="terse", kinds=24, clusters=16, plain=0.0, unpriced=0.0, ranged=0.0, decoys=0.93
)
CONFIGS = {config.name: config for config in (FULL, SMALL)}
EVAL_EVERY = 5
"""One cluster (prose) or product (terse) in this number has evaluation goals."""


def find_config(name: str) -> CatalogConfig:
    """The preset called `name`. Raises ShopDataError where there is none."""
    return CONFIGS[checked_choice("the generated shop", name, CONFIGS, ShopDataError)]


def part_of(asin: str) -> Part:
    """Which part of a generated shop the goals of product `asin` belong to, whatever the case of its letters.

    The generator draws asins until they fall into the part that it planned, so that whole clusters stay together.
    """
    return "eval" if crc32(asin.upper().encode()) % EVAL_EVERY == 0 else "train"


def generate_catalog(config: CatalogConfig = FULL) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """The items file (shuffled, as the original's is) and the attributes file of a generated shop.

    `part_of(asin)` says whether the goals of a product are for training or for evaluation. Raises ShopDataError for
    settings that cannot be met.
    """
    pairs = list(records(config))
    order = np.random.default_rng([config.seed, config.version, 1]).permutation(len(pairs)).tolist()
    return [pairs[place][0] for place in order], {item["asin"]: ins for item, ins in pairs}


def records(config: CatalogConfig) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """(item, attributes) pairs in the order of leaf categories, one cluster in memory at a time."""
    if config.style == "terse":
        yield from terse_records(config)
        return
    words = load_words()
    if not 1 <= config.kinds <= len(words.leaves) or config.clusters < 1:
        raise ShopDataError(
            f"generated shop {config.name!r}: kinds is {config.kinds}, clusters is {config.clusters}; "
            f"valid: 1 to {len(words.leaves)} kinds, from 1 cluster"
        )
    number = 0
    for turn in range(config.clusters):
        for place, leaf in enumerate(words.leaves[: config.kinds]):
            # crc32, because seeds are numbers and hash() of a str differs between processes
            rng = np.random.default_rng([config.seed, config.version, crc32(config.name.encode()), turn, place])
            for draft in plan_cluster(config, words, leaf, rng, number):
                number += 1
                yield write_item(draft, rng), write_ins(draft, rng)


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
            [Leaf(kind=kind, group=group, department=one) for group, kinds in one.groups.items() for kind in kinds]
            for one in self.departments
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
    is_, has = _some(rng, department.is_, 4), _some(rng, department.has, 4)
    part: Part = "eval" if rng.integers(EVAL_EVERY) == 0 else "train"
    asins = _asins(rng, part, first)
    shared = is_[3:] if rng.random() < 0.3 else ()
    options, others = _options(config, words, leaf, rng)
    target = ProductDraft(
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


def _dressed(config: CatalogConfig, draft: ProductDraft, rng: np.random.Generator) -> ProductDraft:
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


def _options(
    config: CatalogConfig, words: CatalogWords, leaf: Leaf, rng: np.random.Generator
) -> tuple[Options, Options]:
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
    """`number` different items in random order."""
    return tuple(items[place] for place in rng.permutation(len(items))[:number].tolist())


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
    text = _one(rng, _ASKS).format(
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
    """`customization_options`: the empty string where there are none."""
    if not draft.options:
        return ""
    return {
        name: [
            {"is_selected": place == 0, "is_available": True, "value": value.title() if value.isalpha() else value}
            for place, value in enumerate(values)
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
    both = [(feature, True) for feature in draft.is_] + [(feature, False) for feature in draft.has]
    return [pair for pair, where in zip(both, draft.places, strict=True) if where == place]


def _title(draft: ProductDraft, slots: dict[str, str]) -> str:
    # the cluster's pattern, so that near-duplicates look alike
    pattern = _TITLES[crc32((draft.brand + draft.leaf.kind).encode()) % len(_TITLES)]
    shown = [feature.title() if is_ else f"with {feature.title()}" for feature, is_ in _shown(draft, "title")]
    features = "".join(f", {text}" for text in shown)
    return pattern.format(**{**slots, "kind": slots["kind"].title(), "features": features})


def _bait_title(draft: ProductDraft, slots: dict[str, str]) -> str:
    """Search words in a heap: each pair of words stands the wrong way round."""
    heap = " ".join(" ".join(reversed(feature.split())) for feature in draft.bait).title()
    kind = slots["kind"].title()
    return f"{kind} {slots['model']} {heap} {kind} {slots['brand']}"


def _description(draft: ProductDraft, slots: dict[str, str], rng: np.random.Generator) -> str:
    number = int(rng.integers(2, 5))
    lines = [_STORIES[place].format(**slots) for place in rng.permutation(len(_STORIES))[:number].tolist()]
    for feature, is_ in _shown(draft, "description"):
        line = _one(rng, _IS if is_ else _HAS).format(f=feature)
        lines.insert(int(rng.integers(1, len(lines) + 1)), line)
    return " ".join(lines)


def _bullets(draft: ProductDraft, slots: dict[str, str], rng: np.random.Generator) -> list[str]:
    order = rng.permutation(len(_BULLETS))[: int(rng.integers(2, 6))].tolist()
    numbers = {"n": int(rng.integers(14, 900)), "a": int(rng.integers(4, 40)), "b": int(rng.integers(4, 60))}
    rows = [_BULLETS[place].format(**slots, **numbers) for place in order]
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
    return f"{feature.capitalize()}: {_one(rng, _BULLET_TAILS)}"


# --- style terse

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
        for place in rng.permutation(len(LOOKS))[: config.clusters].tolist():
            look, title = LOOKS[place], f"{LOOKS[place]} {kind}"
            options = {"Color": _some(rng, COLORS, int(rng.integers(2, 5)))}
            if rng.random() < 0.6:
                options["Size"] = _some(rng, SIZES, int(rng.integers(2, 4)))
            twins = _one(rng, TWINS) if rng.random() < config.decoys else 0
            # 0 for the wanted product, from 1 for its dear twins
            for number in range(1 + twins):
                asin = f"{prefix}{look_codes[look]}{number}"
                entry: dict[str, Any] = {"attributes": [look, kind]}
                if number == 0:
                    entry |= {"instruction": ASK + title, "instruction_attributes": entry["attributes"]}
                item = {
                    "name": title,
                    "full_description": STORY if number % 2 == 0 else "",
                    "pricing": pricing((float(_one(rng, DEAR_PRICES if number else PRICES)),)),
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
        (department, row[turn])
        for turn in range(len(PRODUCT_KINDS["home"]))
        for department, row in PRODUCT_KINDS.items()
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
