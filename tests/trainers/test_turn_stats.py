"""Turn statistics by hand on the two ragged episodes, and what pooling must keep."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turngym.envs.episode import Status
from turngym.trainers.batch import pack
from turngym.trainers.rollout_plan.turn_stats import (
    deep_third,
    probe_stats,
    reliable_prefix,
    separation_by_phase,
    stats_from_json,
    stats_to_json,
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
    np.testing.assert_allclose(stats.mass_T, [0.2, 0.75])
    np.testing.assert_allclose(stats.mass_share_T, [0.2 / 0.95, 0.75 / 0.95], rtol=1e-6)
    assert stats.h_eff == 1  # 0.789


def test_pooling_is_over_tokens_not_episodes(make_episode):
    batch = pack([make_episode([([1], [2, 3, 4])]), make_episode([([1], [2])])])
    np.testing.assert_allclose(turn_stats(batch, np.array([1.0, 1, 1, 5])).kl_T, [2.0])


def test_outcome_separation_by_hand(ragged):
    stats = turn_stats(pack(ragged), KL)
    np.testing.assert_allclose(stats.kl_fail_T, [0.3, 1.5])
    np.testing.assert_allclose(stats.kl_success_T, [0.1, NAN])
    np.testing.assert_allclose(stats.separation_T, [0.2, NAN])
    assert (stats.tokens_fail_T.tolist(), stats.tokens_success_T.tolist()) == ([2, 1], [2, 0])


def test_an_episode_at_the_depth_cap_is_neither_success_nor_failure(ragged, make_episode):
    capped = make_episode([([1], [2, 3])], status=Status.TRUNCATED_DEPTH)
    stats = turn_stats(pack([*ragged, capped]), np.array([*KL, 9.0, 9.0]))
    np.testing.assert_allclose(stats.kl_fail_T, [0.3, 1.5])
    np.testing.assert_allclose(stats.kl_T, [18.8 / 6, 1.5])


def test_loss_share_by_hand(ragged):
    stats = turn_stats(pack(ragged), KL, weight_N=np.array([0.1, 0.1, 0.4, 0.2, 0.2]))
    # turn 0: 0.02 + 0.04 + 0.02 + 0.02 = 0.1; turn 1: 0.6
    np.testing.assert_allclose(stats.loss_share_T, [1 / 7, 6 / 7])
    np.testing.assert_allclose(turn_stats(pack(ragged), KL).loss_share_T, [0.8 / 2.3, 1.5 / 2.3])
    np.testing.assert_array_equal(turn_stats(pack(ragged), -KL).loss_share_T, [0, 0])


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
    np.testing.assert_allclose(stats.mass_T, [1, 0, 3])


def test_separation_by_phase_pools_the_steps_of_a_phase(ragged):
    batch = pack(ragged)
    steps = [turn_stats(batch, KL), turn_stats(batch, 3 * KL)]
    (whole,) = separation_by_phase(steps, 1)
    # failures (0.3 * 2 + 0.9 * 2) / 4, successes (0.1 * 2 + 0.3 * 2) / 4
    np.testing.assert_allclose(whole, [0.4, NAN])
    first, second = separation_by_phase(steps, 2)
    np.testing.assert_allclose(first, [0.2, NAN])
    np.testing.assert_allclose(second, [0.6, NAN])
    assert [len(part) for part in separation_by_phase([], 3)] == [0, 0, 0]
    with pytest.raises(ValueError, match="phases is 0"):
        separation_by_phase(steps, 0)


def test_reliable_prefix_by_hand():
    def n(*values: int) -> np.ndarray:
        return np.array(values)

    assert reliable_prefix([n(64, 32, 8, 7)]) == 3
    assert reliable_prefix([n(100, 50, 10, 9)]) == 3  # 10 % of turn 0
    assert reliable_prefix([n(30, 3)], n_min=1) == 2  # 0.1 * 30 is a little more than 3 in binary
    # turn 1 holds in 3 of 5 steps, turn 2 in 2 of 5
    assert reliable_prefix([n(20, 9, 9), n(20, 9, 9), n(20, 9), n(20, 2), n(20)]) == 2
    assert reliable_prefix([n(20, 2, 20)]) == 1  # a prefix: what lies behind a gap is not plotted
    assert (reliable_prefix([]), reliable_prefix([n(3, 2)])) == (0, 0)


def test_statistics_survive_json(ragged):
    stats = turn_stats(pack(ragged), KL)
    line = json.dumps(stats_to_json(stats), allow_nan=False)
    back = stats_from_json(json.loads(line))
    for name in type(stats).__dataclass_fields__:
        np.testing.assert_array_equal(getattr(back, name), getattr(stats, name))
    assert back.tokens_T.dtype == np.int64
    with pytest.raises(ValueError, match=r"lack.*kl_T"):
        stats_from_json({"h_eff": 1})


def test_columns_of_another_length_are_errors(ragged):
    batch = pack(ragged)
    with pytest.raises(ValueError, match=r"entropy has shape \(3,\).*\(5,\)"):
        turn_stats(batch, KL, entropy_N=np.zeros(3))
    with pytest.raises(ValueError, match="include_E has 5 entries for 2 episodes"):
        turn_stats(batch, KL, include_E=np.ones(5, np.bool_))


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
    assert stats.loss_share_T.sum() == pytest.approx(1.0)
    np.testing.assert_array_equal(stats.tokens_T, stats.tokens_success_T + stats.tokens_fail_T)
    order = random.sample(range(len(episodes)), len(episodes))
    moved = np.concatenate([kl[batch.episode_N == k] for k in order])
    other = turn_stats(pack([episodes[k] for k in order]), moved)
    for name in ("kl_T", "survivors_T", "kl_fail_T", "mass_T", "loss_share_T"):
        np.testing.assert_allclose(getattr(other, name), getattr(stats, name), atol=1e-12)
