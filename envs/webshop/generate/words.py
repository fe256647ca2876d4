"""The word lists of generated shops, read once."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Department:
    """Products that share features, materials and options."""

    category: str
    name: str
    price: tuple[int, int]
    """Lowest and highest usual price in dollars."""
    materials: tuple[str, ...]
    uses: tuple[str, ...]
    options: tuple[str, ...]
    """Keys of `Words.options`."""
    is_: tuple[str, ...]
    """Features that follow `that is`."""
    has: tuple[str, ...]
    """Features that follow `with`."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    leaves: tuple[Leaf, ...]
    """Of all departments in turn, so that any prefix is mixed."""
    options: dict[str, tuple[str, ...]]
    """`color` or `size:clothes` to values; what stands before the colon is the option's name."""
    brands: tuple[str, ...]


def plural(kind: str) -> str:
    """English enough for the word lists."""
    if kind.endswith(("s", "x", "ch", "sh")):
        return kind + "es"
    if kind.endswith("y") and kind[-2] not in "aeiou":
        return kind[:-1] + "ies"
    return kind + "s"


@cache
def load_words() -> Words:
    record = json.loads(Path(__file__).with_name("catalog_words.json").read_text(encoding="utf-8"))
    columns = []
    for row in record["departments"]:
        department = Department(
            category=row["category"],
            name=row["name"],
            price=tuple(row["price"]),
            materials=tuple(row["materials"]),
            uses=tuple(row["uses"]),
            options=tuple(row["options"]),
            is_=tuple(row["is"]),
            has=tuple(row["has"]),
        )
        kinds = [(group, kind) for group, names in row["groups"].items() for kind in names]
        columns.append([Leaf(kind=kind, group=group, department=department) for group, kind in kinds])
    leaves = tuple(leaf for turn in zip(*columns, strict=True) for leaf in turn)
    options = {name: tuple(values) for name, values in record["options"].items()}
    return Words(leaves=leaves, options=options, brands=tuple(record["brands"]))
