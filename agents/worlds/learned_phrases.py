"""A vocabulary for an environment that publishes none: words that were seen, and words that always go together."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

WORD = re.compile(r" ?[^\W\d_]+| ?\d+|\s+|[^\w\s]|_")
"""A word or a number with the space before it, white space, or one other sign: the pieces of any text, none lost."""
TOGETHER = 0.9
"""Two neighbors become one piece where each of them is seen beside the other in at least this share."""
SEEN = 4
"""A pair that was seen less often says nothing."""
ROUNDS = 40
"""Most rounds of joining; a piece at most doubles in each, so nothing that is ever said is longer."""


def learn_phrases(texts: Iterable[str]) -> tuple[str, ...]:
    """The pieces of `texts`, in order: all words, single digits, and phrases whose words hardly ever stand apart.

    Rounds of joining neighbors a b with count(a b) at least `SEEN` and 0.9 max(count(a), count(b)): what is always said
    whole becomes one piece ("Nothing happens."), and what combines freely stays apart ("cabinet" and " 3"), so that a
    model can say what was never seen. Texts count as often as they come.
    """
    rows = [(WORD.findall(text), count) for text, count in sorted(Counter(texts).items())]
    found = {piece for row, _ in rows for piece in row} | {f"{gap}{digit}" for gap in ("", " ") for digit in range(10)}
    for _ in range(ROUNDS):
        pairs = _inseparable(rows)
        if not pairs:
            break
        rows = [(_joined(row, pairs), count) for row, count in rows]
        found |= {piece for row, _ in rows for piece in row}
    return tuple(sorted(found))


def _inseparable(rows: Sequence[tuple[Sequence[str], int]]) -> set[tuple[str, str]]:
    single: Counter[str] = Counter()
    both: Counter[tuple[str, str]] = Counter()
    for row, count in rows:
        for piece in row:
            single[piece] += count
        for pair in pairwise(row):
            both[pair] += count
    return {
        pair
        for pair, count in both.items()
        if count >= SEEN and count >= TOGETHER * max(single[pair[0]], single[pair[1]])
    }


def _joined(row: Sequence[str], pairs: set[tuple[str, str]]) -> list[str]:
    """`row` with neighbors in `pairs` as one piece, from the left."""
    found: list[str] = []
    place = 0
    while place < len(row):
        both = place + 1 < len(row) and (row[place], row[place + 1]) in pairs
        found.append(row[place] + row[place + 1] if both else row[place])
        place += 2 if both else 1
    return found
