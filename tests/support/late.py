"""Parameters of which few are quick: one of each kind; the others are long, as all but one of a test's doors may be."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def late(rows: Iterable[Any], *kept: Any, mark: pytest.MarkDecorator = pytest.mark.long) -> list[Any]:
    """`rows` as parameters: those of `kept`, rows or the first values of rows, are as the test is. All others have the
    mark: they are long, or nightly."""
    parameters = []
    for row in rows:
        values = row if isinstance(row, tuple) else (row,)
        marks = () if row in kept or values[0] in kept else mark
        parameters.append(pytest.param(*values, marks=marks))
    assert sum(not parameter.marks for parameter in parameters) >= len(kept) > 0, f"there is no {kept}"
    return parameters
