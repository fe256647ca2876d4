"""How the records of a shop become products, and where the products are kept.

`read_products` joins the items file with attributes and instructions and skips what the original skips. A `Catalog`
holds the products with everything that prices and goals are drawn from: `MemoryCatalog` here, a folder of mapped files
in `open_catalog`.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from turngym.core.redaction import brief, excerpt
from turngym.core.rows import text_problem
from turngym.core.sequences import LazySequence
from turngym.envs.webshop.goals import GoalCollector, GoalEntries
from turngym.envs.webshop.products import (
    Instruction,
    Product,
    ShopDataError,
    cut_repr,
    encode_product,
    parse_pricing,
    price_text,
)
from turngym.retrieval.bm25 import LuceneIndex

NO_ATTRIBUTES = ("DUMMY_ATTR",)
"""Attributes of a product that the attributes file does not list; the original's placeholder."""
LONGEST_ASIN = 10


def read_products(
    items: Iterable[Any], attributes: Mapping[str, Any], human: Mapping[str, Any] | None, *, source: str = "items"
) -> Iterator[Product]:
    """The products of `items` in their order, without what the original skips: no asin, a long one, a repeated one.

    `human` None: instructions come from `attributes` (synthetic goals), which must then hold every product.
    Raises ShopDataError naming the product: a missing or wrong field, a price that cannot be read.

    Args:
        attributes: asin -> its entry in the attributes file.
        human: asin -> its instructions by people; None: synthetic goals.
    """
    seen: set[str] = set()
    for number, item in enumerate(items):
        where = f"{source}, record {number}"
        if not isinstance(item, dict):
            raise ShopDataError(f"{where} is a JSON {type(item).__name__}, not an object with asin, name and so on")
        asin = _text(item, "asin", where)
        if asin != "nan" and len(asin) <= LONGEST_ASIN and asin not in seen:
            seen.add(asin)
            yield parse_product(item, asin, attributes, human, f"{where}, product {asin!r}")


def parse_product(
    item: Mapping[str, Any], asin: str, attributes: Mapping[str, Any], human: Mapping[str, Any] | None, where: str
) -> Product:
    """Makes a product of one record. Raises ShopDataError for a missing or wrong field.

    Args:
        attributes: asin -> its entry in the attributes file.
        human: asin -> its instructions by people; None: synthetic goals.
    """
    extra = attributes.get(asin)
    if extra is not None and not isinstance(extra, dict):
        raise ShopDataError(f"{where}: its entry in the attributes file is {cut_repr(extra)}, not an object")
    listed = _texts(extra, "attributes", where) if extra is not None and "attributes" in extra else NO_ATTRIBUTES
    bullets = _get(item, "small_description", where)
    prices = parse_pricing(item.get("pricing"), where)
    return Product(
        asin=asin,
        title=_text(item, "name", where),
        description=_text(item, "full_description", where),
        # one text, or null, which the original shows as None, is one bullet
        bullets=("None",) if bullets is None else _texts(item, "small_description", where, or_one=True),
        category=_text(item, "category", where),
        query=_text(item, "query", where).lower().strip(),
        product_category=_text(item, "product_category", where),
        attributes=listed,
        options=_options(_get(item, "customization_options", where), where),
        main_image=next(iter(_texts(item, "images", where, or_one=True)), "") if item.get("images") is not None else "",
        price_text=price_text(prices),
        prices=prices,
        instructions=_synthetic(extra, where) if human is None else _human(human.get(asin), where),
    )


def _options(contents: Any, where: str) -> dict[str, tuple[str, ...]]:
    if contents is None or contents == "" or contents == []:
        return {}
    if not isinstance(contents, dict):
        raise ShopDataError(f"{where}: customization_options is {cut_repr(contents)}; valid: '' or an object of lists")
    options = {}
    for name, values in contents.items():
        if values is None:
            continue
        if not isinstance(values, list) or not all(
            isinstance(value, dict) and isinstance(value.get("value"), str) for value in values
        ):
            raise ShopDataError(f"{where}: option {brief(name, 60)} is not a list of objects with a text 'value'")
        for text in (name, *(value["value"] for value in values)):
            # the line is made where it is said: it takes longer than to read the option
            if (problem := text_problem(text)) is not None:
                raise ShopDataError(f"{where}: option {brief(name, 60)} {problem}")
        options[name.lower()] = tuple(value["value"].strip().replace("/", " | ").lower() for value in values)
    return options


def _synthetic(extra: Mapping[str, Any] | None, where: str) -> tuple[Instruction, ...]:
    if extra is None:
        raise ShopDataError(f"{where} is not in the attributes file, which synthetic goals need for every product")
    if extra.get("instruction") is None:
        return ()
    wanted = _texts(extra, "instruction_attributes", where)
    if not wanted:
        raise ShopDataError(f"{where}: it has an instruction but instruction_attributes is empty")
    return (Instruction(text=_text(extra, "instruction", where), attributes=wanted),)


def _human(entries: Any, where: str) -> tuple[Instruction, ...]:
    """The human instructions of a product. Those without attributes cannot be scored and are left out."""
    if entries is not None and not isinstance(entries, list):
        raise ShopDataError(f"{where}: its entry in the instructions file is {cut_repr(entries)}, not a list")
    found = []
    for entry in entries or ():
        if not isinstance(entry, dict):
            raise ShopDataError(f"{where}: one of its human instructions is {cut_repr(entry)}, not an object")
        if wanted := _texts(entry, "instruction_attributes", where):
            text, options = _text(entry, "instruction", where), _texts(entry, "instruction_options", where)
            found.append(Instruction(text=text, attributes=wanted, options=options))
    return tuple(found)


def _get(item: Mapping[str, Any], key: str, where: str) -> Any:
    if key not in item:
        raise ShopDataError(f"{where} has no {key!r}; keys here: {excerpt(', '.join(sorted(item)), 200)}")
    return item[key]


def _text(item: Mapping[str, Any], key: str, where: str) -> str:
    value = _get(item, key, where)
    if not isinstance(value, str):
        raise ShopDataError(f"{where}: {key!r} is {cut_repr(value)}, not a text")
    _check(value, f"{where}: {key!r}")
    return value


def _texts(item: Mapping[str, Any], key: str, where: str, *, or_one: bool = False) -> tuple[str, ...]:
    """A list of texts; a single text, too, if `or_one`."""
    value = _get(item, key, where)
    values = [value] if or_one and isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(text, str) for text in values):
        raise ShopDataError(f"{where}: {key!r} is {cut_repr(value)}, not a list of texts")
    for text in values:
        _check(text, f"{where}: {key!r}")
    return tuple(values)


def _check(text: str, what: str) -> None:
    if (problem := text_problem(text)) is not None:
        raise ShopDataError(f"{what} {problem}")


# --- where products are kept


class Catalog(LazySequence[Product]):
    """Products by row and by asin, and the columns from which prices and goals are drawn."""

    pricing: np.ndarray
    """float64 [N, 2]: dollars, NaN in the second column where there is one price."""
    entries: GoalEntries
    order: np.ndarray | None
    """`goals.shuffled` of the number of goals, if it was kept."""
    sha256: str
    """Hash of all products in order; equal for equal shops, however they are stored."""

    @abstractmethod
    def row(self, asin: str) -> int | None:
        """Row of the product, None if there is none."""

    @abstractmethod
    def engine(self) -> LuceneIndex:
        """Its search index, built or opened when first asked for."""

    @abstractmethod
    def close(self) -> None:
        """Releases files and memory."""


def search_text(product: Product) -> str:
    """The text of the product that is searched: title, description, first bullet and options."""
    options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in product.options.items())
    first = product.bullets[0] if product.bullets else ""
    return " ".join([product.title, product.description, first, options]).lower()


def pricing_row(product: Product) -> tuple[float, float]:
    """The product's row of `Catalog.pricing`."""
    return product.prices[0], product.prices[1] if len(product.prices) > 1 else np.nan


class MemoryCatalog(Catalog):
    """A shop of some thousand products, all of them in memory."""

    def __init__(self, products: Iterable[Product]) -> None:
        collector, digest = GoalCollector(), hashlib.sha256()
        self._products: list[Product] = []
        self._rows: dict[str, int] = {}
        for row, product in enumerate(products):
            self._products.append(product)
            self._rows[product.asin] = row
            collector.add(row, product)
            digest.update(encode_product(product) + b"\n")
        # reshape: an empty shop has no row to tell the second axis from
        self.pricing = np.array([pricing_row(product) for product in self._products]).reshape(-1, 2)
        self.entries = collector.entries()
        self.order: np.ndarray | None = None
        self.sha256 = digest.hexdigest()
        self._engine: LuceneIndex | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leaves the index out: it is built again where it is needed."""
        return {**vars(self), "_engine": None}

    def __len__(self) -> int:
        return len(self._products)

    def item(self, row: int) -> Product:
        return self._products[row]

    def row(self, asin: str) -> int | None:
        return self._rows.get(asin)

    def engine(self) -> LuceneIndex:
        if not self._rows:
            raise ShopDataError("this shop is empty or closed: there is nothing to search")
        if self._engine is None:
            self._engine = LuceneIndex.build((product.asin, search_text(product)) for product in self._products)
        return self._engine

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
        self._engine, self._products, self._rows = None, [], {}
