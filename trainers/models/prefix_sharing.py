"""Rows that begin alike as one line: a trunk, and branches that see their part of the trunk and themselves.

The hinted prompt of every turn repeats the whole history before it, so that a teacher who reads one row per turn reads
an episode of T turns about T / 2 times. In a line with branches it reads the history once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from turngym.trainers.models.model import hidden_states
from turngym.trainers.models.packing import TOLERANCE

IntArray = NDArray[np.int64]
MOST_TOKENS = 16384
"""Of a line with branches: its mask has a byte for every pair of tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """Row `rows[0]` (the trunk, L_0 tokens), then of every other row b what comes after its `shared[b]` first tokens.

    `shared[0]` is 0. Branch b fills `starts[b] .. starts[b + 1]` of the line; `starts` has one entry more than `rows`.
    """

    rows: tuple[int, ...]
    shared: IntArray
    starts: IntArray

    @property
    def length(self) -> int:
        """Tokens of the line, L."""
        return int(self.starts[-1])

    def line(self, ids: Sequence[NDArray[np.int32]]) -> NDArray[np.int64]:
        """Ids of the line: int64 [L]."""
        parts = [ids[row][shared:] for row, shared in zip(self.rows, self.shared, strict=True)]
        return np.concatenate(parts).astype(np.int64)

    def positions(self) -> IntArray:
        """Where each token of the line is in its own row: int64 [L]."""
        sizes = np.diff(self.starts)
        return np.concatenate([np.arange(s, s + n) for s, n in zip(self.shared, sizes, strict=True)]).astype(np.int64)

    def mask(self) -> NDArray[np.bool_]:
        """Whether the token of the line (first axis) sees that one (second axis): bool [L, L]."""
        trunk = int(self.starts[1])
        sees = np.zeros((self.length, self.length), np.bool_)
        sees[:trunk, :trunk] = np.tri(trunk, dtype=np.bool_)
        for shared, start, stop in zip(self.shared[1:], self.starts[1:-1], self.starts[2:], strict=True):
            sees[start:stop, :shared] = True
            sees[start:stop, start:stop] = np.tri(stop - start, dtype=np.bool_)
        return sees

    def places(self, branch: int, positions: IntArray) -> IntArray:
        """Where in the line the tokens at `positions` of row `rows[branch]` are."""
        shared, start = self.shared[branch], self.starts[branch]
        return np.where(positions < shared, positions, start + positions - shared)


def bundles(ids: Sequence[NDArray[np.int32]], max_tokens: int) -> Iterator[Bundle]:
    """Every row in one bundle; neighbors come together where they begin alike for a quarter of the shorter one.

    A line has at most `max_tokens` tokens (and `MOST_TOKENS`), unless a single row is longer.
    """
    limit, members = min(max_tokens, MOST_TOKENS), [0] if ids else []
    for row in range(1, len(ids)):
        grown = [*members, row]
        alike = 4 * common(ids[row - 1], ids[row]) >= min(len(ids[row - 1]), len(ids[row]))
        if alike and _bundle(ids, grown).length <= limit:
            members = grown
        else:
            yield _bundle(ids, members)
            members = [row]
    if members:
        yield _bundle(ids, members)


def common(one: NDArray[np.int32], two: NDArray[np.int32]) -> int:
    """Tokens that both begin with."""
    size = min(len(one), len(two))
    differs = np.flatnonzero(one[:size] != two[:size])
    return int(differs[0]) if len(differs) else size


def bundle_states(model: Any, ids: Sequence[NDArray[np.int32]], bundle: Bundle) -> torch.Tensor:
    """Hidden states [L, D] of the bundle's line."""
    return hidden_states(model, bundle.line(ids)[None], bundle.positions()[None], bundle.mask()[None])


def understands_branches(model: Any) -> bool:
    """Whether `model` keeps branches apart: three rows in one line, against each alone.

    Attention in sdpa does; recurrent layers, which carry their state across, and flash attention do not.
    """
    rows = [np.array(row, np.int32) for row in ([3, 1, 4, 1, 5, 9, 2], [3, 1, 4, 6, 5], [3, 1, 4, 1, 8, 8])]
    (bundle,) = bundles(rows, MOST_TOKENS)
    with torch.no_grad():
        apart = torch.cat([hidden_states(model, row[None].astype(np.int64)) for row in rows]).float()
        try:
            line = bundle_states(model, rows, bundle).float()
        except (RuntimeError, ValueError, NotImplementedError):
            return False
    order = [int(np.flatnonzero(np.array(bundle.rows) == row)[0]) for row in range(len(rows))]
    where = [bundle.places(branch, np.arange(len(row))) for branch, row in zip(order, rows, strict=True)]
    gap = float((apart - line[torch.from_numpy(np.concatenate(where)).to(line.device)]).abs().max())
    return gap <= TOLERANCE.get(next(model.parameters()).dtype, 0.1) * float(apart.abs().max())


def _bundle(ids: Sequence[NDArray[np.int32]], rows: Sequence[int]) -> Bundle:
    trunk = max(rows, key=lambda row: len(ids[row]))
    ordered = (trunk, *(row for row in rows if row != trunk))
    # a row that is wholly in the trunk keeps its last token, so that no branch is empty
    shared = [min(common(ids[trunk], ids[row]), len(ids[row]) - 1) for row in ordered[1:]]
    sizes = [len(ids[row]) - begin for row, begin in zip(ordered, [0, *shared], strict=True)]
    return Bundle(rows=ordered, shared=np.array([0, *shared], np.int64), starts=np.cumsum([0, *sizes]).astype(np.int64))
