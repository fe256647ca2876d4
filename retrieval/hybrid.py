"""Several retrievers as one, by reciprocal rank fusion."""

from __future__ import annotations

from collections.abc import Sequence, Sized

from turngym.retrieval.checks import check_request
from turngym.retrieval.core import Hit, Passage, RetrievalError, Retriever

DEPTH = 50
"""Hits asked of every part: what one of them ranks 40th can still win when another ranks it first."""


class HybridRetriever:
    """A passage scores `sum over parts of weight / (constant + rank)`, ranks from 1; equal scores go by id.

    Ranks alone count, so parts need no common scale. Source: [rrf]; docs/algorithms.md#rank-fusion (constant 60).
    """

    def __init__(
        self,
        parts: Sequence[Retriever],
        *,
        constant: float = 60.0,
        depth: int = DEPTH,
        weights: Sequence[float] | None = None,
    ) -> None:
        """Fuse `parts`, which must serve the same corpus: passages are the same where their ids are.

        Raises:
            RetrievalError: no parts, or not one positive weight for each.
        """
        weights = [1.0] * len(parts) if weights is None else list(weights)
        if not parts or len(weights) != len(parts) or min(weights) <= 0:
            raise RetrievalError(
                f"{len(parts)} parts with weights {weights}; a hybrid needs parts, each weight above 0"
            )
        if constant < 0 or depth < 1:
            raise RetrievalError(f"constant {constant} and depth {depth}; they must be at least 0 and 1")
        self._parts, self._weights, self._constant, self._depth = tuple(parts), weights, constant, depth

    @property
    def fingerprint(self) -> str:
        inside = ",".join(
            f"{weight:g}*{part.fingerprint}" for weight, part in zip(self._weights, self._parts, strict=True)
        )
        return f"rrf:constant={self._constant:g}:depth={self._depth}[{inside}]"

    def __len__(self) -> int:
        """Passages that can be found; 0 where no part knows."""
        return max((len(part) for part in self._parts if isinstance(part, Sized)), default=0)

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        check_request(queries, k)
        found = [part.search(queries, max(k, self._depth)) for part in self._parts]
        return [self._fuse(lists, k) for lists in zip(*found, strict=True)] if queries else []

    def close(self) -> None:
        for part in self._parts:
            part.close()

    def _fuse(self, lists: Sequence[Sequence[Hit]], k: int) -> list[Hit]:
        scores: dict[str, float] = {}
        passages: dict[str, Passage] = {}
        for weight, hits in zip(self._weights, lists, strict=True):
            for rank, hit in enumerate(hits, 1):
                name = hit.passage.id
                passages.setdefault(name, hit.passage)
                scores[name] = scores.get(name, 0.0) + weight / (self._constant + rank)
        best = sorted(scores, key=lambda name: (-scores[name], name))[:k]
        return [Hit(passage=passages[name], score=scores[name]) for name in best]
