"""Turn statistics by hand on the two ragged episodes, and what pooling must keep."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turngym.envs.episode import Status
from turngym.trainers.batch import pack
from turngym.trainers.rollout_plan.turn_stats import (
    deep_third,
    loss_share,
    probe_stats,
    sum_by_turn,
    turn_stats,
)

repeatable = settings(max_examples=40, deadline=None, derandomize=True)

# A (failed): turn 0 has tokens 0.2, 0.4, turn 1 has 1.5; B (succeeded): turn 0 has 0.1, 0.1
KL = np.array([0.2, 0.4, 1.5, 0.1, 0.1])
NAN = float("nan")


def test_divergence_by_turn_by_hand(ragged):
    stats = turn_stats(pack(ragged), KL)
    assert (stats.tokens_T.tolist(), stats.survivors_T.tolist()) == ([4, 1], [2, 1])
    # pooled over tokens: 0.8 / 4, not the mean of episode means
    np.testing.assert_allclose(stats.kl_T, [0.2, 1.5])


def test_pooling_is_over_tokens_not_episodes(make_episode):
    batch = pack([make_episode([([1], [2, 3, 4])]), make_episode([([1], [2])])])
    np.testing.assert_allclose(turn_stats(batch, np.array([1.0, 1, 1, 5])).kl_T, [2.0])


def test_outcome_separation_by_hand(ragged):
    stats = turn_stats(pack(ragged), KL)
    np.testing.assert_allclose(stats.kl_fail_T, [0.3, 1.5])
    np.testing.assert_allclose(stats.kl_success_T, [0.1, NAN])


def test_an_episode_at_the_depth_cap_is_neither_success_nor_failure(ragged, make_episode):
    capped = make_episode([([1], [2, 3])], status=Status.TRUNCATED_DEPTH)
    stats = turn_stats(pack([*ragged, capped]), np.array([*KL, 9.0, 9.0]))
    np.testing.assert_allclose(stats.kl_fail_T, [0.3, 1.5])
    np.testing.assert_allclose(stats.kl_T, [18.8 / 6, 1.5])


def test_loss_share_by_hand(ragged):
    batch, weight = pack(ragged), np.array([0.1, 0.1, 0.4, 0.2, 0.2])
    # turn 0: 0.02 + 0.04 + 0.02 + 0.02 = 0.1; turn 1: 0.6
    np.testing.assert_allclose(sum_by_turn(weight * KL, batch), [0.1, 0.6])
    np.testing.assert_allclose(loss_share(KL, weight, batch), [1 / 7, 6 / 7])
    # a policy gradient's losses have both signs: they must not cancel
    np.testing.assert_allclose(loss_share(np.array([0.2, 0.4, -1.5, -0.1, 0.1]), weight, batch), [1 / 7, 6 / 7])
    np.testing.assert_array_equal(loss_share(np.zeros(5), weight, batch), [0, 0])


def test_deep_third_by_hand():
    assert deep_third(np.array([0.5, 0.3, 0.2])) == pytest.approx(0.2)
    assert deep_third(np.array([0.1, 0.2, 0.3, 0.15, 0.15, 0.1])) == pytest.approx(0.25)
    # of four turns only turn 3 lies at or beyond 8/3
    assert deep_third(np.array([0.4, 0.3, 0.2, 0.1])) == pytest.approx(0.1)
    assert deep_third(np.array([1.0])) == 0.0


def test_entropy_by_turn_by_hand(ragged):
    batch = pack(ragged)
    stats = turn_stats(batch, KL, entropy_N=np.array([1.0, 2, 3, 1, 0]), teacher_entropy_N=np.array([0.0, 0, 7, 2, 2]))
    np.testing.assert_allclose(stats.entropy_T, [1.0, 3.0])
    np.testing.assert_allclose(stats.teacher_entropy_T, [1.0, 7.0])
    assert np.isnan(turn_stats(batch, KL).entropy_T).all()


def test_probe_stats_leave_depth_capped_episodes_out(ragged, make_episode):
    capped = make_episode([([1], [2, 3]), ([4], [5]), ([6], [7])], status=Status.TRUNCATED_DEPTH)
    stats = probe_stats(pack([*ragged, capped]), np.array([*KL, 9.0, 9.0, 9.0, 9.0]))
    np.testing.assert_allclose(stats.kl_T, [0.2, 1.5])
    assert stats.survivors_T.tolist() == [2, 1]
    assert (stats.last_turn_E.tolist(), stats.reward_E.tolist()) == ([1, 0], [0.0, 1.0])
    only_capped = probe_stats(pack([capped]), np.full(4, 9.0))
    assert len(only_capped.kl_T) == len(only_capped.last_turn_E) == 0


def test_a_turn_without_supervised_tokens_still_has_survivors(make_episode):
    episode = make_episode([([1], [2]), ([3], [4]), ([5], [6])], origins=["policy", "noise", "policy"])
    stats = turn_stats(pack([episode]), np.array([1.0, 3.0]))
    assert (stats.survivors_T.tolist(), stats.tokens_T.tolist()) == ([1, 1, 1], [1, 0, 1])
    np.testing.assert_allclose(stats.kl_T, [1, NAN, 3])


def test_columns_of_another_length_are_errors(ragged):
    batch = pack(ragged)
    with pytest.raises(ValueError, match=r"entropy has shape \(3,\).*\(5,\)"):
        turn_stats(batch, KL, entropy_N=np.zeros(3))


games = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=4), min_size=1, max_size=6)


@repeatable
@given(games, st.randoms(use_true_random=False))
def test_totals_are_kept_and_order_does_not_matter(make_episode, lengths, random):
    episodes = [
        make_episode([([1], [2] * n) for n in game], number=k, success=k % 2 == 0) for k, game in enumerate(lengths)
    ]
    batch = pack(episodes)
    kl = np.linspace(0.1, 1.0, batch.tokens)
    stats = turn_stats(batch, kl)
    assert (stats.kl_T * stats.tokens_T).sum() == pytest.approx(kl.sum())
    assert loss_share(kl, np.ones(batch.tokens), batch).sum() == pytest.approx(1.0)
    order = random.sample(range(len(episodes)), len(episodes))
    moved = np.concatenate([kl[batch.episode_N == k] for k in order])
    other = turn_stats(pack([episodes[k] for k in order]), moved)
    for name in ("kl_T", "survivors_T", "kl_fail_T", "tokens_T"):
        np.testing.assert_allclose(getattr(other, name), getattr(stats, name), atol=1e-12)
