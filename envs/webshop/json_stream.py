"""Reading a large JSON array or object piece by piece, so that a 5 GB file of products needs a few megabytes."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from turngym.envs.webshop.products import ShopDataError

CHUNK = 1 << 20
"""Bytes read at once."""
LONGEST = 1 << 26
"""Characters of one element at most: a longer one is damage, not a product."""
_BLANK = " \t\r\n"


def read_array(path: Path) -> Iterator[Any]:
    """The elements of the array that the file holds; ShopDataError where it is damaged or holds something else."""
    text = _Text(path)
    text.open("[", "a list of products")
    while text.more("]"):
        yield text.value()


def read_object(path: Path) -> Iterator[tuple[str, Any]]:
    """The members of the object that the file holds, repeats included; ShopDataError as in `read_array`."""
    text = _Text(path)
    text.open("{", "an object with one entry per product")
    while text.more("}"):
        key = text.value()
        if not isinstance(key, str):
            raise text.damaged(f"a key is {key!r:.60}, not a text")
        text.expect(":")
        yield key, text.value()


class _Text:
    """The characters of the file that are still to be read; those that were read are dropped from memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("rb")
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._json = json.JSONDecoder()
        self._buffer = ""
        self._at = 0
        self._dropped = 0
        self._elements = 0
        self._ended = False

    def open(self, bracket: str, what: str) -> None:
        if (found := self._peek()) != bracket:
            raise ShopDataError(f"{self.path.name} begins with {found!r}; valid: {what}, which begins with {bracket!r}")
        self._at += 1

    def more(self, closing: str) -> bool:
        """Move to the next element; False, and the file closed, after the last."""
        character = self._peek()
        if character != closing:
            if self._elements:
                self.expect(",")
            self._elements += 1
            return True
        self._at += 1
        if (rest := self._peek()) != "":
            raise self.damaged(f"{rest!r} after the end")
        self._file.close()
        return False

    def expect(self, character: str) -> None:
        if (found := self._peek()) != character:
            raise self.damaged(f"{found!r} where {character!r} is needed")
        self._at += 1

    def value(self) -> Any:
        # raw_decode takes no blank in front of a value
        self._peek()
        while True:
            try:
                value, end = self._json.raw_decode(self._buffer, self._at)
            except ValueError as error:
                # cut off or damaged looks the same until the file ends or the element is too long to be one
                if self._ended or len(self._buffer) - self._at > LONGEST:
                    raise self.damaged(f"{error.args[0]:.80}") from None
            except RecursionError:
                raise self.damaged("brackets nested too deep") from None
            else:
                if self._ended or self._complete(value, end):
                    self._at = end
                    return value
            # doubled, because each try begins at the start of the element again
            self._read(max(CHUNK, len(self._buffer) - self._at))

    def _complete(self, value: Any, end: int) -> bool:
        """Whether `value` is complete: the digits of a number may go on in the next piece of the file."""
        rest = self._buffer[end : end + 64]
        return bool(rest.lstrip("0123456789.eE+-") if isinstance(value, int | float) else rest)

    def damaged(self, what: str) -> ShopDataError:
        place = self._dropped + self._at
        return ShopDataError(
            f"{self.path.name} is damaged after element {max(self._elements - 1, 0)}, character {place}: {what}"
        )

    def _peek(self) -> str:
        """The next character that is not blank; '' at the end."""
        while True:
            while self._at < len(self._buffer) and self._buffer[self._at] in _BLANK:
                self._at += 1
            if self._at < len(self._buffer) or self._ended:
                return self._buffer[self._at : self._at + 1]
            self._read(CHUNK)

    def _read(self, size: int) -> None:
        chunk = self._file.read(size)
        self._ended = not chunk
        try:
            text = self._decoder.decode(chunk, final=self._ended)
        except UnicodeDecodeError as error:
            raise self.damaged(f"not UTF-8 ({error.reason})") from None
        self._dropped += self._at
        self._buffer, self._at = self._buffer[self._at :] + text, 0
