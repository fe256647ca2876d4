"""What every retriever shares: passages, hits, errors, the protocols Retriever and Encoder, a build lock."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from turngym.core.errors import RetrievalError
from turngym.core.files import LOCK, locked_folder
from turngym.core.plugin_values import Refusal, answers, checked_number, checked_text, failures_of
from turngym.core.redaction import brief, excerpt


class RetrieverUnavailable(RetrievalError):
    """The search failed (dead server, deadline passed, unreadable answer): never the same as finding nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """One row of a corpus. Titles repeat in real corpora, so only `id` is a key."""

    id: str
    title: str
    text: str

    @property
    def contents(self) -> str:
        """Search-R1's one-string form: the title in quotation marks, a newline, the text."""
        return f'"{self.title}"\n{self.text}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """A passage that was found, with the score that ranked it (higher is better)."""

    passage: Passage
    score: float


class Retriever(Protocol):
    """Finds passages. One instance serves many environments and threads."""

    @property
    def fingerprint(self) -> str:
        """Identifies corpus, kind of index and settings; goes into task hashes and reports."""

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """Finds for each query `k` (>= 1) hits at most, best first; fewer or none if nothing else matches.

        Raises:
            RetrieverUnavailable: the search failed; an empty list is never returned instead.
        """

    def close(self) -> None:
        """Frees what it holds. Twice is fine."""


class Encoder(Protocol):
    """Turns text into vectors for dense retrieval."""

    @property
    def dim(self) -> int: ...

    @property
    def fingerprint(self) -> str:
        """Identifies model, weights, pooling, prefixes and normalization: equal ones give the same vectors."""

    def encode_queries(self, texts: Sequence[str]) -> np.ndarray:
        """float32 `[len(texts), dim]`."""

    def encode_passages(self, passages: Sequence[Passage]) -> np.ndarray:
        """float32 `[len(passages), dim]`."""


def vector_size(encoder: Encoder) -> int:
    """The `dim` of an encoder. Raises RetrievalError unless it is a whole number of at least 1."""
    # NumPy's whole numbers too
    if isinstance(encoder.dim, bool) or not isinstance(encoder.dim, Integral) or encoder.dim < 1:
        raise RetrievalError(f"the encoder's dim is {brief(encoder.dim, 80)}; it must be a whole number from 1")
    return int(encoder.dim)


def query_vectors(encoder: Encoder, texts: Sequence[str]) -> NDArray[np.float32]:
    """Encodes `texts` as queries with any package's encoder, and checks the result (`checked_vectors`). Raises
    RetrieverUnavailable if it fails."""
    with failures_of("the encoder", encoder, RetrieverUnavailable):
        vectors = encoder.encode_queries(texts)
    return checked_vectors(vectors, len(texts), vector_size(encoder))


def passage_vectors(encoder: Encoder, passages: Sequence[Passage]) -> NDArray[np.float32]:
    """Encodes passages as `query_vectors` does queries."""
    with failures_of("the encoder", encoder, RetrieverUnavailable):
        vectors = encoder.encode_passages(passages)
    return checked_vectors(vectors, len(passages), vector_size(encoder))


def checked_vectors(output: object, texts: int, dim: int) -> NDArray[np.float32]:
    """Checks an encoder's vectors of `texts` texts, and returns them as contiguous float32 `[texts, dim]`.

    Raises RetrieverUnavailable for another shape, other types than numbers, and values that are not finite: a search
    with them finds nothing, or anything.
    """
    due = f"floats [{texts}, {dim}] are due"
    try:
        array = np.asarray(output)
    # ragged lists; a tensor that has a gradient or lies on another device
    except (TypeError, ValueError, RuntimeError) as error:
        raise RetrieverUnavailable(f"the encoder gave {brief(output, 80)}; {due}") from error
    if array.shape != (texts, dim):
        raise RetrieverUnavailable(f"the encoder gave shape {list(array.shape)} for {texts} texts; {due}")
    # NumPy would read texts and dates as numbers, and leave out what is imaginary
    if array.dtype.kind not in "fiu":
        raise RetrieverUnavailable(f"the encoder gave {array.dtype}; {due}")
    # what is beyond float32 becomes infinite
    with np.errstate(over="ignore"):
        vectors = np.ascontiguousarray(array, np.float32)
    if not (fine := np.isfinite(vectors).all(1)).all():
        raise RetrieverUnavailable(f"the encoder's vector of text {int(np.argmin(fine))} of {texts} is not finite")
    return vectors


def searched(retriever: Retriever, queries: Sequence[str], k: int) -> list[tuple[Hit, ...]]:
    """The hits of any package's retriever for each query, checked.

    Raises RetrieverUnavailable for another number of answers, and where `checked_hits` refuses one.
    """
    hit_lists = answers("the retriever", retriever.search(queries, k), len(queries), object, RetrieverUnavailable)
    return [checked_hits(hits, k) for hits in hit_lists]


def checked_hits(answer: object, most: int) -> tuple[Hit, ...]:
    """The hits of any package's retriever or reranker for one query, checked.

    Raises RetrieverUnavailable for anything but at most `most` hits, for passages that are no text, and for a score
    that is not finite.
    """
    hits = answer if isinstance(answer, list | tuple) else (answer,)
    if len(hits) > most:
        raise RetrieverUnavailable(f"the retriever gave {len(hits)} hits; at most {most} were asked for")
    checked: list[Hit] = []
    for hit in hits:
        if not isinstance(hit, Hit) or not isinstance(hit.passage, Passage):
            raise RetrieverUnavailable(f"the retriever gave {brief(hit, 80)}; it must be a list of Hit for each query")
        checked_passage(hit.passage, "a passage that was found", RetrieverUnavailable)
        score = checked_number(f"the score of passage {hit.passage.id!r}", hit.score, error=RetrieverUnavailable)
        checked.append(hit if type(hit.score) is float else replace(hit, score=score))
    return tuple(checked)


def checked_passage(passage: Passage, what: str, error: Refusal = RetrievalError) -> Passage:
    """Returns `passage`. Raises `error` if it is not a Passage, or one of its fields is not a text."""
    if not isinstance(passage, Passage):
        raise error(f"{what} is {brief(passage, 80)}; it must be a Passage")
    for name in ("id", "title", "text"):
        checked_text(f"the {name} of {what}", getattr(passage, name), error=error)
    return passage


def check_request(queries: Sequence[str], k: int) -> None:
    """Raises RetrievalError if `queries` is one string, or holds anything but strings, or k is not a whole number of at
    least 1."""
    if isinstance(queries, str):
        raise RetrievalError(f"queries is the string {excerpt(queries, 40)!r}; give a sequence of strings")
    for query in queries:
        checked_text("a query", query, error=RetrievalError)
    # NumPy's whole numbers too
    if isinstance(k, bool) or not isinstance(k, Integral) or k < 1:
        raise RetrievalError(f"k={k!r}: a whole number of passages must be asked for, at least 1")


def build_folder(out: Path) -> Path:
    """The folder in which `out` is built, beside it."""
    return out.with_name(out.name + ".building")


def real_folder(out: Path) -> Path:
    """`out`, or the folder that it leads to if it is a link: what is built goes there, and the link stays."""
    return Path(os.path.realpath(out)) if out.is_symlink() else out


@contextmanager
def build_lock(
    folder: Path, is_ours: Callable[[str], bool], error: type[RetrievalError] = RetrievalError
) -> Iterator[None]:
    """Makes the caller the only one who builds in `folder` (`locked_folder`).

    Raises `error` where the folder holds a name that is not `is_ours`: a build removes what is there.
    """
    if folder.exists() and not folder.is_dir():
        raise error(f"{folder} is a file, and the build needs a folder of this name; move it away")
    with locked_folder(folder):
        if foreign := sorted(path.name for path in folder.iterdir() if path.name != LOCK and not is_ours(path.name)):
            raise error(f"{folder}, where the build works, holds {foreign[0]!r}, which no build has left; move it away")
        yield


# Threads, locks and connections do not survive a fork. Objects that hold some register here to be told in the child.


class Renewable(Protocol):
    """Holds something that a forked child must not share."""

    def renew(self) -> None:
        """Starts afresh in a child process: new locks, no threads, no connections. It must close nothing."""


_LIVING: weakref.WeakSet[Renewable] = weakref.WeakSet()


def renew_in_children(thing: Renewable) -> None:
    """Calls `thing.renew()` in every child that this process forks while `thing` lives."""
    _LIVING.add(thing)


def _renew() -> None:
    for thing in list(_LIVING):
        thing.renew()


os.register_at_fork(after_in_child=_renew)
