"""What /healthz says, in the text form that Prometheus reads."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

LABELED = ("unnamed", "ignored", "left_out")
"""Tables whose names are anybody's words: a label, not a part of the metric's name."""


def prometheus(health: Mapping[str, Any]) -> str:
    """One line per number, `turngym_` and its path in /healthz with underscores; what is no number is left out."""
    return "".join(f"{name} {value:.12g}\n" for name, value in _numbers("turngym", health))


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, bool | int | float):
        yield name, float(value)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            if name.removeprefix("turngym_") in LABELED:
                yield f'{name}{{name="{_escaped(str(key))}"}}', float(inner)
            else:
                yield from _numbers(f"{name}_{re.sub('[^a-zA-Z0-9_]', '_', str(key))}", inner)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
