"""Scorers with log-probabilities that can be worked out in the head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from turngym.core.episode import TopK


@dataclass(frozen=True)
class Slope:
    """Id i has log-probability `slope` times i; the likeliest ids at position p are `first` + p and those after it."""

    slope: float
    first: int = 0
    lost: int = 0
    """How many answers of the last row it loses."""
    asked: list[Any] = field(default_factory=list)

    def _note(self, ids: Sequence[Any], positions: Sequence[Any]) -> None:
        assert all(row.dtype == np.int32 for row in ids)
        self.asked.append(([row.tolist() for row in ids], [where.tolist() for where in positions]))

    def logprobs(self, ids: Sequence[Any], positions: Sequence[Any]) -> list[Any]:
        self._note(ids, positions)
        logps = [(self.slope * row[where]).astype(np.float32) for row, where in zip(ids, positions, strict=True)]
        return [*logps[:-1], logps[-1][self.lost :]]

    def topk(self, ids: Sequence[Any], positions: Sequence[Any], k: int) -> list[TopK]:
        self._note(ids, positions)
        tops = [(self.first + where[:, None] + np.arange(k)).astype(np.int32) for where in positions]
        return [TopK(ids=top, logp=(self.slope * top).astype(np.float32)) for top in tops]
