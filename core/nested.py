"""Nested tables by dotted paths: `judge.votes` is what `{"judge": {"votes": 3}}` holds there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

KIND = "kind"
"""The key of a table that says which of several kinds of table it is."""
NONE = "none"
"""How None is written where there is no null: in TOML and on a command line."""


class TomlNone(str):
    """`NONE` as TOML has it: None in a table of any keys, where the same text in JSON or Python is a text."""


def each(value: Any, change: Callable[[Any], Any]) -> Any:
    """`value` with every single value in its tables and lists changed."""
    if isinstance(value, Mapping):
        return {name: each(item, change) for name, item in value.items()}
    if isinstance(value, list | tuple):
        parts = [each(item, change) for item in value]
        return tuple(parts) if isinstance(value, tuple) else parts
    return change(value)


def at(table: Any, path: str) -> Any:
    """The value at a dotted path of nested tables; None where there is none."""
    for name in path.split("."):
        if not isinstance(table, Mapping) or name not in table:
            return None
        table = table[name]
    return table


def put(table: dict[str, Any], path: str, value: Any) -> None:
    """Sets the value at a dotted path; tables on the way are made, two tables at one place are merged."""
    *above, last = path.split(".")
    for name in above:
        table = table.setdefault(name, {})
    old = table.get(last)
    table[last] = {**old, **value} if isinstance(old, dict) and isinstance(value, Mapping) else value


def flat(table: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """All values of nested tables by dotted path. An empty table is a value itself."""
    values: dict[str, Any] = {}
    for name, value in table.items():
        key = f"{above}.{name}" if above else str(name)
        values |= flat(value, key) if isinstance(value, Mapping) and value else {key: value}
    return values


def differing(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The paths at which two tables differ, with both values; None where one of them has nothing there.

    Of tables of different kinds only the kinds are named.
    """
    old, new = flat(first), flat(second)
    both = {path: (old.get(path), new.get(path)) for path in {**old, **new}}
    changes = {path: (before, after) for path, (before, after) in both.items() if _plain(before) != _plain(after)}
    tables = [path.removesuffix(KIND) for path in changes if path.rpartition(".")[2] == KIND]
    below = {path for path in changes for table in tables if path.startswith(table) and path != table + KIND}
    return {path: values for path, values in changes.items() if path not in below}


def _plain(value: Any) -> Any:
    """`value` so that only equal settings are equal: 1 is not True, and a tuple is the list that JSON gives back."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return (bool, value) if isinstance(value, bool) else value
