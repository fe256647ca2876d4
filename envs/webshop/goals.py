"""What is a shopper asked for? Goals in the original's order, which of them train and evaluate, and their task ids.

A goal says which product to buy, with what attributes, options and price cap.
"""

from __future__ import annotations

import hashlib
import random
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from turngym.core.errors import TaskError, checked_choice
from turngym.core.sequences import LazySequence
from turngym.envs.webshop.products import Kind, Product, ShopDataError, ShopProfile, cap_text, draw_cap

SHUFFLE_SEED = 233
MOST_GOALS = 10**8
"""Goals of a shop at most: their order takes 8 bytes each, 16 while it is shuffled, and a minute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What a shopper is asked to buy."""

    index: int
    """Place in the shop's order of goals; the goal's id within its profile."""
    asin: str
    instruction_text: str
    """What the shopper reads, price clause included."""
    attributes: tuple[str, ...]
    goal_options: tuple[str, ...] | tuple[tuple[str, str], ...]
    """Wanted values of a human goal; (option name, value) pairs of a synthetic one. The reward treats them apart."""
    price_upper: float
    """Price cap in dollars; 1,000,000 where the text names none."""
    category: str
    query: str
    product_category: str
    title: str
    """Title of the goal product."""
    kind: Kind

    @property
    def request(self) -> str:
        """The text without its price clause, which is the same for every draw of the prices."""
        return self.instruction_text.removesuffix(cap_text(self.price_upper))


@dataclass(frozen=True, slots=True, kw_only=True)
class GoalEntries:
    """All instructions of a catalog in product order, as columns over E entries; independent of prices."""

    row: np.ndarray
    """int64 [E]: product row."""
    number: np.ndarray
    """int32 [E]: which of the product's instructions."""
    goals: np.ndarray
    """int64 [E]: how many goals it makes, one per combination of options (synthetic) or one (human)."""


class GoalCollector:
    """Builds `GoalEntries` from products that are added one after another."""

    def __init__(self) -> None:
        self._row = array("q")
        self._number = array("i")
        self._goals = array("q")
        self._count = 0

    def add(self, row: int, product: Product) -> None:
        """Adds the instructions of the next product. Raises ShopDataError where the shop gets too many goals."""
        for number, instruction in enumerate(product.instructions):
            goals = product.combinations if instruction.options is None else 1
            self._count += goals
            if self._count > MOST_GOALS:
                raise ShopDataError(
                    f"product {product.asin!r}: every combination of its {len(product.options)} options is a goal, and "
                    f"with them the shop has more than {MOST_GOALS:,}, the most that are read"
                )
            self._row.append(row)
            self._number.append(number)
            self._goals.append(goals)

    def entries(self) -> GoalEntries:
        return GoalEntries(
            row=np.array(self._row, dtype=np.int64),
            number=np.array(self._number, dtype=np.int32),
            goals=np.array(self._goals, dtype=np.int64),
        )


def shuffled(count: int) -> np.ndarray:
    """The original's order of `count` goals (int64 [count]: place in file order)."""
    # shuffle draws by the length alone: the same order as the original's list of goals, in 8 bytes each
    order = array("q", range(count))
    random.Random(SHUFFLE_SEED).shuffle(order)
    return np.array(order, dtype=np.int64)


class Goals(LazySequence[Goal]):
    """The goals of a shop in their final order; each is made when it is asked for, the last 4,096 are kept."""

    def __init__(
        self,
        entries: GoalEntries,
        prices: np.ndarray,
        rng: random.Random,
        *,
        kind: Kind,
        product: Callable[[int], Product],
        order: np.ndarray | None,
    ) -> None:
        """Draws the price caps of all goals.

        Args:
            entries: all instructions of the catalog, in product order.
            prices: price of each product in dollars, float64 [N].
            rng: the generator from which the prices were drawn, as it is after that; it is advanced.
            product: from a product's row to the product.
            order: what `shuffled` gives for the number of goals; None: it is computed.
        """
        self.kind = kind
        self.entries = entries
        # one cap per instruction in product order, before the shuffle: any other order would give other caps
        self.caps = np.array([draw_cap(price, rng) for price in prices[entries.row].tolist()])
        self._ends = np.cumsum(entries.goals)
        count = int(self._ends[-1]) if len(self._ends) else 0
        self.order = shuffled(count) if order is None else order
        """int64 [len(self)]: place in file order of each goal."""
        self._product = product
        # of the object: a cache on the method would be shared by all shops and keep closed ones alive
        self._made = lru_cache(maxsize=4096)(self._make)

    def __len__(self) -> int:
        return len(self.order)

    def item(self, index: int) -> Goal:
        return self._made(index)

    def __iter__(self) -> Iterator[Goal]:
        # past the cache, from which a walk over all goals would push those that are played
        return (self._make(index) for index in range(len(self)))

    def _make(self, index: int) -> Goal:
        position = int(self.order[index])
        # right: an entry without goals ends where it begins, and is passed over
        entry = int(np.searchsorted(self._ends, position, side="right"))
        product = self._product(int(self.entries.row[entry]))
        instruction = product.instructions[int(self.entries.number[entry])]
        cap = float(self.caps[entry])
        options: tuple[str, ...] | tuple[tuple[str, str], ...]
        if instruction.options is None:
            combination = position - int(self._ends[entry] - self.entries.goals[entry])
            options = _combination(product, combination)
            wishes = ", and ".join(f"{name}: {value}" for name, value in options)
            text = instruction.text + (f" with {wishes}" if wishes else "")
        else:
            options, text = instruction.options, instruction.text.strip(".")
        return Goal(
            index=index,
            asin=product.asin,
            instruction_text=text + cap_text(cap),
            attributes=instruction.attributes,
            goal_options=options,
            price_upper=cap,
            category=product.category,
            query=product.query,
            product_category=product.product_category,
            title=product.title,
            kind=self.kind,
        )


def _combination(product: Product, number: int) -> tuple[tuple[str, str], ...]:
    """Number `number` of the product's option combinations: names sorted, the last name's value changes first."""
    chosen = []
    for name in sorted(product.options, reverse=True):
        number, index = divmod(number, len(product.options[name]))
        chosen.append((name, product.options[name][index]))
    return tuple(reversed(chosen))


# --- which goals are for evaluation and which for training

TRAIN = "train"
EVALUATION_GOALS = 200
TRAINING_GOALS = 3000
PAPERS = {"test": (0, 500), "dev": (500, 1500), TRAIN: (1500, None)}
"""First goal and end of each split that papers report on, for the human goals of the full shop and for those of 1,000
products."""
PRODUCTS = "products"
HELD_OUT = 4
"""With the scheme `products`, one product in this number, chosen by the hash of its asin, is for evaluation alone."""
PER_PRODUCT = 4
"""Evaluation goals of one product at most, with that scheme: some products have hundreds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Splits:
    """Goal numbers by split, in ascending order; disjoint, and no training text is an evaluation text."""

    scheme: str
    parts: Mapping[str, tuple[int, ...]]
    dropped: int
    """Training goals left out because an evaluation goal asks for the same in the same words, prices aside."""

    def __getitem__(self, name: str) -> tuple[int, ...]:
        """The goals of a split; ShopDataError lists the names."""
        return self.parts[checked_choice("split", name, self.parts, ShopDataError)]

    def name_of(self, goal: int) -> str:
        """The split of a goal, or 'unused'."""
        return next((name for name, goals in self.parts.items() if goal in goals), "unused")


def make_splits(
    goals: Goals, profile: ShopProfile, scheme: str | None = None, *, part_of: Callable[[str], str] | None = None
) -> Splits:
    """`turnopd` (goals 0-199 evaluate, the next 3,000 train), `papers` (real shops: test 0-499, dev 500-1499, train
    1500 on), `products` (200 goals of products that no training goal asks for), `generated` (as the generator planned,
    by product too); None: `generated` for generated shops, else `turnopd`.

    Training goals that ask for the same as another split's goal, in the same words, are dropped. Raises ShopDataError
    for a scheme that the shop cannot have, and for a shop without goals.

    Args:
        part_of: from a product's asin to `train` or `eval`, as the generator planned; None: a real shop.
    """
    if not len(goals):
        raise ShopDataError(
            f"profile {profile.name!r}: the shop has no goals, for which a product needs an instruction and a value "
            "for each of its options"
        )
    chosen = scheme or ("generated" if profile.generated else "turnopd")
    if chosen == "turnopd":
        last = EVALUATION_GOALS + TRAINING_GOALS
        parts = _cut(len(goals), {"eval": (0, EVALUATION_GOALS), TRAIN: (EVALUATION_GOALS, last)})
    elif chosen == "papers" and part_of is None:
        parts = _cut(len(goals), PAPERS)
    elif chosen == PRODUCTS and part_of is None:
        parts = _by_product([goal.asin for goal in goals])
    elif chosen == "generated" and part_of is not None:
        names = [part_of(goal.asin) for goal in goals]
        parts = {split: tuple(i for i, name in enumerate(names) if name == split) for split in ("eval", TRAIN)}
    else:
        valid = ["turnopd", *(["generated"] if part_of else ["papers", PRODUCTS])]
        raise ShopDataError(
            f"splits is {scheme!r}; for profile {profile.name!r} valid: {', '.join(valid)}"
            " ('papers' needs a real shop, 'generated' a generated one, which has its products apart already)"
        )
    # no training goal may ask for the same as an evaluation goal in the same words
    texts = {_plain(goals[goal].request) for name, numbers in parts.items() if name != TRAIN for goal in numbers}
    train = tuple(goal for goal in parts[TRAIN] if _plain(goals[goal].request) not in texts)
    return Splits(scheme=chosen, parts={**parts, TRAIN: train}, dropped=len(parts[TRAIN]) - len(train))


def _cut(count: int, bounds: Mapping[str, tuple[int, int | None]]) -> dict[str, tuple[int, ...]]:
    return {
        name: tuple(range(min(first, count), count if end is None else min(end, count)))
        for name, (first, end) in bounds.items()
    }


def _by_product(asins: list[str]) -> dict[str, tuple[int, ...]]:
    """Splits the goals, in the shop's order, into those of products that are held out and all others."""
    held = {asin: hashlib.sha256(asin.encode()).digest()[0] % HELD_OUT == 0 for asin in set(asins)}
    times: Counter[str] = Counter()
    evaluation: list[int] = []
    for number, asin in enumerate(asins):
        if held[asin] and times[asin] < PER_PRODUCT and len(evaluation) < EVALUATION_GOALS:
            times[asin] += 1
            evaluation.append(number)
    training = [number for number, asin in enumerate(asins) if not held[asin]]
    return {"eval": tuple(evaluation), TRAIN: tuple(training[:TRAINING_GOALS])}


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())


# --- task ids: `<profile>/<goal>`, and `<profile>/<goal>@<price seed>` for prices and caps of another draw


class GoalIds(LazySequence[str]):
    """The ids of some goals of a shop, made when they are asked for; `in` is true for every goal of the shop."""

    def __init__(self, profile: str, listed: Sequence[int], goals: int) -> None:
        """Lists the goals `listed` of a shop that has `goals` goals."""
        self._prefix = f"{profile}/"
        self._listed = listed
        self._goals = goals

    def __len__(self) -> int:
        return len(self._listed)

    def item(self, index: int) -> str:
        return f"{self._prefix}{self._listed[index]}"

    def __contains__(self, task_id: object) -> bool:
        return isinstance(task_id, str) and self._numbers(task_id) is not None

    def goal_of(self, task_id: str) -> tuple[int, int | None]:
        """The goal's number, and the seed of its prices; None for the shop's own.

        Raises TaskError for an id of another shop and for a number that does not exist.
        """
        numbers = self._numbers(task_id)
        if numbers is None:
            raise TaskError(f"task {task_id!r} is not one of {self._prefix}0 to {self._prefix}{self._goals - 1}")
        return numbers

    def _numbers(self, task_id: str) -> tuple[int, int | None] | None:
        match = _NUMBERS.fullmatch(task_id.removeprefix(self._prefix)) if task_id.startswith(self._prefix) else None
        if match is None or int(match["goal"]) >= self._goals:
            return None
        return int(match["goal"]), None if match["seed"] is None else int(match["seed"])


# twelve digits at most: int() raises ValueError for thousands of them
_NUMBERS = re.compile(r"(?P<goal>0|[1-9][0-9]{0,11})(?:@(?P<seed>0|[1-9][0-9]{0,11}))?")
"""Numbers in their one spelling: no sign, no leading zeros, no other alphabet's digits."""


def listed_goals(splits: Splits, split: str | None) -> tuple[int, ...]:
    """The goals of a split; None is training, or where that is empty the first split with goals."""
    if split is None:
        split = next((name for name in (TRAIN, *splits.parts) if splits.parts.get(name)), TRAIN)
    return splits[split]
