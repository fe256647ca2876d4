"""Cuts text into words as Lucene's StandardTokenizer does: Unicode's UAX #29 word boundaries, and emoji as words.

A word is a run of letters, digits and underscores with a letter or digit in it; one point, colon or apostrophe joins
letters, one point, comma, semicolon or apostrophe joins digits. Han and Hiragana characters are words of their own,
South East Asian runs stay whole, emoji sequences are words. Words longer than 255 UTF-16 units are cut there.
"""

from __future__ import annotations

import re
from typing import Any

from turngym.retrieval.lucene.grammar import emoji_pattern, later_pattern, word_pattern

LONGEST = 255
"""UTF-16 units of the longest word."""
_WINDOW = 1024

_PARTS_WORDS = re.compile(r"[.:,;'](?!(?<=[A-Za-z][.:'])[A-Za-z]|(?<=[0-9][.,;'])[0-9])")
"""A point or the like in ASCII text that joins neither letters nor digits."""
_BLANKS = {code: " " for code in range(128) if not (chr(code).isalnum() or chr(code) in "_.:,;'")}


def words(text: str) -> list[str]:
    """The words of `text` in order, as written."""
    if text.isascii():
        return _ascii_words(text)
    found: list[str] = []
    # No word contains a blank, and most stretches between blanks are ASCII: only the others need the full grammar.
    for part in text.split(" "):
        found += _ascii_words(part) if part.isascii() else _unicode_words(part)
    return found


def _ascii_words(text: str) -> list[str]:
    found = _PARTS_WORDS.sub(" ", text).translate(_BLANKS).split()
    if "_" in text:
        found = [word for word in found if word.strip("_")]
    if len(text) > LONGEST and found and len(max(found, key=len)) > LONGEST:
        return _unicode_words(text)
    return found


def _unicode_words(text: str) -> list[str]:
    """Lucene's scanner sees `LONGEST` units from where a word may start; the window looks for starts in full view."""
    text = later_pattern().sub("\n", text)
    found: list[str] = []
    place = 0
    while place < len(text):
        end = place + _WINDOW
        viewed = end - LONGEST if end < len(text) else len(text)
        match = word_pattern().search(text, place, end)
        if match is None or match.start() > viewed or (match["junk"] is not None and match.end() == end):
            place = viewed
        elif match["junk"] is not None:
            place = match.end()
        else:
            word = _word_at(text, match, end)
            place = match.start() + max(len(word), 1)
            found += [word] if word else []
    return found


def _word_at(text: str, match: Any, end: int) -> str:
    """The word that starts where `match` does, cut to fit; "" where the part that fits is none."""
    start = match.start()
    word = _longer(match, emoji_pattern().match(text, start, end))
    if _units(word) <= LONGEST:
        return word
    end = start + LONGEST
    while _units(text[start:end]) > LONGEST:
        end -= 1
    short = word_pattern().match(text, start, end)
    return _longer(short, emoji_pattern().match(text, start, end)) if short is not None else ""


def _longer(match: Any, emoji: Any) -> str:
    word = match[0] if match["junk"] is None else ""
    return word if emoji is None or len(emoji[0]) <= len(word) else emoji[0]


def _units(text: str) -> int:
    return len(text) if len(text) <= LONGEST // 2 else len(text.encode("utf-16-le", "surrogatepass")) // 2
