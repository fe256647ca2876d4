"""Where the local engine keeps keys and values: one row of a large tensor for every session.

Per layer, `RaggedCache` holds K and V of shape [slots + 1, heads, capacity, dim]. Row `slot` holds one session, filled
to that session's own length (hence ragged); the last row is a scratch row for the keys of padding.

    slot 0   session a   k k k k k k k . . .      rows 0..B-1 are the batch being decoded, so that a pass
    slot 1   session b   k k k k . . . . . .      reads them as a view; the others wait for their next turn
    slot 2   session c   k k k k k . . . . .
    scratch              x x . . . . . . . .

- `SlotTable` says which session has which slot, moves sessions together and evicts the least recently used.
- `make_key_groups` groups adjacent rows that read their keys in one call.
- `HybridCache` adds the constant-size states of linear-attention and convolution layers.
- `find_shared_prefixes` finds prompts that begin alike (a system prompt, a task), whose keys are copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import Cache

Ids = NDArray[np.int32]


class KeyGroup(NamedTuple):
    """Rows start..stop-1 of a batch, which read their keys in one attention call."""

    start: int
    stop: int
    length: int
    """Number of keys that each of them reads; shorter rows are padded to it."""
    even: bool
    """Whether all rows have exactly `length` keys, so that no mask is needed."""

    def grown(self, steps: int) -> KeyGroup:
        """The group after `steps` more keys in every row."""
        return self._replace(length=self.length + steps)


def make_key_groups(lengths: Sequence[int], wasted_keys: float) -> tuple[KeyGroup, ...]:
    """Group rows with `lengths` keys into key groups; rows of length 0 may be in none.

    A row joins the group before it if this pads at most `wasted_keys` keys: as many as could be read in the time that
    one more attention call takes. At least one length must be above 0.
    """
    groups: list[KeyGroup] = []
    for row, length in enumerate(lengths):
        if not length:
            continue
        if groups:
            start, stop, longest, even = groups[-1]
            together = (row + 1 - start) * max(longest, length)
            if together - (stop - start) * longest - length <= wasted_keys:
                groups[-1] = KeyGroup(start, row + 1, max(longest, length), even and row == stop and length == longest)
                continue
        groups.append(KeyGroup(row, row + 1, length, True))
    return tuple(groups)


Moves = tuple[list[int], list[int]]
"""(destinations, sources): row `sources[i]` goes to row `destinations[i]`, all of them at the same time."""


@dataclass(slots=True)
class CachedSession:
    """What the cache holds for one session: row `slot` has the keys and values of `ids`."""

    slot: int
    ids: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    saved_at: int = 0
    """Number of leading ids after which a recurrent state was saved; 0 if none is saved."""
    used: int = 0
    """Clock of the last use; the session with the smallest is evicted first."""

    def common(self, ids: NDArray[np.int32]) -> int:
        """Number of leading ids that are the same; their keys and values can be reused."""
        limit = min(len(self.ids), len(ids))
        different = np.flatnonzero(self.ids[:limit] != ids[:limit])
        return int(different[0]) if len(different) else limit

    def resume(self, ids: NDArray[np.int32], *, recurrent: bool) -> int:
        """Number of leading ids of a prompt that need not be fed; never the last, since its logits are not cached.

        Keys and values can be reused up to any id. A recurrent state can be used only as it stands, as it was saved,
        or empty.
        """
        start = min(self.common(ids), len(ids) - 1)
        if not recurrent or start == len(self.ids):
            return start
        return self.saved_at if self.saved_at <= start else 0


class SlotTable:
    """Which session lies in which of the slots 0..limit-1. This is bookkeeping only; it touches no tensors.

    Rows of a batch are kept in adjacent slots, so that a batch reads the cache as a view instead of a copy.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held: dict[str, CachedSession] = {}
        self.owner: list[str | None] = []
        self._clock = 0

    def release(self, session: str) -> None:
        """Forget `session`; unknown sessions are fine."""
        held = self.held.pop(session, None)
        if held is not None:
            self.owner[held.slot] = None

    def clear(self) -> None:
        """Forget everything."""
        self.held.clear()
        self.owner.clear()

    def admit(self, sessions: Sequence[str], start: int) -> Moves:
        """Give `sessions` (distinct, none in a slot below `start`) the slots start..start+len-1, in any order.

        The slots below `start` belong to rows being decoded and never move. New sessions get an empty slot; the least
        recently used others are evicted if the table is full. Returns the row moves that the cache must make. Raises
        ValueError if `start + len(sessions)` exceeds the limit.
        """
        stop = start + len(sessions)
        if stop > self.limit:
            raise ValueError(f"{stop} rows do not fit in {self.limit} slots")
        before = {name: held.slot for name, held in self.held.items()}
        self.owner.extend([None] * (stop - len(self.owner)))
        members = set(sessions)
        new = [name for name in sessions if name not in self.held]
        # before the holes are counted: what is evicted may leave an empty one
        excess = max(len(self.held) + len(new) - self.limit, 0)
        idle = [name for name, held in self.held.items() if held.slot >= start and name not in members]
        for name in sorted(idle, key=lambda name: self.held[name].used)[:excess]:
            self.release(name)
        holes = [slot for slot in range(start, stop) if self.owner[slot] not in members]
        # occupied holes go to sessions that have keys (the two rows change places); new sessions have nothing to
        # copy and take the empty ones
        holes.sort(key=lambda slot: self.owner[slot] is not None, reverse=True)
        outside = [name for name in sessions if name in self.held and self.held[name].slot >= stop]
        for name in outside:
            self._swap(self.held[name].slot, holes.pop(0))
        for name, hole in zip(new, holes, strict=True):
            if self.owner[hole] is not None:
                if None not in self.owner[stop:]:
                    self.owner.append(None)
                self._swap(hole, self.owner.index(None, stop))
            self.held[name] = CachedSession(slot=hole)
            self.owner[hole] = name
        for name in sessions:
            self._clock += 1
            self.held[name].used = self._clock
        return self._moves(before)

    def retire(self, leaving: Sequence[int], count: int) -> Moves:
        """Move the rows `leaving` of the batch in slots 0..count-1 behind its other rows; returns the row moves."""
        before = {name: held.slot for name, held in self.held.items()}
        stop = count - len(leaving)
        gone = set(leaving)
        tails = [slot for slot in range(stop, count) if slot not in gone]
        for hole, tail in zip([slot for slot in leaving if slot < stop], tails, strict=True):
            self._swap(hole, tail)
        return self._moves(before)

    def _swap(self, first: int, second: int) -> None:
        self.owner[first], self.owner[second] = self.owner[second], self.owner[first]
        for slot in (first, second):
            name = self.owner[slot]
            if name is not None:
                self.held[name].slot = slot

    def _moves(self, before: dict[str, int]) -> Moves:
        # a session that had no slot before has nothing to move
        changed = [
            (held.slot, before[name]) for name, held in self.held.items() if before.get(name, held.slot) != held.slot
        ]
        return [to for to, _ in changed], [source for _, source in changed]


Rows = slice | Tensor
"""The cache rows of a batch: a slice (read as a view) or an int64 tensor of row numbers (read as a copy)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Where one forward pass over B rows and Q new ids per row reads and writes."""

    rows: Rows
    write_rows: Tensor
    """int64 [B, Q]: row of each new key; `RaggedCache.scratch_row` for padding and idle rows."""
    write_positions: Tensor
    """int64 [B, Q]: position of each new key in its row."""
    length: int
    """Positions 0..length-1 are read; the mask hides what is not the row's own past."""
    mask: Tensor | None = None
    """Additive mask [B, 1, Q, length] that the caller keeps; with None the model makes one."""
    key_groups: tuple[KeyGroup, ...] = ()
    """Which rows read how many keys, in a step of one id per row. If empty, all rows read `length`."""
    cells: Tensor | None = None
    """int64 [T], ascending: which of the B * Q ids are real (neither padding nor of an idle row). None means all."""


class RaggedCache(Cache):
    """A key/value cache for transformers models whose rows have different lengths and survive between calls.

    Memory starts at zero and must only ever hold finite numbers: a masked position still enters the product with
    weight 0, and 0 * NaN would reach the row.
    """

    def __init__(self, max_slots: int, max_capacity: int) -> None:
        # Cache expects layers or a class of them; neither is used, since update() below keeps the tensors itself
        super().__init__(layers=[])
        self._max_slots, self._max_capacity = max_slots, max_capacity
        self.slots = 0
        self.capacity = 0
        self.step: Step | None = None
        self.allocations = 0
        """How often memory was allocated: as long as it is the same, keys and values lie where they lay."""
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    @property
    def scratch_row(self) -> int:
        """The row that takes the keys of padding ids and idle rows."""
        return self.slots

    def reserve(self, slots: int, capacity: int) -> None:
        """Make room for at least `slots` rows of `capacity` positions; grows by half at least, so copies stay rare."""
        if slots <= self.slots and capacity <= self.capacity:
            return
        if slots > self.slots:
            slots = max(slots, min(self.slots * 3 // 2, self._max_slots))
        if capacity > self.capacity:
            # rounded up to 64, since growth by half alone would copy a short cache at almost every id
            capacity = max(capacity, min(-(-max(capacity, self.capacity * 3 // 2) // 64) * 64, self._max_capacity))
        self.slots, self.capacity = max(slots, self.slots), max(capacity, self.capacity)
        self.allocations += 1
        self._keys = [self._grown(tensor) for tensor in self._keys]
        self._values = [self._grown(tensor) for tensor in self._values]

    def relocate(self, moves: Moves, length: int) -> None:
        """Move the first `length` positions of rows."""
        to, source = moves
        if not to:
            return
        for tensor in (*self._keys, *self._values):
            index = torch.tensor(source, device=tensor.device)
            # all sources are copied first, since a row may be both source and destination
            moved = tensor[:, :, :length].index_select(0, index)
            # several times faster than one indexed assignment
            for row, slot in enumerate(to):
                tensor[slot, :, :length] = moved[row]

    def copy(self, source: int, slot: int, length: int) -> None:
        """Copy the first `length` positions of row `source` to row `slot`."""
        for tensor in (*self._keys, *self._values):
            tensor[slot, :, :length] = tensor[source, :, :length]

    def resume(self, slot: int, start: int, held: int) -> None:
        """Continue row `slot`, which holds `held` ids, after its first `start`; later positions are overwritten."""

    def save(self, slots: Sequence[int]) -> None:
        """Allow `resume` to come back to where rows `slots` are now. Keys and values need nothing for that."""

    def settle(self) -> None:
        """Called after each pass through the model."""

    def clear(self) -> None:
        """Free the memory."""
        self.slots = self.capacity = 0
        self._keys, self._values = [], []

    def position_bytes(self) -> int:
        """Bytes of one position of one row in one layer."""
        if not self._keys:
            return 1
        return sum(
            tensor.shape[1] * tensor.shape[3] * tensor.element_size() for tensor in (self._keys[0], self._values[0])
        )

    def nbytes(self) -> int:
        """Memory of the cache in bytes."""
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
        """Number of positions read by the current pass, without its new ids."""
        return 0 if self.step is None else self.step.length - self.step.write_rows.shape[1]

    def _allocate(self, layer: int, keys: Tensor, values: Tensor) -> None:
        if layer != len(self._keys):
            raise ValueError(
                f"layer {layer} was updated before layer {len(self._keys)}; this model shares layers' caches"
            )
        self.allocations += 1
        for store, new in ((self._keys, keys), (self._values, values)):
            store.append(new.new_zeros(self.slots + 1, new.shape[-2], self.capacity, new.shape[-1]))

    def _grown(self, old: Tensor) -> Tensor:
        # the scratch row is not copied; it is now the last row of the larger tensor
        rows, held = old.shape[0] - 1, old.shape[2]
        new = old.new_empty(self.slots + 1, old.shape[1], self.capacity, old.shape[3])
        new[:rows, :, :held] = old[:rows]
        new[:rows, :, held:].zero_()
        new[rows:].zero_()
        return new


RECURRENT_LAYERS = frozenset({"linear_attention", "conv"})
"""Names in `layer_types` of layers that keep a convolution's last inputs, a recurrent state, or both."""


class StateRows:
    """One state of one layer for every slot [slots, ...], and a copy from where each slot's last prompt ended.

    A state sums up its whole past and cannot be rewound to an earlier id, hence the earlier copy in `saved`.
    """

    def __init__(self, like: Tensor, slots: int) -> None:
        self.live = like.new_zeros(slots, *like.shape[1:])
        self.saved = torch.zeros_like(self.live)
        self._borrowed: tuple[Tensor, Tensor] | None = None

    def grow(self, slots: int) -> None:
        """Make room for `slots` rows."""
        for name in ("live", "saved"):
            old = getattr(self, name)
            new = old.new_zeros(slots, *old.shape[1:])
            new[: len(old)] = old
            setattr(self, name, new)

    def read(self, rows: Rows) -> Tensor:
        """States of `rows`. The model may change them in place; `settle` writes such changes back."""
        if isinstance(rows, slice):
            return self.live[rows]
        self._borrowed = (rows, self.live[rows])
        return self._borrowed[1]

    def write(self, rows: Rows, value: Tensor) -> None:
        """Replace the states of `rows`."""
        self.live[rows] = value
        self._borrowed = None

    def settle(self) -> None:
        """Write back what a pass changed in place in a copy."""
        if self._borrowed is not None:
            self.write(*self._borrowed)


class HybridCache(RaggedCache):
    """A `RaggedCache` whose layers of `RECURRENT_LAYERS` hold states instead of keys and values.

    transformers hands each such layer its state through the four methods that end in `_state`. Padding would enter a
    state for good, so a pass holds no padding: `prefill` feeds such a model rows of equal width.
    """

    def __init__(self, max_slots: int, max_capacity: int, layer_types: Sequence[str]) -> None:
        super().__init__(max_slots, max_capacity)
        attention = [layer for layer, kind in enumerate(layer_types) if kind not in RECURRENT_LAYERS]
        self._place = {layer: index for index, layer in enumerate(attention)}
        self._conv: dict[int, StateRows] = {}
        self._recurrent: dict[int, StateRows] = {}

    def reserve(self, slots: int, capacity: int) -> None:
        """Make room for at least `slots` rows; only keys and values grow with `capacity`."""
        before = self.slots
        super().reserve(slots, capacity)
        if self.slots > before:
            for state in self._states():
                state.grow(self.slots)

    def relocate(self, moves: Moves, length: int) -> None:
        """Move the first `length` positions of keys and values, and whole states."""
        super().relocate(moves, length)
        to, source = moves
        for state in self._states() if to else ():
            for tensor in (state.live, state.saved):
                tensor[to] = tensor[source]

    def resume(self, slot: int, start: int, held: int) -> None:
        """Rewind the states of `slot` from `held` ids to `start`: `held` itself, 0, or where they were last saved."""
        for state in self._states() if start != held or not start else ():
            if start:
                state.live[slot] = state.saved[slot]
            else:
                state.live[slot].zero_()

    def save(self, slots: Sequence[int]) -> None:
        """Keep a copy of the states of `slots` as they are."""
        rows = list(slots)
        for state in self._states():
            state.saved[rows] = state.live[rows]

    def settle(self) -> None:
        for state in self._states():
            state.settle()

    def clear(self) -> None:
        super().clear()
        self._conv, self._recurrent = {}, {}

    def nbytes(self) -> int:
        return super().nbytes() + sum(state.live.nbytes + state.saved.nbytes for state in self._states())

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """`RaggedCache.update` with layers numbered among those that have keys."""
        return super().update(key_states, value_states, self._place[layer_idx])

    def is_recording_past(self, layer_idx: int) -> bool:
        """States are saved and resumed by the engine, never cropped by the model."""
        return False

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether any state exists. Those of an empty slot are zero, which means the same as no state."""
        return bool(self._conv or self._recurrent)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """[B, channels, kernel], or None before the model's first pass."""
        return self._read(self._conv, layer_idx, state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """[B, ...], or None before the model's first pass."""
        return self._read(self._recurrent, layer_idx, state_idx)

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Put the new inputs [B, channels, Q] behind a convolution's last ones; returns [B, channels, kernel + Q].

        The signature is that of `transformers.Cache.update_conv_state`, with the `conv_kernel_size` that models pass.
        """
        _only(state_idx)
        assert self.step is not None
        kernel = conv_kernel_size or conv_states.shape[-1]
        if layer_idx not in self._conv:
            self._conv[layer_idx] = StateRows(conv_states[..., :1].expand(*conv_states.shape[:-1], kernel), self.slots)
        state = self._conv[layer_idx]
        inputs = torch.cat((state.read(self.step.rows), conv_states), -1)
        state.write(self.step.rows, inputs[..., -kernel:])
        return inputs

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """Store the states [B, ...] after a pass."""
        _only(state_idx)
        assert self.step is not None
        if layer_idx not in self._recurrent:
            self._recurrent[layer_idx] = StateRows(recurrent_states, self.slots)
        self._recurrent[layer_idx].write(self.step.rows, recurrent_states)
        return recurrent_states

    def _read(self, states: dict[int, StateRows], layer: int, state_idx: int) -> Tensor | None:
        _only(state_idx)
        assert self.step is not None
        return states[layer].read(self.step.rows) if layer in states else None

    def _states(self) -> Iterator[StateRows]:
        yield from self._conv.values()
        yield from self._recurrent.values()


def _only(state_idx: int) -> None:
    if state_idx:
        raise ValueError(f"a layer with a second state (number {state_idx}); this cache holds one of each kind")


MIN_SHARED = 16
"""Shared prefixes with fewer ids are computed again."""
MIN_SECOND_WAVE = 64
"""Fewest ids that a second pass, for prompts that wait for another prompt's keys, must save in all."""


class SharedPrefix(NamedTuple):
    """The first `length` keys and values of `slot` can be copied."""

    slot: int
    length: int


class SharedPrefixes(NamedTuple):
    """What pending prompts copy, by their slots."""

    now: dict[int, SharedPrefix]
    """Ids that are copied from slots that hold them already."""
    later: dict[int, SharedPrefix]
    """Ids that are copied from other pending prompts, once those have been fed."""


def find_shared_prefixes(pending: Mapping[int, Ids], held: Iterable[CachedSession]) -> SharedPrefixes:
    """The longest prefix that each of the prompts `pending` (by slot) can copy; their slots hold almost nothing of it.

    No prompt waits for one that waits itself.
    """

    # Prefixes shorter than MIN_SHARED do not count, so only prompts with equal first ids are compared.
    def key(ids: Ids) -> bytes:
        return np.asarray(ids[:MIN_SHARED], np.int32).tobytes()

    def longest(prompt: Ids, sources: Iterable[tuple[int, Ids]]) -> SharedPrefix:
        # never the last id of the prompt, since its logits are not cached
        most = len(prompt) - 1
        prefixes = (SharedPrefix(slot, min(CachedSession(slot, ids).common(prompt), most)) for slot, ids in sources)
        return max(prefixes, key=lambda prefix: prefix.length, default=SharedPrefix(0, 0))

    cached_by_start: dict[bytes, list[tuple[int, Ids]]] = {}
    for entry in held:
        if len(entry.ids) >= MIN_SHARED:
            cached_by_start.setdefault(key(entry.ids), []).append((entry.slot, entry.ids))
    first_wave: dict[bytes, list[tuple[int, Ids]]] = {}
    shared = SharedPrefixes({}, {})
    for slot, prompt in pending.items():
        if len(prompt) <= MIN_SHARED:
            continue
        start = key(prompt)
        cached, pending_prefix = (
            longest(prompt, cached_by_start.get(start, ())),
            longest(prompt, first_wave.get(start, ())),
        )
        if cached.length:
            shared.now[slot] = cached
        if pending_prefix.length >= cached.length + MIN_SHARED:
            shared.later[slot] = pending_prefix
        else:
            first_wave.setdefault(start, []).append((slot, prompt))
    if sum(prefix.length for prefix in shared.later.values()) < MIN_SECOND_WAVE:
        shared.later.clear()
    return shared
