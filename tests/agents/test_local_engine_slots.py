"""Cache bookkeeping against a naive reference: a dictionary of what each session's row should hold."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from turngym.agents.local_engine.cache import Moves, SlotTable

torch = pytest.importorskip("torch")

LIMIT = 5
NAMES = [f"s{i}" for i in range(9)]


class Bookkeeping(RuleBasedStateMachine):
    """`rows` stands for the cache: what was written where. `truth` says what each session must find in its row."""

    def __init__(self) -> None:
        super().__init__()
        self.table = SlotTable(LIMIT)
        self.rows: list[int] = [0] * LIMIT
        self.truth: dict[str, int] = {}
        self.active: list[str] = []
        self.counter = 0
        self.recent: list[str] = []

    def apply(self, moves: Moves) -> None:
        before = list(self.rows)
        for to, source in zip(*moves, strict=True):
            self.rows[to] = before[source]

    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        outside = [name for name in NAMES if name not in self.active]
        room = LIMIT - len(self.active)
        chosen = data.draw(st.lists(st.sampled_from(outside), unique=True, max_size=room))
        start, known = len(self.active), set(self.table.held)
        new = [name for name in chosen if name not in known]
        self.apply(self.table.admit(chosen, start))
        assert sorted(self.table.held[name].slot for name in chosen) == list(range(start, start + len(chosen)))
        gone = known - set(self.table.held)
        assert len(gone) == max(len(known) + len(new) - LIMIT, 0)
        idle = [name for name in self.recent if name in known and name not in self.active and name not in chosen]
        assert gone == set(idle[: len(gone)])
        for name in gone:
            del self.truth[name]
        self.active += sorted(chosen, key=lambda name: self.table.held[name].slot)
        self.recent = [name for name in self.recent if name not in chosen] + chosen
        for name in new:
            self.write(name)

    def write(self, name: str) -> None:
        self.counter += 1
        self.truth[name] = self.rows[self.table.held[name].slot] = self.counter

    @precondition(lambda self: self.active)
    @rule(data=st.data())
    def decode_and_retire(self, data: st.DataObject) -> None:
        for name in self.active:
            self.write(name)
        leaving = data.draw(st.lists(st.integers(0, len(self.active) - 1), unique=True).map(sorted))
        staying = [name for slot, name in enumerate(self.active) if slot not in leaving]
        self.apply(self.table.retire(leaving, len(self.active)))
        self.active = sorted(staying, key=lambda name: self.table.held[name].slot)

    @rule(name=st.sampled_from(NAMES))
    def release(self, name: str) -> None:
        if name not in self.active:
            self.table.release(name)
            self.truth.pop(name, None)

    @invariant()
    def every_session_finds_its_own(self) -> None:
        assert set(self.table.held) == set(self.truth)
        for name, held in self.table.held.items():
            assert self.table.owner[held.slot] == name
            assert self.rows[held.slot] == self.truth[name]
        assert sum(name is not None for name in self.table.owner) == len(self.table.held) <= LIMIT
        assert len(self.table.owner) <= LIMIT

    @invariant()
    def the_batch_is_adjacent(self) -> None:
        assert [self.table.held[name].slot for name in self.active] == list(range(len(self.active)))


Bookkeeping.TestCase.settings = settings(max_examples=150, stateful_step_count=25, deadline=None)
TestBookkeeping = Bookkeeping.TestCase


def test_the_same_sessions_again_move_nothing() -> None:
    table = SlotTable(8)
    table.admit(["a", "b", "c", "d"], 0)
    table.retire([0, 1, 2, 3], 4)
    assert table.admit(["d", "b", "a", "c"], 0) == ([], [])


def test_a_row_that_leaves_changes_places_with_the_last() -> None:
    table = SlotTable(8)
    table.admit(["a", "b", "c", "d"], 0)
    to, source = table.retire([1], 4)
    assert sorted(zip(to, source, strict=True)) == [(1, 3), (3, 1)]
    assert table.owner == ["a", "d", "c", "b"]


def test_more_rows_than_slots() -> None:
    with pytest.raises(ValueError, match="3 rows do not fit in 2 slots"):
        SlotTable(2).admit(["a", "b", "c"], 0)


def test_cache_grows_and_moves_without_losing_rows() -> None:
    from turngym.agents.local_engine.cache import RaggedCache, Step

    cache = RaggedCache(max_slots=6, max_capacity=200)
    cache.reserve(2, 3)
    assert (cache.slots, cache.capacity) == (2, 64)

    def write(row: int, position: int, value: float, read: slice, length: int) -> torch.Tensor:
        at = torch.tensor([[row]]), torch.tensor([[position]])
        cache.step = Step(rows=read, write_rows=at[0], write_positions=at[1], length=length)
        return cache.update(torch.full((1, 2, 1, 4), value), torch.full((1, 2, 1, 4), -value), 0)[0]

    write(0, 0, 1.0, slice(0, 1), 1)
    write(1, 0, 2.0, slice(0, 2), 1)
    cache.reserve(3, 150)
    assert (cache.slots, cache.capacity) == (3, 192)
    cache.reserve(4, 193)
    assert (cache.slots, cache.capacity) == (4, 200)  # never beyond what can be used
    cache.relocate(([0, 1, 3], [1, 0, 0]), 1)
    keys = write(2, 0, 5.0, slice(0, 4), 2)
    assert keys[:, 0, 0, 0].tolist() == [2.0, 1.0, 5.0, 1.0]
    assert keys[:, 0, 1].abs().sum() == 0
    assert cache.nbytes() == 2 * 5 * 2 * 200 * 4 * 4
    with pytest.raises(ValueError, match="layer 2"):
        cache.update(keys, keys, 2)
