"""Which id of a response completes a stop text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class StopText:
    """Checks whether a response now contains a stop text; decodes only when the newest id could end one.

    A stop text can only become complete with an id whose own text holds the stop text's last character (or part of a
    character, shown as U+FFFD, or white space, which some tokenizers drop around a lone id).
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._pieces: dict[int, str] = {}

    def hit(self, ids: Sequence[int], stops: Sequence[str]) -> bool:
        """Whether the decoded tail of the response `ids` contains one of `stops`; call it after every new id."""
        if ids[-1] not in self._pieces:
            self._pieces[ids[-1]] = self._decode(ids[-1:])
        piece = self._pieces[ids[-1]]
        unclear = not piece.strip() or "\ufffd" in piece
        live = [stop for stop in stops if unclear or stop[-1] in piece or stop[-1].isspace()]
        if not live:
            return False
        # every id adds at least one UTF-8 byte of text, except special ones; the margin of 16 is for those
        tail = self._decode(ids[-(max(len(stop.encode()) for stop in live) + 16) :])
        return any(stop in tail for stop in live)

    def first_hit(self, ids: Sequence[int], start: int, stops: Sequence[str]) -> int | None:
        """Number of ids up to and including the first one after `ids[:start]` that completes a stop text, or None.

        For a response that was generated in parts: an engine sees only the part that it generates.
        """
        lengths = range(start + 1, len(ids) + 1)
        return next((length for length in lengths if self.hit(ids[:length], stops)), None)

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))
