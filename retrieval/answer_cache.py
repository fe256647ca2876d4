"""Answers that searches remember, by their query. They are bounded in bytes, not in entries alone: queries and passages
are as long as somebody else likes."""

from __future__ import annotations

import sys

from cachetools import LRUCache

from turngym.retrieval.batching import Hits

Key = tuple[str, int]
"""Query and number of hits."""
USUAL_ANSWER = 4096
"""Bytes of a usual answer with its query. One with more of them takes the place of several."""


class Answers:
    """The answers that were used last. The caller holds a lock."""

    def __init__(self, limit: int) -> None:
        """`limit`: how many usual answers are remembered."""
        self._kept: LRUCache[Key, tuple[int, Hits]] = LRUCache(limit, getsizeof=lambda entry: entry[0])

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Key) -> Hits | None:
        """The answer; None where it is not remembered."""
        entry = self._kept.get(key)
        return None if entry is None else entry[1]

    def keep(self, key: Key, hits: Hits) -> None:
        """Remember an answer. One that is larger than all that are remembered is passed by."""
        texts = (key[0], *(text for hit in hits for text in (hit.passage.id, hit.passage.title, hit.passage.text)))
        places = -(-sum(map(sys.getsizeof, texts)) // USUAL_ANSWER)
        if places <= self._kept.maxsize:
            self._kept[key] = places, hits
