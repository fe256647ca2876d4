"""PPO by hand: where rewards come, advantages against a critic, the loss, and two steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reward_methods import RUN, assert_trains, tokens
from scorers import Slope

from turngym.core.episode import Episode, Status
from turngym.trainers.algorithm import Algorithm, Scorers
from turngym.trainers.algorithm_spec import BuildContext
from turngym.trainers.algorithms.ppo import CriticBaseline, PpoConfig, at_last_tokens, build
from turngym.trainers.batch import RolloutBatch, pack
from turngym.trainers.run_config import CriticConfig
from turngym.trainers.targets import TargetError, WithReference

torch.set_num_threads(1)
Make = Callable[..., Episode]


def flat(batch: RolloutBatch) -> Any:
    """A critic with fixed values."""
    return np.array([0.5, 1.0, 1.5, 0.0, 1.0], np.float32)


SCORERS = Scorers(student=Slope(0.0), critic=flat)


def made(**options: Any) -> Algorithm:
    return build(PpoConfig(**options), BuildContext(run=RUN))


def paid(episode: Episode, rewards: Sequence[float]) -> Episode:
    """`episode` whose turn t was paid `rewards[t]`."""
    turns = [replace(turn, reward=worth) for turn, worth in zip(episode.turns, rewards, strict=True)]
    return replace(episode, turns=tuple(turns))


def test_a_turn_pays_the_last_token_that_was_chosen_by_its_end(make_episode: Make) -> None:
    shown = "demonstration"
    pieces = [([1], [2]), ([3], [4, 5]), ([6], [7]), ([8], [9]), ([10], [11])]
    first = make_episode(pieces, origins=[shown, "policy", shown, "policy", "noise"])
    nothing = make_episode([([1], [2])], origins=[shown], number=1)
    last = make_episode([([1], [2]), ([3], [4]), ([5], [6, 7])], origins=[shown, "policy", "policy"], number=2)
    rewards = [np.array([8.0, 1.0, 2.0, 0.5, 3.0]), np.array([7.0]), np.array([6.0, 4.0, 5.0])]
    batch = pack([first, nothing, last])
    assert at_last_tokens(rewards, batch).tolist() == [0.0, 3.0, 3.5, 4.0, 0.0, 5.0]
    # the first turn of a batch of one episode pays nobody either
    assert at_last_tokens(rewards[2:], pack([last])).tolist() == [4.0, 0.0, 5.0]
    assert at_last_tokens(rewards[:2], pack([first, nothing])).tolist() == [0.0, 3.0, 3.5]


def test_advantages_by_hand(pair: list[Episode]) -> None:
    found = CriticBaseline(gamma=0.5, lam=0.5)(pack(pair), pair, SCORERS)
    # rewards 0, 0, 0.5 | 0, 2.5; deltas 0, -0.25, -1 | 0.5, 1.5; carried by a quarter
    wanted = np.array([-0.125, -0.5, -1.0, 0.875, 1.5])
    np.testing.assert_allclose(found.return_N, wanted + flat(pack(pair)), rtol=1e-6)
    np.testing.assert_allclose(found.advantage_N, (wanted - wanted.mean()) / wanted.std(ddof=1), rtol=1e-6)
    np.testing.assert_array_equal(found.value_N, flat(pack(pair)))
    np.testing.assert_array_equal(found.reward, [0.0, 0.0, 0.5, 0.0, 2.5])
    for column in (found.advantage_N, found.return_N, found.value_N):
        assert column is not None
        assert column.dtype == np.float32
    # a success is worth 1
    found = CriticBaseline(reward="success")(pack(pair), pair, SCORERS)
    np.testing.assert_array_equal(found.reward, [0.0, 0.0, 0.0, 0.0, 1.0])


def test_turns_may_be_paid_on_their_own(pair: list[Episode]) -> None:
    episodes = [paid(pair[0], [0.25, 0.5]), paid(pair[1], [2.5])]
    signal = CriticBaseline(paid="turn", gamma=0.5, lam=0.5)
    found = signal(pack(episodes), episodes, SCORERS)
    # rewards 0, 0.25, 0.5 | 0, 2.5; deltas 0, 0, -1 | 0.5, 1.5
    wanted = np.array([-0.0625, -0.25, -1.0, 0.875, 1.5])
    np.testing.assert_allclose(found.return_N, wanted + flat(pack(episodes)), rtol=1e-6)
    np.testing.assert_array_equal(found.reward, [0.0, 0.25, 0.5, 0.0, 2.5])
    # a success comes at the last turn
    found = replace(signal, reward="success")(pack(episodes), episodes, SCORERS)
    np.testing.assert_array_equal(found.reward, [0.0, 0.0, 0.0, 0.0, 1.0])
    # episodes of a batch are found by what was packed
    lost = replace(pair[0], status=Status.ERROR_ENV)
    found = signal(pack([lost, *episodes]), [lost, *episodes], SCORERS)
    np.testing.assert_array_equal(found.reward, [0.0, 0.25, 0.5, 0.0, 2.5])


def test_a_limit_is_a_failure_unless_the_critic_goes_on(pair: list[Episode]) -> None:
    episodes = [pair[0], replace(pair[1], status=Status.TRUNCATED_TURNS, success=False)]
    signal = CriticBaseline(gamma=0.5, lam=0.0)
    # V + delta: half of the next value, and the reward at the end
    found = signal(pack(episodes), episodes, SCORERS)
    np.testing.assert_allclose(found.return_N, [0.5, 0.75, 0.5, 0.5, 2.5])
    found = replace(signal, bootstrap=True)(pack(episodes), episodes, SCORERS)
    np.testing.assert_allclose(found.return_N, [0.5, 0.75, 0.5, 0.5, 3.0])
    with pytest.raises(TargetError, match=r"\bcritic\b"):
        signal(pack(episodes), episodes, Scorers(student=Slope(0.0)))


def test_the_loss_by_hand() -> None:
    reference_n = torch.tensor([0.25, 0.5, 0.25, 0.25]).log()
    given = tokens([1.0, 1.0, 1.5, 0.5], [2.0, 2.0, 2.0, -2.0], reference_logp_n=reference_n)
    losses = made(kl_coef=0.5, entropy_coef=0.1).token_loss(given)
    # surrogates -2, -2, -2.4, 1.6; k3 of d = log 2 is 2 - 1 - log 2; the entropy's 0.2 off each
    kl = 0.5 * (1 - float(np.log(2.0)))
    torch.testing.assert_close(losses.loss_n, torch.tensor([-2.2, -2.2 + kl, -2.6, 1.4]))


def test_what_it_needs() -> None:
    plain, near = made(), made(kl_coef=0.1, entropy_coef=0.1, critic=CriticConfig(kind="head"))
    assert (plain.needs_teacher, plain.needs_reference, plain.entropy_gradient) == (False, False, False)
    assert (plain.target_fn, plain.group, plain.critic) == (CriticBaseline(), 1, CriticConfig())
    assert (near.needs_teacher, near.needs_reference, near.entropy_gradient) == (False, True, True)
    assert (near.target_fn, near.critic) == (WithReference(target_fn=CriticBaseline()), CriticConfig(kind="head"))


def test_two_steps_move_the_parameters_and_options_move_them_elsewhere(tmp_path: Path) -> None:
    assert_trains(made, [{"paid": "turn"}, {"kl_coef": 0.5}, {"critic": CriticConfig(kind="head", lr=1e-2)}], tmp_path)
