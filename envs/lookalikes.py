"""Which texts look alike? White space, characters that cannot be seen, normal forms and letter case aside.

Labels of real products hold no-break spaces, double blanks and zero-width characters. Who reads such a label types it
without them, so a page that lists it and the action that names it look the same and are not.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from functools import lru_cache

# What fonts draw as nothing, besides the categories Cc, Cf and the white space: fillers, joiners, variation selectors.
_INVISIBLE = frozenset(
    map(chr, (0x34F, 0x115F, 0x1160, 0x17B4, 0x17B5, *range(0x180B, 0x1810), 0x3164, *range(0xFE00, 0xFE10), 0xFFA0))
) | frozenset(map(chr, range(0xE0100, 0xE01F0)))
# Braille's pattern without a dot: a symbol to Unicode, a blank to a reader.
_BLANK_PATTERN = "\u2800"
# Hyphens and the minus sign, which keyboards do not have. Dashes are other characters to a reader.
_HYPHENS = dict.fromkeys(map(ord, "\u2010\u2011\u2212"), "-")
LONGEST_COMPARED = 2_000
"""Characters of a text that is compared; a longer one looks like nothing here."""
# ASCII's control characters, but for its white space.
_CONTROLS = dict.fromkeys(code for code in (*range(32), 127) if not chr(code).isspace())
# A blank next to the inner side of a bracket.
_INSIDE = re.compile(r"(?<=[\[(<{]) | (?=[\])>}])")


def plain(text: str) -> str:
    """`text` as a reader sees it: compatibility forms composed (NFKC), hyphens as typed, invisible characters dropped,
    runs of white space one blank (none at the ends and inside of brackets), letter case folded."""
    if text.isascii():
        text = text.translate(_CONTROLS).casefold()
    else:
        text = "".join(map(_seen, unicodedata.normalize("NFKC", text))).translate(_HYPHENS)
        # folding may take a text out of its normal form
        text = unicodedata.normalize("NFKC", text.casefold())
    return _INSIDE.sub("", " ".join(text.split()))


def _seen(character: str) -> str:
    """The character, "" if nothing is drawn for it, a blank for what is drawn as one."""
    if character == _BLANK_PATTERN:
        return " "
    return "" if is_invisible(character) and not character.isspace() else character


def is_invisible(character: str) -> bool:
    """Whether a reader cannot see the character, or takes it for an ordinary blank."""
    if " " <= character <= "~":
        return False
    kind = unicodedata.category(character)
    return kind[0] == "Z" or kind in ("Cc", "Cf") or character in _INVISIBLE or character == _BLANK_PATTERN


def alike(text: str, among: Iterable[str]) -> list[str]:
    """The texts of `among` that look like `text`."""
    wanted = None if len(text) > LONGEST_COMPARED else plain(text)
    return [candidate for candidate in among if _remembered(candidate) == wanted]


# labels are compared again and again
_remembered = lru_cache(maxsize=4096)(plain)


def shown(text: str, beside: str | None = None) -> str:
    """`text` with Python's escapes (`\\xa0`) for the characters that cannot be seen.

    `beside` is a text that looks like it: whatever that lacks is escaped too, ASCII aside, so that the two differ.
    """
    return "".join(
        ascii(character)[1:-1]
        if is_invisible(character) or (beside is not None and not character.isascii() and character not in beside)
        else character
        for character in text
    )
