"""The grammar of Lucene 8's StandardTokenizer for any script, and the character classes it has from Unicode 9.0.

Classes come from the `regex` module's newer Unicode; where they changed since, the differences are listed here. They
were found by running every code point through Lucene 8 in ten contexts.
"""

from __future__ import annotations

from functools import cache
from typing import Any

_PICTOGRAPHS = (
    "A9 AE 203C 2049 2122 2139 2194-2199 21A9-21AA 231A-231B 2328 2388 23CF 23E9-23F3 23F8-23FA 24C2 25AA-25AB 25B6 "
    "25C0 25FB-25FE 2600-2605 2607-2612 2614-2685 2690-2705 2708-2712 2714 2716 271D 2721 2728 2733-2734 2744 2747 "
    "274C 274E 2753-2755 2757 2763-2767 2795-2797 27A1 27B0 27BF 2934-2935 2B05-2B07 2B1B-2B1C 2B50 2B55 3030 303D "
    "3297 3299 1F000-1F0FF 1F10D-1F10F 1F12F 1F16C-1F171 1F17E-1F17F 1F18E 1F191-1F19A 1F1AD-1F1E5 1F201-1F20F 1F21A "
    "1F22F 1F232-1F23A 1F23C-1F23F 1F249-1F3FA 1F400-1F53D 1F546-1F64F 1F680-1F6FF 1F774-1F77F 1F7D5-1F7FF "
    "1F80C-1F80F 1F848-1F84F 1F85A-1F85F 1F888-1F88F 1F8AE-1F8FF 1F90C-1F93A 1F93C-1F945 1F947-1FFFD"
)
"""Extended_Pictographic of emoji data 11.0, the version that Lucene 8 knows; later versions dropped ★ and others."""
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
"""Letters, digits and marks that Unicode 9.0, which Lucene 8 knows, had not: they part words."""
_FORMAT = "600-605 6DD 70F 8E2 1CF2-1CF3 110BD"
"""Ignored inside words in Unicode 9.0, letters or digits now."""
_NOT_DIGITS = "19DA 1FBF0-1FBF9"
_SOUTH_EAST_ASIAN = "19DA"
_JOINS_LETTERS = "2D7"
"""A joiner of letters in Unicode 9.0, a letter now."""
_JOINS_DIGITS = "FE10 FE14"


@cache
def word_pattern() -> Any:
    """The compiled grammar. A match is one word or, in the group `junk`, something that is none.

    Every repeat is possessive, so that no text makes matching slow.
    """
    import regex

    return regex.compile(f"{_word()}|{_emoji()}|{_others()}", regex.VERSION1)


@cache
def emoji_pattern() -> Any:
    """Matches a word that is an emoji; a few letters are emoji too, and the longer word counts."""
    import regex

    return regex.compile(f"(?=[{_ranges(_PICTOGRAPHS)}]){_emoji()}", regex.VERSION1)


@cache
def later_pattern() -> Any:
    """Matches characters that Lucene's Unicode does not know as parts of words."""
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
    one = rf"(?>(?:[{_ranges(_SKIN_BASES)}]{marks})?[{_SKINS}]{marks}|{picture})"
    first = rf"(?:{_ZWJ}++(?![{_SKINS}]))?+{one}"
    after_selector = rf"(?<={_AS_EMOJI})(?:{_ZWJ}(?=[{_SKINS}])|{_ZWJ}++(?![{_SKINS}])){one}"
    tags = rf"(?<={_AS_EMOJI})[\U000e0020-\U000e007e]++\U000e007f"
    sequence = rf"{first}(?:{tags}|(?:(?<={_ZWJ}){one}|{after_selector})*+)"
    no_cap = rf"[{_IGNORED}--[\ufe0e\ufe0f{_KEYCAP}]]*+"
    keycap = rf"[0-9#*](?:{marks}{_AS_EMOJI}{_KEYCAP}{marks}|{no_cap}{_KEYCAP}{marks})"
    return f"{sequence}|{keycap}"


def _others() -> str:
    flags = _each(r"\p{WB=Regional_Indicator}")
    asian = rf"\p{{Line_Break=Complex_Context}}{_ranges(_SOUTH_EAST_ASIAN)}"
    single = "|".join(_each(rf"\p{{Script={name}}}") for name in ("Han", "Hiragana"))
    return f"{flags}{{2}}|{_each(asian)}++|{single}|(?P<junk>{_junk(asian)})"


def _junk(asian: str) -> str:
    """Runs that start no word: without this each of their characters would be tried as a start, all to the end."""
    no_picture = rf"{_ZWJ}(?!{_ZWJ}*+[{_ranges(_PICTOGRAPHS)}])"
    return rf"(?:\p{{WB=ExtendNumLet}}(?:[{_IGNORED}--[{asian}{_ZWJ}]]|{no_picture})*+)++|{_ZWJ}++"
