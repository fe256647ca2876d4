"""ATOD's advantages: what a step weighs, and how much each turn counts, on two ragged episodes by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turngym.core.episode import Episode
from turngym.trainers.algorithm import Scorers
from turngym.trainers.batch import pack
from turngym.trainers.contrib.atod import Annealing, turn_factors
from turngym.trainers.contrib.grpo_opd import CombinedAdvantage
from turngym.trainers.targets import TargetError


@dataclass(frozen=True)
class Table:
    """A scorer with fixed log-probabilities, row after row: three labels of A, two of B."""

    logp: tuple[float, ...]

    def topk(self, ids: Any, positions: Any, k: int) -> Any:
        raise AssertionError("nobody asks for this")

    def logprobs(self, ids: Sequence[Any], positions: Sequence[Any]) -> list[Any]:
        return np.split(np.array(self.logp, np.float32), np.cumsum([len(places) for places in positions])[:-1])


STUDENT, TEACHER = (-1.0, -3.0, -1.0, -0.5, -1.5), (-3.0, -5.0, -2.0, -0.25, -0.75)
SCORERS = Scorers(student=Table(STUDENT), teacher=Table(TEACHER), step=1)  # type: ignore[arg-type]
# D of the turns: 2, 1 and -0.5, that is 0; U: 2, 1, 1. Of the largest: 1, 1/2, 0 and 1, 1/2, 1/2; means 1, 1/2, 1/4
UTILITY = np.array([1.0, 1.0, 0.5, 0.25, 0.25])
RATIO = np.array([-2.0, -2.0, -1.0, 0.25, 0.75])
CONTRAST = np.array([-1.0, -1.0, -1.0, 1.0, 1.0])


def test_turns_by_hand(pair: list[Episode], make_episode: Callable[..., Episode]) -> None:
    batch = pack(pair)
    found = turn_factors(batch, np.array(STUDENT), np.array(TEACHER), 1.0)
    # 2, 2, 3/2, 5/4, 5/4: 8 over 5 tokens
    np.testing.assert_allclose(found, np.array([2.0, 2.0, 1.5, 1.25, 1.25]) / 1.6)
    found = turn_factors(batch, np.array(STUDENT), np.array(TEACHER), 3.0)
    np.testing.assert_allclose(found, (1.0 + 3.0 * UTILITY) / (1.0 + 3.0 * UTILITY).mean())
    np.testing.assert_allclose(turn_factors(batch, np.array(STUDENT), np.array(TEACHER), 0.0), 1.0)
    # nobody disagrees: uncertainty alone, 1, 1/2, 1/2
    found = turn_factors(batch, np.array(STUDENT), np.array(STUDENT), 1.0)
    np.testing.assert_allclose(found, np.array([1.5, 1.5, 1.25, 1.25, 1.25]) / 1.35)
    # a third episode, one token: the most uncertain of all; U over 4 is 1/2, 1/4, 1/4, 1
    batch = pack([*pair, make_episode([([7], [30])], number=2, group=7)])
    found = turn_factors(batch, np.array([*STUDENT, -4.0]), np.array([*STUDENT, -4.0]), 2.0)
    np.testing.assert_allclose(found, np.array([1.5, 1.5, 1.25, 1.25, 1.25, 2.0]) / (8.75 / 6))
    batch = pack(pair)
    # a student that is certain: all turns alike
    np.testing.assert_allclose(turn_factors(batch, np.zeros(5), np.zeros(5), 1.0), 1.0)


def test_what_a_step_weighs() -> None:
    plain = Annealing(total=10)
    assert plain(1) == pytest.approx((0.1, 0.9))
    assert plain(10) == pytest.approx((1.0, 0.0))
    late = Annealing(total=10, start=0.2, end=0.6, floor=0.25)
    assert late(2) == pytest.approx((0.25, 1.0))
    assert late(3) == pytest.approx((0.25 + 0.75 * 0.25, 0.75))
    assert late(6) == late(9) == pytest.approx((1.0, 0.0))


def test_advantages_by_hand(pair: list[Episode]) -> None:
    batch = pack(pair)
    signal = CombinedAdvantage(
        annealing=Annealing(total=4, floor=0.2), scale="none", factor=partial(turn_factors, strength=3.0)
    )
    taught = RATIO * (1.0 + 3.0 * UTILITY) / (1.0 + 3.0 * UTILITY).mean()
    targets = signal(batch, pair, SCORERS)
    np.testing.assert_allclose(targets.advantage_N, 0.4 * CONTRAST + 0.75 * taught, rtol=1e-5)
    assert targets.advantage_N is not None
    assert targets.advantage_N.dtype == np.float32
    np.testing.assert_allclose(targets.label_logp_N, TEACHER)
    np.testing.assert_allclose(targets.reward, [0.5, 2.5])
    found = signal(batch, pair, replace(SCORERS, step=3)).advantage_N
    np.testing.assert_allclose(found, 0.8 * CONTRAST + 0.25 * taught, rtol=1e-5)
    found = replace(signal, scale="std")(batch, pair, replace(SCORERS, step=4)).advantage_N
    np.testing.assert_allclose(found, CONTRAST / 2**0.5, rtol=1e-5)
    found = replace(signal, reward="success")(batch, pair, replace(SCORERS, step=4)).advantage_N
    np.testing.assert_allclose(found, CONTRAST / 2, rtol=1e-5)
    # each alone in its group: the baseline is 0
    apart = [pair[0], replace(pair[1], group=8)]
    found = signal(pack(apart), apart, replace(SCORERS, step=4)).advantage_N
    np.testing.assert_allclose(found, [0.5, 0.5, 0.5, 2.5, 2.5], rtol=1e-5)
    with pytest.raises(TargetError, match=r"\bteacher\b"):
        signal(batch, pair, replace(SCORERS, teacher=None))
    with pytest.raises(TargetError, match=r"\bstudent\b"):
        signal(batch, pair, replace(SCORERS, student=None))  # type: ignore[arg-type]


NUMBERS = st.lists(st.floats(-6, 0), min_size=5, max_size=5)


@given(student=NUMBERS, teacher=NUMBERS, strength=st.floats(0, 5))
def test_factors_have_mean_one_and_are_those_of_turns(
    pair: list[Episode], student: list[float], teacher: list[float], strength: float
) -> None:
    batch = pack(pair)
    found = turn_factors(batch, np.array(student), np.array(teacher), strength)
    assert found.mean() == pytest.approx(1.0)
    assert found[0] == found[1]
    assert found[3] == found[4]
    assert found.max() <= (1.0 + strength) * found.min() * (1.0 + 1e-9)
