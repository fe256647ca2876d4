"""What every retriever shares: passages, hits, errors and the two seams, Retriever and Encoder."""

from __future__ import annotations

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
