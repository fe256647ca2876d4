"""JSON from outside, read strictly: whatever is accepted can be computed with, shown in an error, and written again.

Python's `json` parses; what it lets pass (NaN, half surrogate pairs, bodies of any size and depth) is checked around
it.
"""

from __future__ import annotations

import json
import math
from typing import Any

from turngym.core.errors import TurngymError
from turngym.core.redaction import excerpt
from turngym.core.user_files import text_problem, too_many_values

MAX_DEPTH = 64
"""How deep arrays and objects may be nested: far below Python's recursion limit, since readers recurse too."""
MAX_VALUES = 250_000
"""Values in one body: however short it is written, one takes some hundred bytes."""
MAX_DIGITS = 400
"""Digits that a number may have: a float has at most 309 before its point, and long integers take quadratic time."""


class JsonError(TurngymError):
    """A body is not JSON, or is JSON that could not be written again; one line says what is wrong and where."""


def json_object(flag: str, text: str) -> dict[str, Any]:
    """Parses the JSON object that was given as the option `flag`. Raises TurngymError."""
    try:
        # half surrogate pairs may be: so Python writes the bytes of a path that are no UTF-8
        value = json.loads(text, parse_constant=_no_number, object_pairs_hook=_each_once)
    except (ValueError, RecursionError) as error:
        raise TurngymError(f"{flag} {excerpt(text, 200)!r} is not JSON: {error}") from None
    except JsonError as error:
        raise TurngymError(f"{flag} {excerpt(text, 200)!r} {str(error).removeprefix('the body ')}") from None
    if not isinstance(value, dict):
        raise TurngymError(
            f'{flag} {excerpt(text, 200)!r} must be a JSON object, for example \'{{"split": "valid_seen"}}\''
        )
    return value


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Raises for a name that is given twice: Python takes the last value, and other readers the first."""
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise JsonError(f"the body gives {excerpt(twice, 80)} twice")
    return table


def strict_json(body: bytes) -> Any:
    """Parses the JSON value in `body` (RFC 8259).

    Raises:
        JsonError: not UTF-8, not JSON (NaN and Infinity are not), half a surrogate pair, a number that no float holds,
            more than `MAX_DEPTH` arrays and objects inside each other, or more than `MAX_VALUES` values.
    """
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise JsonError(f"the body is not UTF-8: byte 0x{body[error.start]:02x} at offset {error.start}") from None
    if not text.strip():
        raise JsonError("the body is empty")
    if too_many_values(body, MAX_VALUES):
        raise JsonError(f"the body has too many values; at most {MAX_VALUES} are read")
    # a caller that keeps no name of it lets go of its memory here, before the value is made
    del body
    try:
        value = json.loads(text, parse_constant=_no_number, parse_float=_float, parse_int=_integer)
    # what json raises for deep nesting
    except RecursionError:
        raise JsonError(f"the body is nested too deeply; at most {MAX_DEPTH} levels are read") from None
    except ValueError as error:
        raise JsonError(f"the body is not JSON: {error}") from None
    # level by level and without recursion, because the depth is the sender's choice
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        below: list[Any] = []
        for item in level:
            if isinstance(item, str) and (problem := text_problem(item)) is not None:
                raise JsonError(f"a text in the body {problem}")
            if isinstance(item, dict | list):
                below.append(item)
        if not below:
            return value
        level = [part for item in below for part in (*item, *(item.values() if isinstance(item, dict) else ()))]
    raise JsonError(f"the body is nested too deeply; at most {MAX_DEPTH} levels are read")


def _no_number(name: str) -> Any:
    raise JsonError(f"the body has {name}, which is no JSON number")


def _float(digits: str) -> float:
    value = float(digits) if len(digits) <= MAX_DIGITS else math.inf
    if not math.isfinite(value):
        raise JsonError(f"the body has the number {digits[:20]}..., which is beyond what a float holds")
    return value


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise JsonError(f"the body has a number of {len(digits)} digits; at most {MAX_DIGITS} are read")
    return int(digits)
