"""RLOO by hand: who is compared with whom, the KL in the reward, the loss, and two steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from reward_methods import RUN, assert_trains, tokens
from scorers import Slope

from turngym.core.episode import Episode
from turngym.trainers.algorithm import Algorithm, Scorers
from turngym.trainers.algorithm_spec import BuildContext
from turngym.trainers.algorithms.rloo import LeaveOneOut, RlooConfig, build, leave_one_out
from turngym.trainers.batch import pack
from turngym.trainers.group_advantage import ComparableGroups

torch.set_num_threads(1)
SCORERS = Scorers(student=Slope(-0.05), reference=Slope(-0.1))


def made(**options: Any) -> Algorithm:
    return build(RlooConfig(**options), BuildContext(run=RUN))


def test_an_episode_is_compared_with_the_others_of_its_group() -> None:
    reward, group = np.array([3.0, 5.0, 1.0, 4.0, 2.0, 0.0]), np.array([7, 2, 7, 9, 7, 9])
    # group 7: 3 - 3/2, 1 - 5/2, 2 - 4/2; group 9: 4 - 0, 0 - 4; group 2 is alone
    np.testing.assert_allclose(leave_one_out(reward, group), [1.5, 0.0, -1.5, 4.0, 0.0, -4.0], atol=1e-12)


def test_advantages_by_hand(pair: list[Episode]) -> None:
    batch = pack(pair)
    found = LeaveOneOut()(batch, pair, SCORERS)
    assert found.advantage_N is not None
    assert found.advantage_N.dtype == np.float32
    assert found.advantage_N.tolist() == [-2.0, -2.0, -2.0, 2.0, 2.0]
    assert found.reward is not None
    assert found.reward.tolist() == [0.5, 2.5]
    found = LeaveOneOut(reward="success")(batch, pair, SCORERS)
    np.testing.assert_array_equal(found.advantage_N, [-1.0, -1.0, -1.0, 1.0, 1.0])


def test_groups_of_a_batch_are_compared_apart(pair: list[Episode], make_episode: Callable[..., Episode]) -> None:
    other = [make_episode([([1], [5])], number=2, group=3, episode_return=worth) for worth in (4.0, 9.0)]
    found = LeaveOneOut()(pack([*pair, *other]), [*pair, *other], SCORERS)
    np.testing.assert_array_equal(found.advantage_N, [-2.0, -2.0, -2.0, 2.0, 2.0, -5.0, 5.0])


def test_the_kl_of_an_episode_is_taken_off_its_reward(pair: list[Episode]) -> None:
    # log p - log pi_0 is 0.05 times the label: 1.65 for 10, 11, 12 and 2.05 for 20, 21
    found = LeaveOneOut(kl_coef=2.0)(pack(pair), pair, SCORERS)
    np.testing.assert_allclose(found.reward, [0.5 - 3.3, 2.5 - 4.1], rtol=1e-6)
    np.testing.assert_allclose(found.advantage_N, [-1.2] * 3 + [1.2] * 2, rtol=1e-5)


def test_the_loss_by_hand() -> None:
    given = tokens([1.0, 1.0, 1.5, 0.5, 1.5, 0.5], [2.0, -2.0, 2.0, -2.0, -2.0, 2.0])
    losses = made().token_loss(given)
    # clipped where the ratio has moved the way of the advantage: at 1.2 and 0.8
    torch.testing.assert_close(losses.loss_n, torch.tensor([-2.0, 2.0, -2.4, 1.6, 3.0, -1.0]))
    losses.loss_n.sum().backward()
    # the first two are REINFORCE's gradient, minus the advantage
    torch.testing.assert_close(given.logp_n.grad, torch.tensor([-2.0, 2.0, 0.0, 0.0, 3.0, -1.0]))


def test_a_group_of_one_is_left_out_and_a_group_without_contrast_is_not() -> None:
    algorithm = made(n=3)
    assert (algorithm.group, algorithm.select) == (3, ComparableGroups(spread=False))
    assert made(n=2).group == 2


def test_two_steps_move_the_parameters_and_options_move_them_elsewhere(tmp_path: Path) -> None:
    assert_trains(made, [{"n": 2}, {"kl_coef": 0.5}], tmp_path)
