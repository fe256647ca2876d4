"""Prints how many words the documentation has, by section of the site's navigation: `python tests/support/words.py`.

A word holds a letter or a digit: bars of tables, bullets and arrows are none. Code blocks count. Pages that are made
from the code (the API, `docs/metrics.md`) have a line of their own. `--pages` prints each page.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
AT_ROOT = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
MADE = ("api/", "metrics.md")
"""Pages, or the beginning of their names, whose text is written in the code."""


class _Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, whose tags name Python objects, without making any."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def words(text: str) -> int:
    return sum(1 for part in text.split() if re.search(r"\w", part))


def pages(entry: Any) -> list[str]:
    """The pages of a part of the navigation, in its order."""
    if isinstance(entry, str):
        return [entry]
    return [page for part in (entry if isinstance(entry, list) else entry.values()) for page in pages(part)]


def counts() -> dict[str, dict[str, int]]:
    """Words of each page by section; sections are those of the navigation, and `made`."""
    config = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader=_Loader)
    by_section: dict[str, dict[str, int]] = {"made": {}}
    for section in config["nav"]:
        ((name, inside),) = section.items()
        for page in pages(inside):
            path = ROOT / AT_ROOT[page] if page in AT_ROOT else ROOT / "docs" / page
            kind = "made" if page.startswith(MADE) else name
            by_section.setdefault(kind, {})[page] = words(path.read_text(encoding="utf-8"))
    by_section["Project"].pop("changelog.md")
    return by_section


def totals() -> tuple[int, int, int]:
    """Words of the pages for users (by hand, without the changelog and the next two), of Evidence and
    Contrib, and of Research."""
    by_section = {name: sum(inside.values()) for name, inside in counts().items()}
    evidence, research = by_section["Evidence"] + by_section["Contrib"], by_section["Research"]
    return sum(by_section.values()) - evidence - research - by_section["made"], evidence, research


if __name__ == "__main__":
    for name, inside in counts().items():
        print(f"{sum(inside.values()):7,}  {name}")
        for page, number in sorted(inside.items(), key=lambda item: -item[1]):
            if "--pages" in sys.argv[1:]:
                print(f"         {number:7,}  {page}")
    kinds = ("pages for users, written by hand", "evidence, contrib", "research")
    for number, kind in zip(totals(), kinds, strict=True):
        print(f"{number:7,}  {kind}")
