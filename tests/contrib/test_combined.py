"""The reward's advantage and the teacher's log-ratio in one, on two ragged episodes by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scorers import Slope

from turngym.core.episode import Episode
from turngym.trainers.algorithm import Scorers
from turngym.trainers.batch import pack
from turngym.trainers.contrib.grpo_opd import CombinedAdvantage
from turngym.trainers.targets import TargetError, combined_advantage

SCORERS = Scorers(student=Slope(-0.05), teacher=Slope(-0.1))  # type: ignore[arg-type]
RATIO = np.array([-0.5, -0.55, -0.6, -1.0, -1.05])  # -0.05 times the label
CONTRAST = np.array([-1.0, -1.0, -1.0, 1.0, 1.0])


def test_both_parts_by_hand(pair: list[Episode]) -> None:
    batch = pack(pair)
    signal = CombinedAdvantage(scale="none", w_reward=0.5, w_teacher=2.0)
    targets = signal(batch, pair, SCORERS)
    # returns 0.5 and 2.5: -1 and 1 from their mean
    np.testing.assert_allclose(targets.advantage_N, 0.5 * CONTRAST + 2.0 * RATIO, rtol=1e-5)
    np.testing.assert_allclose(targets.label_logp_N, [-1.0, -1.1, -1.2, -2.0, -2.1], rtol=1e-6)
    np.testing.assert_allclose(targets.reward, [0.5, 2.5])
    assert targets.advantage_N is not None
    assert targets.advantage_N.dtype == np.float32
    found = replace(signal, scale="std")(batch, pair, SCORERS).advantage_N
    np.testing.assert_allclose(found, 0.5 * CONTRAST / 2**0.5 + 2.0 * RATIO, rtol=1e-5)
    # success is 0 and 1: a contrast of one half
    found = replace(signal, reward="success")(batch, pair, SCORERS).advantage_N
    np.testing.assert_allclose(found, 0.25 * CONTRAST + 2.0 * RATIO, rtol=1e-5)
    # each alone in its group: the baseline is 0
    apart = [pair[0], replace(pair[1], group=8)]
    found = signal(pack(apart), apart, SCORERS).advantage_N
    np.testing.assert_allclose(found, 0.5 * np.array([0.5, 0.5, 0.5, 2.5, 2.5]) + 2.0 * RATIO, rtol=1e-5)
    plain = CombinedAdvantage(scale="none")(batch, pair, SCORERS).advantage_N
    np.testing.assert_allclose(plain, CONTRAST + RATIO, rtol=1e-5)


def test_the_sum_by_hand() -> None:
    reward, ratio = np.array([1.0, -2.0], np.float32), np.array([0.5, 0.25], np.float32)
    found = combined_advantage(reward, ratio, w_reward=3.0, w_teacher=4.0)
    np.testing.assert_allclose(found, [5.0, -5.0])
    assert found.dtype == np.float32


NUMBERS = st.lists(st.floats(-5, 5, width=32), min_size=2, max_size=2)


@given(reward=NUMBERS, ratio=NUMBERS, w=st.floats(0, 3), scale=st.floats(0, 3))
def test_it_is_linear_in_both_and_blind_to_neither(
    reward: list[float], ratio: list[float], w: float, scale: float
) -> None:
    first, second = np.array(reward, np.float32), np.array(ratio, np.float32)

    def sum_of(w_reward: float, w_teacher: float) -> Any:
        return combined_advantage(first, second, w_reward=w_reward, w_teacher=w_teacher)

    np.testing.assert_allclose(sum_of(w, 0.0) + sum_of(0.0, scale), sum_of(w, scale), atol=1e-4)
    np.testing.assert_array_equal(sum_of(1.0, 0.0), first)
    np.testing.assert_array_equal(sum_of(0.0, 1.0), second)


def test_a_teacher_that_is_the_student_leaves_the_reward_alone(pair: list[Episode]) -> None:
    same = Scorers(student=Slope(-0.05), teacher=Slope(-0.05))  # type: ignore[arg-type]
    found = CombinedAdvantage(scale="none", w_teacher=9.0)(pack(pair), pair, same).advantage_N
    np.testing.assert_allclose(found, CONTRAST)


def test_who_is_missing_is_named(pair: list[Episode]) -> None:
    with pytest.raises(TargetError, match=r"\bteacher\b"):
        CombinedAdvantage()(pack(pair), pair, Scorers(student=Slope(-0.05)))  # type: ignore[arg-type]
    with pytest.raises(TargetError, match=r"\bstudent\b"):
        CombinedAdvantage()(pack(pair), pair, Scorers(student=None, teacher=Slope(-0.1)))  # type: ignore[arg-type]
