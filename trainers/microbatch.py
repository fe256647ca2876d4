"""Micro-batches: which rows of a batch go through the model together, and how they lie in its input.

Two ways: every row in a line of its own, padded (`split_rows`, `pad_rows`), or all rows of a pass behind one another in
one line, without padding, where what several rows begin with lies once (`PackedLine`).
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
from turngym.trainers.models import Line, can_keep_rows_apart, hidden_states, rows_apart
from turngym.trainers.world import World, balanced_shares

Ids = NDArray[np.int32] | IntArray
"""Token ids of one row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Some rows of a batch and every supervised token in them.

    `rows` int64 [r], longest first; `tokens` int64 [n], indices in N, ordered as the rows are. Each row is a line of
    its own, or all lie in one (`line`, whose member m is `rows[m]`).
    """

    rows: IntArray
    tokens: IntArray
    line: PackedLine | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedRows:
    """A micro-batch as the model reads it, padded on the right to L tokens.

    `input_ids_RL` int64 [r, L]; `attention_RL` bool [r, L]; `predictor_n` int64 [n] indexes the flattened [r * L]
    hidden states, in the order of `MicroBatch.tokens`. Where rows share the line: `position_RL` int64 [1, L] of every
    token in its own row, and `line` as `models.hidden_states` wants it.
    """

    input_ids_RL: IntArray
    attention_RL: BoolArray
    predictor_n: IntArray
    position_RL: IntArray | None = None
    line: Line | None = None


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


def micro_batch(batch: RolloutBatch, rows: Sequence[int] | IntArray, line: PackedLine | None = None) -> MicroBatch:
    """The micro-batch of these rows, with every supervised token in them."""
    chosen = np.asarray(rows, np.int64)
    first, last = np.searchsorted(batch.row_N, chosen), np.searchsorted(batch.row_N, chosen + 1)
    tokens = np.concatenate([np.arange(start, stop) for start, stop in zip(first, last, strict=True)])
    return MicroBatch(rows=chosen, tokens=tokens.astype(np.int64), line=line)


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
    position_n = batch.position_M[batch.predictor_N[micro.tokens]]
    if micro.line is not None:
        return _one_line(batch, micro, micro.line, position_n)
    lengths = np.diff(batch.row_offsets)[micro.rows]
    width = int(lengths.max())
    input_ids = np.full((len(micro.rows), width), pad_id, dtype=np.int64)
    line_of_row = np.zeros(batch.rows, dtype=np.int64)
    line_of_row[micro.rows] = np.arange(len(micro.rows))
    for line, row, length in zip(input_ids, micro.rows, lengths, strict=True):
        line[:length] = _row_ids(batch, row)
    return PaddedRows(
        input_ids_RL=input_ids,
        attention_RL=np.arange(width) < lengths[:, None],
        predictor_n=line_of_row[batch.row_N[micro.tokens]] * width + position_n,
    )


def _one_line(batch: RolloutBatch, micro: MicroBatch, line: PackedLine, position_n: IntArray) -> PaddedRows:
    ids = line.ids([_row_ids(batch, row) for row in micro.rows])
    row_n = batch.row_N[micro.tokens]
    places = [line.places(member, position_n[row_n == row]) for member, row in enumerate(micro.rows)]
    return PaddedRows(
        input_ids_RL=ids,
        attention_RL=np.ones(ids.shape, np.bool_),
        predictor_n=np.concatenate(places),  # the tokens are ordered as the rows are
        position_RL=line.positions(),
        line=line.parts(),
    )


def _row_ids(batch: RolloutBatch, row: int) -> Ids:
    return batch.input_ids_M[batch.row_offsets[row] : batch.row_offsets[row + 1]]


def _cuts(lengths: IntArray, max_tokens: int) -> Iterator[tuple[int, int]]:
    """Half-open ranges of rows, given their lengths in descending order."""
    start = 0
    while start < len(lengths):
        size = max(1, int(max_tokens // lengths[start]))
        stop = min(start + size, len(lengths))
        yield start, stop
        start = stop


# The rows of a pass behind one another in one line: no padding to compute, and what rows begin with computed once.
#
# Rows of one task begin with the same instructions and the same first observation. A hinted prompt of every turn
# repeats the history before it: a teacher who reads one row per turn reads an episode of T turns about T / 2 times.

TOLERANCE = {torch.float32: 1e-4}
"""How far hidden states may differ, relative to the largest; 0.1 in other precisions. Rows that see each other differ
by far more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLine:
    """Rows in one line: `rows[0]` whole, then of every other row m what follows its first `shared[m]` tokens.

    Those are also the first tokens of `rows[0]`, and so of the line, which the row attends to besides its own.
    `shared[0]` is 0. Row m fills `starts[m] .. starts[m + 1]` of the line; `starts` has one entry more than `rows`.
    """

    rows: tuple[int, ...]
    shared: IntArray
    starts: IntArray

    @property
    def length(self) -> int:
        """Tokens of the line, L."""
        return int(self.starts[-1])

    def ids(self, rows: Sequence[Ids]) -> NDArray[np.int64]:
        """Ids of the line, of its `rows` in their order: int64 [1, L]."""
        parts = [row[shared:] for row, shared in zip(rows, self.shared, strict=True)]
        return np.concatenate(parts).astype(np.int64)[None]

    def positions(self) -> IntArray:
        """Position of each token in its own row, as the position embedding needs it: int64 [1, L]."""
        return np.concatenate([np.arange(s, s + n) for n, s in self.parts()]).astype(np.int64)[None]

    def parts(self) -> Line:
        """What `models.hidden_states` needs to keep the rows apart."""
        return list(zip(np.diff(self.starts).tolist(), self.shared.tolist(), strict=True))

    def places(self, member: int, positions: IntArray) -> IntArray:
        """Where in the line the tokens at `positions` of row `rows[member]` are."""
        shared, start = self.shared[member], self.starts[member]
        return np.where(positions < shared, positions, start + positions - shared)


def packed_lines(rows: Sequence[Ids], max_tokens: int) -> list[PackedLine]:
    """Lines of at most `max_tokens` tokens that hold every row once, longest line first; a longer row comes alone.

    Rows are taken in the order of their ids, so that those which begin alike come together.
    """
    lines: list[PackedLine] = []
    members: list[int] = []
    # the bytes of ids are in no order that means something, but equal beginnings are equal bytes
    for row in sorted(range(len(rows)), key=lambda row: (rows[row].tobytes(), row)):
        line = _line(rows, [*members, row])
        if members and line.length > max_tokens:
            line = _line(rows, [row])
            members = []
        if members:
            lines.pop()
        lines.append(line)
        members.append(row)
    # a pass too large for memory fails at once
    return sorted(lines, key=lambda line: -line.length)


def _line(ids: Sequence[Ids], rows: Sequence[int]) -> PackedLine:
    # the longest stays whole, so that every prefix that the others share with it is in the line
    ordered = sorted(rows, key=lambda row: -len(ids[row]))
    longest = ids[ordered[0]]
    # a row that is wholly a prefix of the longest keeps its last token, so that no row is empty
    shared = [min(shared_tokens(longest, ids[row]), len(ids[row]) - 1) for row in ordered[1:]]
    sizes = [len(ids[row]) - begin for row, begin in zip(ordered, [0, *shared], strict=True)]
    starts = np.cumsum([0, *sizes]).astype(np.int64)
    return PackedLine(rows=tuple(ordered), shared=np.array([0, *shared], np.int64), starts=starts)


def shared_tokens(one: Ids, two: Ids) -> int:
    """How many tokens both begin with."""
    size = min(len(one), len(two))
    differs = np.flatnonzero(one[:size] != two[:size])
    return int(differs[0]) if len(differs) else size


def line_states(model: Any, rows: Sequence[Ids], line: PackedLine) -> torch.Tensor:
    """Hidden states [L, D] of the line; `rows` are all rows that its numbers count."""
    ids = line.ids([rows[row] for row in line.rows])
    with rows_apart(model):
        return hidden_states(model, ids, line.positions(), line.parts())


def split_packed(batch: RolloutBatch, max_tokens: int, rows: IntArray | None = None) -> list[MicroBatch]:
    """`split_rows` whose passes are one line each. Errors: `BatchError` if `max_tokens` is below 1."""
    if max_tokens < 1:
        raise BatchError(f"max_tokens is {max_tokens}; a micro-batch needs at least 1 token")
    chosen = np.arange(batch.rows) if rows is None else np.unique(rows)
    lines = packed_lines([_row_ids(batch, row) for row in chosen], max_tokens)
    return [micro_batch(batch, chosen[list(line.rows)], line) for line in lines]


def packing_for(packing: Packing, model: Any) -> Packing:
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
    """Raise ConfigError unless `model` keeps rows that share a line apart: four rows, alone and in one line."""
    name = type(model).__name__
    if not can_keep_rows_apart(model):
        raise ConfigError(f"--packing on: {name} has layers other than sdpa attention; train it with padded rows")
    # they branch off after different tokens, so that a wrong mask as well as a wrong position moves some state
    rows = [np.array(row, np.int32) for row in ([3, 1, 4, 1, 5, 9, 2], [3, 1, 4, 6, 5], [3, 1, 4, 1, 8, 8], [9, 2, 6])]
    line = _line(rows, range(len(rows)))
    with torch.no_grad(), rows_apart(model):
        apart = torch.cat([hidden_states(model, rows[row][None].astype(np.int64)) for row in line.rows]).float()
        together = line_states(model, rows, line).float()
    where = np.concatenate([line.places(member, np.arange(len(rows[row]))) for member, row in enumerate(line.rows)])
    gap, size = (
        float((apart - together[torch.from_numpy(where).to(together.device)]).abs().max()),
        float(apart.abs().max()),
    )
    # `not <=`, for a model that gives NaN is refused too
    if not gap <= TOLERANCE.get(next(model.parameters()).dtype, 0.1) * size:
        raise ConfigError(
            f"--packing on: {name} lets rows in one line see each other (hidden states differ by {gap:.1e} of "
            f"{size:.1e}); train it with padded rows"
        )
