"""Group-relative advantages on numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turngym.trainers.group_advantage import AdvantageError, grpo_advantage, grpo_split_advantage, has_spread

GROUPS = np.array([0, 0, 0, 0, 7, 7, 9])
REWARDS = np.array([1.0, 0.0, 0.0, 1.0, 3.0, 1.0, 5.0])
ALL = np.ones(7, np.bool_)


def test_grpo_by_hand() -> None:
    # group 0: mean 0.5, unbiased std sqrt(1/3); group 7: mean 2, std sqrt(2); group 9: alone, mean 0 and std 1
    a, b = 0.5 / (np.sqrt(1 / 3) + 1e-6), 1.0 / (np.sqrt(2.0) + 1e-6)
    wanted = [a, -a, -a, a, b, -b, 5.0 / (1 + 1e-6)]
    np.testing.assert_allclose(grpo_advantage(REWARDS, GROUPS), wanted, rtol=1e-12)
    np.testing.assert_allclose(grpo_advantage(REWARDS, GROUPS, scale="none"), [0.5, -0.5, -0.5, 0.5, 1, -1, 5])


def test_the_split_baseline_knows_only_the_policys_own_episodes() -> None:
    own = np.array([False, True, True, True, False, True, True])
    # group 0: own rewards 0, 0, 1: mean 1/3, unbiased std sqrt(1/3); group 7: one own episode: mean 0, std 1
    unit = np.sqrt(1 / 3) + 1e-6
    wanted = [(2 / 3) / unit, (-1 / 3) / unit, (-1 / 3) / unit, (2 / 3) / unit, 3 / (1 + 1e-6), 1 / (1 + 1e-6)]
    np.testing.assert_allclose(grpo_split_advantage(REWARDS, GROUPS, own)[:6], wanted, rtol=1e-12)


def test_no_spread_is_one_unit() -> None:
    own = np.array([False, True, True])
    found = grpo_split_advantage(np.array([1.0, 0.0, 0.0]), np.zeros(3, np.int64), own)
    np.testing.assert_allclose(found, [1 / (1 + 1e-6), 0.0, 0.0])


def test_a_spread_of_rounding_is_none() -> None:
    # the mean of three times 0.1 is not 0.1, so that their computed deviation is 1.7e-17; 0.1 + 0.2 is 0.3 to a reader
    for policy in [0.1, 0.1, 0.1], [0.1 + 0.2, 0.3, 0.3]:
        own = np.array([False, True, True, True])
        found = grpo_split_advantage(np.array([1.0, *policy]), np.zeros(4, np.int64), own)
        np.testing.assert_allclose(found, [1.0 - policy[-1], 0.0, 0.0, 0.0], rtol=1e-5, atol=1e-15)


def test_errors_say_which_group_and_which_episode() -> None:
    with pytest.raises(AdvantageError, match="group 7 has 2 episodes, none"):
        grpo_split_advantage(REWARDS, GROUPS, np.array([True] * 4 + [False] * 2 + [True]))
    with pytest.raises(AdvantageError, match="reward of episode 2 is nan"):
        grpo_advantage(np.array([0.0, 1.0, np.nan]), np.zeros(3, np.int64))


def test_rewards_that_differ() -> None:
    assert has_spread(np.array([0.6, 0, 0, 0, 0.2, 0.4, 0, 0]))
    assert has_spread(np.array([-1.0, -1.001]))
    assert not has_spread(np.array([0.3, 0.1 + 0.2, 0.3]))  # rounding
    assert not has_spread(np.array([5.0]))


@given(
    st.lists(st.tuples(st.integers(0, 3), st.floats(-10, 10)), min_size=1, max_size=30),
    st.floats(-5, 5),
    st.floats(0.5, 4.0),
)
def test_a_shift_changes_nothing_and_groups_do_not_mix(
    rows: list[tuple[int, float]], shift: float, factor: float
) -> None:
    group, reward = np.array([g for g, _ in rows]), np.array([r for _, r in rows])
    base = grpo_advantage(reward, group, scale="none")
    shared = np.array([np.sum(group == g) > 1 for g in group])
    moved = grpo_advantage(reward + shift * shared, group, scale="none")
    np.testing.assert_allclose(moved, base, atol=1e-9)
    for g in set(group.tolist()):
        part = group == g
        scaled = grpo_advantage(reward[part] * factor, group[part], scale="none")
        np.testing.assert_allclose(scaled, base[part] * factor, atol=1e-9)
