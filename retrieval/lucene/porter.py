"""Porter's stemmer with its author's later extensions (bli -> ble, logi -> log), as Lucene's PorterStemFilter stems.

Source: [porter]; docs/algorithms.md#stemming, and the departures listed on its author's page. Words of one or two
letters stay as they are.
"""

from __future__ import annotations

import re

_STEP_2 = (
    ("ational", "ate"),
    ("tional", "tion"),
    ("enci", "ence"),
    ("anci", "ance"),
    ("izer", "ize"),
    ("bli", "ble"),
    ("alli", "al"),
    ("entli", "ent"),
    ("eli", "e"),
    ("ousli", "ous"),
    ("ization", "ize"),
    ("ation", "ate"),
    ("ator", "ate"),
    ("alism", "al"),
    ("iveness", "ive"),
    ("fulness", "ful"),
    ("ousness", "ous"),
    ("aliti", "al"),
    ("iviti", "ive"),
    ("biliti", "ble"),
    ("logi", "log"),
)
_STEP_3 = (
    ("icate", "ic"),
    ("ative", ""),
    ("alize", "al"),
    ("iciti", "ic"),
    ("ical", "ic"),
    ("ful", ""),
    ("ness", ""),
)
_STEP_4 = (
    *("al", "ance", "ence", "er", "ic", "able", "ible", "ant", "ement", "ment", "ent", "ion", "ou", "ism", "ate"),
    *("iti", "ous", "ive", "ize"),
)
"""A suffix comes before the shorter ones that it ends with."""
_ENDS_2, _ENDS_3 = (tuple(suffix for suffix, _ in step) for step in (_STEP_2, _STEP_3))
_SIMPLE_MEASURE = re.compile("[aeiou][^aeiou]")


def stem(word: str) -> str:
    """The stem of a lower-case word; letters other than a, e, i, o, u, y count as consonants."""
    # Lucene counts UTF-16 units: two letters beyond the first plane are four
    if len(word) <= 2 and len(word.encode("utf-16-le", "surrogatepass")) <= 4:
        return word
    word = _past(_plural(word))
    if word.endswith("y") and "v" in _shape(word[:-1]):
        word = word[:-1] + "i"
    if word.endswith(_ENDS_2):
        word = _replaced(word, _STEP_2)
    if word.endswith(_ENDS_3):
        word = _replaced(word, _STEP_3)
    if word.endswith(_STEP_4):
        word = _stripped(word)
    return _trimmed(word) if word.endswith(("e", "l")) else word


def _shape(word: str) -> str:
    """One letter per letter: c for consonant, v for vowel; a y after a consonant is a vowel."""
    shape = ""
    for letter in word:
        shape += "v" if letter in "aeiou" or (letter == "y" and shape.endswith("c")) else "c"
    return shape


def _measure(word: str) -> int:
    """How many times a vowel is followed by a consonant."""
    return _shape(word).count("vc") if "y" in word else len(_SIMPLE_MEASURE.findall(word))


def _doubled(word: str) -> bool:
    return len(word) > 1 and word[-1] == word[-2] and _shape(word).endswith("c")


def _short(word: str) -> bool:
    """Consonant, vowel, consonant other than w, x, y at the end."""
    return _shape(word).endswith("cvc") and word[-1] not in "wxy"


def _plural(word: str) -> str:
    if word.endswith(("sses", "ies")):
        return word[:-2]
    return word[:-1] if word.endswith("s") and not word.endswith("ss") else word


def _past(word: str) -> str:
    if word.endswith("eed"):
        return word[:-1] if _measure(word[:-3]) else word
    for suffix in ("ed", "ing"):
        if word.endswith(suffix):
            bare = word[: -len(suffix)]
            return _mended(bare) if "v" in _shape(bare) else word
    return word


def _mended(word: str) -> str:
    if word.endswith(("at", "bl", "iz")):
        return word + "e"
    if _doubled(word):
        return word if word[-1] in "lsz" else word[:-1]
    return word + "e" if _measure(word) == 1 and _short(word) else word


def _replaced(word: str, suffixes: tuple[tuple[str, str], ...]) -> str:
    for suffix, instead in suffixes:
        if word.endswith(suffix):
            bare = word[: -len(suffix)]
            return bare + instead if _measure(bare) else word
    return word


def _stripped(word: str) -> str:
    for suffix in _STEP_4:
        if word.endswith(suffix):
            bare = word[: -len(suffix)]
            if suffix == "ion" and not bare.endswith(("s", "t")):
                return word
            return bare if _measure(bare) > 1 else word
    return word


def _trimmed(word: str) -> str:
    whole = _measure(word)
    if word.endswith("e") and (whole > 1 or (whole == 1 and not _short(word[:-1]))):
        word = word[:-1]
    return word[:-1] if word.endswith("l") and _doubled(word) and whole > 1 else word
