"""Feeding prompts: rows of different lengths share passes, padded where padding leaves no trace, else in pieces."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from turngym.agents.local_engine.hybrid_cache import HybridCache
from turngym.agents.local_engine.kv_cache import RaggedCache, Rows, Step
from turngym.agents.local_engine.model import CausalModel, Ids

CELLS = 1 << 24
"""Most pairs of a fed id and a key that one pass looks at: their mask lies in memory, and would grow with the square of
a history that is read at once."""


def prefill(
    model: CausalModel,
    cache: RaggedCache,
    slots: Sequence[int],
    starts: Sequence[int],
    new: Sequence[Ids],
    *,
    tokens: int,
) -> Tensor:
    """Feed `new[i]` (one id or more) at positions `starts[i]`... of row `slots[i]`; logits [B, V] after the last ids.

    Rows of similar length share a pass of at most about `tokens` padded ids, fewer where histories are long (CELLS);
    those of a hybrid model are fed without padding, and their states saved before the last id.
    """
    if isinstance(cache, HybridCache):
        return _prefill_pieces(model, cache, slots, starts, new, tokens)
    logits: Tensor | None = None
    for group in _groups([len(ids) for ids in new], tokens):
        rows = [slots[i] for i in group]
        part = _prefill_group(model, cache, rows, [starts[i] for i in group], [new[i] for i in group], tokens)
        if logits is None:
            logits = part.new_empty(len(new), part.shape[-1])
        logits[group] = part
    assert logits is not None
    return logits


def as_rows(slots: Sequence[int], device: torch.device) -> Rows:
    """A slice if the slots are adjacent and ascending, else their numbers."""
    if list(slots) == list(range(slots[0], slots[0] + len(slots))):
        return slice(slots[0], slots[0] + len(slots))
    return torch.tensor(slots, device=device)


def _prefill_group(
    model: CausalModel, cache: RaggedCache, slots: list[int], starts: list[int], new: list[Ids], tokens: int
) -> Tensor:
    lengths = np.array([len(ids) for ids in new])
    width, ends = int(lengths.max()), np.array(starts) + lengths
    cache.reserve(max(slots) + 1, int(ends.max()))
    # Left padding: the last column is then every row's last id. Padding looks at position 0 (so it stays finite) and
    # its keys go to the trash row.
    column = np.arange(width)[None, :] - (width - lengths)[:, None]
    positions = np.maximum(column + np.array(starts)[:, None], 0)
    ids = np.zeros((len(new), width), np.int64)
    for row, values in enumerate(new):
        ids[row, width - len(values) :] = values
    write_rows = np.where(column >= 0, np.array(slots)[:, None], cache.trash)
    ids_t, positions_t, write_t = (torch.from_numpy(array).to(model.device) for array in (ids, positions, write_rows))
    real = column >= 0
    rows = as_rows(slots, model.device)
    chunk = max(min(tokens, CELLS // int(ends.max())) // len(new), 1)
    logits: Tensor | None = None
    for begin in range(0, width, chunk):
        part = slice(begin, begin + chunk)
        length = int(positions[:, part].max()) + 1
        step = Step(
            rows=rows,
            write_rows=write_t[:, part],
            write_positions=positions_t[:, part],
            length=length,
            cells=None if real[:, part].all() else torch.from_numpy(np.flatnonzero(real[:, part])).to(model.device),
        )
        logits = model.forward(cache, ids_t[:, part], positions_t[:, part], step)
    assert logits is not None
    return logits


def _prefill_pieces(
    model: CausalModel,
    cache: HybridCache,
    slots: Sequence[int],
    starts: Sequence[int],
    new: Sequence[Ids],
    tokens: int,
) -> Tensor:
    """All but the last ids in pieces whose widths are powers of two, then the last id of every row in one pass.

    Whatever the lengths, the passes are few: one for each bit of the longest, besides those over `tokens`.
    """
    cache.reserve(max(slots) + 1, max(start + len(ids) for start, ids in zip(starts, new, strict=True)))
    done = [0] * len(new)
    left = [len(ids) - 1 for ids in new]
    while any(left):
        width = 1 << (min(max(left), tokens).bit_length() - 1)
        rows = [i for i, count in enumerate(left) if count >= width]
        for part in _parts(rows, max(tokens // width, 1)):
            _feed(model, cache, part, slots, starts, new, done, width)
        for i in rows:
            done[i] += width
            left[i] -= width
    cache.save(slots)
    return _feed(model, cache, range(len(new)), slots, starts, new, done, 1)


def _parts(rows: list[int], size: int) -> list[list[int]]:
    return [rows[begin : begin + size] for begin in range(0, len(rows), size)]


def _feed(
    model: CausalModel,
    cache: RaggedCache,
    part: Sequence[int],
    slots: Sequence[int],
    starts: Sequence[int],
    new: Sequence[Ids],
    done: Sequence[int],
    width: int,
) -> Tensor:
    """One pass over the next `width` ids of the rows `part`; logits [B, V] after the last."""
    ids = np.stack([new[i][done[i] : done[i] + width] for i in part]).astype(np.int64)
    positions = np.array([starts[i] + done[i] for i in part])[:, None] + np.arange(width)
    mine = [slots[i] for i in part]
    write_rows = torch.tensor(mine, device=model.device)[:, None].expand(-1, width)
    positions_t = torch.from_numpy(positions).to(model.device)
    step = Step(
        rows=as_rows(mine, model.device),
        write_rows=write_rows,
        write_positions=positions_t,
        length=int(positions.max()) + 1,
    )
    return model.forward(cache, torch.from_numpy(ids).to(model.device), positions_t, step)


def _groups(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Indices by similar length: each group at most `tokens` padded ids, its shortest at least half its longest."""
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        longest = lengths[groups[-1][0]] if groups else 0
        if groups and (len(groups[-1]) + 1) * longest <= tokens and 2 * lengths[index] + 16 >= longest:
            groups[-1].append(index)
        else:
            groups.append([index])
    # the caller's rows are in slot order, and rows in adjacent ascending slots are read without a copy
    return [sorted(group) for group in groups]
