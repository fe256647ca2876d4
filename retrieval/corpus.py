"""How a passage corpus is read from a file, identified by a hash, and stored by row.

`read_corpus` yields the checked rows of a file. `PassageWriter` and `PassageStore` keep the passages of an index in
mapped files, which processes share.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from turngym.core.closing import Closes
from turngym.core.errors import RetrievalError
from turngym.core.manifest import read_manifest, write_manifest
from turngym.core.memory_mapped import BlobStore, BlobWriter
from turngym.core.redaction import brief
from turngym.core.rows import absent, read_rows, show
from turngym.core.sequences import LazySequence
from turngym.core.user_files import text_problem
from turngym.retrieval.core import Passage

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
        write_manifest(self._folder / "passages.json", head)


class PassageStore(LazySequence[Passage], Closes):
    """Passages by row (`store[row]`), read from mapped files; threads may share it."""

    def __init__(self, folder: str | Path) -> None:
        """Opens what `PassageWriter` finished. Raises RetrievalError if the folder holds no complete store."""
        folder = Path(folder)
        path = folder / "passages.json"
        head = read_manifest(path, dict[str, Any], lambda why: RetrievalError(f"{why}; build the index again"))
        self.sha256: str = head["sha256"]
        self._blobs = BlobStore(folder / "passages")

    def __len__(self) -> int:
        return len(self._blobs)

    def item(self, index: int) -> Passage:
        record = self._blobs.item(index)
        id_bytes, title_bytes = _HEAD.unpack_from(record)
        start = _HEAD.size
        title, text = start + id_bytes, start + id_bytes + title_bytes
        return Passage(
            id=str(record[start:title], "utf-8"),
            title=str(record[title:text], "utf-8"),
            text=str(record[text:], "utf-8"),
        )

    def close(self) -> None:
        self._blobs.close()


FORMS = '{"id": ..., "contents": "\\"Title\\"\\ntext"} or {"id": ..., "title": ..., "text": ...}'


class CorpusError(RetrievalError):
    """A corpus file cannot be used; the error names the file, the line and the value."""


def read_corpus(path: str | Path) -> Iterator[Passage]:
    """Yields the passages of a file in file order, holding one row at a time.

    Both of Search-R1's forms are read, `{"id", "contents": "\\"Title\\"\\ntext"}` and `{"id", "title", "text"}`, and
    `_id` as BEIR has it, from every file that `read_rows` reads. Numbers as ids become text. Titles may repeat, ids may
    not: they are remembered as 8 bytes each, and a repeated id is reported at the end of the file.

    Raises:
        CorpusError: no file, no rows, a row that is not JSON, not UTF-8, without id or contents, or a repeated id.
    """
    path = Path(path)
    digests = array("Q")
    for _, passage in _passages(path):
        digests.append(id_digest(passage.id))
        yield passage
    values, counts = np.unique(np.array(digests, np.uint64), return_counts=True)
    for digest in values[counts > 1].tolist():
        _report_repeat(path, digest)


def parse_row(row: Any, where: str) -> Passage:
    """The passage of one decoded JSON row; `where` (file and line) goes into errors.

    Null and NaN are the same as a missing field; every other value must be a string (an id may be a whole number). A
    text may be empty: an index has a place for it, and no word finds it.
    """
    if not isinstance(row, dict):
        raise CorpusError(f"{where}: a row must be a JSON object {FORMS}, not {show(row)}")
    row = {name: value for name, value in row.items() if not absent(value)}
    field = "id" if "id" in row or "_id" not in row else "_id"
    name = row.get(field)
    if isinstance(name, bool) or not isinstance(name, (str, int)) or not str(name).strip():
        problem = "no id" if field not in row else f"id {show(name)}"
        raise CorpusError(f"{where}: {problem}; every row needs an id, a string or a whole number")
    name = str(name)
    if (fault := text_problem(name)) is not None:
        raise CorpusError(f"{where}: the id {fault}")
    if "\0" in name:
        raise CorpusError(f"{where}: id {name!r} has a NUL in it; remove it")
    which_row = f"of row {show(name)}"
    if "contents" in row:
        # the first line is the title; a single line is one only in quotation marks
        contents = _string(row, "contents", where, which_row)
        first_line, newline, text = contents.partition("\n")
        first_line = first_line.removesuffix("\r")
        quoted = len(first_line) >= 2 and first_line.startswith('"') and first_line.endswith('"')
        title = first_line[1:-1] if quoted else first_line
        if not newline and not quoted:
            title, text = "", contents
    elif "text" in row:
        title = _string(row, "title", where, which_row) if "title" in row else ""
        text = _string(row, "text", where, which_row)
    else:
        raise CorpusError(f"{where}: row {show(name)} has no contents, only {brief(sorted(row), 200)}; write {FORMS}")
    return Passage(id=name, title=title, text=text)


def _passages(path: Path) -> Iterator[tuple[str, Passage]]:
    """Yields (place in the file, passage) of every row."""
    if not path.exists():
        raise CorpusError(f"{path}: there is no such corpus file")
    has_rows = False
    for row in read_rows(path, FORMS, CorpusError):
        has_rows = True
        yield row.place, parse_row(row.value, f"{path}, {row.place}")
    if not has_rows:
        raise CorpusError(f"{path}: no passages in it; a corpus has one JSON object per line: {FORMS}")


def _string(row: dict[str, Any], key: str, where: str, which_row: str) -> str:
    value = row[key]
    if not isinstance(value, str):
        raise CorpusError(f"{where}: {key} {which_row} is {show(value)}; it must be a string")
    if (problem := text_problem(value)) is not None:
        raise CorpusError(f"{where}: {key} {which_row} {problem}")
    return value


def _report_repeat(path: Path, digest: int) -> None:
    """Raises CorpusError for the repeated id behind `digest`; returns if two different ids merely share the 8 bytes."""
    first: dict[str, str] = {}
    for place, passage in _passages(path):
        if id_digest(passage.id) != digest:
            continue
        if passage.id in first:
            raise CorpusError(
                f"{path}, {place}: id {show(passage.id)} was used in {first[passage.id]} already; ids must be "
                "unique (titles may repeat)"
            )
        first[passage.id] = place
