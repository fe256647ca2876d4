"""Public names of a package that are imported when they are first used, so that importing the package stays quick."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy(package: str, names: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A module's `__getattr__` and `__dir__`, for the public `names`: name -> module that has it.

    Type checkers and editors read the `__init__.pyi` beside the package's `__init__.py`, which imports the same names
    (PEP 562, PEP 561); tests/project/test_doors.py compares the two.
    """

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(names[name]), name)

    def listed() -> list[str]:
        return sorted(names)

    return get, listed
