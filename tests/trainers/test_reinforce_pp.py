"""REINFORCE++ by hand: the KL from a token on, the batch's mean and deviation, the loss, and two steps."""

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
from turngym.trainers.algorithm_spec import BuildContext, find_algorithm
from turngym.trainers.algorithms.reinforce_pp import BatchAdvantage, ReinforcePpConfig, build
from turngym.trainers.batch import pack
from turngym.trainers.group_advantage import ComparableGroups

torch.set_num_threads(1)
SCORERS = Scorers(student=Slope(-0.05), reference=Slope(-0.1))


def made(**options: Any) -> Algorithm:
    return build(ReinforcePpConfig(**options), BuildContext(run=RUN))


def test_rewards_are_normalized_over_the_tokens_of_the_batch(pair: list[Episode]) -> None:
    found = BatchAdvantage()(pack(pair), pair, SCORERS)
    # 0.5 on three tokens, 2.5 on two: mean 1.3, unbiased variance (3 x 0.64 + 2 x 1.44) / 4 = 1.2
    np.testing.assert_allclose(found.advantage_N, np.array([-0.8] * 3 + [1.2] * 2) / 1.2**0.5, rtol=1e-6)
    assert found.advantage_N is not None
    assert found.advantage_N.dtype == np.float32
    assert found.reward is not None
    assert found.reward.tolist() == [0.5, 2.5]
    # 0 and 1: mean 0.4, variance (3 x 0.16 + 2 x 0.36) / 4 = 0.3
    found = BatchAdvantage(reward="success")(pack(pair), pair, SCORERS)
    np.testing.assert_allclose(found.advantage_N, np.array([-0.4] * 3 + [0.6] * 2) / 0.3**0.5, rtol=1e-6)


def test_each_token_pays_for_the_kl_from_there_on(pair: list[Episode]) -> None:
    found = BatchAdvantage(kl_coef=2.0)(pack(pair), pair, SCORERS)
    # log p - log pi_0: 0.5, 0.55, 0.6 | 1, 1.05; twice their sums from the token on: 3.3, 2.3, 1.2 | 4.1, 2.1
    # so -2.8, -1.8, -0.7 | -1.6, 0.4: mean -1.3, unbiased variance (2.25 + 0.25 + 0.36 + 0.09 + 2.89) / 4 = 1.46
    np.testing.assert_allclose(found.advantage_N, np.array([-1.5, -0.5, 0.6, -0.3, 1.7]) / 1.46**0.5, rtol=1e-5)


def test_the_baseline_is_the_mean_of_the_group(pair: list[Episode], make_episode: Callable[..., Episode]) -> None:
    other = [make_episode([([1], [5])], number=2, group=3, episode_return=worth) for worth in (4.0, 8.0)]
    episodes = [*pair, *other]
    found = BatchAdvantage(baseline=True)(pack(episodes), episodes, SCORERS)
    # -1 on three tokens, 1 on two; -2; 2: mean -1/7, sum of squares 13
    raw = np.array([-1, -1, -1, 1, 1, -2, 2])
    np.testing.assert_allclose(found.advantage_N, (raw + 1 / 7) / ((13 - 1 / 7) / 6) ** 0.5, rtol=1e-6)
    assert found.reward is not None
    assert found.reward.tolist() == [0.5, 2.5, 4.0, 8.0]


def test_the_loss_by_hand() -> None:
    given = tokens([1.0, 1.5, 0.5, 1.5, 0.5], [2.0, 2.0, -2.0, -2.0, 2.0])
    losses = made(clip=(0.3, 0.4)).token_loss(given)
    torch.testing.assert_close(losses.loss_n, torch.tensor([-2.0, -2.8, 1.4, 3.0, -1.0]))


def test_several_episodes_per_task_have_a_baseline() -> None:
    assert made().target_fn == BatchAdvantage(kl_coef=0.01)
    assert (made().group, made().select, made().needs_reference) == (1, None, True)
    grouped = made(n=3, kl_coef=0.0)
    assert grouped.target_fn == BatchAdvantage(baseline=True)
    assert (grouped.group, grouped.select, grouped.needs_reference) == (3, ComparableGroups(spread=False), False)


def test_its_name_is_no_identifier_and_its_table_is() -> None:
    spec = find_algorithm("reinforce++")
    assert (spec.name, spec.table) == ("reinforce++", "reinforce_pp")


def test_two_steps_move_the_parameters_and_options_move_them_elsewhere(tmp_path: Path) -> None:
    assert_trains(made, [{"n": 2}, {"kl_coef": 0.5}], tmp_path)
