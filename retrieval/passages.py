"""The passages of an index on disk: read by row or by id, mapped, so that processes share the pages."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import overload

import numpy as np

from turngym.retrieval.blobs import BlobStore, BlobWriter
from turngym.retrieval.checksums import check_manifest, sealed
from turngym.retrieval.core import Passage, RetrievalError

_HEAD = struct.Struct("<II")
"""Bytes of the id and of the title; the text is the rest of the record."""


class CorpusHash:
    """sha256 over passages in order: the same for every file form and any white space between JSON fields."""

    def __init__(self) -> None:
        self._sha = hashlib.sha256()
        self.count = 0

    def update(self, passage: Passage) -> None:
        parts = [part.encode("utf-8") for part in (passage.id, passage.title, passage.text)]
        # Lengths first, so that no shift of characters between fields gives the same bytes.
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
    """8 bytes that stand for an id."""
    return int.from_bytes(hashlib.blake2b(name.encode("utf-8"), digest_size=8).digest(), "little")


class PassageWriter:
    """Writes a passage store row by row; `finish` makes it readable."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._blobs = BlobWriter(self._folder / "passages", checked=True)
        self._digests: list[np.ndarray] = []
        self._fresh: list[int] = []
        self._sha = CorpusHash()

    def add(self, passage: Passage) -> None:
        name, title = passage.id.encode("utf-8"), passage.title.encode("utf-8")
        self._blobs.append(_HEAD.pack(len(name), len(title)) + name + title + passage.text.encode("utf-8"))
        self._sha.update(passage)
        self._fresh.append(id_digest(passage.id))
        if len(self._fresh) >= 65_536:
            self._pack()

    def finish(self) -> None:
        """Write the id table and the content hash; the store is complete when `passages.json` is there."""
        self._blobs.close()
        self._pack()
        digests = np.concatenate(self._digests) if self._digests else np.zeros(0, np.uint64)
        order = np.argsort(digests, kind="stable")
        np.save(self._folder / "ids.npy", np.stack([digests[order], order.astype(np.uint64)]))
        head = {"count": self._sha.count, "sha256": self._sha.hexdigest()}
        (self._folder / "passages.json").write_text(json.dumps(sealed(head)) + "\n", encoding="utf-8")

    def _pack(self) -> None:
        self._digests.append(np.array(self._fresh, np.uint64))
        self._fresh = []


class PassageStore(Sequence[Passage]):
    """Passages by row (`store[row]`) and by id (`store.row(id)`), read from mapped files. Safe across threads."""

    def __init__(self, folder: str | Path) -> None:
        """Open what `PassageWriter` finished.

        Raises:
            RetrievalError: the folder holds no complete store.
        """
        folder = Path(folder)
        try:
            head = json.loads((folder / "passages.json").read_text(encoding="utf-8"))
            check_manifest(head)
            self.sha256: str = head["sha256"]
            self._ids = np.load(folder / "ids.npy", mmap_mode="r")
            self._blobs = BlobStore(folder / "passages")
        except (OSError, ValueError, KeyError) as error:
            raise RetrievalError(f"{folder}: no complete passage store ({error}); build the index again") from error
        if not len(self._blobs) == head["count"] == self._ids.shape[1]:
            raise RetrievalError(
                f"{folder}: {len(self._blobs)} records, {self._ids.shape[1]} ids, but passages.json says "
                f"{head['count']}; build the index again"
            )

    @classmethod
    def build(cls, passages: Iterable[Passage], folder: str | Path) -> PassageStore:
        """Write all passages to `folder` and open it."""
        writer = PassageWriter(folder)
        for passage in passages:
            writer.add(passage)
        writer.finish()
        return cls(folder)

    def __len__(self) -> int:
        return len(self._blobs)

    @overload
    def __getitem__(self, row: int) -> Passage: ...
    @overload
    def __getitem__(self, row: slice) -> Sequence[Passage]: ...
    def __getitem__(self, row: int | slice) -> Passage | Sequence[Passage]:
        if isinstance(row, slice):
            return [self[place] for place in range(*row.indices(len(self)))]
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of {len(self)} passages")
        record = self._blobs[int(row) % len(self)]
        name, title = _HEAD.unpack_from(record)
        start = _HEAD.size
        return Passage(
            id=str(record[start : start + name], "utf-8"),
            title=str(record[start + name : start + name + title], "utf-8"),
            text=str(record[start + name + title :], "utf-8"),
        )

    def __iter__(self) -> Iterator[Passage]:
        return (self[row] for row in range(len(self)))

    def row(self, name: str) -> int | None:
        """The row of the passage with this id; None if there is none."""
        digest = np.uint64(id_digest(name))
        place = int(np.searchsorted(self._ids[0], digest))
        # two ids may share a digest
        while place < self._ids.shape[1] and self._ids[0, place] == digest:
            row = int(self._ids[1, place])
            if self[row].id == name:
                return row
            place += 1
        return None

    def get(self, name: str) -> Passage | None:
        """The passage with this id; None if there is none."""
        row = self.row(name)
        return None if row is None else self[row]

    def close(self) -> None:
        self._blobs.close()

    def __enter__(self) -> PassageStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
