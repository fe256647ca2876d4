"""A ragged key/value cache for transformers models: rows of different lengths that survive between calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from turngym.agents.local_engine.dense.segments import Segment
from turngym.agents.local_engine.slots import Moves

Rows = slice | Tensor
"""The cache rows of a batch: a slice (read as a view) or an int64 tensor of row numbers (read as a copy)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Where one forward pass over B rows and Q new ids per row reads and writes."""

    rows: Rows
    write_rows: Tensor
    """int64 [B, Q]: row of each new key; `RaggedCache.trash` for ids that are not real."""
    write_positions: Tensor
    """int64 [B, Q]: position of each new key in its row."""
    length: int
    """Positions 0..length-1 are read; the mask hides what is not the row's own past."""
    mask: Tensor | None = None
    """Additive, [B, 1, Q, length], where the caller keeps one; None lets the model make it."""
    segments: tuple[Segment, ...] = ()
    """Of a step of one id per row: which rows read how many keys. Empty: all read `length`."""
    cells: Tensor | None = None
    """int64 [T], ascending: which of the B * Q ids are real, neither padding nor of a row that has finished. None: all.
    """


class RaggedCache(Cache):
    """Per layer K and V of shape [slots + 1, heads, capacity, dim]; the last row takes the keys of padding ids.

    Memory starts at zero and only ever holds finite numbers: a masked position still enters the product with weight 0,
    and 0 * NaN would reach the row.
    """

    def __init__(self, max_slots: int, max_capacity: int) -> None:
        # Cache wants layers or a class of them; neither is used, as update() below keeps the tensors itself
        super().__init__(layers=[])
        self._max_slots, self._max_capacity = max_slots, max_capacity
        self.slots = 0
        self.capacity = 0
        self.step: Step | None = None
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    @property
    def trash(self) -> int:
        """The row that takes the keys of padding ids."""
        return self.slots

    def reserve(self, slots: int, capacity: int) -> None:
        """Make room for at least `slots` rows of `capacity` positions, growing by half so that growth stays cheap."""
        if slots <= self.slots and capacity <= self.capacity:
            return
        if slots > self.slots:
            slots = max(slots, min(self.slots * 3 // 2, self._max_slots))
        if capacity > self.capacity:
            # in steps of 64: growth by half alone would copy a short cache at almost every id
            capacity = max(capacity, min(-(-max(capacity, self.capacity * 3 // 2) // 64) * 64, self._max_capacity))
        self.slots, self.capacity = max(slots, self.slots), max(capacity, self.capacity)
        self._keys = [self._grown(tensor) for tensor in self._keys]
        self._values = [self._grown(tensor) for tensor in self._values]

    def relocate(self, moves: Moves, length: int) -> None:
        """Move rows, the first `length` positions of each."""
        to, source = moves
        if not to:
            return
        for tensor in (*self._keys, *self._values):
            index = torch.tensor(source, device=tensor.device)
            # a copy of every source first: a row may be both source and destination
            moved = tensor[:, :, :length].index_select(0, index)
            for row, slot in enumerate(to):  # several times faster than one indexed assignment
                tensor[slot, :, :length] = moved[row]

    def copy(self, source: int, slot: int, length: int) -> None:
        """The first `length` positions of row `source`, in row `slot` too."""
        for tensor in (*self._keys, *self._values):
            tensor[slot, :, :length] = tensor[source, :, :length]

    def resume(self, slot: int, start: int, held: int) -> None:
        """Row `slot`, which holds `held` ids, goes on after its first `start`: later positions are overwritten."""

    def save(self, slots: Sequence[int]) -> None:
        """Rows `slots` may be resumed here: true of every position of keys and values."""

    def settle(self) -> None:
        """A pass is over."""

    def clear(self) -> None:
        """Give the memory back."""
        self.slots = self.capacity = 0
        self._keys, self._values = [], []

    def position_bytes(self) -> int:
        """Of one position of one row in one layer."""
        if not self._keys:
            return 1
        return sum(
            tensor.shape[1] * tensor.shape[3] * tensor.element_size() for tensor in (self._keys[0], self._values[0])
        )

    def nbytes(self) -> int:
        """Bytes held."""
        return sum(tensor.nbytes for tensor in (*self._keys, *self._values))

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the new keys and values [B, heads, Q, dim]; return those of the batch, [B, heads, length, dim]."""
        step = self.step
        assert step is not None
        # two index tensors with a slice between them put their dims first, [B, Q, heads, dim]: hence the transpose
        new = key_states.transpose(1, 2), value_states.transpose(1, 2)
        return self.write(layer_idx, step.write_rows, step.write_positions, *new)

    def write(
        self, layer: int, rows: Tensor, positions: Tensor, new_keys: Tensor, new_values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Write new keys and values [..., heads, dim] at int64 `rows` and `positions` [...]; return the batch's."""
        step = self.step
        assert step is not None
        if layer >= len(self._keys):
            self._allocate(layer, new_keys, new_values)
        keys, values = self._keys[layer], self._values[layer]
        keys[rows, :, positions] = new_keys
        values[rows, :, positions] = new_values
        return keys[step.rows, :, : step.length], values[step.rows, :, : step.length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions read by the pass under way, less its new ids."""
        return 0 if self.step is None else self.step.length - self.step.write_rows.shape[1]

    def _allocate(self, layer: int, keys: Tensor, values: Tensor) -> None:
        if layer != len(self._keys):
            raise ValueError(
                f"layer {layer} was updated before layer {len(self._keys)}; this model shares layers' caches"
            )
        for store, new in ((self._keys, keys), (self._values, values)):
            store.append(new.new_zeros(self.slots + 1, new.shape[-2], self.capacity, new.shape[-1]))

    def _grown(self, old: Tensor) -> Tensor:
        # without the trash row, which is now the last of the grown tensor
        rows, held = old.shape[0] - 1, old.shape[2]
        new = old.new_empty(self.slots + 1, old.shape[1], self.capacity, old.shape[3])
        new[:rows, :, :held] = old[:rows]
        new[:rows, :, held:].zero_()
        new[rows:].zero_()
        return new
