"""Several short rows behind one another in one long row, each seeing only itself: less padding to compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from turngym.trainers.batch import BatchError, RolloutBatch
from turngym.trainers.config import ConfigError, Packing
from turngym.trainers.models.microbatch import MicroBatch, Split, micro_batch, pad_rows, split_rows
from turngym.trainers.models.model import hidden_states, length_batches

IntArray = NDArray[np.int64]
TOLERANCE = {torch.float32: 1e-4}
"""Of hidden states, relative to the largest; other precisions: 0.1. Rows that see each other differ by far more."""
LINE_COST = 0.04
"""What a position in a line of several rows costs more than one in a row alone, times the line's tokens, divided by the
model's width: attention works under a mask, on all pairs instead of the causal half. Measured on CPUs
(docs/distributed.md#packed-rows)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """Rows that go through the model together: where each begins in lines of one length (`shape`: how many, how long).

    `packed` says whether lines are shared; else every row is a line of its own.
    """

    rows: IntArray
    starts: IntArray
    shape: tuple[int, int]
    packed: bool

    def filled(self, rows: Sequence[NDArray[np.int32]]) -> tuple[IntArray, IntArray | None]:
        """The ids of these `rows` in their lines [lines, length], and where lines are shared their positions."""
        ids, positions = np.zeros(self.shape, np.int64), np.zeros(self.shape, np.int64)
        for row, start in zip(rows, self.starts, strict=True):
            place = slice(start, start + len(row))
            ids.reshape(-1)[place], positions.reshape(-1)[place] = row, np.arange(len(row))
        return ids, positions if self.packed else None

    def cost(self, width: int) -> float:
        """What a pass costs by estimate, in positions of rows alone, for a model of that width."""
        lines, length = self.shape
        return lines * length * (1.0 + LINE_COST * length / width * self.packed)


def padded_lines(lengths: Sequence[int], max_tokens: int) -> list[Lines]:
    """Every row in a line of its own, rows of like length together: passes of at most `max_tokens` positions."""
    found = []
    for rows in length_batches(lengths, max_tokens):
        shape = (len(rows), int(lengths[rows[0]]))
        starts = np.arange(len(rows), dtype=np.int64) * shape[1]
        found.append(Lines(rows=np.array(rows, np.int64), starts=starts, shape=shape, packed=False))
    return found


def packed_lines(lengths: Sequence[int], max_tokens: int) -> list[Lines]:
    """Rows that share lines: each pass has lines as long as its longest row, filled first fit.

    Rows come longest first; each goes to the first line with room, into a new one while `max_tokens` allow, or else to
    the next pass. A row longer than `max_tokens` comes alone.
    """
    left = np.argsort(-np.asarray(lengths, np.int64), kind="stable").tolist()
    found = []
    while left:
        width = int(lengths[left[0]])
        # the room that is left in each line; at least one line, for a row longer than max_tokens
        lines = np.full(max(1, max_tokens // width), width, np.int64)
        placed, starts, rest = [], [], []
        for row in left:
            room = np.flatnonzero(lines >= lengths[row])
            if len(room):
                placed.append(row)
                starts.append(int(room[0]) * width + width - int(lines[room[0]]))
                lines[room[0]] -= lengths[row]
            else:
                rest.append(row)
        # first fit opens lines in order, so those without a row are the last ones and can be cut off
        used = int((lines < width).sum())
        rows, begins = np.array(placed, np.int64), np.array(starts, np.int64)
        found.append(Lines(rows=rows, starts=begins, shape=(used, width), packed=True))
        left = rest
    return found


def cheaper_lines(lengths: Sequence[int], max_tokens: int, width: int) -> list[Lines]:
    """Padded or packed, whichever costs less by estimate in a model of that width; nothing else decides."""
    padded, packed = padded_lines(lengths, max_tokens), packed_lines(lengths, max_tokens)
    better = sum(part.cost(width) for part in packed) < sum(part.cost(width) for part in padded)
    return packed if better else padded


def lines_of(packing: Packing, model: Any) -> Callable[[Sequence[int], int], list[Lines]]:
    """How `model` gets its rows; `auto` takes for granted that it keeps rows apart (`resolved`)."""
    if packing == "auto":
        return partial(cheaper_lines, width=int(model.get_output_embeddings().weight.shape[-1]))
    return packed_lines if packing == "on" else padded_lines


def split_by(packing: Packing, model: Any) -> Split:
    """`microbatch.split_rows`, or with rows that share lines, or the cheaper of both."""
    return split_rows if packing == "off" else partial(_split, lines_of(packing, model))


def split_packed(batch: RolloutBatch, max_tokens: int, rows: IntArray | None = None) -> list[MicroBatch]:
    """`split_rows` whose rows share lines (`packed_lines`). Errors: `BatchError` if `max_tokens` is below 1."""
    return _split(packed_lines, batch, max_tokens, rows)


def _split(
    lines: Callable[[Sequence[int], int], list[Lines]],
    batch: RolloutBatch,
    max_tokens: int,
    rows: IntArray | None = None,
) -> list[MicroBatch]:
    if max_tokens < 1:
        raise BatchError(f"max_tokens is {max_tokens}; a micro-batch needs at least 1 token")
    chosen = np.arange(batch.rows) if rows is None else np.unique(rows)
    found = lines(np.diff(batch.row_offsets)[chosen].tolist(), max_tokens)
    return [
        micro_batch(batch, chosen[part.rows], starts=part.starts, shape=part.shape)
        if part.packed
        else micro_batch(batch, chosen[part.rows])
        for part in found
    ]


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
    """Raise ConfigError unless `model` keeps rows that share a line apart: two rows, alone and behind one another.

    transformers tells them apart by positions that begin again at 0 (sdpa, eager and flash attention do; recurrent
    layers carry their state across).
    """
    one, two = np.array([[3, 1, 4, 1, 5]]), np.array([[9, 2, 6]])
    line, positions = np.concatenate([one, two], axis=1), np.array([[0, 1, 2, 3, 4, 0, 1, 2]])
    with torch.no_grad():
        apart = torch.cat([hidden_states(model, one), hidden_states(model, two)]).float()
        packed = hidden_states(model, line, positions).float()
    gap, size = float((apart - packed).abs().max()), float(apart.abs().max())
    # `not <=`, for a model that gives NaN is refused too
    if not gap <= TOLERANCE.get(next(model.parameters()).dtype, 0.1) * size:
        raise ConfigError(
            f"--packing on: {type(model).__name__} lets rows in one line see each other (hidden states differ by "
            f"{gap:.1e} of {size:.1e}); train it with padded rows"
        )


def padding(batch: RolloutBatch, micros: list[MicroBatch]) -> float:
    """Share of the computed positions that hold nothing, in [0, 1)."""
    computed = sum(pad_rows(batch, micro).input_ids_RL.size for micro in micros)
    return 1.0 - len(batch.input_ids_M) / computed
