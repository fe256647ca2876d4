"""What kind of shop is generated, and which part of it a product belongs to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from zlib import crc32

from turngym.core.errors import checked_choice
from turngym.envs.webshop.products import ShopDataError

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
