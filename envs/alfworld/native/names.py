"""Names that players see: `cabinet 6` for an id such as `cabinet_bar__plus_00_dot_65_bar_...`."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache


def entity_names(order: Sequence[str]) -> dict[str, str]:
    """Name every id, handing out each kind's numbers from the high end along `order`.

    `order` is the sorted ids, or a shuffle of them (number shuffling). Ids without `_bar_` get no number but keep the
    space before it, as in alfworld, so they cannot end a command that is matched after `strip()`.
    """
    kinds = {word: _kind(word) for word in order}
    left = Counter(kind for kind in kinds.values() if kind is not None)
    names: dict[str, str] = {}
    for word in order:
        kind = kinds[word]
        if kind is None:
            names[word] = f"{_plain(word)} "
        else:
            names[word] = f"{kind} {left[kind]}"
            left[kind] -= 1
    return names


def shuffled(ids: Sequence[str], seed: int) -> list[str]:
    """Sorted `ids` in the order that alfworld's shuffling gives after `random.seed(seed)`."""
    order = sorted(ids)
    # the same order as from the global generator, which stays as it is
    random.Random(seed).shuffle(order)
    return order


def _kind(word: str) -> str | None:
    head, bar, _ = word.partition("_bar_")
    if not bar:
        return None
    return _plain(head) + ("basin" if "basin" in word else "")


@lru_cache(maxsize=1024)
def _plain(text: str) -> str:
    for code, sign in (("_minus_", "-"), ("_plus_", "+"), ("_dot_", "."), ("_comma_", ",")):
        text = text.replace(code, sign)
    return text


def listing(names: Sequence[str]) -> str:
    """`a mug 2, and a cup 1`: comma before `and` even for two; `nothing` when empty."""
    if not names:
        return "nothing"
    if len(names) == 1:
        return f"a {names[0]}"
    return f"a {', a '.join(names[:-1])}, and a {names[-1]}"
