"""Which terms Lucene's English analysis makes of a text, as Anserini and Pyserini use it by default.

    "The dogs' owner's houses" -> words (UAX #29) -> without possessive 's -> lower case -> without 33 stop words
    -> Porter's stems -> dog, owner, hous

The parts stand in this file from the end of that chain to its beginning: `stem`, the grammar of words, `words`, and
`analyze`, which does it all. Lucene itself would need Java.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any, Final

from turngym.retrieval.word_cache import of_words

# Porter's stemmer with its author's later extensions (bli -> ble, logi -> log), as in Lucene's PorterStemFilter.
# Source: [porter]; docs/algorithms.md#stemming, and the departures listed on its author's page.

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
_STEP_3 = (("icate", "ic"), ("ative", ""), ("alize", "al"), ("iciti", "ic"), ("ical", "ic"), ("ful", ""), ("ness", ""))
_STEP_4 = (
    *("al", "ance", "ence", "er", "ic", "able", "ible", "ant", "ement", "ment", "ent", "ion", "ou", "ism", "ate"),
    *("iti", "ous", "ive", "ize"),
)
"""A suffix comes before shorter ones that it ends with."""
_ENDS_2, _ENDS_3 = (tuple(suffix for suffix, _ in step) for step in (_STEP_2, _STEP_3))
_SIMPLE_MEASURE = re.compile("[aeiou][^aeiou]")


def stem(word: str) -> str:
    """The stem of a lower-case word; letters other than a, e, i, o, u, y count as consonants.

    Words of one or two letters stay as they are.
    """
    # Lucene counts UTF-16 units: two letters beyond the first plane are four
    if len(word) <= 2 and len(word.encode("utf-16-le", "surrogatepass")) <= 4:
        return word
    # step 1a: plurals
    if word.endswith(("sses", "ies")):
        word = word[:-2]
    elif word.endswith("s") and not word.endswith("ss"):
        word = word[:-1]
    # step 1b: -eed, -ed, -ing; what these leave is mended
    if word.endswith("eed"):
        word = word[:-1] if _measure(word[:-3]) else word
    elif word.endswith(("ed", "ing")):
        bare = word[: -2 if word.endswith("ed") else -3]
        if "v" in _shape(bare):
            word = bare
            if word.endswith(("at", "bl", "iz")) or (not _doubled(word) and _measure(word) == 1 and _short(word)):
                word += "e"
            elif _doubled(word) and word[-1] not in "lsz":
                word = word[:-1]
    # step 1c: -y
    if word.endswith("y") and "v" in _shape(word[:-1]):
        word = word[:-1] + "i"
    # steps 2 to 4: suffixes after enough of a stem
    if word.endswith(_ENDS_2):
        word = _replaced(word, _STEP_2)
    if word.endswith(_ENDS_3):
        word = _replaced(word, _STEP_3)
    if word.endswith(_STEP_4):
        suffix = next(suffix for suffix in _STEP_4 if word.endswith(suffix))
        bare = word[: -len(suffix)]
        if _measure(bare) > 1 and (suffix != "ion" or bare.endswith(("s", "t"))):
            word = bare
    # step 5: -e and -ll
    if word.endswith(("e", "l")):
        measure = _measure(word)
        if word.endswith("e") and (measure > 1 or (measure == 1 and not _short(word[:-1]))):
            word = word[:-1]
        if word.endswith("l") and _doubled(word) and measure > 1:
            word = word[:-1]
    return word


def _shape(word: str) -> str:
    """Writes c for each consonant and v for each vowel; a y after a consonant is a vowel."""
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
    """Whether the word ends in consonant, vowel, and a consonant other than w, x, y."""
    return _shape(word).endswith("cvc") and word[-1] not in "wxy"


def _replaced(word: str, suffixes: tuple[tuple[str, str], ...]) -> str:
    for suffix, replacement in suffixes:
        if word.endswith(suffix):
            bare = word[: -len(suffix)]
            return bare + replacement if _measure(bare) else word
    return word


# The grammar of Lucene 8's StandardTokenizer for any script, with the character classes of Unicode 9.0. They come from
# the `regex` module, whose Unicode is newer; the lists below are the differences. They were found by running every
# code point through Lucene 8 in ten contexts.

_PICTOGRAPHS = (
    "A9 AE 203C 2049 2122 2139 2194-2199 21A9-21AA 231A-231B 2328 2388 23CF 23E9-23F3 23F8-23FA 24C2 25AA-25AB 25B6 "
    "25C0 25FB-25FE 2600-2605 2607-2612 2614-2685 2690-2705 2708-2712 2714 2716 271D 2721 2728 2733-2734 2744 2747 "
    "274C 274E 2753-2755 2757 2763-2767 2795-2797 27A1 27B0 27BF 2934-2935 2B05-2B07 2B1B-2B1C 2B50 2B55 3030 303D "
    "3297 3299 1F000-1F0FF 1F10D-1F10F 1F12F 1F16C-1F171 1F17E-1F17F 1F18E 1F191-1F19A 1F1AD-1F1E5 1F201-1F20F 1F21A "
    "1F22F 1F232-1F23A 1F23C-1F23F 1F249-1F3FA 1F400-1F53D 1F546-1F64F 1F680-1F6FF 1F774-1F77F 1F7D5-1F7FF "
    "1F80C-1F80F 1F848-1F84F 1F85A-1F85F 1F888-1F88F 1F8AE-1F8FF 1F90C-1F93A 1F93C-1F945 1F947-1FFFD"
)
"""Extended_Pictographic of emoji data 11.0, which Lucene 8 uses; later versions dropped ★ and others."""
_SKIN_BASES = (
    "261D 26F9 270A-270D 1F385 1F3C2-1F3C4 1F3C7 1F3CA-1F3CC 1F442-1F443 1F446-1F450 1F466-1F469 1F46E 1F470-1F478 "
    "1F47C 1F481-1F483 1F485-1F487 1F4AA 1F574-1F575 1F57A 1F590 1F595-1F596 1F645-1F647 1F64B-1F64F 1F6A3 1F6B4-1F6B6 "
    "1F6C0 1F6CC 1F918-1F91C 1F91E-1F91F 1F926 1F930-1F939 1F93D-1F93E 1F9B5-1F9B6 1F9B8-1F9B9 1F9D1-1F9DD"
)
"""Emoji_Modifier_Base of emoji data 11.0."""
_LATER = (
    "B8 2C2-2C5 2D2-2D6 2DE-2DF 2E5-2EB 2ED 2EF-2FF 558 55A-560 588 58A-58C 5C8-5C9 5EF 7FD 860-89F 8B5 8BE-8D3 "
    "9FC-9FE AFA-AFF B53-B55 C04 C3C C5C-C5D CDC-CDD CF3-D00 D04 D3B-D3C D81 E86 E89 E8C E8E-E93 E98 EA0 EA8-EA9 "
    "EAC EBA ECE 170D 1715-171F 180F 1878 1ABF-1AF0 1B4C 1C89-1CBF 1CF7 1CFA 1DF6-1DFA 208F 209D-209F 2C2F 2C5F "
    "312E-312F 31BB-31BF 4DB6-4DBF 9FD6-9FFF A708-A716 A720-A721 A789-A78A A7AF A7B8-A7F6 A82C A8FE-A8FF AB5B "
    "AB66-AB6D 1032D-1032F 10570-105F3 10780-107BF 10940-10959 10A34-10A35 10D00-10FF6 11070-11075 110C2-110CD "
    "11144-11147 111C9 111CE-111CF 1123F-11241 1133B 11380-113E2 1145E-11461 116B8 116D0-116E3 1171A 11740-1183A "
    "11900-11ABF 11B0A-11BF9 11D00-11FB0 1246F-1247F 12550-12FF0 1342F-143FA 16100-16139 16A70-16AC9 16D40-16ED3 "
    "16F45-16F4F 16F7F-16F87 16FE1-16FF6 1AFF0-1AFFE 1B002-1B168 1CCF0-1D128 1D250-1D281 1D6A6 1DF00-1DFFF "
    "1E030-1E7FE 1E94B 2A6D7-2A6DF 2B735-2B73F 2B81E 2CEA2-2EE5D 30000-33479"
)
"""Letters, digits and marks that are newer than Unicode 9.0: to Lucene 8 they separate words."""
_FORMAT = "600-605 6DD 70F 8E2 1CF2-1CF3 110BD"
"""Ignored inside words in Unicode 9.0, but letters or digits now."""
_NOT_DIGITS = "19DA 1FBF0-1FBF9"
_SOUTH_EAST_ASIAN = "19DA"
_JOINS_LETTERS = "2D7"
"""Joins letters in Unicode 9.0, but is a letter now."""
_JOINS_DIGITS = "FE10 FE14"


@cache
def word_pattern() -> Any:
    """The compiled grammar. A match is one word or, in the group `junk`, text between words.

    Every repeat is possessive, so that no text makes matching slow.
    """
    import regex

    flags = _each(r"\p{WB=Regional_Indicator}")
    asian = rf"\p{{Line_Break=Complex_Context}}{_ranges(_SOUTH_EAST_ASIAN)}"
    single = "|".join(_each(rf"\p{{Script={name}}}") for name in ("Han", "Hiragana"))
    # runs that start no word; without this, each of their characters would be tried as a start, all to the end
    no_picture = rf"{_ZWJ}(?!{_ZWJ}*+[{_ranges(_PICTOGRAPHS)}])"
    junk = rf"(?:\p{{WB=ExtendNumLet}}(?:[{_IGNORED}--[{asian}{_ZWJ}]]|{no_picture})*+)++|{_ZWJ}++"
    alternatives = f"{flags}{{2}}|{_each(asian)}++|{single}|(?P<junk>{junk})"
    return regex.compile(f"{_word()}|{_emoji()}|{alternatives}", regex.VERSION1)


@cache
def emoji_pattern() -> Any:
    """Matches a word that is an emoji. A few letters are emoji too; then the longer match is the word."""
    import regex

    return regex.compile(f"(?=[{_ranges(_PICTOGRAPHS)}]){_emoji()}", regex.VERSION1)


@cache
def later_pattern() -> Any:
    """Matches characters that were not yet part of words in Lucene's version of Unicode."""
    import regex

    return regex.compile(f"[{_ranges(_LATER)}]")


def _ranges(codes: str) -> str:
    pairs = (code.split("-") for code in codes.split())
    return "".join("-".join(f"\\U{int(end, 16):08x}" for end in pair) for pair in pairs)


_SKINS = r"\U0001f3fb-\U0001f3ff"
_IGNORED = rf"[[\p{{WB=Extend}}\p{{WB=Format}}\p{{WB=ZWJ}}{_ranges(_FORMAT)}]--[{_SKINS}]]"
_ZWJ, _AS_EMOJI, _KEYCAP = r"\u200d", r"\ufe0f", r"\u20e3"


def _each(characters: str) -> str:
    """One of `characters` and the marks and format characters that follow it."""
    return rf"(?:[{characters}]{_IGNORED}*+)"


def _word() -> str:
    letter = _each(rf"[\p{{WB=ALetter}}\p{{WB=Hebrew_Letter}}]--[{_ranges(_FORMAT + ' ' + _JOINS_LETTERS)}]")
    digit = _each(rf"[\p{{WB=Numeric}}\uff10-\uff19]--[{_ranges(_FORMAT + ' ' + _NOT_DIGITS)}]")
    katakana, under = _each(r"\p{WB=Katakana}"), _each(r"\p{WB=ExtendNumLet}")
    join_letters = _each(rf"\p{{WB=MidLetter}}\p{{WB=MidNumLet}}\p{{WB=Single_Quote}}{_ranges(_JOINS_LETTERS)}")
    join_digits = _each(rf"\p{{WB=MidNum}}\p{{WB=MidNumLet}}\p{{WB=Single_Quote}}{_ranges(_JOINS_DIGITS)}")
    hebrew, quote, quotes = (_each(rf"\p{{WB={name}}}") for name in ("Hebrew_Letter", "Single_Quote", "Double_Quote"))
    piece = (
        f"{hebrew}(?:{quotes}{hebrew}|{quote})|{letter}(?:{join_letters}{letter})*+|{digit}(?:{join_digits}{digit})*+"
    )
    block = f"(?:{katakana}++|(?:{piece})++)"
    return f"{under}*+{block}(?:{under}++{block})*+{under}*+"


def _emoji() -> str:
    marks = rf"[{_IGNORED}--[\ufe0e\ufe0f]]*+"
    picture = rf"[{_ranges(_PICTOGRAPHS)}]{marks}{_AS_EMOJI}?+"
    emoji = rf"(?>(?:[{_ranges(_SKIN_BASES)}]{marks})?[{_SKINS}]{marks}|{picture})"
    first = rf"(?:{_ZWJ}++(?![{_SKINS}]))?+{emoji}"
    after_selector = rf"(?<={_AS_EMOJI})(?:{_ZWJ}(?=[{_SKINS}])|{_ZWJ}++(?![{_SKINS}])){emoji}"
    tags = rf"(?<={_AS_EMOJI})[\U000e0020-\U000e007e]++\U000e007f"
    sequence = rf"{first}(?:{tags}|(?:(?<={_ZWJ}){emoji}|{after_selector})*+)"
    no_cap = rf"[{_IGNORED}--[\ufe0e\ufe0f{_KEYCAP}]]*+"
    keycap = rf"[0-9#*](?:{marks}{_AS_EMOJI}{_KEYCAP}{marks}|{no_cap}{_KEYCAP}{marks})"
    return f"{sequence}|{keycap}"


LONGEST_WORD = 255
"""Words longer than this many UTF-16 units are cut there."""
_WINDOW = 1024
_PARTS_WORDS = re.compile(r"[.:,;'](?!(?<=[A-Za-z][.:'])[A-Za-z]|(?<=[0-9][.,;'])[0-9])")
"""Punctuation in ASCII text that joins neither letters nor digits."""
_BLANKS = {code: " " for code in range(128) if not (chr(code).isalnum() or chr(code) in "_.:,;'")}


def words(text: str) -> list[str]:
    """The words of `text` in order, as Lucene's StandardTokenizer cuts it: UAX #29, and emoji as words.

    - A word is a run of letters, digits and underscores with a letter or digit in it.
    - One point, colon or apostrophe joins letters; one point, comma, semicolon or apostrophe joins digits.
    - Han and Hiragana characters are words of their own, runs of South East Asian scripts stay whole.
    """
    if text.isascii():
        return _ascii_words(text)
    tokens: list[str] = []
    # no word contains a blank, and most stretches between blanks are ASCII, so few need the full grammar
    for part in text.split(" "):
        tokens += _ascii_words(part) if part.isascii() else _unicode_words(part)
    return tokens


def _ascii_words(text: str) -> list[str]:
    tokens = _PARTS_WORDS.sub(" ", text).translate(_BLANKS).split()
    if "_" in text:
        tokens = [word for word in tokens if word.strip("_")]
    if len(text) > LONGEST_WORD and tokens and len(max(tokens, key=len)) > LONGEST_WORD:
        return _unicode_words(text)
    return tokens


def _unicode_words(text: str) -> list[str]:
    """Words by the full grammar. Lucene's scanner sees `LONGEST_WORD` units from a start; the window moves
    before that."""
    text = later_pattern().sub("\n", text)
    tokens: list[str] = []
    position = 0
    while position < len(text):
        end = position + _WINDOW
        viewed = end - LONGEST_WORD if end < len(text) else len(text)
        match = word_pattern().search(text, position, end)
        if match is None or match.start() > viewed or (match["junk"] is not None and match.end() == end):
            position = viewed
        elif match["junk"] is not None:
            position = match.end()
        else:
            word = _word_at(text, match, end)
            position = match.start() + max(len(word), 1)
            tokens += [word] if word else []
    return tokens


def _word_at(text: str, match: Any, end: int) -> str:
    """The word that starts where `match` does, cut to fit; "" if the part that fits is no word."""
    start = match.start()
    word = _longer(match, emoji_pattern().match(text, start, end))
    if _units(word) <= LONGEST_WORD:
        return word
    end = start + LONGEST_WORD
    while _units(text[start:end]) > LONGEST_WORD:
        end -= 1
    short = word_pattern().match(text, start, end)
    return _longer(short, emoji_pattern().match(text, start, end)) if short is not None else ""


def _longer(match: Any, emoji: Any) -> str:
    word = match[0] if match["junk"] is None else ""
    return word if emoji is None or len(emoji[0]) <= len(word) else emoji[0]


def _units(text: str) -> int:
    return len(text) if len(text) <= LONGEST_WORD // 2 else len(text.encode("utf-16-le", "surrogatepass")) // 2


ANALYSIS: Final = "english-porter-1"
"""Is part of fingerprints, and changes when any text gives other terms."""
_STOPS = (
    "a an and are as at be but by for if in into is it no not of on or such that the their then there these they this "
    "to was will with"
)
STOP_WORDS = frozenset(_STOPS.split())


@of_words(1 << 18)
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


def analyze(text: str) -> list[str]:
    """The terms of `text` in order, repeats included."""
    return [term for word in words(text) if (term := term_of(word))]
