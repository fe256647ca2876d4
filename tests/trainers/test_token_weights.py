"""Weights on two ragged episodes: A holds 2 tokens at turn 0 and 1 at turn 1, B holds 2 at turn 0."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turngym.core.errors import SettingsError
from turngym.trainers.algorithms.turnopd import TurnOpdConfig
from turngym.trainers.batch import pack
from turngym.trainers.token_weights import (
    WEIGHTS,
    Blend,
    TurnLevel,
    blend_alpha,
    blend_weights,
    reliable_turns,
    token_mean,
    trajectory_weights,
    turn_mean,
    turn_weights,
)

repeatable = settings(derandomize=True)


def test_trajectory_weights_by_hand(ragged):
    np.testing.assert_allclose(trajectory_weights(pack(ragged)), [1 / 6, 1 / 6, 1 / 6, 1 / 4, 1 / 4])


def test_token_mean_by_hand(ragged):
    np.testing.assert_allclose(token_mean(pack(ragged)), [0.2] * 5)


def test_turn_mean_by_hand(ragged):
    # three responses of 2, 1 and 2 tokens
    np.testing.assert_allclose(turn_mean(pack(ragged)), [1 / 6, 1 / 6, 1 / 3, 1 / 6, 1 / 6])
    third = replace(ragged[0], task=replace(ragged[0].task, task_id="task/2"))
    wanted = [1 / 10, 1 / 10, 1 / 5, 1 / 10, 1 / 10, 1 / 10, 1 / 10, 1 / 5]
    np.testing.assert_allclose(turn_mean(pack([*ragged, third])), wanted)


def test_turn_weights_by_hand(ragged):
    # with every turn reliable: turn 0 has 4 tokens, turn 1 has 1
    every = turn_weights(pack(ragged), n_min=1)
    np.testing.assert_allclose(every, [1 / 8, 1 / 8, 1 / 2, 1 / 8, 1 / 8])
    # by default n_min = min(max(8, 1), 2) = 2, and one episode alone reaches turn 1
    np.testing.assert_allclose(turn_weights(pack(ragged)), [1 / 4, 1 / 4, 0, 1 / 4, 1 / 4])


def test_blend_weights_by_hand(ragged):
    # 0.75 * trajectory + 0.25 * turn; the unreliable turn 1 keeps 0.75 of its trajectory share
    blend = blend_weights(pack(ragged), 0.25)
    np.testing.assert_allclose(blend, [0.1875, 0.1875, 0.125, 0.25, 0.25])
    assert blend.sum() == pytest.approx(1.0, abs=1e-15)
    np.testing.assert_array_equal(blend_weights(pack(ragged), 0.0), trajectory_weights(pack(ragged)))
    np.testing.assert_array_equal(blend_weights(pack(ragged), 1.0), turn_weights(pack(ragged)))


def test_blend_alpha_by_hand():
    assert blend_alpha(1, 1) == 1.0
    assert [blend_alpha(k, 4) for k in (1, 2, 3, 4)] == [0.25, 0.5, 0.75, 1.0]
    assert [blend_alpha(k, 10, 0.2, 0.6) for k in (1, 2, 4, 6, 9)] == pytest.approx([0, 0, 0.5, 1, 1])
    assert [blend_alpha(k, 10, 0.5, 0.5) for k in (4, 5, 6)] == [0.0, 1.0, 1.0]


def test_a_turn_is_reliable_from_n_min_episodes_on(make_episode):
    def population(long: int, total: int) -> np.ndarray:
        deep = [make_episode([([1], [2]), ([3], [4])], number=n) for n in range(long)]
        return reliable_turns(pack(deep + [make_episode([([1], [2])], number=n) for n in range(total - long)]))

    assert population(7, 20).tolist() == [True, False]  # n_min = max(8, 3)
    assert population(8, 20).tolist() == [True, True]
    assert population(14, 100).tolist() == [True, False]  # n_min = max(8, 15)
    assert population(15, 100).tolist() == [True, True]
    assert population(15, 101).tolist() == [True, False]  # ceil(15.15) = 16
    assert population(5, 6).tolist() == [True, False]  # n_min = min(8, 6)
    assert population(6, 6).tolist() == [True, True]


def test_min_share_is_meant_in_decimal(make_episode):
    # 0.07 * 100 is 7.000000000000001 in binary floating point
    deep = [make_episode([([1], [2]), ([3], [4])], number=n) for n in range(7)]
    batch = pack(deep + [make_episode([([1], [2])], number=n) for n in range(93)])
    assert reliable_turns(batch, n_min=1, min_share=0.07).tolist() == [True, True]


def test_without_a_reliable_turn_trajectories_decide(make_episode):
    # a demonstration played different numbers of turns first, so no turn is supervised in both episodes
    late = make_episode([([1], [2]), ([3], [4])], origins=["demonstration", "policy"])
    batch = pack([make_episode([([1], [2, 3])]), late])
    np.testing.assert_allclose(turn_weights(batch), [1 / 4, 1 / 4, 1 / 2])


def test_an_episode_without_tokens_takes_no_share(ragged, make_episode):
    batch = pack([*ragged, make_episode([([1], [])])])
    for name, weight in WEIGHTS.items():
        assert weight(batch, step=1, total_steps=2).sum() == pytest.approx(1.0), name


def test_registry_pieces_are_the_functions(ragged):
    batch = pack(ragged)
    expected = {
        "trajectory": trajectory_weights(batch),
        "turn": turn_weights(batch),
        "blend": blend_weights(batch, 0.75),
        "token_mean": token_mean(batch),
        "episode_mean": trajectory_weights(batch),
        "turn_mean": turn_mean(batch),
    }
    assert set(WEIGHTS) == set(expected)
    for name, weight in WEIGHTS.items():
        np.testing.assert_array_equal(weight(batch, step=3, total_steps=4), expected[name])
    late = Blend(start=0.5, end=1.0, turn=TurnLevel(n_min=1))
    np.testing.assert_allclose(late(batch, step=3, total_steps=4), blend_weights(batch, 0.5, n_min=1))
    np.testing.assert_array_equal(late(batch, step=1, total_steps=4), trajectory_weights(batch))


def test_thresholds_reach_the_reliable_turns(make_episode):
    # turn 0 in 10 episodes, turn 1 in 4: a least count of 4 keeps it, a share of 1/2 does not
    batch = pack([make_episode([([1], [2]), ([3], [4])][: 2 if n < 4 else 1], number=n) for n in range(10)])
    for n_min, min_share, kept in ((4, 0.1, 2), (4, 0.5, 1), (5, 0.1, 1)):
        wanted = np.where(batch.turn_N == 0, 1 / 10, 1 / 4) / 2 if kept == 2 else (batch.turn_N == 0) / 10
        level = TurnLevel(n_min=n_min, min_share=min_share)
        np.testing.assert_allclose(level(batch, step=1, total_steps=9), wanted)
        np.testing.assert_allclose(Blend(turn=level)(batch, step=9, total_steps=9), wanted)
        np.testing.assert_allclose(blend_weights(batch, 1.0, n_min=n_min, min_share=min_share), wanted)


lengths = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=6), min_size=1, max_size=12).filter(
    lambda games: any(map(any, games))
)


@repeatable
@given(lengths, st.floats(0, 1), st.randoms(use_true_random=False))
def test_sums_are_one_and_order_does_not_matter(make_episode, games, alpha, random):
    episodes = [make_episode([([1], [2] * n) for n in game], number=k) for k, game in enumerate(games)]
    shuffled = random.sample(range(len(games)), len(games))
    batch, other = pack(episodes), pack([episodes[k] for k in shuffled])
    weighers = [w for name, w in WEIGHTS.items() if name != "blend"]
    for weigh in [*weighers, lambda b, **_: blend_weights(b, alpha), lambda b, **_: blend_weights(b, 1.0, n_min=1)]:
        here, there = (weigh(b, step=1, total_steps=1) for b in (batch, other))
        assert here.dtype == np.float64
        assert (here >= 0).all()
        assert here.sum() == pytest.approx(1.0, abs=1e-12)
        for place, original in enumerate(shuffled):
            np.testing.assert_allclose(here[batch.episode_N == original], there[other.episode_N == place])


@repeatable
@given(lengths)
def test_every_reliable_turn_and_every_trajectory_weighs_the_same(make_episode, games):
    batch = pack([make_episode([([1], [2] * n) for n in game], number=k) for k, game in enumerate(games)])
    by_episode = np.bincount(batch.episode_N, weights=trajectory_weights(batch))
    assert np.ptp(by_episode[by_episode > 0]) < 1e-12
    by_turn = np.bincount(batch.turn_N, weights=turn_weights(batch))
    if reliable_turns(batch).any():
        np.testing.assert_allclose(by_turn, reliable_turns(batch) / reliable_turns(batch).sum())


def test_a_blend_that_ends_before_it_starts_is_refused():
    with pytest.raises(SettingsError, match=r"blend_start is 0\.5 and blend_end 0\.2"):
        TurnOpdConfig(blend_start=0.5, blend_end=0.2)
    TurnOpdConfig(blend_start=0.5, blend_end=0.5)


def test_turns_alone_have_no_way_to_go():
    assert [TurnLevel().alpha(step=step, total_steps=4) for step in (1, 4)] == [1.0, 1.0]
