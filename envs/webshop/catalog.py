"""How the records of a shop become products, and where the products are kept.

`read_products` joins the items file with attributes and instructions and skips what the original skips. A `Catalog`
holds the products with everything that prices and goals are drawn from: `MemoryCatalog` here, a folder of mapped files
in `open_catalog`.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

from turngym.core.redaction import brief, excerpt
from turngym.core.sequences import LazySequence
from turngym.envs.webshop.goals import GoalCollector, GoalEntries
from turngym.envs.webshop.products import Instruction, Product, ShopDataError, encode_product, parse_pricing, price_text
from turngym.retrieval.bm25_retriever import LuceneIndex

NO_ATTRIBUTES = ("DUMMY_ATTR",)
"""Attributes of a product that the attributes file does not list; the original's placeholder."""
LONGEST_ASIN = 10


def read_products(
    items: Iterable[Any], entry_of: Callable[[str], Any], human: Mapping[str, Any] | None, *, source: str = "items"
) -> Iterator[Product]:
    """The products of `items` in their order, without what the original skips: no asin, a long one, a repeated one.

    `human` None: instructions come from the attributes file (synthetic goals), which must then hold every product.
    Raises ShopDataError naming the product: a missing or wrong field, a price that cannot be read.

    Args:
        entry_of: gives the entry of an asin in the attributes file, or None.
        human: asin -> its instructions by people; None: synthetic goals.
    """
    seen: set[str] = set()
    for number, item in enumerate(items):
        where = f"{source}, record {number}"
        asin = _typed(item, _Named, where).asin
        if asin != "nan" and len(asin) <= LONGEST_ASIN and asin not in seen:
            seen.add(asin)
            yield parse_product(item, asin, entry_of(asin), human, f"{where}, product {asin!r}")


class _Named(msgspec.Struct):
    asin: str


class _Choice(msgspec.Struct):
    value: str


class _Item(msgspec.Struct):
    """The fields of a record that are read, but for its pricing."""

    name: str
    full_description: str
    small_description: list[str] | str | None
    category: str
    query: str
    product_category: str
    customization_options: dict[str, list[_Choice] | None] | list[str] | str | None
    """An empty text or list is none."""
    images: list[str] | str | None = None


class _Entry(msgspec.Struct):
    """An entry of the attributes file."""

    attributes: list[str] = msgspec.field(default_factory=lambda: list(NO_ATTRIBUTES))


class _SyntheticEntry(_Entry):
    instruction: str | None = None
    instruction_attributes: list[str] = msgspec.field(default_factory=list)


class _Human(msgspec.Struct):
    """One of the instructions by people."""

    instruction: str
    instruction_attributes: list[str]
    instruction_options: list[str]


def _typed(value: Any, kind: Any, where: str) -> Any:
    try:
        # half a surrogate pair is no text that could be written
        msgspec.json.encode(converted := msgspec.convert(value, kind))
        return converted
    # lists of a thousand levels are a RecursionError
    except (ValueError, RecursionError) as error:
        raise ShopDataError(f"{where}: {excerpt(error, 200)}") from error


def parse_product(
    item: Mapping[str, Any], asin: str, extra: Any, human: Mapping[str, Any] | None, where: str
) -> Product:
    """Makes a product of one record. Raises ShopDataError for a missing or wrong field."""
    record, entry, instructions = _typed(item, _Item, where), _Entry(), list[Instruction]()
    if extra is not None:
        entry = _typed(extra, _SyntheticEntry if human is None else _Entry, f"{where}: its entry among the attributes")
    if human is not None:
        where_human = f"{where}: its human instructions"
        orders = _typed(human.get(asin), list[dict[str, Any]] | None, where_human) or ()
        # those without attributes cannot be scored
        scorable = [order for order in orders if order.get("instruction_attributes") != []]
        for order in _typed(scorable, list[_Human], where_human):
            wanted, options = tuple(order.instruction_attributes), tuple(order.instruction_options)
            instructions.append(Instruction(text=order.instruction, attributes=wanted, options=options))
    elif not isinstance(entry, _SyntheticEntry):
        raise ShopDataError(f"{where} is not in the attributes file, which synthetic goals need for every product")
    elif entry.instruction is not None:
        if not entry.instruction_attributes:
            raise ShopDataError(f"{where}: it has an instruction but instruction_attributes is empty")
        instructions.append(Instruction(text=entry.instruction, attributes=tuple(entry.instruction_attributes)))
    choices = record.customization_options or {}
    if not isinstance(choices, dict):
        raise ShopDataError(f"{where}: customization_options is {brief(choices, 60)}; valid: '' or an object of lists")
    bullets, images = record.small_description, record.images or ""
    prices = parse_pricing(item.get("pricing"), where)
    return Product(
        asin=asin,
        title=record.name,
        description=record.full_description,
        # null, which the original shows as None, is one bullet
        bullets=tuple(bullets) if isinstance(bullets, list) else (str(bullets),),
        category=record.category,
        query=record.query.lower().strip(),
        product_category=record.product_category,
        attributes=tuple(entry.attributes),
        options={
            name.lower(): tuple(choice.value.strip().replace("/", " | ").lower() for choice in values)
            for name, values in choices.items()
            if values is not None
        },
        main_image=images if isinstance(images, str) else images[0],
        price_text=price_text(prices),
        prices=prices,
        instructions=tuple(instructions),
    )


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
