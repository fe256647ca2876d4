"""Finds stop strings in responses that were generated in parts; a server sees each part alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class Decoder(Protocol):
    """The part of a Hugging Face tokenizer that is needed."""

    def decode(self, token_ids: Any, /, **kwargs: Any) -> Any: ...


class StopFinder:
    """Finds the first stop text that became complete at or after a given id."""

    def __init__(self, tokenizer: Decoder) -> None:
        self._tokenizer = tokenizer

    def first_hit(self, ids: Sequence[int], start: int, stops: Sequence[str]) -> int | None:
        """Number of ids up to and with the first one after `ids[:start]` that completes one of `stops`; None: none."""
        # every id adds at least one byte of text, except special ones; the margin is for those
        reach = max(len(stop.encode()) for stop in stops) + 16
        for length in range(start + 1, len(ids) + 1):
            tail = str(
                self._tokenizer.decode(
                    list(ids[max(0, length - reach) : length]),
                    skip_special_tokens=False,
                    clean_up_tokenization_spaces=False,
                )
            )
            if any(stop in tail for stop in stops):
                return length
        return None
