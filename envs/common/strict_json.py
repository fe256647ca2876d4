"""JSON from outside, read strictly: what comes through can be computed with, shown in an error, and written again."""

from __future__ import annotations

import json
import math
from typing import Any

from turngym.envs.core import TurngymError

MAX_DEPTH = 64
"""Arrays and objects inside each other. Far below what Python's own recursion bears, since readers recurse too."""
MAX_DIGITS = 400
"""Digits of a number: a float has at most 309 before its point, and reading long integers takes quadratic time."""


class JsonError(TurngymError):
    """A body that is no JSON, or JSON that could not be written again: one line that says what and where."""


def strict_json(body: bytes, *, max_depth: int = MAX_DEPTH) -> Any:
    """The value in `body` (RFC 8259).

    Raises:
        JsonError: not UTF-8, not JSON (NaN and Infinity are not), half a surrogate pair, a number that no float holds,
            or more than `max_depth` arrays and objects inside each other.
    """
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise JsonError(f"the body is not UTF-8: byte 0x{body[error.start]:02x} at offset {error.start}") from None
    if not text.strip():
        raise JsonError("the body is empty")
    try:
        value = json.loads(text, parse_constant=_no_number, parse_float=_float, parse_int=_integer)
    # json answers deep nesting with RecursionError
    except RecursionError:
        raise JsonError(f"the body is nested too deeply; at most {max_depth} levels are read") from None
    except ValueError as error:
        raise JsonError(f"the body is not JSON: {error}") from None
    _check(value, max_depth)
    return value


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


def _check(value: Any, max_depth: int) -> None:
    """Level by level, without recursion: the depth is the client's."""
    level = [value]
    for _ in range(max_depth + 1):
        below: list[Any] = []
        nested = False
        for item in level:
            if isinstance(item, str):
                _check_text(item)
            elif isinstance(item, dict | list):
                nested = True
                below += item
                below += item.values() if isinstance(item, dict) else ()
        if not nested:
            return
        level = below
    raise JsonError(f"the body is nested too deeply; at most {max_depth} levels are read")


def _check_text(text: str) -> None:
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = ord(text[error.start])
        raise JsonError(f"the body has half a surrogate pair, \\u{half:04x}, which is no text") from None
