"""Text of the fictional search worlds: articles of training worlds to learn from, of others to measure on."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from turngym.envs.search.world import TINY, Part
from turngym.envs.search.world_questions import generate_world, one_world

ARTICLES = 8
"""Per document: some 120 tokens of the tiny models."""
TRAIN, HELD_OUT = 2000, 100
"""Documents. No fact of a held-out one is in a training world; the names are coined from the same parts."""


def text_path(folder: Path, part: Part) -> Path:
    return folder / f"passages-{part}.txt"


def write_passages(folder: Path) -> None:
    """Write both files to `folder`, unless they are there."""
    counts: dict[Part, int] = {"train": TRAIN, "eval": HELD_OUT}
    folder.mkdir(parents=True, exist_ok=True)
    for part, count in counts.items():
        path = text_path(folder, part)
        if not path.exists():
            scratch = path.with_suffix(".writing")
            scratch.write_text("\n\n".join(islice(documents(part), count)) + "\n", encoding="utf-8")
            scratch.replace(path)


def documents(part: Part) -> Iterator[str]:
    """Articles in world order, `ARTICLES` to a document, each its title and its text."""
    worlds = (TINY.worlds or (1, 1))[part == "eval"]
    for number in range(worlds):
        articles = [f"{one.title}\n{one.text}" for one in generate_world(one_world(TINY, part, number)).passages]
        # a world's last articles are left out where they do not fill a document
        for place in range(0, len(articles) - ARTICLES + 1, ARTICLES):
            yield "\n".join(articles[place : place + ARTICLES])
