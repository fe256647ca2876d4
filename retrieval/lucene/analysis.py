"""The terms that Lucene's English analysis makes of a text, as Anserini and Pyserini use it by default.

Words (UAX #29), possessive 's off, lower case, 33 stop words out, Porter's stems.
"""

from __future__ import annotations

from turngym.retrieval.lucene.porter import stem
from turngym.retrieval.lucene.words import words

ANALYSIS = "english-porter-1"
"""Goes into fingerprints; changes when any text gives other terms."""
_STOPS = (
    "a an and are as at be but by for if in into is it no not of on or such that the their then there these they this "
    "to was will with"
)
STOP_WORDS = frozenset(_STOPS.split())
_MEMO_LIMIT = 1 << 17


class TermMemo(dict[str, str]):
    """The term of a word, "" where it has none; remembers up to `limit` words. Safe across threads."""

    def __init__(self, limit: int = _MEMO_LIMIT) -> None:
        super().__init__()
        self._limit = limit

    def __missing__(self, word: str) -> str:
        if len(self) >= self._limit:
            self.clear()
        term = self[word] = term_of(word)
        return term


def term_of(word: str) -> str:
    """The term that one word is indexed as; "" for a stop word."""
    if word[-1] in "sS" and word[-2:-1] in ("'", "\u2019", "\uff07"):
        word = word[:-2]
    word = lowered(word)
    return "" if word in STOP_WORDS else stem(word)


def lowered(word: str) -> str:
    """Lower case letter by letter: no final sigma, and the dotted capital I becomes a plain i."""
    if word.isascii():
        return word.lower()
    return "".join("i" if letter == "\u0130" else letter.lower() for letter in word)


_memo = TermMemo()


def analyze(text: str) -> list[str]:
    """The terms of `text` in order, repeats included."""
    return [term for word in words(text) if (term := _memo[word])]
