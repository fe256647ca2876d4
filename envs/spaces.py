"""UnicodeText: the space of everything that an agent reads and writes, which is any Unicode string."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium.spaces import Space
from gymnasium.vector.utils import create_empty_array
from gymnasium.wrappers.utils import create_zero_array

_RANGES = ((0x20, 0x7F), (0x09, 0x0B), (0xA1, 0x250), (0x370, 0x400), (0x4E00, 0x9FA0), (0x1F300, 0x1F650))
"""Half-open ranges that samples draw from: ASCII, tab and newline, accents, Greek, Han, emoji. No surrogates."""


class UnicodeText(Space[str]):
    """Every `str`, the empty one and newlines included.

    `gymnasium.spaces.Text` takes a finite charset, which by default lacks space and newline, and a bounded length.
    Texts of environments and language models fit neither. `sample_length` bounds samples only, never membership.
    """

    def __init__(self, sample_length: int = 32, seed: int | np.random.Generator | None = None) -> None:
        if sample_length < 1:
            raise ValueError(f"UnicodeText: sample_length is {sample_length}; it must be at least 1")
        self.sample_length = sample_length
        super().__init__(shape=None, dtype=None, seed=seed)

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> str:
        """A random string of 0 to `sample_length` characters that UTF-8 can encode."""
        if mask is not None or probability is not None:
            raise ValueError("UnicodeText.sample takes no mask or probability: there is no finite set of characters")
        length = int(self.np_random.integers(0, self.sample_length + 1))
        ranges = self.np_random.integers(0, len(_RANGES), size=length)
        return "".join(chr(int(self.np_random.integers(*_RANGES[index]))) for index in ranges)

    def contains(self, x: Any) -> bool:
        """Whether `x` is a `str`. Lone surrogates are allowed: they are judged as text, not refused as a type."""
        return isinstance(x, str)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UnicodeText) and self.sample_length == other.sample_length

    def __hash__(self) -> int:
        return hash((UnicodeText, self.sample_length))

    def __repr__(self) -> str:
        return f"UnicodeText(sample_length={self.sample_length})"


@create_empty_array.register(UnicodeText)
def _empty_texts(space: UnicodeText, n: int = 1, fn: Callable[..., Any] = np.zeros) -> tuple[str, ...]:
    # Gymnasium's default for unknown spaces is None, which is no member of the batched space
    return ("",) * n


# what Gymnasium's wrappers show where there is no observation yet (FrameStackObservation, DelayObservation)
create_zero_array.register(UnicodeText, lambda space: "")


def printable(text: str) -> str:
    """`text` with lone surrogates replaced by `?`, so that it can be encoded, tokenized and written to files."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")
