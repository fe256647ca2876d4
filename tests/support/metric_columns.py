"""The columns of metrics.jsonl that docs/metrics.md lists."""

from __future__ import annotations

import re
from pathlib import Path

_PAGE = (Path(__file__).resolve().parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
EVERY, SOME = (frozenset(re.findall(r"^\| `(\S+)` \|", part, re.MULTILINE)) for part in _PAGE.split("\n## What ")[1:])
"""Those that every training writes, and those that some algorithms add."""


def known_metric(name: str) -> bool:
    """Whether a trainer may write a column of this name."""
    return name in EVERY | SOME or name.startswith(("eval/", "token/", "term/"))
