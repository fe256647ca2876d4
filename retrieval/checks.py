"""Checks that every retriever makes before it searches."""

from __future__ import annotations

from collections.abc import Sequence

from turngym.retrieval.core import RetrievalError


def check_request(queries: Sequence[str], k: int) -> None:
    """Refuse one string in place of a sequence of them, and k below 1.

    Raises:
        RetrievalError: either of the two.
    """
    if isinstance(queries, str):
        raise RetrievalError(f"queries is the string {queries[:40]!r}; give a sequence of strings")
    if k < 1:
        raise RetrievalError(f"k={k}: at least one passage must be asked for")
