"""How a BM25 index is built: in memory, or on disk in runs that a killed build can take up again.

    documents -> RunBuilder -> Run 0, Run 1, ... (about 8 million words each) -> merge -> the final files

A run has the sorted postings of a stretch of documents. Only one run is in memory at a time, so memory stays bounded.
`BuildFolder` is the folder `<target>.building` where an index on disk is made.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import os
import shutil
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from types import TracebackType

import numpy as np

from turngym.retrieval.core import RetrievalError, build_lock
from turngym.retrieval.lucene_postings import (
    VERSION,
    Parts,
    Settings,
    Statistics,
    TermTable,
    encode_lengths,
    inverse_norms,
    is_index,
    peaks_of,
    rank_ids,
    write_manifest,
)
from turngym.retrieval.lucene_text import ANALYSIS, TermMemo, words
from turngym.retrieval.mapped import ArrayWriter, BlobStore, BlobWriter, map_array

_BUFFER = 1 << 20
"""Postings that are collected before they are written."""
_MEMO = 1 << 19
"""Words whose terms are remembered from one run to the next."""
RUN_TOKENS = 1 << 23
"""Words of a run on disk; sorting one takes about 300 MB of memory."""
_PROGRESS = 1000
"""Documents between two calls of `progress`."""
Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The ids and lengths of documents in a row, and their postings by ascending term. Rows count from 0."""

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
        """Writes the run to a new folder of its own."""
        folder.mkdir()
        for name in ("ids", "terms"):
            with BlobWriter(folder / name) as writer:
                writer.extend(getattr(self, name))
        for name in ("lengths", "starts", "rows", "tfs"):
            np.save(folder / f"{name}.npy", getattr(self, name))

    @classmethod
    def load(cls, folder: Path) -> Run:
        """Maps a saved run."""
        arrays = {name: map_array(folder / f"{name}.npy") for name in ("lengths", "starts", "rows", "tfs")}
        return cls(ids=BlobStore(folder / "ids"), terms=BlobStore(folder / "terms"), **arrays)


class _Numbers(dict[str, int]):
    """The number of each word's term; -1 for words without one (stop words)."""

    def __init__(self, memo: TermMemo) -> None:
        super().__init__()
        self.terms: dict[str, int] = {}
        self._memo = memo

    def __missing__(self, word: str) -> int:
        term = self._memo[word]
        number = self[word] = self.terms.setdefault(term, len(self.terms)) if term else -1
        return number


class RunBuilder:
    """Collects documents for a `Run`."""

    def __init__(self, memo: TermMemo | None = None) -> None:
        self.memo = TermMemo(_MEMO) if memo is None else memo
        """Is handed to the builder of the next run."""
        self._numbers = _Numbers(self.memo)
        self._flat = array("i")
        self._ends = array("q", [0])
        self._ids: list[bytes] = []

    @property
    def tokens(self) -> int:
        """Number of words collected."""
        return len(self._flat)

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, name: bytes, text: str) -> None:
        """Analyzes one document."""
        # a dict's own lookup, so that no Python code runs for a word that was seen before
        self._flat.extend(map(self._numbers.__getitem__, words(text)))
        self._ends.append(len(self._flat))
        self._ids.append(name)

    def finish(self) -> Run:
        """Sorts what was collected. The builder cannot be used again."""
        flat = np.frombuffer(self._flat, np.int32) if self._flat else np.zeros(0, np.int32)
        count = len(self._ids)
        owners = np.repeat(
            np.arange(count, dtype=np.int64), np.diff(np.frombuffer(self._ends, np.int64)).astype(np.int64)
        )
        kept = flat >= 0
        flat, owners = flat[kept], owners[kept]
        lengths = np.bincount(owners, minlength=count).astype(np.int32)
        # number the terms by code point, the order of UTF-8 bytes that merging and lookups rely on
        terms = sorted(self._numbers.terms)
        places = np.empty(len(terms), np.int64)
        places[[self._numbers.terms[term] for term in terms]] = np.arange(len(terms))
        # one number per word, which sorts by term and then by document; runs of equal ones give the frequencies
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


def merge(runs: Sequence[Run], folder: Path) -> None:
    """Writes terms, starts, rows and tfs of all runs, in order, to `folder`."""
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
        starts.extend(fresh)


class _Buffered:
    """Collects short arrays, and writes them together."""

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


_STATE = "state.json"


@dataclass(frozen=True, slots=True)
class Expected:
    """A run that an earlier build left."""

    documents: int
    """Documents up to its end, those of the runs before it included."""
    content: str
    """Content hash of these documents."""


class BuildFolder:
    """The folder `<target>.building`, as a context manager: locked, and moved to the target at the end.

    The runs that a killed build left in it are offered one by one (`expected`), to be accepted or forgotten.

    Raises:
        RetrievalError: the target holds something that is no index, or another process builds it.
    """

    def __init__(self, target: Path) -> None:
        self.target = target
        self.folder = target.with_name(target.name + ".building")
        self.runs: list[Path] = []
        """Runs of this build, in order."""
        self._left: list[Expected] = []
        self._lock = ExitStack()

    def __enter__(self) -> BuildFolder:
        target = self.target
        if target.exists() and not (target.is_dir() and (is_index(target) or not any(target.iterdir()))):
            raise RetrievalError(f"{self.target} exists and is no BM25 index; name an empty or a new folder")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock.enter_context(build_lock(self.folder))
        self._left = self._read_state()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.close()
        # only a build that was cut off is worth continuing: bad input would be bad again
        if kind is None or issubclass(kind, RetrievalError) or not self._left:
            shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def expected(self) -> Expected | None:
        """The next run that an earlier build left."""
        return self._left[len(self.runs)] if len(self.runs) < len(self._left) else None

    def accept(self) -> None:
        """Keeps the expected run, because the documents are those that it was made of."""
        self.runs.append(self._run(len(self.runs)))

    def forget(self) -> None:
        """Drops the expected run and those after it, because the documents differ."""
        del self._left[len(self.runs) :]
        self._write_state()

    def save(self, run: Run, documents: int, content: str) -> None:
        """Writes the next run."""
        path = self._run(len(self.runs))
        shutil.rmtree(path, ignore_errors=True)
        run.save(path)
        self.runs.append(path)
        self._left.append(Expected(documents, content))
        self._write_state()

    def fresh(self) -> Path:
        """An empty folder for the final files."""
        path = self.folder / "final"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        return path

    def publish(self) -> None:
        """Puts the final files in the place of whatever index was there."""
        old = self.folder / "old"
        shutil.rmtree(old, ignore_errors=True)
        if self.target.exists():
            self.target.rename(old)
        (self.folder / "final").rename(self.target)

    def _run(self, number: int) -> Path:
        return self.folder / f"run-{number:05d}"

    def _write_state(self) -> None:
        state = {"made_by": [VERSION, ANALYSIS], "runs": [[run.documents, run.content] for run in self._left]}
        scratch = self.folder / f"{_STATE}.new"
        scratch.write_text(json.dumps(state), encoding="utf-8")
        os.replace(scratch, self.folder / _STATE)

    def _read_state(self) -> list[Expected]:
        try:
            state = json.loads((self.folder / _STATE).read_text(encoding="utf-8"))
            if state["made_by"] != [VERSION, ANALYSIS]:
                return []
            return [Expected(int(documents), str(content)) for documents, content in state["runs"]]
        except (OSError, ValueError, LookupError, TypeError):
            return []


def build_index(
    docs: Iterable[tuple[str, str]], folder: Path | None, settings: Settings, progress: Progress | None = None
) -> Parts | None:
    """Builds in memory and returns the parts, or builds in `folder` and returns None."""
    content = ContentHash()
    if folder is None:
        builder = RunBuilder()
        for name, text in docs:
            builder.add(content.update(name, text), text)
            if progress is not None and content.count % _PROGRESS == 0:
                progress(content.count)
        return _in_memory(builder.finish(), settings, content)
    with BuildFolder(folder) as build:
        _write_runs(docs, build, content, progress)
        _assemble(build, settings, content)
    return None


class ContentHash:
    """sha256 over ids and texts. Lengths come first, so that no characters can shift between the two."""

    def __init__(self) -> None:
        self._sha = hashlib.sha256()
        self.count = 0

    def update(self, name: str, text: str) -> bytes:
        """Adds one document and returns its id as bytes.

        Raises:
            RetrievalError: the id is empty or no text.
        """
        # arrays of fixed-width bytes drop a NUL at the end, so two ids could become one
        if not name or "\0" in name:
            raise RetrievalError(f"document {self.count} (counted from 0): id {name!r} is empty or has a NUL in it")
        try:
            key = name.encode("utf-8")
        except UnicodeEncodeError:
            raise RetrievalError(
                f"document {self.count} (counted from 0): id {name!r} has half a surrogate pair"
            ) from None
        body = text.encode("utf-8", "surrogatepass")
        self._sha.update(b"%d %d\n" % (len(key), len(body)) + key + body)
        self.count += 1
        return key

    def hexdigest(self) -> str:
        return self._sha.hexdigest()


def _statistics(lengths: np.ndarray, content: ContentHash) -> Statistics:
    return Statistics(
        documents=content.count,
        scored=int(np.count_nonzero(lengths)),
        tokens=int(lengths.sum(dtype=np.int64)),
        content=content.hexdigest(),
    )


def _in_memory(run: Run, settings: Settings, content: ContentHash) -> Parts:
    statistics = _statistics(run.lengths, content)
    norms = encode_lengths(run.lengths)
    inverses = inverse_norms(settings.k1, settings.b, statistics.tokens, statistics.scored)
    return Parts(
        settings=settings,
        statistics=statistics,
        terms=TermTable(run.terms),
        ids=[name.decode("utf-8") for name in run.ids],
        starts=run.starts,
        rows=run.rows,
        tfs=run.tfs,
        peaks=peaks_of(run.starts, run.rows, run.tfs, inverses[norms]),
        norms=norms,
        ranks=rank_ids(run.ids),
    )


def _write_runs(
    docs: Iterable[tuple[str, str]], build: BuildFolder, content: ContentHash, progress: Progress | None
) -> None:
    """Reads all documents into runs. Runs that are there already are kept as long as the documents are the same."""
    builder, held = RunBuilder(), []
    for name, text in docs:
        key = content.update(name, text)
        expected = build.expected
        if expected is None:
            builder.add(key, text)
        else:
            # not analyzed yet, because a run that is kept does not need it
            held.append((key, text))
            if content.count == expected.documents:
                if content.hexdigest() == expected.content:
                    build.accept()
                else:
                    build.forget()
                    _add_all(builder, held)
                held = []
        if builder.tokens >= RUN_TOKENS:
            build.save(builder.finish(), content.count, content.hexdigest())
            builder = RunBuilder(builder.memo)
        if progress is not None and content.count % _PROGRESS == 0:
            progress(content.count)
    if held:
        build.forget()
        _add_all(builder, held)
    # without any documents there is one empty run, because merging needs one
    if len(builder) or not build.runs:
        build.save(builder.finish(), content.count, content.hexdigest())


def _add_all(builder: RunBuilder, held: Sequence[tuple[bytes, str]]) -> None:
    for key, text in held:
        builder.add(key, text)


def _assemble(build: BuildFolder, settings: Settings, content: ContentHash) -> None:
    """Merges the runs into the final files and puts them in place."""
    runs = [Run.load(path) for path in build.runs]
    final = build.fresh()
    merge(runs, final)
    with BlobWriter(final / "ids") as ids:
        for run in runs:
            ids.extend(run.ids)
    lengths = np.concatenate([run.lengths for run in runs])
    statistics = _statistics(lengths, content)
    norms = encode_lengths(lengths)
    np.save(final / "norms.npy", norms)
    np.save(final / "ranks.npy", rank_ids([name for run in runs for name in run.ids]))
    inverses = inverse_norms(settings.k1, settings.b, statistics.tokens, statistics.scored)[norms]
    starts, rows, tfs = (map_array(final / f"{name}.npy") for name in ("starts", "rows", "tfs"))
    np.save(final / "peaks.npy", peaks_of(starts, rows, tfs, inverses))
    write_manifest(final, settings, statistics)
    build.publish()
