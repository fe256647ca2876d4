"""Several short rows behind one another in one long row, each seeing only itself: less padding to compute."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from turngym.trainers.batch import BatchError, RolloutBatch
from turngym.trainers.config import ConfigError
from turngym.trainers.models.microbatch import MicroBatch, micro_batch, pad_rows
from turngym.trainers.models.model import hidden_states

IntArray = NDArray[np.int64]
TOLERANCE = {torch.float32: 1e-4}
"""Of hidden states, relative to the largest; other precisions: 0.1. Rows that see each other differ by far more."""


def split_packed(batch: RolloutBatch, max_tokens: int, rows: IntArray | None = None) -> list[MicroBatch]:
    """`split_rows` whose rows share lines: micro-batches of lines as long as their longest row, filled first fit.

    Rows come longest first; each goes to the first line with room, into a new one while `max_tokens` allow, or else to
    the next micro-batch. A row longer than `max_tokens` comes alone. Errors: `BatchError` if `max_tokens` is below 1.
    """
    if max_tokens < 1:
        raise BatchError(f"max_tokens is {max_tokens}; a micro-batch needs at least 1 token")
    lengths = np.diff(batch.row_offsets)
    order = np.argsort(-lengths, kind="stable")
    left = (order if rows is None else order[np.isin(order, rows)]).tolist()
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
        found.append(micro_batch(batch, placed, starts=np.array(starts, np.int64), shape=(used, width)))
        left = rest
    return found


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
            f"--run.packing: {type(model).__name__} lets rows in one line see each other (hidden states differ by "
            f"{gap:.1e} of {size:.1e}); train it with padded rows"
        )


def padding(batch: RolloutBatch, micros: list[MicroBatch]) -> float:
    """Share of the computed positions that hold nothing, in [0, 1)."""
    computed = sum(pad_rows(batch, micro).input_ids_RL.size for micro in micros)
    return 1.0 - len(batch.input_ids_M) / computed
