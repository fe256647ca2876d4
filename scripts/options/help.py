"""Help for many settings on one screen: a line for each, grouped, the ones that everybody needs first."""

from __future__ import annotations

import ast
import inspect
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING
from functools import cache
from itertools import pairwise
from typing import Any, Literal, get_args, get_origin

from turngym.envs.common.settings import Setting
from turngym.scripts.options.parsing import flag

LEFT = 36
"""Columns of the options themselves."""


def width() -> int:
    """Columns to write in: those of the terminal, 80 to 120."""
    return min(max(shutil.get_terminal_size((100, 24)).columns, 80), 120)


def section(title: str, settings: Sequence[Setting], *, whole: bool = False) -> Iterator[str]:
    """A title and a line for each setting; `whole` explains each in all its words."""
    if settings:
        yield ""
        yield f"{title}:"
    for setting in settings:
        yield from _lines(setting, whole)


def _lines(setting: Setting, whole: bool) -> Iterator[str]:
    left = f"  {flag(setting.key)} {_value(setting)}".rstrip()
    text, start = describe(setting), max(LEFT, len(left) + 1)
    if not whole:
        room = width() - start
        yield f"{left:<{start}}{textwrap.shorten(text, room, placeholder=' ...')}".rstrip() if room > 12 else left
        return
    rows = textwrap.wrap(text, width() - LEFT) or [""]
    yield f"{left:<{LEFT}}{rows.pop(0)}" if start == LEFT else left
    yield from (f"{'':<{LEFT}}{row}" for row in rows)


def describe(setting: Setting) -> str:
    """What a setting does, with the values that it takes."""
    text = docs_of(setting.group).get(setting.name, "")
    return f"{text} ({', '.join(choices)})" if (choices := _choices(setting.type)) else text


def _choices(kind: Any) -> list[str]:
    if get_origin(kind) is Literal:
        return [str(item) for item in get_args(kind)]
    found = [choice for item in get_args(kind) for choice in _choices(item)] if get_origin(kind) is not tuple else []
    return list(dict.fromkeys(found))


def _value(setting: Setting) -> str:
    value = setting.default
    if value is MISSING:
        return "(required)"
    if value is None or value == () or value == "":
        return ""
    if isinstance(value, bool):
        return "(on)" if value else ""
    if isinstance(value, tuple):
        return " ".join(f"{item:g}" if isinstance(item, float) else str(item) for item in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


@cache
def docs_of(cls: type[Any]) -> Mapping[str, str]:
    """What stands under each field of a dataclass, as one line; nothing where there is no source to read."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError, SyntaxError):
            continue
        body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
        for field, following in pairwise(body):
            if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
                continue
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                found[field.target.id] = " ".join(str(following.value.value).split())
    return found
