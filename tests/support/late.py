"""Parameters of which few are quick: one of each kind; the others are long, as all but one of a test's doors may be."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def late(rows: Iterable[Any], *quick: Any) -> list[Any]:
    """`rows` as parameters: quick are those of `quick`, rows or the first values of rows. All others are long."""
    found = []
    for row in rows:
        values = row if isinstance(row, tuple) else (row,)
        marks = () if row in quick or values[0] in quick else pytest.mark.long
        found.append(pytest.param(*values, marks=marks))
    assert sum(not one.marks for one in found) >= len(quick) > 0, f"there is no {quick}"
    return found
