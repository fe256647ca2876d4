"""How are rows read from a file that somebody else wrote? JSON lines, a JSON array, a table; plain or `.gz`.

`read_rows` yields every row with the place where it stands. `read_array` and `read_object` read one large JSON value
piece by piece, so that a file of 5 GB needs a few megabytes. They are not ijson, which takes an element of any length
into memory, reads half a surrogate pair as "?", and refuses 1e400 and a byte order mark. What is read is bounded before
memory is taken: the length of a row by `LONGEST_ROW`, and what a `.gz` unpacks to by its own size.

Every function takes the class of the errors that it raises, whose texts name the file and the place in it.
`path_stamp` tells a file or folder that was changed from the one that was read.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from turngym.core.closing import Closes
from turngym.core.redaction import brief, excerpt, redacted
from turngym.core.user_files import json_of

CHUNK = 1 << 20
"""Bytes that are read at once."""
LONGEST_ROW = 1 << 24
"""Bytes of a row, or characters of an element, at most; a row with whole web pages in it has some megabytes."""
UNPACKED = 1 << 26
"""Bytes to which every `.gz` may unpack; a larger one to at most `RATIO` times its size."""
RATIO = 100
"""Texts shrink to a third or a tenth; gzip can shrink zeros to a thousandth."""
Stamp = tuple[int, ...] | tuple[tuple[str, tuple[int, ...]], ...]
"""What changes when a file, or the files of a folder, are replaced or written to; empty where there is nothing."""


class Row(NamedTuple):
    """One row of a file."""

    number: int
    """Number of the row, from 1."""
    line: int | None
    """Line of the file, from 1; None in files whose rows are not lines."""
    value: Any

    @property
    def place(self) -> str:
        return f"row {self.number}" if self.line is None else f"line {self.line}"


def path_stamp(path: str | os.PathLike[str]) -> Stamp:
    """The stamp of a file, or of the files in a folder. It goes into the key of whatever is remembered of a path."""
    try:
        if not os.path.isdir(path):
            return stat_stamp(os.stat(path))
        with os.scandir(path) as entries:
            return tuple(sorted((entry.name, stat_stamp(entry.stat())) for entry in entries))
    except OSError:
        return ()


def stat_stamp(stat: os.stat_result) -> tuple[int, ...]:
    """The stamp of one file. A copy that keeps the time of the original has another inode or time of change."""
    return stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def absent(value: Any) -> bool:
    """Whether a field's value stands for none: null, or the NaN that pandas writes for it."""
    return value is None or value != value


def stem(path: Path) -> str:
    """The file's name without its endings: `q` of `q.jsonl.gz`."""
    name = path.name.removesuffix(".gz")
    return name.removesuffix(Path(name).suffix)


def read_rows(path: Path, form: str, error: type[Exception]) -> Iterator[Row]:
    """Yields the rows of a file in order, holding one at a time.

    The file is one JSON value per line, one JSON array, an object whose member `data` or `Data` is such an array, or,
    where its name says so, a table with a header (`.tsv`, `.csv`), whose rows are objects of texts. Every line of a
    `.tsv` is a row: there are no quotation marks around ends of lines. Blank lines are passed by. `form` says in errors
    what a row should look like.
    """
    if path.is_dir():
        raise error(f"{path} is a folder; name a file with one JSON object per line: {form}")
    kind = Path(path.name.removesuffix(".gz")).suffix.lower()
    if kind in (".tsv", ".csv"):
        yield from _table_rows(path, kind == ".tsv", error)
        return
    with _Opened(path, error) as file:
        head = file.peek_text()
    if head[:1] == "[":
        yield from (Row(number, None, value) for number, value in enumerate(read_array(path, error, "rows"), 1))
    elif _WRAPPED.match(head):
        yield from (Row(number, None, value) for number, value in enumerate(_wrapped(path, error), 1))
    else:
        yield from _line_rows(path, form, error)


_SCALAR = r'"(?:[^"\\]|\\.)*"|[-+.\w]+'
_WRAPPED = re.compile(rf'\{{\s*(?:"\w+"\s*:\s*(?:{_SCALAR})\s*,\s*)*"[dD]ata"\s*:\s*\[\s*\{{')
"""The start of `{"Data": [{...`, as TriviaQA is published."""


def _line_rows(path: Path, form: str, error: type[Exception]) -> Iterator[Row]:
    number = 0
    for line, text in _decoded_lines(path, error):
        if not text.strip():
            continue
        number += 1
        try:
            value = json_of(text)
        # a number of thousands of digits is one, too
        except ValueError as reason:
            raise error(
                f"{path}, line {line}: not JSON ({reason}): {show(text.strip())}; one JSON object per line: {form}"
            ) from None
        yield Row(number, line, value)


def _table_rows(path: Path, by_tabs: bool, error: type[Exception]) -> Iterator[Row]:
    # csv has one limit for the whole process. It is raised and never put back: a reader in another thread may need it
    csv.field_size_limit(max(LONGEST_ROW, csv.field_size_limit()))
    # text between tabs has no quotation marks around it: one that begins a title would swallow the rows behind it
    form: Any = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if by_tabs else {"delimiter": ","}
    reader = csv.reader((text for _, text in _decoded_lines(path, error)), strict=True, **form)
    header: list[str] | None = None
    number = 0
    try:
        for cells in reader:
            if by_tabs:
                cells = [_unquoted(cell) for cell in cells]
            if header is None:
                header = cells
                if len(set(header)) < len(header):
                    raise error(f"{path}, line 1: two columns have one name: {show(header)}")
            elif cells:
                number += 1
                if len(cells) != len(header):
                    raise error(f"{path}, line {reader.line_num}: {len(cells)} cells; the header has {len(header)}")
                yield Row(number, reader.line_num, dict(zip(header, cells, strict=True)))
    except csv.Error as reason:
        # csv's own text advises how to open the file
        problem = str(reason)
        if "new-line character" in problem:
            problem = "a carriage return alone ends a line; save it with the line ends of Unix or Windows"
        raise error(f"{path}, line {reader.line_num}: not a row of the table: {problem}") from None


def _unquoted(cell: str) -> str:
    """`cell` without the quotation marks that a writer (pandas, DPR's) put around one that holds some: all of these are
    doubled then. Others belong to the text."""
    inner = cell[1:-1]
    quoted = cell[:1] == cell[-1:] == '"' and '""' in inner and '"' not in inner.replace('""', "")
    return inner.replace('""', '"') if quoted else cell


def _decoded_lines(path: Path, error: type[Exception]) -> Iterator[tuple[int, str]]:
    """Yields (line number from 1, text with its line end)."""
    with _Opened(path, error) as file:
        number = 0
        while raw := file.line(number):
            number += 1
            try:
                yield number, raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as reason:
                raise error(
                    f"{path}, line {number}: byte 0x{raw[reason.start]:02x} at column {reason.start + 1} is not UTF-8; "
                    "convert the file to UTF-8"
                ) from None


_OTHERS = {
    b"PK\x03\x04": "a zip archive",
    b"\xfd7zXZ\0": "compressed by xz",
    b"BZh": "compressed by bzip2",
    b"\x28\xb5\x2f\xfd": "compressed by zstandard",
    b"PAR1": "a parquet file; questions and pre-training text are read from one whose name ends in .parquet, else",
}
"""First bytes of files of other kinds."""
_UNREADABLE = (EOFError, zlib.error, OSError)
"""What reading a cut or damaged `.gz`, or a broken disk, raises."""


def read_whole(path: Path, error: type[Exception]) -> bytes:
    """All bytes of a file, unpacked if it is a `.gz`, within its bounds; `error` where it cannot be read."""
    with _Opened(path, error) as file:
        return b"".join(iter(lambda: file.piece(CHUNK), b""))


class _Opened(Closes):
    """The bytes of a file, unpacked if it is a `.gz` (told by its first bytes), within the bounds."""

    def __init__(self, path: Path, error: type[Exception]) -> None:
        self.path, self.error = path, error
        self._read = 0
        self._most: int | None = None
        # a pipe would be waited for, a device has no end
        if path.exists() and not path.is_file() and not path.is_dir():
            raise error(f"{path} is no file")
        try:
            file: IO[bytes] = path.open("rb")
            start = file.read(6)
            if (kind := next((name for mark, name in _OTHERS.items() if start.startswith(mark)), None)) is not None:
                file.close()
                raise error(f"{path} is {kind}; valid: JSON or a table as text, plain or compressed by gzip")
            if start.startswith(b"\x1f\x8b"):
                self._most = max(UNPACKED, RATIO * os.fstat(file.fileno()).st_size)
            file.seek(0)
        except OSError as reason:
            raise error(f"{path}: the file cannot be read: {reason.strerror}") from reason
        unpacked: Any = file if self._most is None else gzip.GzipFile(fileobj=file)
        self._raw, self._file = file, io.BufferedReader(unpacked) if self._most is not None else file

    def close(self) -> None:
        self._file.close()
        self._raw.close()

    def peek_text(self) -> str:
        """The first characters, without a byte order mark and blanks; none where the file cannot be read."""
        try:
            return self._file.read(1 << 16).decode("utf-8-sig", "replace").lstrip()
        except _UNREADABLE:
            return ""

    def piece(self, size: int) -> bytes:
        """The next `size` bytes, fewer at the end."""
        return self._counted(self._file.read, size, "")

    def line(self, before: int) -> bytes:
        """The next line, with its end; `before` is how many were read."""
        row = self._counted(self._file.readline, LONGEST_ROW + 1, f", after line {before}")
        if len(row) > LONGEST_ROW:
            raise self.error(f"{self.path}, line {before + 1}: longer than {LONGEST_ROW:,} bytes, which no row is")
        return row

    def _counted(self, read: Any, size: int, where: str) -> bytes:
        try:
            piece: bytes = read(size)
        except _UNREADABLE as reason:
            raise self.error(f"{self.path}{where}: cannot be read further: {reason}") from reason
        self._read += len(piece)
        if self._most is not None and self._read > self._most:
            raise self.error(
                f"{self.path}{where}: it unpacks to more than {self._most:,} bytes, {RATIO} times its size; if it "
                "should, unpack it yourself and name that file"
            )
        return piece


# --- one JSON value, piece by piece


def read_array(path: Path, error: type[Exception], what: str = "a list of products") -> Iterator[Any]:
    """The elements of the array that the file holds; `error` where it is damaged or holds something else."""
    text = _Text(path, error)
    text.open("[", what)
    while text.more("]"):
        yield text.value()
    text.end()


def read_object(path: Path, error: type[Exception]) -> Iterator[tuple[str, Any]]:
    """The members of the object that the file holds, repeats included; `error` as in `read_array`."""
    text = _Text(path, error)
    text.open("{", "an object with one entry per product")
    while text.more("}"):
        yield text.key(), text.value()
    text.end()


def _wrapped(path: Path, error: type[Exception]) -> Iterator[Any]:
    """The elements of the array `data` of the object that the file holds; its other members are passed by."""
    text = _Text(path, error)
    text.open("{", "an object with rows in it")
    while text.more("}"):
        if text.key().lower() != "data":
            text.value()
            continue
        text.open("[", "rows")
        inner, text.elements = text.elements, 0
        while text.more("]"):
            yield text.value()
        text.elements = inner
    text.end()


_BLANK = " \t\r\n"


class _Text:
    """The characters of the file that are still to be read; those that were read are dropped from memory."""

    def __init__(self, path: Path, error: type[Exception]) -> None:
        self.path, self.error = path, error
        self.elements = 0
        """Elements of the innermost open bracket that were begun."""
        self._file = _Opened(path, error)
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._json = json.JSONDecoder()
        self._buffer = ""
        self._at = 0
        self._dropped = 0
        self._ended = False

    def open(self, bracket: str, what: str) -> None:
        if (first := self._peek()) != bracket:
            raise self.error(f"{self.path} begins with {first!r}; valid: {what}, which begins with {bracket!r}")
        self._at += 1

    def more(self, closing: str) -> bool:
        """Move to the next element; False after the last."""
        character = self._peek()
        if character != closing:
            if self.elements:
                self.expect(",")
            self.elements += 1
            return True
        self._at += 1
        return False

    def end(self) -> None:
        """Closes the file, which must hold nothing more."""
        if (rest := self._peek()) != "":
            raise self.damaged(f"{rest!r} after the end")
        self._file.close()

    def key(self) -> str:
        """The name of the next member, and the colon behind it."""
        key = self.value()
        if not isinstance(key, str):
            raise self.damaged(f"a key is {brief(key, 60)}, not a text")
        self.expect(":")
        return key

    def expect(self, character: str) -> None:
        if (actual := self._peek()) != character:
            raise self.damaged(f"{actual!r} where {character!r} is needed")
        self._at += 1

    def value(self) -> Any:
        # raw_decode takes no blank in front of a value
        self._peek()
        while True:
            try:
                value, end = self._json.raw_decode(self._buffer, self._at)
            except ValueError as reason:
                # cut off or damaged looks the same until the file ends or the element is too long to be one
                if self._ended or len(self._buffer) - self._at > LONGEST_ROW:
                    raise self.damaged(excerpt(reason.args[0], 80)) from None
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

    def damaged(self, what: str) -> Exception:
        element, character = max(self.elements - 1, 0), self._dropped + self._at
        return self.error(f"{self.path} is damaged after element {element}, character {character}: {what}")

    def _peek(self) -> str:
        """The next character that is not blank; '' at the end."""
        while True:
            while self._at < len(self._buffer) and self._buffer[self._at] in _BLANK:
                self._at += 1
            if self._at < len(self._buffer) or self._ended:
                return self._buffer[self._at : self._at + 1]
            self._read(CHUNK)

    def _read(self, size: int) -> None:
        chunk = self._file.piece(size)
        self._ended = not chunk
        try:
            text = self._decoder.decode(chunk, final=self._ended)
        except UnicodeDecodeError as reason:
            raise self.damaged(f"not UTF-8 ({reason.reason})") from None
        self._dropped += self._at
        self._buffer, self._at = self._buffer[self._at :] + text, 0


# --- values in errors


def show(value: Any, limit: int = 80) -> str:
    """A value in an error: as JSON, on one line, cut after `limit` characters."""
    try:
        text = repr(value) if isinstance(value, str) else json.dumps(value, default=repr)
    except (RecursionError, ValueError):
        text = f"a {type(value).__name__} that is nested too deep"
    return text if len(text) <= limit + 2 and redacted(text) == text else excerpt(text, limit)
