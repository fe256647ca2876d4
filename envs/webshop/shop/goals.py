"""Goals in the original's order: which product to buy, with what attributes, options and price cap."""

from __future__ import annotations

import random
from array import array
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import overload

import numpy as np

from turngym.envs.webshop.errors import ShopDataError
from turngym.envs.webshop.shop.catalog import Instruction, Kind, Product
from turngym.envs.webshop.shop.prices import cap_text, draw_cap

SHUFFLE_SEED = 233


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
    """Of the goal product."""
    kind: Kind
    weight: float
    """Of this goal where goals are drawn at random."""

    @property
    def request(self) -> str:
        """The text without its price clause: what tells goals apart whatever prices were drawn."""
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
    weight: np.ndarray
    """float64 [E]: weight of each of its goals."""


class GoalCollector:
    """Gathers `GoalEntries` while products stream by."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self._row = array("q")
        self._number = array("i")
        self._goals = array("q")
        self._wanted: list[tuple[str, ...]] = []
        self._uses: Counter[str] = Counter()

    def add(self, row: int, product: Product) -> None:
        for number, instruction in enumerate(product.instructions):
            goals = product.combinations if instruction.options is None else 1
            self._row.append(row)
            self._number.append(number)
            self._goals.append(goals)
            if self.kind == "synthetic":
                self._wanted.append(instruction.attributes)
                for attribute in instruction.attributes:
                    self._uses[attribute] += goals

    def entries(self) -> GoalEntries:
        """Synthetic weights favor rare attributes: the mean of 1 / (goals with that attribute)."""
        goals = np.array(self._goals, dtype=np.int64)
        weight = np.ones(len(goals))
        for entry, wanted in enumerate(self._wanted):
            if goals[entry]:
                weight[entry] = sum(1.0 / self._uses[attribute] for attribute in wanted) / len(wanted)
        row, number = np.array(self._row, dtype=np.int64), np.array(self._number, dtype=np.int32)
        return GoalEntries(row=row, number=number, goals=goals, weight=weight)


def shuffled(count: int) -> tuple[np.ndarray, random.Random]:
    """The original's order of `count` goals (int64 [count]: place in file order), and the generator as it is then."""
    rng = random.Random(SHUFFLE_SEED)
    # shuffle draws by the length alone: the same order as the original's list of goals, in 8 bytes each
    order = array("q", range(count))
    rng.shuffle(order)
    return np.array(order, dtype=np.int64), rng


def draw_goal(weights: Sequence[float], rng: random.Random) -> int:
    """The goal of a session that does not name one, as the original draws it, off by one: goal 0 is (almost) never
    drawn, each later goal has the weight of the one before, and the last has its own as well.
    """
    cumulative = [0.0, *accumulate(weights)]
    return min(bisect(cumulative, rng.uniform(0, cumulative[-1])), len(cumulative) - 2)


def limited(weights: Sequence[float], limit: int, rng: random.Random) -> list[int]:
    """The original's `limit_goals`: that many different goals in the order in which they were drawn."""
    if not 0 < limit <= max(len(weights) - 1, 1):
        raise ShopDataError(f"limit is {limit}; with {len(weights)} goals valid are 1 to {max(len(weights) - 1, 1)}")
    cumulative = [0.0, *accumulate(weights)]
    chosen: dict[int, None] = {}
    while len(chosen) < limit:
        place = bisect(cumulative, rng.uniform(0, cumulative[-1]))
        chosen[min(place, len(cumulative) - 2)] = None
    return list(chosen)


class Goals(Sequence[Goal]):
    """The goals of a shop in their final order; each is made when it is asked for, the last 4,096 are kept."""

    def __init__(
        self,
        entries: GoalEntries,
        prices: np.ndarray,
        rng: random.Random,
        *,
        kind: Kind,
        product: Callable[[int], Product],
        order: np.ndarray | None = None,
    ) -> None:
        """`prices` float64 [N]; `rng` goes on where the product prices left it; `order` is `shuffled`'s, if known."""
        self.kind = kind
        self.entries = entries
        # one cap per instruction in product order, before the shuffle: any other order would give other caps
        self.caps = np.array([draw_cap(price, rng) for price in prices[entries.row].tolist()])
        self._ends = np.cumsum(entries.goals)
        count = int(self._ends[-1]) if len(self._ends) else 0
        self._order = shuffled(count)[0] if order is None else order
        self._product = product
        # of the object: a cache on the method would be shared by all shops and keep closed ones alive
        self._made = lru_cache(maxsize=4096)(self._make)

    @property
    def weights(self) -> np.ndarray:
        """float64 [len(self)], in the goals' order."""
        return np.repeat(self.entries.weight, self.entries.goals)[self._order]

    def __len__(self) -> int:
        return len(self._order)

    @overload
    def __getitem__(self, index: int) -> Goal: ...
    @overload
    def __getitem__(self, index: slice) -> list[Goal]: ...
    def __getitem__(self, index: int | slice) -> Goal | list[Goal]:
        if isinstance(index, slice):
            return [self._made(number) for number in range(*index.indices(len(self)))]
        try:
            return self._made(range(len(self))[index])
        except IndexError:
            raise IndexError(f"goal {index} does not exist; this shop has goals 0 to {len(self) - 1}") from None

    def __iter__(self) -> Iterator[Goal]:
        # past the cache, from which a walk over all goals would push those that are played
        return (self._make(number) for number in range(len(self)))

    def _make(self, index: int) -> Goal:
        place = int(self._order[index])
        # right: an entry without goals ends where it begins, and is passed over
        entry = int(np.searchsorted(self._ends, place, side="right"))
        product = self._product(int(self.entries.row[entry]))
        instruction = product.instructions[int(self.entries.number[entry])]
        cap = float(self.caps[entry])
        options: tuple[str, ...] | tuple[tuple[str, str], ...]
        if instruction.options is None:
            combination = place - int(self._ends[entry] - self.entries.goals[entry])
            options = _combination(product, combination)
            text = _synthetic_text(instruction, options)
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
            weight=float(self.entries.weight[entry]),
        )


def _combination(product: Product, number: int) -> tuple[tuple[str, str], ...]:
    """Number `number` of the product's option combinations: names sorted, the last name's value changes first."""
    chosen = []
    for name in sorted(product.options, reverse=True):
        number, place = divmod(number, len(product.options[name]))
        chosen.append((name, product.options[name][place]))
    return tuple(reversed(chosen))


def _synthetic_text(instruction: Instruction, options: tuple[tuple[str, str], ...]) -> str:
    wishes = ", and ".join(f"{name}: {value}" for name, value in options)
    return instruction.text + (f" with {wishes}" if wishes else "")
