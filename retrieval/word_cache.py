"""What a function of a word gives, remembered for short words: long ones of a query would fill the memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
LONGEST_WORD = 64
"""Letters of a word that is remembered; longer ones are hardly words, and rarely the same."""


def of_words(most: int) -> Callable[[Callable[[str], T]], Callable[[str], T]]:
    """Decorates a function of a word: its results for the `most` latest words are kept, long words aside."""

    def decorate(function: Callable[[str], T]) -> Callable[[str], T]:
        cached = functools.lru_cache(most)(function)

        @functools.wraps(function)
        def remembered(word: str) -> T:
            return cached(word) if len(word) <= LONGEST_WORD else function(word)

        return remembered

    return decorate
