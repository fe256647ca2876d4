"""Postings of a stretch of documents, made in memory, written sorted, and merged: memory stays bounded."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np

from turngym.retrieval.blobs import ArrayWriter, BlobStore, BlobWriter, map_array
from turngym.retrieval.lucene.analysis import TermMemo
from turngym.retrieval.lucene.words import words

_BUFFER = 1 << 20
"""Postings collected before they are written."""
_MEMO = 1 << 19
"""Words whose terms are remembered from one run to the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Documents in a row: their ids and lengths, and their postings by ascending term. Rows count from 0."""

    ids: Sequence[bytes]
    lengths: np.ndarray
    """int32 `[documents]`: terms of each."""
    terms: Sequence[bytes]
    starts: np.ndarray
    """int64 `[terms + 1]`."""
    rows: np.ndarray
    """int32 `[postings]`."""
    tfs: np.ndarray
    """uint32, or smaller where that holds them, `[postings]`."""

    def save(self, folder: Path) -> None:
        """Write the run to a folder of its own."""
        folder.mkdir()
        for name in ("ids", "terms"):
            with BlobWriter(folder / name) as writer:
                writer.extend(getattr(self, name))
        for name in ("lengths", "starts", "rows", "tfs"):
            np.save(folder / f"{name}.npy", getattr(self, name))

    @classmethod
    def load(cls, folder: Path) -> Run:
        """A saved run, mapped."""
        arrays = {name: map_array(folder / f"{name}.npy") for name in ("lengths", "starts", "rows", "tfs")}
        return cls(ids=BlobStore(folder / "ids"), terms=BlobStore(folder / "terms"), **arrays)


class _Numbers(dict[str, int]):
    """Number of the term of each word seen; -1 for words without one."""

    def __init__(self, memo: TermMemo) -> None:
        super().__init__()
        self.terms: dict[str, int] = {}
        self._memo = memo

    def __missing__(self, word: str) -> int:
        term = self._memo[word]
        number = self[word] = self.terms.setdefault(term, len(self.terms)) if term else -1
        return number


class RunBuilder:
    """Collects documents until they are made a `Run`."""

    def __init__(self, memo: TermMemo | None = None) -> None:
        self.memo = TermMemo(_MEMO) if memo is None else memo
        """Hand it to the builder of the next run."""
        self._numbers = _Numbers(self.memo)
        self._flat = array("i")
        self._ends = array("q", [0])
        self._ids: list[bytes] = []

    @property
    def tokens(self) -> int:
        """Words collected."""
        return len(self._flat)

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, name: bytes, text: str) -> None:
        """Analyse one document."""
        # a dict's own lookup, so that no Python code runs for a word seen before
        self._flat.extend(map(self._numbers.__getitem__, words(text)))
        self._ends.append(len(self._flat))
        self._ids.append(name)

    def finish(self) -> Run:
        """Sort what was collected; the builder is spent."""
        flat = np.frombuffer(self._flat, np.int32) if self._flat else np.zeros(0, np.int32)
        count = len(self._ids)
        owners = np.repeat(
            np.arange(count, dtype=np.int64), np.diff(np.frombuffer(self._ends, np.int64)).astype(np.int64)
        )
        kept = flat >= 0
        flat, owners = flat[kept], owners[kept]
        lengths = np.bincount(owners, minlength=count).astype(np.int32)
        # by code point, which is the order of UTF-8 bytes that merging and lookups rely on
        terms = sorted(self._numbers.terms)
        places = np.empty(len(terms), np.int64)
        places[[self._numbers.terms[term] for term in terms]] = np.arange(len(terms))
        keys = places[flat] * max(count, 1)
        keys += owners
        keys.sort()
        first = np.flatnonzero(np.diff(keys, prepend=-1))
        tfs = np.diff(first, append=len(keys))
        by_term, rows = np.divmod(keys[first], max(count, 1))
        starts = np.searchsorted(by_term, np.arange(len(terms) + 1))
        return Run(
            ids=self._ids,
            lengths=lengths,
            terms=[term.encode("utf-8", "surrogatepass") for term in terms],
            starts=starts.astype(np.int64),
            rows=rows.astype(np.int32),
            tfs=narrow(tfs),
        )


def narrow(counts: np.ndarray) -> np.ndarray:
    """The same counts in the smallest unsigned type that holds them."""
    return counts.astype(np.min_scalar_type(int(counts.max(initial=0))))


def merge(runs: Sequence[Run], folder: Path, progress: Callable[[int], None] | None = None) -> None:
    """Write terms, starts, rows and tfs of all runs, in order, to `folder`; `progress` gets the terms written."""
    bases = np.cumsum([0, *(len(run.lengths) for run in runs)])
    tf_type = max((run.tfs.dtype for run in runs), key=lambda kind: kind.itemsize)

    def entries(number: int) -> Iterator[tuple[bytes, int, int]]:
        return ((term, number, place) for place, term in enumerate(runs[number].terms))

    with (
        BlobWriter(folder / "terms") as terms,
        ArrayWriter(folder / "starts.npy", np.int64) as starts,
        _Buffered(ArrayWriter(folder / "rows.npy", np.int32)) as rows,
        _Buffered(ArrayWriter(folder / "tfs.npy", tf_type)) as tfs,
    ):
        fresh = [0]
        edges = [run.starts.tolist() for run in runs]
        # equal terms come in the order of their runs, so that the rows of a term ascend
        merged = heapq.merge(*(entries(number) for number in range(len(runs))))
        for term, parts in groupby(merged, key=lambda entry: entry[0]):
            terms.append(term)
            for _, number, place in parts:
                start, end = edges[number][place], edges[number][place + 1]
                rows.add(runs[number].rows[start:end] + np.int32(bases[number]))
                tfs.add(runs[number].tfs[start:end])
            fresh.append(rows.count)
            if len(fresh) >= _BUFFER:
                starts.extend(fresh)
                fresh = []
                if progress is not None:
                    progress(len(terms))
        starts.extend(fresh)


class _Buffered:
    """Collects short arrays and writes them together."""

    def __init__(self, writer: ArrayWriter) -> None:
        self._writer = writer
        self._parts: list[np.ndarray] = []
        self._waiting = 0
        self.count = 0

    def add(self, part: np.ndarray) -> None:
        self._parts.append(part)
        self.count += len(part)
        self._waiting += len(part)
        if self._waiting >= _BUFFER or len(self._parts) >= _BUFFER // 16:
            self._flush()

    def _flush(self) -> None:
        if self._parts:
            self._writer.extend(np.concatenate(self._parts))
        self._parts, self._waiting = [], 0

    def __enter__(self) -> _Buffered:
        return self

    def __exit__(self, *_: object) -> None:
        self._flush()
        self._writer.close()
