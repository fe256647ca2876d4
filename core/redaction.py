"""Keys stay out of messages and records: `redacted` is what each of them goes through, `excerpt` the only cut.

A key is known by its shape (an address with a user or a query, a field of JSON that is named like a key) or by its
value: `remember_key` notes it, and so does a variable of the environment whose name is a key's. A text of somebody else
is never cut before it is redacted, because whoever cuts a key first hides most of it no more.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import html
import json
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import quote

HIDDEN = "***"
# Nothing here takes more than linear time on any text: what a pattern has scanned it has also consumed.
_RUN = re.compile(r"[^\s\"']++")
# a password may hold any character; what a port follows is no user
_USER = re.compile(r"(?<=://)(?:[^/?#@]++|[^/?#@\[:]*+:(?!\d+[/?#])[^@]++)@")
_QUERY = re.compile(r"(://[^\s?#\"'\\]*+)(\?[^\s#\"'\\]++)?")
# between two words of a name; JSON often writes them in camel case
_JOINT = r"(?:[_-]|(?-i:(?<=[a-z0-9])(?=[A-Z])))"
# tokens of a tokenizer (`eos_token`) are none
_NAME = (
    rf"(?:[\w-]*{_JOINT})?"
    r"(?:key|idtoken|pwd|auth|authorization|bearer|cookies?|credentials?|signature|connection_?string)"
    r"|[\w-]*(?:(?:api|access|account|auth|client|encryption|master|private|secret|service|shared|signing|subscription)"
    r"[_-]?key|(?:access|api|auth|bearer|refresh|security|session)token|secret|passw(?:or)?d|passphrase|passcode)"
    rf"|(?:(?!(?:bos|eos|pad|unk|stop|end|start|sep|cls|mask){_JOINT})[\w-]*{_JOINT})?token"
)
_SECRET_NAME = re.compile(_NAME, re.IGNORECASE)
LONGEST_NAME = 200
"""Letters of a name that may be a secret's."""
# a field of JSON, or of a dict as Python writes it, inside of any text; a value that was cut ends with its line
_FIELD = re.compile(
    rf"(\\?[\"'](?:{_NAME})\\?[\"']\s*+:\s*+)(\\?[\"'])(?:(?!\2)(?:\\.|[^\\\n]|\\\Z))*+(?:\2|(?=\n|\Z))", re.IGNORECASE
)


def without_users(text: str) -> str:
    """`text` with *** for user and password of every address."""
    if "://" not in text or "@" not in text:
        return text

    def hide(run: re.Match[str]) -> str:
        # up to the last @: a scan for one never runs to the end in vain, from however many addresses it begins
        end = run[0].rfind("@") + 1
        return _USER.sub(f"{HIDDEN}@", run[0][:end]) + run[0][end:]

    return _RUN.sub(hide, text)


def redacted(value: Any) -> Any:
    """`value` as it may be written: texts, and those inside of mappings and sequences, without what may be a key."""
    if isinstance(value, str):
        value = without_keys(value)
        if value.startswith(("{", "[")):
            with contextlib.suppress(ValueError, RecursionError):
                parsed = json.loads(value)
                hidden = redacted(parsed)
                return value if hidden == parsed else json.dumps(hidden, ensure_ascii=False)
        text = _QUERY.sub(lambda match: match[1] + (f"?{HIDDEN}" if match[2] else ""), without_users(value))
        return _FIELD.sub(rf"\1\2{HIDDEN}\2", text)
    if isinstance(value, Mapping):
        secret = {name for name in value if isinstance(name, str) and is_secret(name)}
        # a switch or a share called so holds no key
        secret -= {name for name in secret if value[name] is None or isinstance(value[name], bool | float)}
        return {name: HIDDEN if name in secret else redacted(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(redacted, value))
    return value


def is_secret(name: str) -> bool:
    """Whether a field, a header or a variable of this name holds a key."""
    return len(name) <= LONGEST_NAME and _SECRET_NAME.fullmatch(name) is not None


# --- Keys by their value

LEAST_KEY, SHORT_KEY, LONGEST_KEY = 4, 16, 1 << 14
"""Fewest letters of a key, fewest of a value that is no ordinary word, and most letters of a key."""
_remembered = set[str]()


def remember_key(value: str) -> None:
    """From now on `value` is in no message and no record of this process. Shorter than `SHORT_KEY` it may be a word."""
    if SHORT_KEY <= len(value) <= LONGEST_KEY:
        _remembered.add(value)


def remembered_keys() -> frozenset[str]:
    """The keys given to `remember_key`, to be handed to another process of ours."""
    return frozenset(_remembered)


def without_keys(text: str) -> str:
    """`text` without the keys that this process knows, however they are spelled."""
    keys = frozenset(_remembered | _of_environment())
    patterns = _pattern(keys)
    if patterns is None:
        return text
    text = patterns[0].sub(HIDDEN, text)
    if not _SPELLED.search(text):
        return text
    # what a reader could decode is decoded here first: that is fast, and a key is hardly ever found
    plain = _decoded(text)
    if spelled := [key for key in keys if key in plain]:
        for key in spelled:
            text = _spellings(key).sub(HIDDEN, text)
        plain = _decoded(text)
    return HIDDEN if any(key in plain for key in spelled) else text


# what nobody sees between two letters: soft hyphens, joiners, marks of direction
_UNSEEN = "\xad\u200b-\u200f\u2060-\u2064\ufeff"
_SPELLED = re.compile(rf"[%&\\\n{_UNSEEN}]")
_ESCAPE = re.compile(r"(?:%|(?<!\\)\\++(?:u00|x|U0{6}))([0-9a-fA-F]{2})|(?<!\\)\\++u\{0*+([0-9a-fA-F]{2})\}")
_LINE_END = re.compile(rf"(?:(?<!\\)\\++(?:[nr]|u(?i:00ad|200[b-f]|206[0-4]|feff))|[\r\n]++[ \t]*+|[{_UNSEEN}]++)++")
ROUNDS = 3
"""How often one spelling is taken out of another, as of JSON in an address."""


def _decoded(text: str) -> str:
    """`text` as who decodes all of it reads it: of addresses, HTML and JSON, and without ends of lines."""
    for _ in range(ROUNDS):
        plain = html.unescape(_ESCAPE.sub(lambda match: chr(int(match[1] or match[2], 16)), text))
        if plain == text:
            break
        text = plain
    text = _LINE_END.sub("", text)
    return re.sub(r"(?<!\\)\\++(?=[^\w\s\\])", "", text) if "\\" in text else text


@functools.lru_cache(64)
def _spellings(key: str) -> re.Pattern[str]:
    """Every letter of a key as itself, or as one of its escapes, with an end of a line between two of them."""
    letters = []
    for letter in key:
        number, names = ord(letter), "".join(f"|{name}" for name in _ENTITIES.get(letter, ()))
        in_address, in_html = rf"%(?:25)*+{number:02x}", rf"&(?:amp;)*(?:#0*+{number}|#x0*+{number:x}{names});"
        in_code = rf"\\++(?:(?:u00|x|U0{{6}}){number:02x}|u\{{0*+{number:x}\}})"
        letters.append(rf"(?:\\*+{re.escape(letter)}|{in_address}|{in_html}|{in_code})")
    return re.compile(rf"(?:{_LINE_END.pattern})?".join(letters), re.IGNORECASE)


_ENTITIES = {"&": ("amp",), "<": ("lt",), ">": ("gt",), '"': ("quot",), "'": ("apos",)}


def first_letters(text: str, limit: int) -> str:
    """The first `limit` letters of `text` without those keys, for an observation or a hint: its other letters stay."""
    window = limit + 2 * LONGEST_KEY
    return (without_keys(text) if len(text) <= window else _without_last_word(without_keys(text[:window])))[:limit]


def _of_environment() -> set[str]:
    """Values of variables that are named like keys. Read anew: a program may set one late."""
    # every line that is said or written asks for them: names first, for values take longer to read
    values = (os.environ.get(name, "").strip() for name in list(os.environ) if _named(name))
    return {value for value in values if SHORT_KEY <= len(value) <= LONGEST_KEY and not _is_place(value)}


@functools.lru_cache(4096)
def _is_place(value: str) -> bool:
    """Whether it is a file or a folder: $PWD is the working directory, and a variable may name the file of a key.

    A key may begin with a slash, too, but nothing lies there.
    """
    return os.path.isabs(value) and os.path.exists(value)


class HeaderKeys:
    """The keys of one client's headers. Short ones are hidden where they stand alone, and in its errors only."""

    def __init__(self, values: Iterable[str]) -> None:
        keys = frozenset(value.rpartition(" ")[2] for value in values)
        self._long, self._all = _pattern(frozenset(key for key in keys if len(key) >= SHORT_KEY)), _pattern(keys)

    def hidden(self, body: bytes, *, error: bool = True) -> bytes:
        """`body` with its keys hidden. In an answer that is no `error` only long keys are hidden: a model may write
        "EMPTY" or "test"."""
        pattern = self._all if error else self._long
        return body if pattern is None else pattern[1].sub(HIDDEN.encode(), body)


@functools.lru_cache(64)
def _pattern(keys: frozenset[str]) -> tuple[re.Pattern[str], re.Pattern[bytes]] | None:
    forms = {
        form
        for key in keys
        if len(key) >= LEAST_KEY
        for form in (key, json.dumps(key)[1:-1], repr(key)[1:-1], quote(key, ""), *_in_base64(key), *_in_hex(key))
    }
    # a short key ("test") may be part of ordinary words
    parts = [
        re.escape(form) if len(form) >= SHORT_KEY else rf"(?<![\w-]){re.escape(form)}(?![\w-])"
        for form in sorted(forms, key=len, reverse=True)
    ]
    pattern = "|".join(parts)
    return (re.compile(pattern), re.compile(pattern.encode())) if parts else None


def _in_base64(key: str) -> Iterator[str]:
    """The part of a base64 text that a long key always produces, whatever stands before and behind it."""
    data = key.encode("utf-8", "surrogatepass")
    for before in range(3 if len(data) >= SHORT_KEY else 0):
        # letters of 6 bits that hold a bit of a neighbor are left out
        first, last = -(-8 * before // 6), 8 * (before + len(data)) // 6
        for code in (base64.b64encode, base64.urlsafe_b64encode):
            yield code(bytes(before) + data).decode()[first:last]


def _in_hex(key: str) -> Iterator[str]:
    """The digits of a long key's bytes."""
    if len(key) >= SHORT_KEY:
        digits = key.encode("utf-8", "surrogatepass").hex()
        yield from (digits, digits.upper())


_named = functools.lru_cache(4096)(is_secret)


# --- The only cut


def _written(value: object, form: Callable[[object], str]) -> str:
    try:
        return form(redacted(value))
    # a server's JSON may be nested as deep as Python can read it, and no deeper can it be written
    except RecursionError:
        return f"a {type(value).__name__} that is nested too deep"
    # other people's code makes the text of other people's objects
    except Exception as error:
        return f"an object of {type(value).__name__} that cannot be written ({type(error).__name__})"


def _without_last_word(text: str) -> str:
    word = text[-LONGEST_KEY:].rsplit(None, 1)
    return text[: len(text) - len(word[-1])] if word and not text[-1].isspace() else text


def _without_first_word(text: str) -> str:
    word = text[:LONGEST_KEY].split(None, 1)
    return text[len(word[0]) :] if word and not text[0].isspace() else text


def excerpt(value: object, limit: int, *, end: bool = False) -> str:
    """At most `limit` letters of somebody else's text for a message, redacted and then cut; the last ones with `end`.

    Bytes are read as UTF-8, other values as Python writes them. What was cut ends (or begins) with three dots. The time
    is that of the text's first `limit` letters and twice `LONGEST_KEY`, however long it is.
    """
    if isinstance(value, bytes | bytearray):
        value = value[-8 * (limit + 2 * LONGEST_KEY) :] if end else value[: 8 * (limit + 2 * LONGEST_KEY)]
        value = bytes(value).decode("utf-8", "replace")
    text = value if isinstance(value, str) else _written(value, str)
    window = limit + 2 * LONGEST_KEY
    if len(text) <= window:
        safe = redacted(text)
        if len(safe) <= limit:
            return safe
    else:
        # a key that the window itself cuts is its last word, or a part of it
        safe = _without_first_word(redacted(text[-window:])) if end else _without_last_word(redacted(text[:window]))
    return f"...{safe[-limit:]}" if end else f"{safe[:limit]}..."


def brief(value: object, limit: int) -> str:
    """`value` as Python writes it, as an `excerpt`."""
    return excerpt(_written(value, repr), limit)


def said_by(error: BaseException) -> str:
    """The text of an exception in one line. Other people's code makes that text, and may fail at it."""
    try:
        text = str(error)
    except Exception:
        text = "it has no text"
    return excerpt(" ".join(text.split()), 500)


# --- Bugs of ours


def redacted_traceback(error: BaseException) -> str:
    """The traceback of an uncaught exception with keys hidden: its text, and its causes', may contain them."""
    return redacted("".join(traceback.format_exception(error)))


@contextlib.contextmanager
def redacted_tracebacks() -> Iterator[None]:
    """Inside, no exception that ends the process, a thread of it or a finalizer is written with a key in it."""

    def write(what: str, error: BaseException | None) -> None:
        # a standard error that is closed or full must not be what ends a thread
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(what if error is None else f"{what}{redacted_traceback(error)}")
            sys.stderr.flush()

    def of_thread(given: Any) -> None:
        if given.exc_type is not SystemExit:
            name = "a thread" if given.thread is None else given.thread.name
            write(f"Exception in thread {redacted(name)}:\n", given.exc_value)

    def of_finalizer(given: Any) -> None:
        write(f"{redacted(given.err_msg or 'Exception ignored in')}: {brief(given.object, 200)}\n", given.exc_value)

    before = sys.excepthook, threading.excepthook, sys.unraisablehook
    sys.excepthook = lambda kind, error, trace: write("", error)
    threading.excepthook, sys.unraisablehook = of_thread, of_finalizer
    try:
        yield
    finally:
        sys.excepthook, threading.excepthook, sys.unraisablehook = before
