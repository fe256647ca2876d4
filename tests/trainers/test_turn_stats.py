"""Turn statistics by hand on the two ragged episodes, and what pooling must keep."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turngym.core.episode import SHORT, Status
from turngym.trainers.algorithm import DepthState
from turngym.trainers.algorithms.turnopd import AdaptiveDepth, DepthConfig, probe_stats
from turngym.trainers.batch import pack
from turngym.trainers.turn_stats import deep_third, ended_by_turn, kl_share, loss_share, sum_by_turn, turn_row

repeatable = settings(derandomize=True)

# A (failed): turn 0 has tokens 0.2, 0.4, turn 1 has 1.5; B (succeeded): turn 0 has 0.1, 0.1
KL = np.array([0.2, 0.4, 1.5, 0.1, 0.1])
NAN = float("nan")


def by_turn(batch, kl_N, full_depth=False):
    return turn_row(batch, {"loss": kl_N, "kl_bin": kl_N, "kl_raw": kl_N}, np.ones(len(kl_N)), full_depth=full_depth)


def test_divergence_by_turn_by_hand(ragged):
    stats = by_turn(pack(ragged), KL)
    assert (stats["turn/tokens"], stats["turn/survivors"]) == ([4, 1], [2, 1])
    # pooled over tokens: 0.8 / 4, not the mean of episode means
    np.testing.assert_allclose(stats["turn/kl"], [0.2, 1.5])
    np.testing.assert_allclose(stats["turn/kl_failure"], [0.3, 1.5])
    np.testing.assert_allclose(stats["turn/kl_success"], [0.1, NAN])


def test_pooling_is_over_tokens_not_episodes(make_episode):
    batch = pack([make_episode([([1], [2, 3, 4])]), make_episode([([1], [2])])])
    np.testing.assert_allclose(by_turn(batch, np.array([1.0, 1, 1, 5]))["turn/kl"], [2.0])


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


def test_a_probe_counts_every_episode(ragged, make_episode):
    # the cap of the probe itself cut the third: it reached turns 0, 1, 2 like any other
    capped = make_episode([([1], [2, 3]), ([4], [5]), ([6], [7])], status=Status.TRUNCATED_DEPTH)
    batch, kl = pack([*ragged, capped]), np.array([*KL, 9.0, 9.0, 8.0, 7.0])
    stats = probe_stats(batch, kl)
    np.testing.assert_allclose(stats.kl_T, [18.8 / 6, 4.75, 7.0])
    assert stats.survivors_T.tolist() == [3, 2, 1]
    assert stats.last_turn_E.tolist() == [1, 0, 2]
    assert (stats.success_E.tolist(), stats.cut_E.tolist()) == ([False, True, False], [False, False, True])
    depth = AdaptiveDepth(DepthConfig(h_max=3, min_successes=1, rho=0.5))
    state, plan = depth.start(), depth.plan(depth.start(), 1)
    learned = depth.learn(state, plan, batch, [], kl)
    assert learned == depth.update(state, plan, stats) == DepthState(hbar=2.0, h_eff=1, h_cov=0, probes=1)
    # no episode ends before the cap: such a student is measured all the same
    only_capped = probe_stats(pack([capped]), np.array([1.0, 3.0, 8.0, 7.0]))
    assert (only_capped.kl_T.tolist(), only_capped.last_turn_E.tolist()) == ([2, 8, 7], [2])


def test_success_is_the_flag_and_not_a_return(make_episode):
    # a solved task with step penalties, and a lost one with a large return
    solved = make_episode([([1], [2])], success=True, episode_return=0.4)
    lost = make_episode([([1], [2])], number=1, success=False, episode_return=3.0)
    assert probe_stats(pack([solved, lost]), np.zeros(2)).success_E.tolist() == [True, False]


def test_what_ended_a_probes_episode_decides_whether_it_counts(make_episode):
    turns = [([1], [2])]
    played = [Status.COMPLETED, Status.TRUNCATED_TURNS, Status.TRUNCATED_TOKENS, Status.TRUNCATED_DEPTH]
    broken = [Status.ERROR_ENV, Status.ERROR_ENGINE, Status.ERROR_TIMEOUT]
    assert set(Status) == {*played, *broken}
    batch = pack([make_episode(turns, number=n, status=status) for n, status in enumerate([*played, *broken])])
    assert probe_stats(batch, np.zeros(4)).cut_E.tolist() == [False, False, False, True]


def test_short_episodes_of_a_partial_probe_do_not_count(ragged, make_episode):
    # one was stopped at the adaptive cap, one ended by itself before it: both would tilt the statistics
    stopped = make_episode([([1], [2]), ([4], [5])], status=Status.TRUNCATED_DEPTH)
    ended = make_episode([([1], [2])], success=True)
    short = [replace(episode, meta={SHORT: 2}) for episode in (stopped, ended)]
    stats = probe_stats(pack([*ragged, *short]), np.array([*KL, 9.0, 9.0, 9.0]))
    np.testing.assert_allclose(stats.kl_T, [0.2, 1.5])
    assert (stats.survivors_T.tolist(), stats.last_turn_E.tolist()) == ([2, 1], [1, 0])


def test_a_cut_episode_has_failed_at_full_depth_and_is_open_below(ragged, make_episode):
    capped = make_episode([([1], [2, 3])], status=Status.TRUNCATED_DEPTH)
    kl = np.array([*KL, 9.0, 9.0])
    open_ = by_turn(pack([*ragged, capped]), kl)
    np.testing.assert_allclose(open_["turn/kl_failure"], [0.3, 1.5])
    np.testing.assert_allclose(open_["turn/kl"], [18.8 / 6, 1.5])
    full = by_turn(pack([*ragged, capped]), kl, full_depth=True)
    np.testing.assert_allclose(full["turn/kl_failure"], [18.6 / 4, 1.5])
    assert (full["turn/tokens_failure"], full["turn/tokens_success"]) == ([4, 1], [2, 0])
    # one that a partial probe stopped before full depth is still open
    short = by_turn(pack([*ragged, replace(capped, meta={SHORT: 1})]), kl, full_depth=True)
    np.testing.assert_allclose(short["turn/kl_failure"], [0.3, 1.5])
    assert short["turn/tokens_failure"] == [2, 1]


def test_kl_share_by_hand(ragged):
    # turn 0: 0.2 + 0.4 + 0.1 + 0.1 = 0.8; turn 1: 1.5; weights play no part
    np.testing.assert_allclose(kl_share(KL, pack(ragged)), [0.8 / 2.3, 1.5 / 2.3])
    # the raw form may be negative: such a turn has no share
    np.testing.assert_allclose(kl_share(np.array([0.2, 0.4, -1.5, 0.1, 0.1]), pack(ragged)), [1, 0])
    np.testing.assert_array_equal(kl_share(np.zeros(5), pack(ragged)), [0, 0])


def test_a_turn_without_supervised_tokens_still_has_survivors(make_episode):
    episode = make_episode([([1], [2]), ([3], [4]), ([5], [6])], origins=["policy", "noise", "policy"])
    stats = by_turn(pack([episode]), np.array([1.0, 3.0]))
    assert (stats["turn/survivors"], stats["turn/tokens"]) == ([1, 1, 1], [1, 0, 1])
    np.testing.assert_allclose(stats["turn/kl"], [1, NAN, 3])
    late = make_episode([([1], [2]), ([3], [4])], origins=["policy", "noise"])
    # the last turn has no tokens, and only one of the two episodes reached it
    np.testing.assert_allclose(sum_by_turn(np.array([1.0, 2.0]), pack([late, make_episode([([1], [2])])])), [3, 0])


games = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=4), min_size=1, max_size=6)


@repeatable
@given(games, st.randoms(use_true_random=False))
def test_totals_are_kept_and_order_does_not_matter(make_episode, lengths, random):
    episodes = [
        make_episode([([1], [2] * n) for n in game], number=k, success=k % 2 == 0) for k, game in enumerate(lengths)
    ]
    batch = pack(episodes)
    kl = np.linspace(0.1, 1.0, batch.tokens)
    stats = by_turn(batch, kl)
    assert (np.array(stats["turn/kl"]) * stats["turn/tokens"]).sum() == pytest.approx(kl.sum())
    assert loss_share(kl, np.ones(batch.tokens), batch).sum() == pytest.approx(1.0)
    order = random.sample(range(len(episodes)), len(episodes))
    moved = np.concatenate([kl[batch.episode_N == k] for k in order])
    other = by_turn(pack([episodes[k] for k in order]), moved)
    for name in ("turn/kl", "turn/survivors", "turn/kl_failure", "turn/tokens"):
        np.testing.assert_allclose(other[name], stats[name], atol=1e-12)


def test_which_turn_was_the_last_by_hand(make_episode):
    episodes = [make_episode([([1], [2])] * turns, number=number) for number, turns in enumerate((1, 3, 3, 2))]
    batch = pack(episodes)
    assert ended_by_turn(batch, np.array([True, True, True, False])).tolist() == [1, 0, 2]
    assert ended_by_turn(batch, np.array([True, False, False, False])).tolist() == [1, 0, 0]
