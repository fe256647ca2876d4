"""Did you mean: near things are found, far ones are not, long lists stay quick."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from turngym.core.errors import did_you_mean, nearest


def test_finds_the_obvious() -> None:
    assert nearest("go to frige 1", ["look", "go to fridge 1", "open fridge 1"]) == ["go to fridge 1"]
    assert nearest("LOOK", ["go to fridge 1", "look"]) == ["look"]


def test_orders_by_likeness_and_keeps_the_order_of_ties() -> None:
    mugs = ["take mug 2", "take mug 3", "take mug 1"]
    assert nearest("take mug 1", mugs, 3) == ["take mug 1", "take mug 2", "take mug 3"]
    assert nearest("take mug 1", mugs, 2) == ["take mug 1", "take mug 2"]
    assert nearest("take mug 1", ["take mug 1", "make a mug 3", "take mug 2"], 2) == ["take mug 1", "take mug 2"]
    assert nearest("take mug 1", [*mugs[::-1], "take a mug"], 3) == ["take mug 1", "take mug 3", "take mug 2"]


def test_far_things_are_not_suggested() -> None:
    assert nearest("xyzzy", ["go to fridge 1", "look"]) == []
    assert did_you_mean("xyzzy", ["go to fridge 1"]) == ""
    assert nearest("anything", []) == []


def test_error_ending() -> None:
    assert did_you_mean("rejct", ["reject", "noop"]) == " Did you mean 'reject'?"


def test_ids_in_long_lists_are_found_quickly() -> None:
    ids = [
        f"train/pick_and_place_simple-Mug-None-Desk-{scene}/trial_T{number:05}"
        for scene in range(100)
        for number in range(1000)
    ]
    start = time.process_time()
    assert nearest(ids[14_321].replace("Desk", "Dsek"), ids) == [ids[14_321]]
    assert time.process_time() - start < 5.0


@given(st.text(max_size=300), st.lists(st.text(max_size=20), max_size=40), st.integers(1, 5))
def test_any_text_gives_candidates_at_most_n(query: str, candidates: list[str], n: int) -> None:
    found = nearest(query, candidates, n)
    assert len(found) <= n
    assert all(text in candidates for text in found)


@given(st.lists(st.text("abcdef ", min_size=3, max_size=20), min_size=1, max_size=60, unique=True), st.data())
def test_an_exact_candidate_comes_first(candidates: list[str], data: st.DataObject) -> None:
    wanted = data.draw(st.sampled_from(candidates))
    assert nearest(wanted, candidates)[0] == wanted
