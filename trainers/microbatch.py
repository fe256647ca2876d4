"""Micro-batches: which rows of a batch go through the model together, and how they lie in its input.

Three ways: every row in a line of its own (`split_rows`, `pad_rows`), all rows of a pass in one line (`packed_rows`),
and, for scoring only, rows that begin alike with their shared prefix read once (`prefix_groups`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from turngym.trainers.batch import BatchError, BoolArray, IntArray, RolloutBatch
from turngym.trainers.config import ConfigError, Packing
from turngym.trainers.models import can_keep_rows_apart, hidden_states, rows_apart
from turngym.trainers.world import World, balanced_shares


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Some rows of a batch and every supervised token in them.

    `rows` int64 [r], longest first; `tokens` int64 [n], indices in N, ordered as the rows are. Each row is a line of
    its own, or all lie behind one another in one line (`packed`).
    """

    rows: IntArray
    tokens: IntArray
    packed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedRows:
    """A micro-batch as the model reads it, padded on the right to L tokens.

    `input_ids_RL` int64 [r, L]; `attention_RL` bool [r, L]; `predictor_n` int64 [n] indexes the flattened [r * L]
    hidden states, in the order of `MicroBatch.tokens`. `position_RL` int64 [1, L] where rows share the line: every row
    begins at 0.
    """

    input_ids_RL: IntArray
    attention_RL: BoolArray
    predictor_n: IntArray
    position_RL: IntArray | None = None


def split_rows(batch: RolloutBatch, max_tokens: int, rows: IntArray | None = None) -> list[MicroBatch]:
    """Micro-batches of rows sorted by length, longest first, each at most `max_tokens` tokens after padding.

    Padding is rows times the longest row. A row longer than `max_tokens` comes alone. Together they hold every row (of
    `rows`, int64, if given) and its supervised tokens once, so a sum of weighted losses over them is the sum over all.
    Errors: `BatchError` if `max_tokens` is below 1.
    """
    if max_tokens < 1:
        raise BatchError(f"max_tokens is {max_tokens}; a micro-batch needs at least 1 token")
    lengths = np.diff(batch.row_offsets)
    # rows of like length together waste little padding; stable, so that a run repeats itself exactly
    order = np.argsort(-lengths, kind="stable")
    if rows is not None:
        order = order[np.isin(order, rows)]
    return [micro_batch(batch, order[start:stop]) for start, stop in _cuts(lengths[order], max_tokens)]


Split = Callable[[RolloutBatch, int, IntArray | None], list[MicroBatch]]
"""`split_rows` or `split_packed`."""


def micro_batches(batch: RolloutBatch, max_tokens: int, world: World, split: Split = split_rows) -> list[MicroBatch]:
    """This process's share of `split(batch, max_tokens)`: whole episodes, about as many tokens as the others'.

    All processes get equally many micro-batches, for a sharded model computes in step; those without work of their own
    get empty ones at the end.
    """
    lengths = np.diff(batch.row_offsets)
    # a row has at least one supervised token, whose episode is the row's
    episode_R = batch.episode_N[np.searchsorted(batch.row_N, np.arange(batch.rows))]
    tokens_E = np.bincount(episode_R, weights=lengths, minlength=batch.episodes)
    shares = [np.flatnonzero(np.isin(episode_R, members)) for members in balanced_shares(tokens_E, world.size)]
    # everybody splits all shares: the largest number of micro-batches is then known without asking
    all_shares = [split(batch, max_tokens, rows) for rows in shares]
    empty = MicroBatch(rows=np.empty(0, np.int64), tokens=np.empty(0, np.int64))
    own, largest = all_shares[world.rank], max(map(len, all_shares))
    return own + [empty] * (largest - len(own))


def micro_batch(batch: RolloutBatch, rows: Sequence[int] | IntArray, *, packed: bool = False) -> MicroBatch:
    """The micro-batch of these rows, with every supervised token in them."""
    chosen = np.asarray(rows, np.int64)
    first, last = np.searchsorted(batch.row_N, chosen), np.searchsorted(batch.row_N, chosen + 1)
    tokens = np.concatenate([np.arange(start, stop) for start, stop in zip(first, last, strict=True)])
    return MicroBatch(rows=chosen, tokens=tokens.astype(np.int64), packed=packed)


def pad_rows(batch: RolloutBatch, micro: MicroBatch, pad_id: int = 0) -> PaddedRows:
    """The rows of `micro` padded on the right with `pad_id`, and where in them each supervised token is predicted.

    A micro-batch without rows becomes one row of padding in which nothing is predicted.
    Errors: `BatchError` for a row outside the batch.
    """
    if len(micro.rows) == 0:
        # the model must run all the same: other processes wait for this one wherever a layer gathers its parameters
        nothing = np.full((1, 1), pad_id, np.int64)
        return PaddedRows(input_ids_RL=nothing, attention_RL=nothing < 0, predictor_n=np.empty(0, np.int64))
    if micro.rows.min() < 0 or micro.rows.max() >= batch.rows:
        raise BatchError(f"rows {micro.rows.tolist()} are not rows of this batch; valid are 0..{batch.rows - 1}")
    lengths = np.diff(batch.row_offsets)[micro.rows]
    lines, width = (1, int(lengths.sum())) if micro.packed else (len(micro.rows), int(lengths.max()))
    starts = np.cumsum(lengths) - lengths if micro.packed else np.arange(lines) * width
    input_ids = np.full(lines * width, pad_id, dtype=np.int64)
    attention = np.zeros(lines * width, dtype=np.bool_)
    positions = np.zeros(lines * width, dtype=np.int64)
    start_of_row = np.zeros(batch.rows, dtype=np.int64)
    start_of_row[micro.rows] = starts
    for row, start, length in zip(micro.rows, starts, lengths, strict=True):
        place = slice(start, start + length)
        input_ids[place] = batch.input_ids_M[batch.row_offsets[row] : batch.row_offsets[row + 1]]
        attention[place], positions[place] = True, np.arange(length)
    position = batch.position_M[batch.predictor_N[micro.tokens]]
    predictor = start_of_row[batch.row_N[micro.tokens]] + position
    return PaddedRows(
        input_ids_RL=input_ids.reshape(lines, width),
        attention_RL=attention.reshape(lines, width),
        predictor_n=predictor,
        position_RL=positions.reshape(lines, width) if micro.packed else None,
    )


def _cuts(lengths: IntArray, max_tokens: int) -> Iterator[tuple[int, int]]:
    """Half-open ranges of rows, given their lengths in descending order."""
    start = 0
    while start < len(lengths):
        size = max(1, int(max_tokens // lengths[start]))
        stop = min(start + size, len(lengths))
        yield start, stop
        start = stop


# The rows of a pass behind one another in one long row, each seeing only itself: no padding to compute.

TOLERANCE = {torch.float32: 1e-4}
"""How far hidden states may differ, relative to the largest; 0.1 in other precisions. Rows that see each other differ
by far more."""


def packed_rows(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Row numbers, longest first, cut into passes of at most `max_tokens` tokens; a longer row comes alone."""
    passes: list[list[int]] = []
    left = 0
    for row in np.argsort(-np.asarray(lengths, np.int64), kind="stable").tolist():
        if not passes or lengths[row] > left:
            passes.append([])
            left = max_tokens
        passes[-1].append(row)
        left -= lengths[row]
    return passes


def in_one_line(rows: Sequence[NDArray[np.int32]]) -> tuple[NDArray[np.int64], IntArray]:
    """The ids of `rows` behind one another and the position of each in its row, both int64 [1, L]."""
    ids, positions = np.concatenate(rows), np.concatenate([np.arange(len(row)) for row in rows])
    return ids[None].astype(np.int64), positions[None]


def split_packed(batch: RolloutBatch, max_tokens: int, rows: IntArray | None = None) -> list[MicroBatch]:
    """`split_rows` whose passes are one line each. Errors: `BatchError` if `max_tokens` is below 1."""
    if max_tokens < 1:
        raise BatchError(f"max_tokens is {max_tokens}; a micro-batch needs at least 1 token")
    chosen = np.arange(batch.rows) if rows is None else np.unique(rows)
    lengths = np.diff(batch.row_offsets)[chosen].tolist()
    return [micro_batch(batch, chosen[part], packed=True) for part in packed_rows(lengths, max_tokens)]


def resolved(packing: Packing, model: Any) -> Packing:
    """`off` in the place of `auto` for a model that does not keep rows apart; ConfigError if it has to."""
    if packing == "auto":
        try:
            check_packing(model)
        # models that know no positions, or no ids as small as those of the trial, say so in many ways
        except (ConfigError, RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
            return "off"
    elif packing == "on":
        check_packing(model)
    return packing


def check_packing(model: Any) -> None:
    """Raise ConfigError unless `model` keeps rows that share a line apart: two rows, alone and behind one another."""
    name = type(model).__name__
    if not can_keep_rows_apart(model):
        raise ConfigError(f"--packing on: {name} has layers other than sdpa attention; train it with padded rows")
    one, two = np.array([[3, 1, 4, 1, 5]]), np.array([[9, 2, 6]])
    line, positions = np.concatenate([one, two], axis=1), np.array([[0, 1, 2, 3, 4, 0, 1, 2]])
    with torch.no_grad(), rows_apart(model):
        apart = torch.cat([hidden_states(model, one), hidden_states(model, two)]).float()
        packed = hidden_states(model, line, positions).float()
    gap, size = float((apart - packed).abs().max()), float(apart.abs().max())
    # `not <=`, for a model that gives NaN is refused too
    if not gap <= TOLERANCE.get(next(model.parameters()).dtype, 0.1) * size:
        raise ConfigError(
            f"--packing on: {name} lets rows in one line see each other (hidden states differ by {gap:.1e} of "
            f"{size:.1e}); train it with padded rows"
        )


# Rows that begin with the same tokens, packed into one row that holds their shared prefix once.
#
# The hinted prompt of every turn repeats the whole history before it, so that a teacher who reads one row per turn
# reads an episode of T turns about T / 2 times. In a packed row with a mask it reads the history once: the longest row
# comes first and whole, then the tokens of every other row that are not in the prefix which it shares with the first.
# A token attends to the shared prefix and to its own row, never to another row's tokens.

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
