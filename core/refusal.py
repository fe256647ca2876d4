"""What is wrong with a table of settings, in our words: what, which value, who gave it, and what would be valid."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from turngym.core.errors import did_you_mean
from turngym.core.nested import KIND, NONE, at
from turngym.core.numbers import FINITE
from turngym.core.redaction import brief
from turngym.core.setting import Setting, choices_of, kind_of, members_of, settings_of, short_name, short_names

_AT = re.compile(r"(?P<what>.*?)(?: - at `\$\.?(?P<path>[^`]*)`)?$", re.DOTALL)
_UNKNOWN = re.compile("Object contains unknown field `(.*)`$", re.DOTALL)
_MISSING = re.compile("Object missing required field `(.*)`$")


def refusal_of(cls: type[Struct], table: Any, said: str, where: str, origins: Mapping[str, str]) -> str:
    """msgspec's error in our words."""
    match = _AT.match(said)
    assert match is not None
    expected, path = match["what"], re.sub(r"\[[^\]]*\]", "", match["path"] or "")
    # of a whole number that no float holds
    expected = f"Expected `float` <= {FINITE}" if expected == "Number out of range" else expected
    if unknown := _UNKNOWN.match(expected):
        full = f"{path}.{unknown[1]}" if path else unknown[1]
        # of a table what was given in it
        inner = (given for given in origins if given.startswith(f"{full}.") and at(table, given) is not None)
        named = next(inner, full)
        origin = said_by(origins, named, where)
        setting = settings_of(cls).get(full)
        if setting is None:
            return f"{origin}: there is no setting {brief(full, 80)}.{did_you_mean(unknown[1], short_names(cls))}"
        named = named.removesuffix(f".{KIND}")
        named = short_name(cls, named) if named in settings_of(cls) else named
        # the union whose other kinds have it
        while path in settings_of(cls) and kind_of(settings_of(cls)[path].tables[0]) is None:
            path = path.rpartition(".")[0]
        union = settings_of(cls).get(path)
        kinds = [] if union is None else [kind for kind in union.tables if full[len(path) + 1 :] in settings_of(kind)]
        owners = " or ".join(str(kind_of(kind)) for kind in kinds)
        return f"{origin}: {named} is a setting of {path} = {owners}; {path} is {at(table, f'{path}.{KIND}')}"
    if missing := _MISSING.match(expected):
        # where it is the kind of a table, or what a table is called by, the table
        if missing[1] in (KIND, path.rpartition(".")[2]):
            full = short_name(cls, path) if path in settings_of(cls) else path
        else:
            full = f"{path}.{missing[1]}" if path else missing[1]
        return f"{said_by(origins, path, where)}: {full} must be given"
    name = short_name(cls, path) if path in settings_of(cls) else path
    if not expected.startswith(("Expected", "Invalid", "Object")):
        # what a class says itself begins with the name of a field
        return f"{said_by(origins, path, where)}: {name}{'.' if name else ''}{expected}"
    value = at(table, path)
    setting = settings_of(cls).get(path)
    valid = _valid(expected) if setting is None else valid_for(setting, value, expected)
    if path.endswith(f".{KIND}"):
        union = settings_of(cls).get(path.removesuffix(f".{KIND}"))
        kinds = [] if union is None else [str(kind_of(kind)) for kind in union.tables]
        valid, name = f"{', '.join(kinds)}.{did_you_mean(str(value), kinds)}", path
    return f"{said_by(origins, path, where)}: {name} is {brief(value, 80)}; valid: {valid}"


def said_by(origins: Mapping[str, str], path: str, where: str = "") -> str:
    """The layer that gave the value at `path`, or the table that it is in."""
    while path and path not in origins:
        path = path.rpartition(".")[0]
    return origins.get(path, where or "settings")


_NAMES = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "path": "a path",
    "bool": "true or false",
    "array": "a list",
    "object": "a table",
    "null": NONE,
}
_BOUNDS = {">=": "of at least", "<=": "of at most", ">": "above", "<": "below"}


def valid_for(setting: Setting, value: Any, said: str) -> str:
    """Describes the valid values of a setting; `said` is msgspec's message about `value`."""
    choices = choices_of(setting.type)
    # of a number or a word, a number out of its range
    if not choices or re.search(" [<>]=? ", said):
        return _valid(said)
    numbers = [_NAMES[kind.__name__] for kind in (int, float) if kind in members_of(setting.type)]
    return f"{', '.join([*numbers, *choices])}.{did_you_mean(str(value), choices)}"


def _valid(message: str) -> str:
    """Translates msgspec's expectation: "Expected `int` >= 1" becomes "a whole number of at least 1"."""
    match = re.match(r"Expected `([^`]*)`(?:(?: of length)? (>=|<=|>|<) (\S+))?( of length \d+)?", message)
    if match is None:
        return message
    names = " or ".join(_NAMES.get(name.strip(), name.strip()) for name in match[1].split("|"))
    if match[3] is not None and abs(float(match[3])) == FINITE:
        return "a finite number"
    bound = "" if match[2] is None else f" {_BOUNDS[match[2]]} {match[3].removesuffix('.0')}"
    return f"{names}{bound}{match[4] or ''}"
