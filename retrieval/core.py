"""What every retriever shares: passages, hits, errors and the two seams, Retriever and Encoder."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


class RetrievalError(Exception):
    """Base of every error that retrieval raises on purpose; its text says what, which value, where, what is valid."""


class RetrieverUnavailable(RetrievalError):
    """The machinery failed (dead server, deadline passed, garbage answered): never the same as finding nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """One row of a corpus. Titles repeat in real corpora; only `id` is a key."""

    id: str
    title: str
    text: str

    @property
    def contents(self) -> str:
        """Search-R1's one-string form: the title in quotation marks, a newline, the text."""
        return f'"{self.title}"\n{self.text}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """A passage found, with the score that ranked it (higher is better)."""

    passage: Passage
    score: float


class Retriever(Protocol):
    """Finds passages. One instance serves many environments and threads."""

    @property
    def fingerprint(self) -> str:
        """Fixes what is found: corpus, kind of index and its settings. Goes into task hashes and reports."""

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """For each query at most `k` (>= 1) hits, best first; fewer or none where nothing else matches.

        Raises:
            RetrieverUnavailable: the answer could not be had; never an empty list instead.
        """

    def close(self) -> None:
        """Free what it holds; twice is fine."""


class Encoder(Protocol):
    """Turns text into vectors for dense retrieval."""

    @property
    def dim(self) -> int: ...

    @property
    def fingerprint(self) -> str:
        """Fixes the vectors: model, weights, pooling, prefixes, normalization."""

    def encode_queries(self, texts: Sequence[str]) -> np.ndarray:
        """float32 `[len(texts), dim]`."""

    def encode_passages(self, passages: Sequence[Passage]) -> np.ndarray:
        """float32 `[len(passages), dim]`."""


# Checks that every retriever makes before it searches.


def check_request(queries: Sequence[str], k: int) -> None:
    """Refuse one string in place of a sequence of them, and k below 1.

    Raises:
        RetrievalError: either of the two.
    """
    if isinstance(queries, str):
        raise RetrievalError(f"queries is the string {queries[:40]!r}; give a sequence of strings")
    if k < 1:
        raise RetrievalError(f"k={k}: at least one passage must be asked for")


# Threads, locks and connections do not survive a fork; objects that hold some are told so in the child.


class Renewable(Protocol):
    """Holds what a forked child must not share."""

    def renew(self) -> None:
        """Start afresh in a child process: new locks, no threads, no connections; forget, do not close."""


_LIVING: weakref.WeakSet[Renewable] = weakref.WeakSet()


def renew_in_children(thing: Renewable) -> None:
    """Call `thing.renew()` in every child that this process forks while `thing` lives."""
    _LIVING.add(thing)


def _renew_all() -> None:
    for thing in list(_LIVING):
        thing.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_all)
