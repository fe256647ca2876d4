"""Builds an index: in memory, or on disk in runs that a killed build can take up again."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from turngym.retrieval.blobs import BlobWriter, map_array
from turngym.retrieval.core import RetrievalError
from turngym.retrieval.lucene.build_folder import Workshop
from turngym.retrieval.lucene.files import write_manifest
from turngym.retrieval.lucene.parts import Parts, Settings, Statistics, TermTable, peaks_of, rank_ids
from turngym.retrieval.lucene.runs import Run, RunBuilder, merge
from turngym.retrieval.lucene.scoring import encode_lengths, inverse_norms

RUN_TOKENS = 1 << 23
"""Words of a run on disk; about 300 MB of memory while it is sorted."""
_PROGRESS = 1000
"""Documents between two calls of `progress`."""

Progress = Callable[[int], None]


def build_index(
    docs: Iterable[tuple[str, str]], folder: Path | None, settings: Settings, progress: Progress | None = None
) -> Parts | None:
    """The parts in memory, or None where they were written to `folder`."""
    content = ContentHash()
    if folder is None:
        builder = RunBuilder()
        for name, text in docs:
            builder.add(content.update(name, text), text)
            if progress is not None and content.count % _PROGRESS == 0:
                progress(content.count)
        return _in_memory(builder.finish(), settings, content)
    with Workshop(folder) as workshop:
        _write_runs(docs, workshop, content, progress)
        _assemble(workshop, settings, content)
    return None


class ContentHash:
    """sha256 over ids and texts, lengths first, so that nothing can shift between them."""

    def __init__(self) -> None:
        self._sha = hashlib.sha256()
        self.count = 0

    def update(self, name: str, text: str) -> bytes:
        """Take one document; its id as bytes.

        Raises:
            RetrievalError: the id is empty or no text.
        """
        # arrays of fixed-width bytes drop a NUL at the end: two ids could become one
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
    docs: Iterable[tuple[str, str]], workshop: Workshop, content: ContentHash, progress: Progress | None
) -> None:
    """Read all documents into runs; runs that are there already are kept while the documents are the same."""
    builder, held = RunBuilder(), []
    for name, text in docs:
        key = content.update(name, text)
        expected = workshop.expected
        if expected is None:
            builder.add(key, text)
        else:
            # not analyzed yet: a run that is kept needs none of it
            held.append((key, text))
            if content.count == expected.documents:
                if content.hexdigest() == expected.content:
                    workshop.accept()
                else:
                    workshop.forget()
                    _add_all(builder, held)
                held = []
        if builder.tokens >= RUN_TOKENS:
            workshop.save(builder.finish(), content.count, content.hexdigest())
            builder = RunBuilder(builder.memo)
        if progress is not None and content.count % _PROGRESS == 0:
            progress(content.count)
    if held:
        workshop.forget()
        _add_all(builder, held)
    # no documents at all are one empty run, for merging needs one
    if len(builder) or not workshop.runs:
        workshop.save(builder.finish(), content.count, content.hexdigest())


def _add_all(builder: RunBuilder, held: Sequence[tuple[bytes, str]]) -> None:
    for key, text in held:
        builder.add(key, text)


def _assemble(workshop: Workshop, settings: Settings, content: ContentHash) -> None:
    """Merge the runs into the final files and put them in place."""
    runs = [Run.load(path) for path in workshop.runs]
    final = workshop.fresh()
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
    workshop.publish()
