"""A drawn house before it is text, and the stream of draws that makes it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

import numpy as np

from turngym.envs.alfworld.generate.priors import TaskRow

K = TypeVar("K")

APPLIANCE = {
    "pick_clean_then_place_in_recep": "SinkBasin",
    "pick_heat_then_place_in_recep": "Microwave",
    "pick_cool_then_place_in_recep": "Fridge",
}
LOOK, TWO, SIMPLE = "look_at_obj_in_light", "pick_two_obj_and_place", "pick_and_place_simple"


class Rejected(Exception):
    """This draw makes no game; the generator draws again with the next attempt's seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Receptacle:
    type: str
    openable: bool
    location: int
    """Receptacles with the same number share a location."""


@dataclass(slots=True, kw_only=True)
class Thing:
    type: str
    where: int
    """Index of its receptacle."""
    inside: int | None = None
    """Index of the object that holds it."""
    cool: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class House:
    """One drawn game before it is text. Index order is the order of ids."""

    row: TaskRow
    receptacles: tuple[Receptacle, ...]
    things: tuple[Thing, ...]
    sentence: str


@dataclass(slots=True)
class Draw:
    """A stream of draws. Only `Generator.random` is used: the method whose stream is the simplest to keep stable."""

    rng: np.random.Generator

    def chance(self, probability: float) -> bool:
        return float(self.rng.random()) < probability

    def index(self, count: int) -> int:
        """Uniform in 0..count-1."""
        return min(int(self.rng.random() * count), count - 1)

    def between(self, low: int, high: int) -> int:
        """Uniform in low..high, both included."""
        return low + self.index(high - low + 1)

    def weighted(self, items: Iterable[tuple[K, float]]) -> K:
        """One of the keys, in proportion to its weight. Raises Rejected when nothing has weight."""
        pairs = list(items)
        totals = list(accumulate(weight for _, weight in pairs))
        if not totals or totals[-1] <= 0:
            raise Rejected("nothing to draw from")
        # bisect_right: a draw of exactly 0.0 must not choose a first key without weight
        return pairs[min(bisect_right(totals, float(self.rng.random()) * totals[-1]), len(pairs) - 1)][0]
