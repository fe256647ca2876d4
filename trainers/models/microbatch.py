"""Micro-batches: which rows of a batch go through the model together, and how they lie in its input."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from turngym.trainers.batch import BatchError, BoolArray, IntArray, RolloutBatch
from turngym.trainers.distributed.world import World, balanced_shares


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Some rows of a batch and every supervised token in them.

    `rows` int64 [r], longest first; `tokens` int64 [n], indices in N, ordered as the rows are. Each row is a line of
    its own, unless `starts` int64 [r] says where in the lines (`shape`: how many, how long) each begins.
    """

    rows: IntArray
    tokens: IntArray
    starts: IntArray | None = None
    shape: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedRows:
    """A micro-batch as the model reads it, padded on the right to L tokens.

    `input_ids_RL` int64 [r, L]; `attention_RL` bool [r, L]; `predictor_n` int64 [n] indexes the flattened [r * L]
    hidden states, in the order of `MicroBatch.tokens`. `position_RL` int64 [r, L] where rows share lines: every row
    begins at 0, and so does each token of padding.
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
"""`split_rows`, or what `packing.split_by` gives."""


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


def micro_batch(
    batch: RolloutBatch, rows: Sequence[int] | IntArray, *, starts: IntArray | None = None, shape: Any = None
) -> MicroBatch:
    """The micro-batch of these rows, with every supervised token in them."""
    chosen = np.asarray(rows, np.int64)
    first, last = np.searchsorted(batch.row_N, chosen), np.searchsorted(batch.row_N, chosen + 1)
    tokens = np.concatenate([np.arange(start, stop) for start, stop in zip(first, last, strict=True)])
    return MicroBatch(rows=chosen, tokens=tokens.astype(np.int64), starts=starts, shape=shape)


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
    lines, width = micro.shape or (len(micro.rows), int(lengths.max()))
    starts = np.arange(lines) * width if micro.starts is None else micro.starts
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
        position_RL=None if micro.starts is None else positions.reshape(lines, width),
    )


def _cuts(lengths: IntArray, max_tokens: int) -> Iterator[tuple[int, int]]:
    """Half-open ranges of rows, given their lengths in descending order."""
    start = 0
    while start < len(lengths):
        size = max(1, int(max_tokens // lengths[start]))
        stop = min(start + size, len(lengths))
        yield start, stop
        start = stop
