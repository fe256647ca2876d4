"""Product-like documents from a Zipf vocabulary, and queries for them: a catalog of any size without data."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

FULL_SHOP = 1_181_436
"""Products of the original's full catalog."""
_BLOCK = 4096
_CONSONANTS, _VOWELS = "bcdfghjklmnprstvwz", "aeiou"
_LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class BigShop:
    """A seeded catalog: document n is the same for every size and every reading."""

    def __init__(self, *, seed: int = 0, words: int = 300_000, length: float = 60.0, exponent: float = 1.0) -> None:
        """Describe the catalog.

        Args:
            seed: Of everything.
            words: Size of the vocabulary; word n is drawn in proportion to `1 / (n + 3) ** exponent`.
            length: Mean words of a document.
            exponent: How uneven the words are; 1.0 is close to real product texts.
        """
        self._seed, self._length = seed, length
        self._words = _vocabulary(np.random.default_rng([seed, 0]), words)
        weights = 1.0 / (np.arange(words) + 3.0) ** exponent
        self._edges = np.cumsum(weights / weights.sum())

    def documents(self, count: int) -> Iterator[tuple[str, str]]:
        """`count` pairs of (10-character id, text)."""
        for block in range(0, count, _BLOCK):
            lengths, drawn = self._draw(block)
            ends = np.cumsum(lengths).tolist()
            chosen = self._words[drawn].tolist()
            start = 0
            for number, end in enumerate(ends[: count - block], block):
                yield _asin(number), " ".join(chosen[start:end])
                start = end

    def queries(self, count: int, products: int) -> Iterator[str]:
        """`count` queries of 2 to 8 words that one of the `products` has, frequent words as often as it has them."""
        rng = np.random.default_rng([self._seed, 1])
        for _ in range(count):
            block, place = divmod(int(rng.integers(products)), _BLOCK)
            lengths, drawn = self._draw(block * _BLOCK)
            start = int(lengths[:place].sum())
            words = self._words[drawn[start : start + int(lengths[place])]]
            yield " ".join(rng.choice(words, size=min(int(rng.integers(2, 9)), len(words)), replace=False))

    def _draw(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """(words per document `[_BLOCK]`, word numbers of all of them) of the block that starts at `block`."""
        rng = np.random.default_rng([self._seed, 2, block])
        lengths = 5 + rng.poisson(self._length - 5, _BLOCK)
        drawn = np.searchsorted(self._edges, rng.random(int(lengths.sum())))
        return lengths, np.minimum(drawn, len(self._words) - 1)


def _vocabulary(rng: np.random.Generator, count: int) -> np.ndarray:
    """Made-up words, `[count]` objects; a few may repeat."""
    syllables = [first + second for first in _CONSONANTS for second in _VOWELS]
    parts = rng.integers(len(syllables), size=(count, 4))
    keep = rng.integers(2, 5, size=count)
    words = ["".join(syllables[part] for part in row[:kept]) for row, kept in zip(parts.tolist(), keep, strict=True)]
    return np.array(words, object)


def _asin(number: int) -> str:
    """An id in no order of the numbers: ties are then not decided by place."""
    scrambled, letters = number * 2_654_435_761 % 36**9, ""
    for _ in range(9):
        scrambled, digit = divmod(scrambled, 36)
        letters += _LETTERS[digit]
    return "B" + letters
