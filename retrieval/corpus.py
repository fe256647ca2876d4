"""How a passage corpus is read from JSONL, identified by a hash, and stored by row.

`read_corpus` yields the checked rows of a file. `PassageWriter` and `PassageStore` keep the passages of an index in
mapped files, which processes share.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import struct
import zlib
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from turngym.retrieval.core import Closes, Passage, RetrievalError
from turngym.retrieval.mapped import BlobStore, BlobWriter, check_manifest, sealed
from turngym.retrieval.sequences import LazySequence

_HEAD = struct.Struct("<II")
"""Begins a stored record: bytes of the id and of the title. The text is the rest of the record."""


class CorpusHash:
    """sha256 over passages in order; it does not depend on the form of the file or on white space between fields."""

    def __init__(self) -> None:
        self._sha = hashlib.sha256()
        self.count = 0

    def update(self, passage: Passage) -> None:
        parts = [part.encode("utf-8") for part in (passage.id, passage.title, passage.text)]
        # lengths come first, so that no shift of characters between fields gives the same bytes
        self._sha.update(b"%d %d %d\n" % (len(parts[0]), len(parts[1]), len(parts[2])) + b"".join(parts))
        self.count += 1

    def hexdigest(self) -> str:
        return self._sha.hexdigest()


def corpus_sha256(passages: Iterable[Passage]) -> str:
    """The content hash of passages in this order."""
    sha = CorpusHash()
    for passage in passages:
        sha.update(passage)
    return sha.hexdigest()


def id_digest(name: str) -> int:
    """A hash of 8 bytes that stands for an id."""
    return int.from_bytes(hashlib.blake2b(name.encode("utf-8"), digest_size=8).digest(), "little")


class PassageWriter:
    """Writes a passage store row by row; `finish` makes it readable."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._blobs = BlobWriter(self._folder / "passages", checked=True)
        self._sha = CorpusHash()

    def add(self, passage: Passage) -> None:
        name, title = passage.id.encode("utf-8"), passage.title.encode("utf-8")
        self._blobs.append(_HEAD.pack(len(name), len(title)) + name + title + passage.text.encode("utf-8"))
        self._sha.update(passage)

    def finish(self) -> None:
        """Writes the content hash; the store is complete when `passages.json` exists."""
        self._blobs.close()
        head = {"count": self._sha.count, "sha256": self._sha.hexdigest()}
        (self._folder / "passages.json").write_text(json.dumps(sealed(head)) + "\n", encoding="utf-8")


class PassageStore(LazySequence[Passage], Closes):
    """Passages by row (`store[row]`), read from mapped files; threads may share it."""

    def __init__(self, folder: str | Path) -> None:
        """Opens what `PassageWriter` finished. Raises RetrievalError if the folder holds no complete store."""
        folder = Path(folder)
        try:
            head = json.loads((folder / "passages.json").read_text(encoding="utf-8"))
            check_manifest(head)
            self.sha256: str = head["sha256"]
            self._blobs = BlobStore(folder / "passages")
        except (OSError, ValueError, KeyError) as error:
            raise RetrievalError(f"{folder}: no complete passage store ({error}); build the index again") from error
        if len(self._blobs) != head["count"]:
            raise RetrievalError(
                f"{folder}: {len(self._blobs)} records, but passages.json says {head['count']}; build the index again"
            )

    @classmethod
    def build(cls, passages: Iterable[Passage], folder: str | Path) -> PassageStore:
        """Writes all passages to `folder` and opens it."""
        writer = PassageWriter(folder)
        for passage in passages:
            writer.add(passage)
        writer.finish()
        return cls(folder)

    def __len__(self) -> int:
        return len(self._blobs)

    def item(self, index: int) -> Passage:
        record = self._blobs.item(index)
        name, title = _HEAD.unpack_from(record)
        start = _HEAD.size
        return Passage(
            id=str(record[start : start + name], "utf-8"),
            title=str(record[start + name : start + name + title], "utf-8"),
            text=str(record[start + name + title :], "utf-8"),
        )

    def close(self) -> None:
        self._blobs.close()


FORMS = '{"id": ..., "contents": "\\"Title\\"\\ntext"} or {"id": ..., "title": ..., "text": ...}'


class CorpusError(RetrievalError):
    """A corpus file cannot be used; the error names the file, the line and the value."""


def read_corpus(path: str | Path) -> Iterator[Passage]:
    """Yields the passages of a JSONL file (plain or .gz) in file order, holding one row at a time.

    Both of Search-R1's forms are read: `{"id", "contents": "\\"Title\\"\\ntext"}` and `{"id", "title", "text"}`.
    Numbers as ids become text. Titles may repeat, ids may not: they are remembered as 8 bytes each, and a repeated id
    is reported at the end of the file.

    Raises:
        CorpusError: no file, no rows, a row that is not JSON, not UTF-8, without id or contents, or a repeated id.
    """
    path = Path(path)
    digests = array("Q")
    for _, passage in _rows(path):
        digests.append(id_digest(passage.id))
        yield passage
    found, counts = np.unique(np.array(digests, np.uint64), return_counts=True)
    for digest in found[counts > 1].tolist():
        _report_repeat(path, digest)


def parse_row(row: Any, where: str) -> Passage:
    """The passage of one decoded JSON row; `where` (file and line) goes into errors."""
    if not isinstance(row, dict):
        raise CorpusError(f"{where}: a row must be a JSON object {FORMS}, not {_show(row)}")
    name = row.get("id")
    if isinstance(name, bool) or not isinstance(name, (str, int)) or name == "":
        found = "no id" if "id" not in row else f"id {_show(name)}"
        raise CorpusError(f"{where}: {found}; every row needs an id, a string or a whole number")
    _check_text(str(name), f"{where}: the id")
    if "\0" in str(name):
        raise CorpusError(f"{where}: id {name!r} has a NUL in it; remove it")
    if "contents" in row:
        # the first line is the title; a single line is one only in quotation marks
        contents = _string(row, "contents", where)
        head, newline, text = contents.partition("\n")
        quoted = len(head) >= 2 and head.startswith('"') and head.endswith('"')
        title = head[1:-1] if quoted else head
        if not newline and not quoted:
            title, text = "", contents
    elif "text" in row:
        title = _string(row, "title", where) if row.get("title") is not None else ""
        text = _string(row, "text", where)
    else:
        raise CorpusError(f"{where}: row {name!r} has no contents, only {sorted(row)}; write {FORMS}")
    if not title.strip() and not text.strip():
        raise CorpusError(f"{where}: row {name!r} has empty contents; leave the row out or give it text")
    return Passage(id=str(name), title=title, text=text)


def _rows(path: Path) -> Iterator[tuple[int, Passage]]:
    """Yields (1-based line, passage) of every row that is not blank."""
    found = False
    with _open(path) as file:
        for number, raw in _lines(file, path):
            where = f"{path}, line {number}"
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                byte = raw[error.start]
                raise CorpusError(
                    f"{where}: byte 0x{byte:02x} at column {error.start + 1} is not UTF-8; convert the file to UTF-8"
                ) from None
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise CorpusError(
                    f"{where}: not JSON ({error}): {_show(line.strip())}; one JSON object per line: {FORMS}"
                ) from None
            found = True
            yield number, parse_row(row, where)
    if not found:
        raise CorpusError(f"{path}: no passages in it; a corpus has one JSON object per line: {FORMS}")


def _open(path: Path) -> IO[bytes]:
    if not path.exists():
        raise CorpusError(f"{path}: there is no such corpus file")
    if path.is_dir():
        raise CorpusError(f"{path} is a folder; name the JSONL file of the corpus")
    file = path.open("rb")
    if file.read(2) == b"\x1f\x8b":
        file.seek(0)
        return io.BufferedReader(gzip.GzipFile(fileobj=file))  # type: ignore[arg-type]
    file.seek(0)
    return file


def _lines(file: IO[bytes], path: Path) -> Iterator[tuple[int, bytes]]:
    number = 0
    try:
        for number, raw in enumerate(file, 1):
            yield number, raw
    except (EOFError, zlib.error, OSError) as error:
        raise CorpusError(f"{path}, after line {number}: cannot be read further: {error}") from error


def _string(row: dict[str, Any], key: str, where: str) -> str:
    value = row[key]
    if not isinstance(value, str):
        raise CorpusError(f"{where}: {key} of row {row['id']!r} is {_show(value)}; it must be a string")
    _check_text(value, f"{where}: {key} of row {row['id']!r}")
    return value


def _check_text(value: str, what: str) -> None:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise CorpusError(
            f"{what} has half a surrogate pair (\\u{ord(value[error.start]):04x}) at character {error.start}, which is "
            "no text; remove it"
        ) from None


def _show(value: Any, limit: int = 80) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    text = text if len(text) <= limit else text[:limit] + "..."
    return repr(text) if isinstance(value, str) else text


def _report_repeat(path: Path, digest: int) -> None:
    """Raises CorpusError for the repeated id behind `digest`; returns if two different ids merely share the 8 bytes."""
    first: dict[str, int] = {}
    for number, passage in _rows(path):
        if id_digest(passage.id) != digest:
            continue
        if passage.id in first:
            raise CorpusError(
                f"{path}, line {number}: id {passage.id!r} was used in line {first[passage.id]} already; ids must be "
                "unique (titles may repeat)"
            )
        first[passage.id] = number
