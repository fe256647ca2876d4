"""Cache bookkeeping against a naive reference (what each session's row should hold); prompts that begin alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from engine_requests import VOCAB, reference_ids, request, tiny
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from turngym.agents.local_engine.cache import (
    MIN_SECOND_WAVE,
    MIN_SHARED,
    CachedSession,
    Moves,
    RaggedCache,
    SharedPrefix,
    SlotTable,
    Step,
    find_shared_prefixes,
)
from turngym.agents.local_engine.engine import LocalEngine

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


Bookkeeping.TestCase.settings = settings(stateful_step_count=25)
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


SYSTEM = [(7 * n + 3) % VOCAB for n in range(40)]


def build(family: str = "Qwen3", **more: Any) -> Any:
    model = tiny(family, 3, **{"head_dim": 8, "max_position_embeddings": 512} | more)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    return model


def sliding() -> Any:
    """A model that is run with its modules, one layer of which looks back eight ids."""
    return build("Gemma3Text", sliding_window=8, layer_types=["sliding_attention", "full_attention"])


def ids(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, count).tolist()


def newcomer(slot: int, *prompt: int) -> dict[int, Any]:
    return {slot: np.array(prompt, np.int32)}


@pytest.mark.parametrize("made", [build, sliding])
def test_a_system_prompt_is_fed_once_and_the_answers_are_the_same(made: Callable[[], Any]) -> None:
    model = made()
    engine = LocalEngine(model, max_batch=8)
    asked = [request(str(row), [*SYSTEM, row, *ids(4 + row, row)], max_new_tokens=6) for row in range(6)]
    answers = engine.generate(asked)
    assert engine.fed_tokens == 40 + sum(5 + row for row in range(6))
    for one, answer in zip(asked, answers, strict=True):
        assert answer.ids.tolist() == reference_ids(model, one)
    # sessions that come later take it from any that is still there
    late = request("late", [*SYSTEM, *ids(9, 99)], max_new_tokens=6)
    before = engine.fed_tokens
    assert engine.generate([late])[0].ids.tolist() == reference_ids(model, late)
    assert engine.fed_tokens - before == 9


def test_samples_of_one_task_share_its_whole_prompt_but_its_last_id() -> None:
    model = build()
    engine = LocalEngine(model, max_batch=8)
    prompt = [*SYSTEM, *ids(20, 1)]
    asked = [request(str(row), prompt, (row,), max_new_tokens=8, temperature=1.0) for row in range(8)]
    together = engine.generate(asked)
    assert engine.fed_tokens == 60 + 7
    for one, answer in zip(asked, together, strict=True):
        alone = LocalEngine(model).generate([one])[0]
        assert answer.ids.tolist() == alone.ids.tolist()
        np.testing.assert_allclose(answer.logprobs, alone.logprobs, atol=1e-5)


def test_a_row_that_is_being_decoded_lends_its_prompt() -> None:
    model = build()
    engine = LocalEngine(model, max_batch=2)
    asked = [
        request("long", [*SYSTEM, 1], max_new_tokens=40),
        request("short", ids(5, 2), max_new_tokens=1),
        request("next", [*SYSTEM, 2], max_new_tokens=5),
    ]
    answers = engine.generate(asked)
    assert engine.fed_tokens == 41 + 5 + 1
    assert [answer.ids.tolist() for answer in answers] == [reference_ids(model, one) for one in asked]


def test_nothing_is_taken_from_weights_that_have_changed() -> None:
    model = build()
    engine = LocalEngine(model, max_batch=4)
    engine.generate([request("old", [*SYSTEM, 1])])
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(1.5)
    asked = request("new", [*SYSTEM, 2])
    before = engine.fed_tokens
    assert engine.generate([asked])[0].ids.tolist() == reference_ids(model, asked)
    assert engine.fed_tokens - before == 41


def test_loans_by_hand() -> None:
    far, near = list(range(MIN_SHARED + 4)), list(range(MIN_SHARED + 10))
    held = [CachedSession(7, np.array([*far, 99], np.int32)), CachedSession(9, np.array([*near, 98], np.int32))]
    # the longest of those that hold it, never the last id of the prompt
    assert find_shared_prefixes(newcomer(1, *near, 50), held).now == {1: SharedPrefix(9, MIN_SHARED + 10)}
    assert find_shared_prefixes(newcomer(1, *near), held).now == {1: SharedPrefix(9, MIN_SHARED + 9)}
    # fewer ids than MIN_SHARED are fed
    assert not find_shared_prefixes(newcomer(1, *far[: MIN_SHARED - 1], 50, 51, 52), held).now
    assert not find_shared_prefixes(newcomer(1, *far[:MIN_SHARED]), held).now


def test_one_newcomer_goes_first_and_the_others_wait_where_that_saves_enough() -> None:
    many = {slot: np.array([*range(30), 40 + slot], np.int32) for slot in range(5)}
    assert find_shared_prefixes(many, []).later == {slot: SharedPrefix(0, 30) for slot in range(1, 5)}
    assert MIN_SECOND_WAVE > 2 * 30
    assert not find_shared_prefixes({slot: many[slot] for slot in range(3)}, []).later
    # nobody waits for one who waits, and not for what is held already
    held = [CachedSession(9, np.arange(30, dtype=np.int32))]
    loans = find_shared_prefixes(many, held)
    assert loans.now == {slot: SharedPrefix(9, 30) for slot in range(5)}
    assert not loans.later
