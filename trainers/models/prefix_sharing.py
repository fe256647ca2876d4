"""Rows that begin with the same tokens, packed into one row that holds their shared prefix once.

The hinted prompt of every turn repeats the whole history before it, so that a teacher who reads one row per turn reads
an episode of T turns about T / 2 times. In a packed row with a mask it reads the history once: the longest row comes
first and whole, then the tokens of every other row that are not in the prefix which it shares with the first. A token
attends to the shared prefix and to its own row, never to another row's tokens.
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
"""Of a packed row: its attention mask has a byte for every pair of tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixGroup:
    """Rows in one packed row: `rows[0]` whole, then of every other row m what follows its first `shared[m]` tokens.

    `shared[0]` is 0. Member m fills `starts[m] .. starts[m + 1]` of the packed row; `starts` has one entry more than
    `rows`.
    """

    rows: tuple[int, ...]
    shared: IntArray
    starts: IntArray

    @property
    def length(self) -> int:
        """Tokens of the packed row, L."""
        return int(self.starts[-1])

    def packed_row(self, ids: Sequence[NDArray[np.int32]]) -> NDArray[np.int64]:
        """Ids of the packed row: int64 [L]."""
        parts = [ids[row][shared:] for row, shared in zip(self.rows, self.shared, strict=True)]
        return np.concatenate(parts).astype(np.int64)

    def positions(self) -> IntArray:
        """Position of each packed token in its own row, as the position embedding needs it: int64 [L]."""
        sizes = np.diff(self.starts)
        return np.concatenate([np.arange(s, s + n) for s, n in zip(self.shared, sizes, strict=True)]).astype(np.int64)

    def mask(self) -> NDArray[np.bool_]:
        """Whether a packed token (first axis) attends to another (second axis): bool [L, L]."""
        whole = int(self.starts[1])
        sees = np.zeros((self.length, self.length), np.bool_)
        sees[:whole, :whole] = np.tri(whole, dtype=np.bool_)
        for shared, start, stop in zip(self.shared[1:], self.starts[1:-1], self.starts[2:], strict=True):
            # all of the shared prefix lies before the row's own tokens, which are causal among themselves
            sees[start:stop, :shared] = True
            sees[start:stop, start:stop] = np.tri(stop - start, dtype=np.bool_)
        return sees

    def indices(self, member: int, positions: IntArray) -> IntArray:
        """Where in the packed row the tokens at `positions` of row `rows[member]` are."""
        shared, start = self.shared[member], self.starts[member]
        return np.where(positions < shared, positions, start + positions - shared)


def prefix_groups(ids: Sequence[NDArray[np.int32]], max_tokens: int) -> Iterator[PrefixGroup]:
    """Every row in one group; neighbors are grouped where they share a quarter of the shorter one or more.

    A packed row has at most `max_tokens` tokens (and `MOST_TOKENS`), unless a single row is longer.
    """
    limit, members = min(max_tokens, MOST_TOKENS), [0] if ids else []
    for row in range(1, len(ids)):
        grown = [*members, row]
        alike = 4 * shared_tokens(ids[row - 1], ids[row]) >= min(len(ids[row - 1]), len(ids[row]))
        if alike and _group(ids, grown).length <= limit:
            members = grown
        else:
            yield _group(ids, members)
            members = [row]
    if members:
        yield _group(ids, members)


def shared_tokens(one: NDArray[np.int32], two: NDArray[np.int32]) -> int:
    """How many tokens both begin with."""
    size = min(len(one), len(two))
    differs = np.flatnonzero(one[:size] != two[:size])
    return int(differs[0]) if len(differs) else size


def group_states(model: Any, ids: Sequence[NDArray[np.int32]], group: PrefixGroup) -> torch.Tensor:
    """Hidden states [L, D] of the group's packed row."""
    return hidden_states(model, group.packed_row(ids)[None], group.positions()[None], group.mask()[None])


def supports_prefix_sharing(model: Any) -> bool:
    """Whether `model` obeys the mask of a packed row: three rows in one, compared with each alone.

    Attention in sdpa does; recurrent layers, which carry their state across, and flash attention do not.
    """
    # they branch off after different tokens, so that a wrong mask as well as a wrong position moves some state
    rows = [np.array(row, np.int32) for row in ([3, 1, 4, 1, 5, 9, 2], [3, 1, 4, 6, 5], [3, 1, 4, 1, 8, 8])]
    (group,) = prefix_groups(rows, MOST_TOKENS)
    with torch.no_grad():
        alone = torch.cat([hidden_states(model, row[None].astype(np.int64)) for row in rows]).float()
        try:
            packed = group_states(model, rows, group).float()
        except (RuntimeError, ValueError, NotImplementedError):
            return False
    order = [int(np.flatnonzero(np.array(group.rows) == row)[0]) for row in range(len(rows))]
    where = [group.indices(member, np.arange(len(row))) for member, row in zip(order, rows, strict=True)]
    gap = float((alone - packed[torch.from_numpy(np.concatenate(where)).to(packed.device)]).abs().max())
    return gap <= TOLERANCE.get(next(model.parameters()).dtype, 0.1) * float(alone.abs().max())


def _group(ids: Sequence[NDArray[np.int32]], rows: Sequence[int]) -> PrefixGroup:
    # the longest stays whole, so that every prefix that the others share with it is in the packed row
    longest = max(rows, key=lambda row: len(ids[row]))
    ordered = (longest, *(row for row in rows if row != longest))
    # a row that is wholly a prefix of the longest keeps its last token, so that no member is empty
    shared = [min(shared_tokens(ids[longest], ids[row]), len(ids[row]) - 1) for row in ordered[1:]]
    sizes = [len(ids[row]) - begin for row, begin in zip(ordered, [0, *shared], strict=True)]
    starts = np.cumsum([0, *sizes]).astype(np.int64)
    return PrefixGroup(rows=ordered, shared=np.array([0, *shared], np.int64), starts=starts)
