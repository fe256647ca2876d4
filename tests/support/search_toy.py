"""A handful of passages and questions as files, and retrievers that fail on request."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from turngym.retrieval.core import Hit, Passage, RetrieverUnavailable

PASSAGES = (
    ("p0", "Velma Orr", "Velma Orr (born 3 May 1931) was a film director from Tarnby."),
    ("p1", "The Glass Orchard", "The Glass Orchard is a 1961 film directed by Velma Orr."),
    ("p2", "The Glass Orchard", "The Glass Orchard is a 1984 novel by Ines Maro about a greenhouse."),
    ("p3", "Tarnby", "Tarnby is a town of 4,100 people on the river Leck."),
    ("p4", "Ines Maro", "Ines Maro was born in Ostrel in 1950. She wrote four novels."),
    ("p5", "Ostrel", "Ostrel is the capital of Haldia."),
)
QUESTIONS: tuple[dict[str, Any], ...] = (
    {
        "id": "a",
        "question": "Where was the director of the 1961 film The Glass Orchard from?",
        "golden_answers": ["Tarnby", "the town of Tarnby"],
        "data_source": "hotpotqa",
        "gold_ids": ["p1", "p0"],
        "hops": ["1961 film Glass Orchard director", "Velma Orr"],
    },
    {
        "id": "b",
        "question": "which country has its capital where Ines Maro was born",
        "golden_answers": ["Haldia"],
        "data_source": "musique",
        "gold_ids": ["p4", "p5"],
        "hops": ["Ines Maro born", "Ostrel capital"],
    },
    {"id": "c", "question": "Is Tarnby on the river Leck?", "golden_answers": ["yes"], "data_source": "popqa"},
    {"id": "d", "question": "How many people live in Tarnby?", "golden_answers": ["4,100"], "data_source": "popqa"},
)


def write_toy(folder: Path) -> dict[str, str]:
    """Question file and corpus in `folder`: the arguments of `gym.make`."""
    corpus, questions = folder / "corpus.jsonl", folder / "questions.jsonl"
    rows = [{"id": name, "contents": f'"{title}"\n{text}'} for name, title, text in PASSAGES]
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    questions.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS), encoding="utf-8")
    return {"source": str(questions), "corpus": str(corpus)}


def passages() -> tuple[Passage, ...]:
    return tuple(Passage(id=name, title=title, text=text) for name, title, text in PASSAGES)


class Shelf:
    """Hands out the same passages for every query, and remembers the queries; `dead` makes it fail."""

    fingerprint = "shelf"

    def __init__(self, passages: Sequence[Passage] = ()) -> None:
        self.passages = tuple(passages)
        self.asked: list[tuple[str, int]] = []
        self.dead = False

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        if self.dead:
            raise RetrieverUnavailable("no answer from the shelf within 20 s")
        self.asked += [(query, k) for query in queries]
        hits = [Hit(passage=passage, score=1.0 / place) for place, passage in enumerate(self.passages[:k], 1)]
        return [hits for _ in queries]

    def close(self) -> None:
        pass
