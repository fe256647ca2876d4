"""Files that people name and write: which path a text means, and what a text file says.

A path may hold every character that a file system allows. Bytes that are no UTF-8 stand in texts as Python's lone
surrogates (`surrogateescape`), as the system gave them.
"""

from __future__ import annotations

import codecs
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from turngym.core.errors import TurngymError
from turngym.core.redaction import brief

OTHER = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
"""First bytes of files in other encodings; those of UTF-32 begin like those of UTF-16, and come first."""


def user_path(text: str | os.PathLike[str]) -> Path:
    """The path that `text` means: `~` and `~name` at its beginning are home folders, unless they are files here.

    Raises TurngymError for a text with the one character that no file system allows, and for a home folder where there
    is none (a container's user without a name).
    """
    if "\0" in os.fspath(text):
        raise TurngymError(f"{os.fspath(text)!r} holds a null character; valid: a path")
    if os.path.lexists(text):
        return Path(text)
    path = os.path.expanduser(text)
    if path == "~" or path.startswith("~/"):
        raise TurngymError(f"{path} is in the home folder, which this user does not have: set HOME, or name another")
    return Path(path)


def named_path(text: str) -> tuple[str, Path]:
    """Splits `NAME=PATH` or `PATH` into name and path; the name is "" if none is given.

    A path that is there is taken for one, whatever it holds; then the longest one behind a `=` that is there.
    """
    cuts = [index for index, letter in enumerate(text) if letter == "="]
    for name, rest in [("", text), *((text[:cut], text[cut + 1 :]) for cut in cuts)]:
        if rest and (path := user_path(rest)).exists():
            return name, path
    name, _, rest = text.rpartition("=")
    return name, user_path(rest)


def must_be_new(out: Path, error: type[Exception]) -> None:
    """Raises `error` where something is at `out`, a link without a goal, too: no file is replaced without a word."""
    if os.path.lexists(out) or goal_of(out).exists():
        raise error(f"{out} exists already and is kept as it is; choose another --out")


def must_end(out: Path, *endings: str) -> None:
    """Raises TurngymError where the name of a file has another ending than those of its kind; it may have none."""
    if out.suffix.lower() not in ("", *endings):
        raise TurngymError(f"--out is {out}; what is written ends in {' or '.join(endings)}")


def goal_of(out: Path) -> Path:
    """Where a file is written whose missing folders are made first: `new/../x` is `x`, although no `new` is there."""
    return Path(os.path.realpath(out))


def keep_inputs(out: Path, inputs: Iterable[str | os.PathLike[str]], error: type[Exception]) -> None:
    """Raises `error` where replacing `out` would destroy one of `inputs`, which has not been read yet.

    That is where both are one file or folder, by whatever names (links of both kinds, letter case where the file system
    knows none), or where `out` is a folder that holds the input.
    """
    goal = goal_of(out)
    if not goal.exists():
        return
    for text in inputs:
        path = Path(os.path.expanduser(text))
        # unlike Path.exists, it says no to a text that is too long for a name, or holds a null character
        if os.path.exists(path) and any(map(goal.samefile, (path, *path.resolve().parents))):
            raise error(f"{out} is kept as it is: it is, or holds, the input {path}; choose another --out")


def library_path(folder: str | os.PathLike[str]) -> Path:
    """An existing folder under a name that every library can open: those in Rust and C++ take UTF-8 alone.

    A folder whose name is something else gets a link, which is removed when this process ends.
    """
    path = Path(folder)
    try:
        os.fspath(path).encode("utf-8")
    except UnicodeEncodeError:
        return _link(path.resolve())
    return path


@cache
def _link(folder: Path) -> Path:
    link = Path(_links().name, str(len(os.listdir(_links().name))))
    link.symlink_to(folder, target_is_directory=True)
    return link


@cache
def _links() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="turngym-links-")


LARGEST_FILE = 2**28
"""Bytes of a file that is read whole."""


def read_text(path: str | os.PathLike[str], error: type[Exception], *, raw: str = "") -> str:
    """The text of a file that a person writes: UTF-8 with or without a byte order mark, line ends of any system.

    A file that begins with the line `raw` (ours, with paths in it) may hold other bytes, too.

    Raises `error`, which names the file, if it cannot be read or is in another encoding.
    """
    try:
        # a pipe is a file here, as a shell's <(...) gives one; a device may have no end
        with user_path(path).open("rb") as file:
            data = file.read(LARGEST_FILE + 1)
    except OSError as reason:
        raise error(f"{path} cannot be read: {reason.strerror}") from reason
    if len(data) > LARGEST_FILE:
        raise error(f"{path} cannot be read: it has more than {LARGEST_FILE:,} bytes")
    if raw and data.startswith(raw.encode()):
        return data.decode("utf-8", "surrogateescape")
    return "".join(_lines(data.splitlines(keepends=True), path, error))


MOST_VALUES = 1 << 23
"""JSON values of a file, or of a line of one, at most: some 600 MB of empty lists. An episode of 32,000 tokens with a
teacher's 64 best ones has half as many."""
_MARKS = (b",", b"[", b"{")


def too_many_values(body: bytes, most: int) -> bool:
    """Whether JSON holds more than `most` values, told before they are made: `[]` takes 27 times its bytes.

    Each value but the first has a bracket or a comma before it; those in texts, which may be code, do not count. The
    time is that of a few passes over the bytes, whatever they are: 0.1 s for 8 MB.
    """
    # a value takes a byte, and a bracket or a comma
    if len(body) <= 2 * most or sum(map(body.count, _MARKS)) <= most:
        return False
    # what is left has quotes only where texts begin and end: an even number of backslashes escapes nothing
    plain = np.frombuffer(body.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
    inside = np.bitwise_xor.accumulate((plain == ord('"')).view(np.uint8))
    marks = np.logical_or.reduce([plain == ord(mark) for mark in _MARKS])
    return int(np.count_nonzero(marks & (inside == 0))) > most


def json_of(text: str | bytes) -> Any:
    """The JSON value of a stranger's text, which may begin with a byte order mark. Raises ValueError, for one that is
    nested too deep or has more than `MOST_VALUES` values, too."""
    # a text that is short enough is not encoded for that
    if len(text) > 2 * MOST_VALUES:
        body = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
        if too_many_values(body, MOST_VALUES):
            raise ValueError(f"it has more than {MOST_VALUES:,} values")
        del body
    try:
        return json.loads(text.removeprefix("\ufeff") if isinstance(text, str) else text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def text_problem(value: str) -> str | None:
    """Says why `value` is not a text that can be written to a file; None if it is."""
    if value.isascii():
        return None
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        return (
            f"has half a surrogate pair (\\u{ord(value[error.start]):04x}) at character {error.start}, which is no "
            "text; remove it"
        )
    return None


def bounded_bytes(path: str | os.PathLike[str], most: int) -> bytes:
    """The bytes of a file that may come from a stranger.

    Raises ValueError for more than `most`, and for what is no file: in a pipe nobody writes, and a device has no end.
    """
    if os.path.lexists(path) and not os.path.isfile(path):
        raise ValueError("it is no file")
    with open(path, "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"it has more than {most:,} bytes")
    return data


def json_file(path: str | os.PathLike[str], error: Callable[[str], Exception]) -> Any:
    """The JSON value of a file that a program has written, in a folder that may come from a stranger.

    Raises `error`, which names the file, for one that is not there, is no file, has more than `LARGEST_FILE` bytes, or
    is no JSON in UTF-8.
    """
    try:
        return json_of(bounded_bytes(path, LARGEST_FILE).decode("utf-8"))
    except (OSError, ValueError) as reason:
        raise error(f"{path} cannot be read: {getattr(reason, 'strerror', None) or reason}") from reason


def json_object(path: str | os.PathLike[str], error: Callable[[str], Exception]) -> dict[str, Any]:
    content = json_file(path, error)
    if not isinstance(content, dict):
        raise error(f"{path} cannot be read: it is {brief(content, 80)}; valid: an object")
    return content


def text_lines(path: str | os.PathLike[str], error: type[Exception]) -> Iterator[str]:
    """The lines of `read_text`, each with its end, holding one at a time."""
    try:
        with user_path(path).open("rb") as file:
            yield from _lines(file, path, error)
    except OSError as reason:
        raise error(f"{path} cannot be read: {reason.strerror}") from reason


def _lines(lines: Iterable[bytes], path: str | os.PathLike[str], error: type[Exception]) -> Iterator[str]:
    for number, line in enumerate(lines, start=1):
        for mark, name in OTHER.items() if number == 1 else ():
            if line.startswith(mark):
                raise error(f"{path} is {name} text; save it as UTF-8")
        # what some editors write without a mark: a zero beside every letter
        if b"\0" in line:
            raise error(f"{path}, line {number}: a zero byte; it is no text, or UTF-16 text: save it as UTF-8")
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as reason:
            problem = f"byte 0x{line[reason.start]:02x} at column {reason.start + 1}"
            raise error(f"{path}, line {number}: {problem} is no UTF-8; save it as UTF-8") from None
        yield text.replace("\r\n", "\n").replace("\r", "\n")
