"""Which adjacent rows of a batch read their keys together: rows of one segment are padded to its longest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import Cache


class Segment(NamedTuple):
    """Rows start..stop-1 of a batch."""

    start: int
    stop: int
    length: int
    """Keys that each of them reads."""
    even: bool
    """Whether all have exactly so many: no mask is needed."""

    def grown(self, steps: int) -> Segment:
        """The same after so many steps, each of which gave every row one more key."""
        return self._replace(length=self.length + steps)


def segments(lengths: Sequence[int], call: float) -> tuple[Segment, ...]:
    """Rows of `lengths` in segments, so that little is read in vain; rows of length 0 may be in none.

    A row joins the segment before it where the keys that are then read in vain are at most `call`: how many keys could
    be read in the time that one more segment takes. At least one length must be above 0.
    """
    found: list[Segment] = []
    for row, length in enumerate(lengths):
        if not length:
            continue
        if found:
            start, stop, longest, even = found[-1]
            together = (row + 1 - start) * max(longest, length)
            if together - (stop - start) * longest - length <= call:
                found[-1] = Segment(start, row + 1, max(longest, length), even and row == stop and length == longest)
                continue
        found.append(Segment(row, row + 1, length, True))
    return tuple(found)


# Which session's keys and values lie in which row of the cache: pure bookkeeping, no tensors.

Moves = tuple[list[int], list[int]]
"""(destinations, sources): row `sources[i]` as it was before goes to row `destinations[i]`; all at once."""


@dataclass(slots=True)
class Held:
    """What the cache holds for one session: the K/V of `ids[:length]` lie in row `slot`."""

    slot: int
    ids: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    mark: int = 0
    """How many of `ids` a saved recurrent state stands for; 0 if none is saved."""
    used: int = 0
    """Clock of the last use; the smallest is evicted first."""

    def common(self, ids: NDArray[np.int32]) -> int:
        """How many leading ids are the same: the K/V of these can be used again."""
        limit = min(len(self.ids), len(ids))
        different = np.flatnonzero(self.ids[:limit] != ids[:limit])
        return int(different[0]) if len(different) else limit

    def resume(self, ids: NDArray[np.int32], *, recurrent: bool) -> int:
        """How many leading ids of a prompt need not be fed: never its last, whose logits are not held.

        Keys and values can be used up to any id; a recurrent state only where it stands, where it was saved, or empty.
        """
        start = min(self.common(ids), len(ids) - 1)
        if not recurrent or start == len(self.ids):
            return start
        return self.mark if self.mark <= start else 0


class SlotTable:
    """Sessions in slots 0..limit-1. The slots below `start` of each call belong to rows being decoded and never move.

    Rows of a batch are kept in adjacent slots, so that a batch reads the cache as a view instead of a copy.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held: dict[str, Held] = {}
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

        Sessions without a slot get an empty one; the least recently used others are evicted if the table is full.
        Returns the row moves that make the cache agree. Raises ValueError if `start + len(sessions)` exceeds the limit.
        """
        stop = start + len(sessions)
        if stop > self.limit:
            raise ValueError(f"{stop} rows do not fit in {self.limit} slots")
        before = {name: held.slot for name, held in self.held.items()}
        self.owner.extend([None] * (stop - len(self.owner)))
        members = set(sessions)
        new = [name for name in sessions if name not in self.held]
        # before the holes are counted: what is evicted may leave an empty one
        self._evict(len(new), members, start)
        holes = [slot for slot in range(start, stop) if self.owner[slot] not in members]
        # occupied holes go to sessions that have keys (the two rows change places); new sessions have nothing to
        # copy and take the empty ones
        holes.sort(key=lambda slot: self.owner[slot] is not None, reverse=True)
        outside = [name for name in sessions if name in self.held and self.held[name].slot >= stop]
        for name in outside:
            self._swap(self.held[name].slot, holes.pop(0))
        for name, hole in zip(new, holes, strict=True):
            if self.owner[hole] is not None:
                self._swap(hole, self._free_slot(stop))
            self.held[name] = Held(slot=hole)
            self.owner[hole] = name
        for name in sessions:
            self._clock += 1
            self.held[name].used = self._clock
        return self._moves(before)

    def retire(self, leaving: Sequence[int], count: int) -> Moves:
        """Let the rows `leaving` of the batch in slots 0..count-1 go; the others end in 0..count-len(leaving)-1."""
        before = {name: held.slot for name, held in self.held.items()}
        stop = count - len(leaving)
        gone = set(leaving)
        tails = [slot for slot in range(stop, count) if slot not in gone]
        for hole, tail in zip([slot for slot in leaving if slot < stop], tails, strict=True):
            self._swap(hole, tail)
        return self._moves(before)

    def _evict(self, new: int, members: set[str], start: int) -> None:
        excess = len(self.held) + new - self.limit
        idle = [name for name, held in self.held.items() if held.slot >= start and name not in members]
        for name in sorted(idle, key=lambda name: self.held[name].used)[: max(excess, 0)]:
            self.release(name)

    def _free_slot(self, begin: int) -> int:
        for slot in range(begin, len(self.owner)):
            if self.owner[slot] is None:
                return slot
        self.owner.append(None)
        return len(self.owner) - 1

    def _swap(self, one: int, other: int) -> None:
        self.owner[one], self.owner[other] = self.owner[other], self.owner[one]
        for slot in (one, other):
            name = self.owner[slot]
            if name is not None:
                self.held[name].slot = slot

    def _moves(self, before: dict[str, int]) -> Moves:
        # a session that was not here before has no row to bring
        changed = [
            (held.slot, before[name]) for name, held in self.held.items() if before.get(name, held.slot) != held.slot
        ]
        return [to for to, _ in changed], [source for _, source in changed]


# A ragged key/value cache for transformers models: rows of different lengths that survive between calls.

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


# The ragged cache of a hybrid model: keys and values of its attention layers, constant-size state of its others.

RECURRENT_LAYERS = frozenset({"linear_attention", "conv"})
"""Names in `layer_types` of layers whose state is a convolution's last inputs and a recurrent state, or one of them."""


class StateRows:
    """One state of one layer for every slot [slots, ...], and what it was where each slot's last prompt ended.

    A state holds its whole past at once and cannot be rewound to an earlier id, so `saved` keeps one earlier copy.
    """

    def __init__(self, like: Tensor, slots: int) -> None:
        self.live = like.new_zeros(slots, *like.shape[1:])
        self.saved = torch.zeros_like(self.live)
        self._borrowed: tuple[Tensor, Tensor] | None = None

    def grow(self, slots: int) -> None:
        """Room for `slots` rows."""
        for name in ("live", "saved"):
            old = getattr(self, name)
            new = old.new_zeros(slots, *old.shape[1:])
            new[: len(old)] = old
            setattr(self, name, new)

    def read(self, rows: Rows) -> Tensor:
        """Those of `rows`, which the model may change in place; `settle` puts a copy back."""
        if isinstance(rows, slice):
            return self.live[rows]
        self._borrowed = (rows, self.live[rows])
        return self._borrowed[1]

    def write(self, rows: Rows, value: Tensor) -> None:
        """New states of `rows`."""
        self.live[rows] = value
        self._borrowed = None

    def settle(self) -> None:
        """What a pass changed in place in a copy is written back."""
        if self._borrowed is not None:
            self.write(*self._borrowed)


class HybridCache(RaggedCache):
    """A `RaggedCache` whose layers of `RECURRENT_LAYERS` hold states instead of keys and values.

    transformers hands each such layer its state through the four methods that end in `_state`. Padding would enter a
    state for good, so a pass holds no padding: `prefill` feeds such a model rows of equal width.

    Args:
        layer_types: one name per layer, as the model's configuration has them.
    """

    def __init__(self, max_slots: int, max_capacity: int, layer_types: Sequence[str]) -> None:
        super().__init__(max_slots, max_capacity)
        attention = [layer for layer, kind in enumerate(layer_types) if kind not in RECURRENT_LAYERS]
        self._place = {layer: place for place, layer in enumerate(attention)}
        self._conv: dict[int, StateRows] = {}
        self._recurrent: dict[int, StateRows] = {}

    def reserve(self, slots: int, capacity: int) -> None:
        """Room for at least `slots` rows; only keys and values grow with `capacity`."""
        before = self.slots
        super().reserve(slots, capacity)
        if self.slots > before:
            for state in self._states():
                state.grow(self.slots)

    def relocate(self, moves: Moves, length: int) -> None:
        """Move rows: the first `length` positions of keys and values, and whole states."""
        super().relocate(moves, length)
        to, source = moves
        for state in self._states() if to else ():
            for tensor in (state.live, state.saved):
                tensor[to] = tensor[source]

    def resume(self, slot: int, start: int, held: int) -> None:
        """Bring the states of `slot`, which are those after `held` ids, back to those after `start` ids.

        `start` is `held`, 0, or where the states of the slot were last saved.
        """
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
        """A pass is over."""
        for state in self._states():
            state.settle()

    def clear(self) -> None:
        """Give the memory back."""
        super().clear()
        self._conv, self._recurrent = {}, {}

    def nbytes(self) -> int:
        """Bytes held."""
        return super().nbytes() + sum(state.live.nbytes + state.saved.nbytes for state in self._states())

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """`RaggedCache.update`, the layers that have keys counted alone."""
        return super().update(key_states, value_states, self._place[layer_idx])

    def is_recording_past(self, layer_idx: int) -> bool:
        """States are saved and resumed by the engine, never cropped by the model."""
        return False

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether there are states; those of a slot without ids are zero, which is what no state means."""
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
        """Inputs [B, channels, kernel + Q] of a convolution over the new ones [B, channels, Q] and those before."""
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
        """Keep the states [B, ...] after a pass."""
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


Ids = NDArray[np.int32]

# Prefixes that sessions share, such as a system prompt or a task: keys and values are computed once and copied.

LEAST = 16
"""Ids; a shorter prefix is computed again."""
WORTH = 64
"""Ids that those who wait for a pass of their own must save together."""


class Loan(NamedTuple):
    """The first `length` keys and values of `slot` are copied."""

    slot: int
    length: int


@dataclass(frozen=True, slots=True)
class Newcomer:
    """A prompt whose slot `slot` holds nothing of it, or next to nothing."""

    slot: int
    prompt: Ids

    def shared(self, slot: int, ids: Ids) -> Loan:
        """What it could take over from `slot`, which holds `ids`: never its own last id, whose logits are not held."""
        return Loan(slot, min(Held(slot, ids).common(self.prompt), len(self.prompt) - 1))


@dataclass(frozen=True, slots=True)
class Loans:
    """What newcomers take over, by their slots."""

    now: dict[int, Loan]
    """From slots that hold it already."""
    later: dict[int, Loan]
    """From other newcomers, once those have been fed."""


def find_loans(newcomers: Sequence[Newcomer], held: Iterable[Held]) -> Loans:
    """The longest prefix for each newcomer; nobody waits for one who waits."""
    known: dict[bytes, list[tuple[int, Ids]]] = {}
    for entry in held:
        if len(entry.ids) >= LEAST:
            known.setdefault(_key(entry.ids), []).append((entry.slot, entry.ids))
    leaders: dict[bytes, list[Newcomer]] = {}
    loans = Loans({}, {})
    for one in newcomers:
        if len(one.prompt) <= LEAST:
            continue
        key = _key(one.prompt)
        here = _longest(one.shared(*source) for source in known.get(key, ()))
        there = _longest(one.shared(other.slot, other.prompt) for other in leaders.get(key, ()))
        if here.length:
            loans.now[one.slot] = here
        if there.length >= here.length + LEAST:
            loans.later[one.slot] = there
        else:
            leaders.setdefault(key, []).append(one)
    if sum(loan.length for loan in loans.later.values()) < WORTH:
        loans.later.clear()
    return loans


def _key(ids: Ids) -> bytes:
    return np.asarray(ids[:LEAST], np.int32).tobytes()


def _longest(loans: Iterable[Loan]) -> Loan:
    return max(loans, key=lambda loan: loan.length, default=Loan(0, 0))
