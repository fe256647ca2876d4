"""How a BM25 index is built: in memory, or on disk in runs that a killed build can take up again.

    documents -> RunBuilder -> Run 0, Run 1, ... (about 8 million words each) -> merge -> the final files

A run has the sorted postings of a stretch of documents. Only one run is in memory at a time, so memory stays bounded.
An index on disk is made in the folder `<target>.building`, in which each run has a folder of its own.
"""

from __future__ import annotations

import hashlib
import heapq
import shutil
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

import numpy as np

from turngym.core.errors import RetrievalError
from turngym.core.manifest import describe_files, write_manifest
from turngym.core.memory_mapped import ArrayWriter, BlobStore, BlobWriter, map_array
from turngym.retrieval.bm25_index import (
    MANIFEST,
    VERSION,
    BM25Manifest,
    IndexArrays,
    Settings,
    Statistics,
    TermTable,
    is_index,
    peaks_of,
    rank_ids,
)
from turngym.retrieval.bm25_scores import encode_lengths, inverse_norms
from turngym.retrieval.core import build_folder, build_lock, real_folder
from turngym.retrieval.lucene_text import ANALYSIS, term_of, words

RUN_TOKENS = 1 << 23
"""Words of a run on disk; sorting one takes about 300 MB of memory."""
_PROGRESS = 1000
"""Documents between two calls of `progress`."""
Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PostingsRun:
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
    def load(cls, folder: Path) -> PostingsRun:
        arrays = {name: map_array(folder / f"{name}.npy") for name in ("lengths", "starts", "rows", "tfs")}
        return cls(ids=BlobStore(folder / "ids"), terms=BlobStore(folder / "terms"), **arrays)


class _Numbers(dict[str, int]):
    """The number of each word's term; -1 for words without one (stop words)."""

    def __init__(self) -> None:
        super().__init__()
        self.terms: dict[str, int] = {}

    def __missing__(self, word: str) -> int:
        term = term_of(word)
        number = self[word] = self.terms.setdefault(term, len(self.terms)) if term else -1
        return number


class RunBuilder:
    """Collects documents for a `PostingsRun`."""

    def __init__(self) -> None:
        self._numbers = _Numbers()
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

    def finish(self) -> PostingsRun:
        """Sorts what was collected. The builder cannot be used again."""
        flat = np.frombuffer(self._flat, np.int32) if self._flat else np.zeros(0, np.int32)
        count = len(self._ids)
        sizes = np.diff(np.frombuffer(self._ends, np.int64)).astype(np.int64)
        owners = np.repeat(np.arange(count, dtype=np.int64), sizes)
        is_word = flat >= 0
        flat, owners = flat[is_word], owners[is_word]
        lengths = np.bincount(owners, minlength=count).astype(np.int32)
        # number the terms by code point, the order of UTF-8 bytes that merging and lookups rely on
        terms = sorted(self._numbers.terms)
        places = np.empty(len(terms), np.int64)
        places[[self._numbers.terms[term] for term in terms]] = np.arange(len(terms))
        # one number per word, which sorts by term and then by document; runs of equal ones give the frequencies
        keys = places[flat] * max(count, 1)
        keys += owners
        keys.sort()
        firsts = np.flatnonzero(np.diff(keys, prepend=-1))
        tfs = np.diff(firsts, append=len(keys))
        by_term, rows = np.divmod(keys[firsts], max(count, 1))
        starts = np.searchsorted(by_term, np.arange(len(terms) + 1))
        return PostingsRun(
            ids=self._ids,
            lengths=lengths,
            terms=[term.encode("utf-8", "surrogatepass") for term in terms],
            starts=starts.astype(np.int64),
            rows=rows.astype(np.int32),
            tfs=narrow(tfs),
        )


def narrow(counts: np.ndarray) -> np.ndarray:
    """Returns `counts` in the smallest unsigned type that holds them."""
    return counts.astype(np.min_scalar_type(int(counts.max(initial=0))))


def merge(runs: Sequence[PostingsRun], folder: Path) -> None:
    """Writes terms, starts, rows and tfs of all runs, in order, to `folder`."""
    bases = np.cumsum([0, *(len(run.lengths) for run in runs)])
    tf_type = max((run.tfs.dtype for run in runs), key=lambda dtype: dtype.itemsize)

    def entries(number: int) -> Iterator[tuple[bytes, int, int]]:
        return ((term, number, index) for index, term in enumerate(runs[number].terms))

    with (
        BlobWriter(folder / "terms") as terms,
        ArrayWriter(folder / "starts.npy", np.int64) as starts,
        ArrayWriter(folder / "rows.npy", np.int32) as rows,
        ArrayWriter(folder / "tfs.npy", tf_type) as tfs,
    ):
        starts.append(0)
        edges = [run.starts.tolist() for run in runs]
        # equal terms come in the order of their runs, so that the rows of a term ascend
        merged = heapq.merge(*(entries(number) for number in range(len(runs))))
        for term, parts in groupby(merged, key=lambda entry: entry[0]):
            terms.append(term)
            for _, number, index in parts:
                start, end = edges[number][index], edges[number][index + 1]
                rows.extend(runs[number].rows[start:end] + np.int32(bases[number]))
                tfs.extend(runs[number].tfs[start:end])
            starts.append(rows.rows)


def build_index(
    docs: Iterable[tuple[str, str]], folder: Path | None, settings: Settings, progress: Progress | None = None
) -> IndexArrays | None:
    """Builds in memory and returns the parts, or builds in `folder` and returns None.

    Raises:
        RetrievalError: an id repeats or is no text, the folder or the one beside it in which it is built holds
            something else, or another process builds it.
    """
    content = ContentHash()
    if folder is None:
        builder = RunBuilder()
        for name, text in docs:
            builder.add(content.update(name, text), text)
            if progress is not None and content.count % _PROGRESS == 0:
                progress(content.count)
        return _in_memory(builder.finish(), settings, content)
    if folder.exists() and not (folder.is_dir() and (is_index(folder) or not any(folder.iterdir()))):
        raise RetrievalError(f"{folder} exists and is no BM25 index; name an empty or a new folder")
    folder = real_folder(folder)
    work = build_folder(folder)
    with build_lock(work, lambda name: name in ("new", "old", "final") or name.startswith("run-")):
        try:
            final = _assemble(_write_runs(docs, work, content, progress), work, settings, content)
        except RetrievalError:
            # only a build that was cut off is worth continuing: bad input would be bad again
            shutil.rmtree(work, ignore_errors=True)
            raise
        if folder.exists():
            folder.rename(_fresh(work / "old"))
        final.rename(folder)
        shutil.rmtree(work, ignore_errors=True)
    return None


def _fresh(path: Path) -> Path:
    """`path`, where there is nothing."""
    shutil.rmtree(path, ignore_errors=True)
    return path


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


def _in_memory(run: PostingsRun, settings: Settings, content: ContentHash) -> IndexArrays:
    statistics = _statistics(run.lengths, content)
    norms = encode_lengths(run.lengths)
    inverses = inverse_norms(settings.k1, settings.b, statistics.tokens, statistics.scored)
    return IndexArrays(
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
    docs: Iterable[tuple[str, str]], work: Path, content: ContentHash, progress: Progress | None
) -> list[Path]:
    """Reads all documents into runs. Those that a killed build left are kept as long as the documents are the same."""
    runs: list[Path] = []
    earlier = sorted(work.glob("run-*"))
    builder = RunBuilder()
    waiting: list[tuple[bytes, str]] = []
    """Documents that are not analyzed yet, because a run that is kept does not need it."""

    def analyze() -> None:
        for document in waiting:
            builder.add(*document)
        waiting.clear()

    def save() -> None:
        nonlocal builder
        scratch = _fresh(work / "new")
        builder.finish().save(scratch)
        runs.append(scratch.rename(work / _run_name(len(runs), content)))
        builder = RunBuilder()

    def forget() -> None:
        while earlier:
            # renamed first: a run that is half removed must not be taken for a whole one
            shutil.rmtree(earlier.pop().rename(_fresh(work / "new")))

    for name, text in docs:
        waiting.append((content.update(name, text), text))
        if earlier and content.count == int(earlier[0].name.split("-")[2]):
            if earlier[0].name == _run_name(len(runs), content):
                runs.append(earlier.pop(0))
                waiting.clear()
            else:
                forget()
        if not earlier:
            analyze()
        if builder.tokens >= RUN_TOKENS:
            save()
        if progress is not None and content.count % _PROGRESS == 0:
            progress(content.count)
    forget()
    analyze()
    # without any documents there is one empty run, because merging needs one
    if len(builder) or not runs:
        save()
    return runs


def _run_name(number: int, content: ContentHash) -> str:
    """The folder of a run that ends with the last document of `content`: says how many there are, and seals them."""
    seal = hashlib.sha256(f"{VERSION} {ANALYSIS} {content.hexdigest()}".encode()).hexdigest()
    return f"run-{number:05d}-{content.count}-{seal[:32]}"


def _assemble(paths: Sequence[Path], work: Path, settings: Settings, content: ContentHash) -> Path:
    """Merges the runs into the final files and returns their folder."""
    runs = [PostingsRun.load(path) for path in paths]
    final = _fresh(work / "final")
    final.mkdir()
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
    files = describe_files(final, (path.name for path in final.iterdir()))
    manifest = BM25Manifest(settings=settings, statistics=statistics, files=files)
    write_manifest(final / MANIFEST, asdict(manifest))
    return final
