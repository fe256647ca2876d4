"""Rows that begin alike in one line: nothing but the time changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="training needs turngym[train]")

from turngym.trainers.microbatch import MOST_TOKENS, prefix_groups, shared_tokens, supports_prefix_sharing  # noqa: E402
from turngym.trainers.models import tiny_qwen3  # noqa: E402
from turngym.trainers.scorer import LocalScorer  # noqa: E402


def rows_of(*rows: list[int]) -> list[Any]:
    return [np.array(row, np.int32) for row in rows]


def episode(turns: int, seed: int = 0, history: int = 30) -> tuple[list[Any], list[Any]]:
    """What a hinted teacher reads: the history so far, a hint, the response; and where the responses are."""
    rng = np.random.default_rng(seed)
    past, rows, places = list(rng.integers(1, 40, history)), [], []
    for _ in range(turns):
        past += list(rng.integers(1, 40, 6))
        response = list(rng.integers(1, 40, int(rng.integers(1, 5))))
        row = past + list(rng.integers(1, 40, 4)) + response
        rows.append(np.array(row, np.int32))
        places.append(np.arange(len(row) - len(response), len(row)))
        past += response
    return rows, places


def test_three_rows_by_hand() -> None:
    (group,) = prefix_groups(rows_of([1, 2, 3, 4], [1, 2, 9], [1, 2, 3]), 100)
    assert group.rows == (0, 1, 2)
    assert group.shared.tolist() == [0, 2, 2]
    assert group.packed_row(rows_of([1, 2, 3, 4], [1, 2, 9], [1, 2, 3])).tolist() == [1, 2, 3, 4, 9, 3]
    assert group.positions().tolist() == [0, 1, 2, 3, 2, 2]
    assert group.mask().astype(int).tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [1, 1, 0, 0, 0, 1],
    ]
    assert group.indices(1, np.array([0, 1, 2])).tolist() == [0, 1, 4]


def test_what_begins_otherwise_or_does_not_fit_comes_apart() -> None:
    strangers = rows_of([1, 2, 3, 4], [5, 2, 3, 4])
    assert [group.rows for group in prefix_groups(strangers, 100)] == [(0,), (1,)]
    alike = rows_of([1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 6])
    assert [group.rows for group in prefix_groups(alike, 100)] == [(0, 1, 2)]
    assert [group.rows for group in prefix_groups(alike, 5)] == [(0, 1), (2,)]
    assert [group.rows for group in prefix_groups(alike, 1)] == [(0,), (1,), (2,)]
    assert list(prefix_groups([], 100)) == []
    long = [np.arange(MOST_TOKENS + 1, dtype=np.int32)] * 2
    assert [group.rows for group in prefix_groups(long, 10**6)] == [(0,), (1,)]


@given(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=9), min_size=1, max_size=8), st.integers(1, 40))
def test_every_token_of_every_row_sees_its_own_past(lists: list[list[int]], budget: int) -> None:
    ids = rows_of(*lists)
    found = list(prefix_groups(ids, budget))
    assert sorted(row for group in found for row in group.rows) == list(range(len(ids)))
    for group in found:
        line, positions, mask = group.packed_row(ids), group.positions(), group.mask()
        assert group.length == len(line) == len(positions) <= max(budget, len(ids[group.rows[0]]))
        for branch, row in enumerate(group.rows):
            own = np.arange(len(ids[row]))
            places = group.indices(branch, own)
            assert line[places].tolist() == ids[row].tolist()
            assert positions[places].tolist() == own.tolist()
            # a branch computes its last token itself; what the trunk holds for it, the trunk's tokens see alike
            assert sorted(np.flatnonzero(mask[places[-1]])) == sorted(places)


def test_tokens_in_common() -> None:
    one, two = rows_of([1, 2, 3], [1, 2, 4, 5])
    assert (
        shared_tokens(one, two),
        shared_tokens(one, one),
        shared_tokens(one, one[:2]),
        shared_tokens(one, two[1:]),
    ) == (2, 3, 2, 0)


@pytest.mark.parametrize("max_tokens", [1, 60, 150, 4096])
def test_scores_are_those_of_separate_rows(max_tokens: int) -> None:
    model = tiny_qwen3(41, width=32, layers=2, heads=2)
    ids, places = [], []
    for seed, turns in enumerate((5, 1, 7)):
        more = episode(turns, seed)
        ids += more[0]
        places += more[1]
    apart = LocalScorer(model=model, max_tokens=max_tokens)
    shared = LocalScorer(model=model, max_tokens=max_tokens, share_prefixes=True)
    for one, two in zip(apart.logprobs(ids, places), shared.logprobs(ids, places), strict=True):
        np.testing.assert_allclose(two, one, atol=2e-5)
    for one, two in zip(apart.topk(ids, places, 3), shared.topk(ids, places, 3), strict=True):
        assert two.ids.tolist() == one.ids.tolist()
        np.testing.assert_allclose(two.logp, one.logp, atol=2e-5)


def test_a_teacher_reads_the_history_once() -> None:
    ids, _ = episode(24, history=100)
    (group,) = prefix_groups(ids, 4096)
    assert sum(len(row) for row in ids) > 9 * group.length


def test_which_models_keep_branches_apart() -> None:
    from transformers import MambaConfig, MambaForCausalLM

    model: Any = tiny_qwen3(41, width=32, layers=2, heads=2)
    assert supports_prefix_sharing(model)
    model.config._attn_implementation = "eager"  # adds a mask of booleans as if it held scores
    assert not supports_prefix_sharing(model)
    recurrent = MambaForCausalLM(MambaConfig(vocab_size=41, hidden_size=16, state_size=4, num_hidden_layers=1))
    assert not supports_prefix_sharing(recurrent.eval())
