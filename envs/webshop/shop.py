"""What is a shop? Products, prices, goals, search and reward, read only, shared by all environments of a process.

`open_shop` opens the shop of a profile once per process. `Shop` answers what sessions ask. `goal_task` makes a goal
into a task with its hash.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from sys import getsizeof
from threading import Lock, RLock
from typing import Any, Literal

from cachetools import LRUCache, cached

from turngym.core.rows import path_stamp
from turngym.core.task import Task, content_hash
from turngym.envs.webshop.actions import (
    CLICK,
    COMPAT,
    PER_PAGE,
    SEARCH,
    Quirks,
    can_buy,
    click_action,
    parse_action,
    pressable,
    search_action,
)
from turngym.envs.webshop.catalog import Catalog, search_text
from turngym.envs.webshop.catalog_config import part_of
from turngym.envs.webshop.goals import Goal, Goals, Splits, make_splits
from turngym.envs.webshop.nouns import BUILTIN, SPACY_MODEL, NounTagger, find_tagger
from turngym.envs.webshop.open_catalog import load_catalog
from turngym.envs.webshop.products import (
    DEFAULT_PRICE_SEED,
    Product,
    ShopDataError,
    ShopProfile,
    draw_prices,
    find_files,
    find_profile,
    shop_folder,
)
from turngym.envs.webshop.reward import ProductFacts, Reward, best_purchase, compute_reward

OracleQuery = Literal["title", "instruction"]
"""What an expert searches for: the product's title, or what the instruction says."""
_TITLE_WORDS = 12
ENV_ID = "turngym/WebShop-v0"
RESULTS = 50
"""Products that one search finds at most."""
MEMO = 4096
"""Searches, products and best purchases that are remembered, each."""
DRAWN = 16
"""Other draws of a shop's prices that are remembered."""
MEMO_BYTES = 32 << 20
"""Most bytes of remembered searches: queries are the agents' own words, and may be as long as they like."""


_lock = RLock()
_open: dict[tuple[Hashable, ...], Shop] = {}
"""The shops of `open_shop` by its arguments; `_lock` guards it and the counts of users."""


class Shop:
    """One shop with its prices drawn. Safe for any number of sessions and threads; it never changes."""

    def __init__(
        self,
        catalog: Catalog,
        profile: ShopProfile,
        *,
        price_seed: int = DEFAULT_PRICE_SEED,
        tagger: str | NounTagger | None = None,
    ) -> None:
        """Draws the prices of all products and the price caps of all goals."""
        self.profile = profile
        self.products = catalog
        self.price_seed = price_seed
        self.tagger = find_tagger(tagger, catalog, profile)
        self.users = 0
        """How many `open_shop` calls have not been closed."""
        self._made_with: dict[str, Any] = {"price_seed": price_seed, "tagger": tagger}
        rng = random.Random(price_seed)
        self._prices = draw_prices(catalog.pricing, rng)
        self.goals = Goals(catalog.entries, self._prices, rng, kind=profile.kind, product=self._at, order=catalog.order)
        self._lock = RLock()
        self._at_row = lru_cache(maxsize=MEMO)(catalog.__getitem__)
        self._facts = lru_cache(maxsize=MEMO)(lambda row: ProductFacts(self._at(row), self.tagger))
        self._best = lru_cache(maxsize=MEMO)(self._find_best)
        own_parts = part_of if profile.generated else None
        self._splits = lru_cache(maxsize=None)(partial(make_splits, self.goals, profile, part_of=own_parts))
        # concurrent searches for the same keywords may both ask the index; the lock guards only the memory
        self._search = cached(LRUCache(MEMO_BYTES, _answer_cost), lock=Lock())(self._find)
        self._drawn = lru_cache(maxsize=DRAWN)(self._draw_with)
        self._opened_with: Callable[[], Shop] | None = None

    def __repr__(self) -> str:
        return f"<Shop {self.profile.name}: {len(self.products)} products, {len(self.goals)} goals>"

    def __deepcopy__(self, _: object) -> Shop:
        """Returns the shop itself, because it never changes and `gym.make(..., shop=shop)` copies its arguments."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """A shop of `open_shop` is opened again where it is unpickled, and stays open there; others travel whole."""
        if self._opened_with is None:
            return partial(Shop, self.products, self.profile, **self._made_with), ()
        return self._opened_with, ()

    @property
    def fingerprint(self) -> str:
        """SHA-256 of everything that decides products, prices, goals and scores."""
        content = {"products": self.products.sha256, "kind": self.profile.kind, "price_seed": self.price_seed}
        return content_hash({**content, "tagger": self.tagger.name, "goals": len(self.goals)})

    @property
    def scoring(self) -> dict[str, str]:
        """The facts besides the goal on which scores depend: `scored_with`, the tagger of titles with its version, and,
        if that is not the original's, `approximate`, which says what would make scores exact.

        Empty for a generated shop, whose scores are defined by the built-in list of nouns.
        """
        if self.profile.generated and self.tagger.name == BUILTIN:
            return {}
        facts = {"scored_with": self.tagger.name}
        if self.profile.generated or self.tagger.exact:
            return facts
        command = f"`turngym index nouns --profile {self.profile.name}`"
        return facts | {"approximate": f"nouns of titles by {self.tagger.name}, not by {SPACY_MODEL}: {command}"}

    def product(self, asin: str) -> Product | None:
        """The product with that asin (upper case as in the files), or None."""
        row = self.products.row(asin)
        return None if row is None else self._at(row)

    def price(self, asin: str) -> float:
        """Dollars to pay for it; a product with a price range has one price per shop."""
        return float(self._prices[self._row(asin)])

    def search(self, keywords: str) -> tuple[str, ...]:
        """Asins of at most 50 products, best first, as the original's Lucene ranks them."""
        return self._search(keywords)[1]

    def reward(self, goal: Goal, asin: str, options: Mapping[str, str]) -> Reward:
        """The reward for buying `asin` with `options` (name to value)."""
        row = self._row(asin)
        return compute_reward(goal, self._facts(row), float(self._prices[row]), options.values(), self.tagger)

    def way_to(self, goal: Goal, query: OracleQuery) -> str | None:
        """The first of an expert's searches that lists the goal's product where a click opens it; None if none does.

        By its title, or by what the instruction says; then by all that is searched of it, as a whole and word by word.
        Each costs the shop a search, and the first nearly always does.
        """
        titles = [goal.title, " ".join(goal.title.split()[:_TITLE_WORDS])]
        # what a shopper who has only the instruction might type, fewest words first
        options = [option if isinstance(option, str) else option[1] for option in goal.goal_options]
        wishes = [
            " ".join([goal.query, *goal.attributes]),
            " ".join([goal.query, *goal.attributes, *options]),
            " ".join([*goal.attributes, *options]),
            goal.query,
            goal.request,
        ]
        document = search_text(self._at(self._row(goal.asin)))
        first = [*titles, *wishes] if query == "title" else [*wishes, goal.title]
        for action in map(search_action, (*first, document, *dict.fromkeys(document.split()))):
            parsed = parse_action(action)
            if parsed is not None and opens(goal.asin, self.search(parsed[1])):
                return action
        return None

    def attainable(self, goal: Goal, quirks: Quirks = COMPAT["webshop"]) -> tuple[float, dict[str, str]]:
        """The highest score that buying the goal's own product can earn, and the options to press for it.

        What is counted can be done: a search finds the product, and the options can be pressed together on its page.
        0.0 where no search finds it. Below 1.0 for some goals of real shops, too: the reward compares a synthetic
        goal's options in a way that may fail their own value.
        """
        score, options = self._best(goal, quirks)
        return score, dict(options)

    def drawn_with(self, price_seed: int) -> Shop:
        """The same products, goals and search with prices and price caps drawn with another seed.

        It is not closed by itself: it lives as long as this shop.
        """
        return self if price_seed == self.price_seed else self._drawn(price_seed)

    def splits(self, scheme: str | None = None) -> Splits:
        """Goals for training and for evaluation: `make_splits` for this shop."""
        return self._splits(scheme)

    def close(self) -> None:
        """Gives up one use of the shop; the last one releases products and index."""
        with _lock:
            self.users -= 1
            if self.users > 0:
                return
            for key in [key for key, shop in _open.items() if shop is self]:
                del _open[key]
        self.products.close()
        for memo in (self._at_row, self._facts, self._best, self._search, self._splits, self._drawn):
            memo.cache_clear()

    def _draw_with(self, price_seed: int) -> Shop:
        shop = Shop(self.products, self.profile, price_seed=price_seed, tagger=self.tagger)
        # what is found does not depend on prices
        shop._search = self._search
        return shop

    # a method, because the goals are given it before there is a memo
    def _at(self, row: int) -> Product:
        return self._at_row(row)

    def _row(self, asin: str) -> int:
        row = self.products.row(asin)
        if row is None:
            raise ShopDataError(f"product {asin!r} is not in the shop {self.profile.name!r}")
        return row

    def _find(self, keywords: str) -> tuple[str, tuple[str, ...]]:
        """(keywords, asins found); the keywords too, because their bytes count in the cache."""
        with self._lock:
            # only opening is guarded; searches of many threads may run at once
            engine = self.products.engine()
        return keywords, tuple(asin for asin, _ in engine.search(keywords, RESULTS))

    def _find_best(self, goal: Goal, quirks: Quirks) -> tuple[float, dict[str, str]]:
        row = self._row(goal.asin)
        product, search = self._at(row), self.way_to(goal, "title")
        if search is None or not can_buy(product, quirks):
            return 0.0, {}
        # what cannot be pressed is no option of an agent's
        offered = replace(product, options=pressable(product, quirks, search))
        reward, options = best_purchase(goal, offered, self._facts(row), float(self._prices[row]), self.tagger)
        return reward.total, options


def opens(asin: str, found: Sequence[str]) -> bool:
    """Whether a click on one of the pages of results `found` opens the product `asin`."""
    if asin not in found or parse_action(click_action(asin)) != (CLICK, asin.lower()) or asin.lower() == SEARCH:
        return False
    first = found.index(asin) // PER_PAGE * PER_PAGE
    # of two products on a page whose asins differ in letter case alone, the last is what is clicked
    return next(shown for shown in reversed(found[first : first + PER_PAGE]) if shown.lower() == asin.lower()) == asin


def _answer_cost(answer: tuple[str, tuple[str, ...]]) -> int:
    """The cost of a search in a cache of `MEMO_BYTES` and at most `MEMO` answers."""
    keywords, asins = answer
    cost = getsizeof(keywords) + getsizeof(asins) + sum(map(getsizeof, asins))
    # too large for the cache: an answer that would drive out everything else is not kept
    return max(cost, MEMO_BYTES // MEMO) if cost <= MEMO_BYTES // 16 else MEMO_BYTES + 1


def goal_task(shop: Shop, goal: Goal, split: str | None = None, task_id: str | None = None) -> Task:
    """The task of buying for `goal`; its hash covers goal, price and all that the reward reads of the goal product.

    The task's category, which is its row in result tables, is the product's department.

    Args:
        split: name of the task's split; None: that of the shop's default splits.
        task_id: None: `<profile>/<number of the goal>`.
    """
    product = shop.product(goal.asin)
    assert product is not None
    task_id = task_id or f"{shop.profile.name}/{goal.index}"
    content = {
        "task_id": task_id,
        "text": goal.instruction_text,
        "price_upper": goal.price_upper,
        "goal_options": goal.goal_options,
        "attributes": goal.attributes,
        "asin": goal.asin,
        "title": product.title,
        "bullets": product.bullets,
        "description": product.description,
        "product_attributes": product.attributes,
        # pairs: content_hash sorts the keys of an object, but the order of options is part of the page
        "options": [[name, values] for name, values in product.options.items()],
        "category": product.category,
        "query": product.query,
        "product_category": product.product_category,
        "price": shop.price(goal.asin),
    }
    split = shop.splits().name_of(goal.index) if split is None else split
    category = goal.category or "other"
    return Task(
        env_id=ENV_ID, task_id=task_id, sha256=content_hash(content), split=split, category=category, cluster=goal.asin
    )


def open_shop(
    profile: str = "embedded",
    data: str | os.PathLike[str] | None = None,
    *,
    price_seed: int = DEFAULT_PRICE_SEED,
    tagger: str | NounTagger | None = None,
    progress: Any = None,
) -> Shop:
    """The shop of a profile: one per process and arguments, freed when everyone who opened it has closed it.

    Args:
        profile: `embedded`, `embedded-small`, `1k-synthetic`, `1k-human`, `full-synthetic` or `full-human`.
        data: folder of the original's files; None: `$WEBSHOP_DATA`, else where `turngym data get webshop` puts them.
            Embedded shops ignore it.
        price_seed: prices and caps are what the original draws after `random.seed(price_seed)`.
        tagger: what finds the nouns of titles: None for the recorded ones, else the built-in list; `builtin`, `spacy`,
            `spacy:MODEL`, `all-words`, or one of your own.
        progress: called with (what, products done) while a mapped shop is built, in `$TURNGYM_CACHE`, else
            `~/.cache/turngym`: one with more than 64 MiB of products.

    Raises:
        ShopDataError: files that are missing, damaged or foreign, and arguments that are not valid.
    """
    chosen = find_profile(profile)
    folder = "" if chosen.generated else shop_folder(data)
    # a shop whose files were edited is another one
    files = () if chosen.generated else tuple(map(path_stamp, find_files(chosen, data)))
    key = (profile, folder, files, price_seed, tagger)
    with _lock:
        if key not in _open:
            catalog = load_catalog(chosen, data, progress=progress)
            shop = _open[key] = Shop(catalog, chosen, price_seed=price_seed, tagger=tagger)
            where = None if chosen.generated else data or folder
            shop._opened_with = partial(open_shop, profile, where, price_seed=price_seed, tagger=tagger)
        _open[key].users += 1
        return _open[key]
