"""How are shops generated? From a seed, in the original's file formats, with text of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from zlib import crc32

import numpy as np

from turngym.envs.webshop.catalog_config import FULL, CatalogConfig
from turngym.envs.webshop.products import ShopDataError
from turngym.envs.webshop.prose_shop import load_words, plan_cluster, write_ins, write_item
from turngym.envs.webshop.terse_shop import terse_records


def generate_catalog(config: CatalogConfig = FULL) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """The items file (shuffled, as the original's is) and the attributes file of a generated shop.

    `part_of(asin)` says whether the goals of a product are for training or for evaluation. Raises ShopDataError for
    settings that cannot be met.
    """
    pairs = list(records(config))
    order = np.random.default_rng([config.seed, config.version, 1]).permutation(len(pairs)).tolist()
    return [pairs[row][0] for row in order], {item["asin"]: ins for item, ins in pairs}


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
        for leaf_number, leaf in enumerate(words.leaves[: config.kinds]):
            # crc32, because seeds are numbers and hash() of a str differs between processes
            rng = np.random.default_rng([config.seed, config.version, crc32(config.name.encode()), turn, leaf_number])
            for draft in plan_cluster(config, words, leaf, rng, number):
                number += 1
                yield write_item(draft, rng), write_ins(draft, rng)
