"""SOD's weights and advantages, on two ragged episodes by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turngym.core.episode import Episode
from turngym.trainers.algorithm import Scorers
from turngym.trainers.batch import pack
from turngym.trainers.contrib.grpo_opd import CombinedAdvantage
from turngym.trainers.contrib.sod import step_weights


@dataclass(frozen=True)
class Table:
    """A scorer with fixed log-probabilities, row after row: three labels of A, three of B."""

    logp: tuple[float, ...]

    def topk(self, ids: Any, positions: Any, k: int) -> Any:
        raise AssertionError("nobody asks for this")

    def logprobs(self, ids: Sequence[Any], positions: Sequence[Any]) -> list[Any]:
        return np.split(np.array(self.logp, np.float32), np.cumsum([len(places) for places in positions])[:-1])


# log q - log p: the signs within a turn differ, so that a mean of differences is not the mean distance
STUDENT = (-1.0, -3.0, -1.0, -0.5, -1.5, -1.0)
TEACHER = (-3.0, -2.0, -1.5, -1.0, -1.25, -2.5)
RATIO = np.array([-2.0, 1.0, -0.5, -0.5, 0.25, -1.5])


@pytest.fixture(scope="module")
def three(make_episode: Callable[..., Episode]) -> list[Episode]:
    """A says 10 11, then 12; B says 20, then 21, then 22."""
    return [
        make_episode([([1, 2, 3], [10, 11]), ([4], [12])], number=0, group=7, episode_return=0.5),
        make_episode([([5, 6], [20]), ([7], [21]), ([8], [22])], number=1, group=7, episode_return=2.5),
    ]


def test_weights_by_hand(three: list[Episode]) -> None:
    batch = pack(three)
    # distances: A 3/2 and 1/2; B 1/2, 1/4 and 3/2. Of the first turn: 1 and 3; 1, 2 and 1/3
    found = step_weights(batch, np.array(STUDENT), np.array(TEACHER), 5.0)
    np.testing.assert_allclose(found, [1.0, 1.0, 3.0, 1.0, 2.0, 1.0 / 3.0], rtol=1e-5)
    found = step_weights(batch, np.array(STUDENT), np.array(TEACHER), 0.2)
    np.testing.assert_allclose(found, [1.0, 1.0, 1.2, 1.0, 1.2, 1.0 / 3.0], rtol=1e-5)
    # a turn without distance is bounded; where all have none all count the same
    found = step_weights(batch, np.array(STUDENT), np.array([*TEACHER[:2], -1.0, *TEACHER[3:]]), 0.5)
    np.testing.assert_allclose(found[:3], [1.0, 1.0, 1.5])
    np.testing.assert_allclose(step_weights(batch, np.array(STUDENT), np.array(STUDENT), 0.5), 1.0)
    # a first turn without distance: what comes later has parted from it without bounds
    found = step_weights(batch, np.array(STUDENT), np.array([*STUDENT[:2], -1.5, *TEACHER[3:]]), 0.5)
    np.testing.assert_allclose(found[:3], [1.0, 1.0, 1e-6 / 0.500001])


def test_advantages_by_hand(three: list[Episode]) -> None:
    batch = pack(three)
    scorers = Scorers(student=Table(STUDENT), teacher=Table(TEACHER), step=1)  # type: ignore[arg-type]
    signal = CombinedAdvantage(scale="none", w_teacher=0.5, factor=partial(step_weights, delta=0.2))
    weights = np.array([1.0, 1.0, 1.2, 1.0, 1.2, 1.0 / 3.0])
    # returns 0.5 and 2.5: -1 and 1 from their mean
    contrast = np.array([-1.0, -1.0, -1.0, 1.0, 1.0, 1.0])
    targets = signal(batch, three, scorers)
    np.testing.assert_allclose(targets.advantage_N, contrast + 0.5 * weights * RATIO, rtol=1e-5)
    np.testing.assert_allclose(targets.label_logp_N, TEACHER)


NUMBERS = st.lists(st.floats(-6, 0), min_size=6, max_size=6)


@given(student=NUMBERS, teacher=NUMBERS, delta=st.floats(0, 2))
def test_weights_are_those_of_turns_and_bounded(
    three: list[Episode], student: list[float], teacher: list[float], delta: float
) -> None:
    found = step_weights(pack(three), np.array(student), np.array(teacher), delta)
    assert found[0] == found[1] == found[3] == 1.0
    assert 0.0 < found.min() <= found.max() <= 1.0 + delta
