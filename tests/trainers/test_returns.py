"""GAE on two ragged episodes, worked out by hand, and against a literal loop."""

from __future__ import annotations

import numpy as np
import pytest

from turngym.trainers.group_advantage import AdvantageError
from turngym.trainers.returns import at_last_token, gae, minillm_returns, of_next_token, whiten

EPISODE = np.array([0, 0, 0, 2])
REWARD = np.array([1.0, 0.0, 2.0, 5.0])
VALUE = np.array([0.5, 1.0, 1.5, 3.0])


def test_gae_by_hand() -> None:
    # gamma 0.5, lam 0.5; deltas of episode 0: 1 + 0.5 - 0.5 = 1; 0 + 0.75 - 1 = -0.25; 2 - 1.5 = 0.5
    advantage, returns = gae(REWARD, VALUE, EPISODE, gamma=0.5, lam=0.5)
    np.testing.assert_allclose(advantage, [1 + 0.25 * (-0.25 + 0.25 * 0.5), -0.25 + 0.25 * 0.5, 0.5, 2.0])
    np.testing.assert_allclose(returns, advantage + VALUE)


def test_an_episode_that_was_cut_goes_on_with_its_last_value() -> None:
    # only the last delta is another one: 2 + 0.75 - 1.5 = 1.25; episode 2 has ended, and episode 1 has no tokens
    cut = np.array([True, True, False])
    advantage, returns = gae(REWARD, VALUE, EPISODE, gamma=0.5, lam=0.5, cut_E=cut)
    np.testing.assert_allclose(advantage, [1 + 0.25 * (-0.25 + 0.25 * 1.25), -0.25 + 0.25 * 1.25, 1.25, 2.0])
    np.testing.assert_allclose(returns, advantage + VALUE)
    advantage, _ = gae(REWARD, VALUE, EPISODE, gamma=0.5, lam=0.5, cut_E=~cut)
    np.testing.assert_allclose(advantage[2:], [0.5, 3.5])
    # no reward, and a value that stays: there is nothing to learn from a cut
    flat, one = np.full(3, 0.5), np.zeros(3, np.int64)
    assert gae(np.zeros(3), flat, one, lam=0.95, cut_E=np.array([True]))[0].tolist() == [0.0] * 3
    assert gae(np.zeros(3), flat, one, lam=0.95, cut_E=np.array([False]))[0][2] == -0.5


def test_without_discount_returns_are_sums_of_rewards() -> None:
    advantage, returns = gae(REWARD, VALUE, EPISODE, gamma=1.0, lam=1.0)
    np.testing.assert_allclose(returns, [3.0, 2.0, 2.0, 5.0])
    np.testing.assert_allclose(advantage, [2.5, 1.0, 0.5, 2.0])


def test_nothing_follows_the_last_token_of_an_episode() -> None:
    found = of_next_token(np.array([1.0, 2.0, 3.0, 4.0, 5.0]), np.array([0, 0, 0, 1, 1]))
    assert found.tolist() == [2.0, 3.0, 0.0, 5.0, 0.0]


def test_minillm_returns_are_divided_by_the_number_of_tokens_left() -> None:
    # episode 0: 2; 0 + 2/2; 1 + 1/2, over 1, 2 and 3 tokens; episode 2: 5
    found = minillm_returns(REWARD, EPISODE, gamma=0.5)
    np.testing.assert_allclose(found, [1.5 / 3, 1.0 / 2, 2.0, 5.0])
    np.testing.assert_allclose(minillm_returns(np.ones(3), np.zeros(3, np.int64)), [2.8525 / 3, 1.95 / 2, 1.0])


def test_whitening_and_last_tokens() -> None:
    for kind, ddof in (("unbiased", 1), ("population", 0)):
        white = whiten(REWARD, kind)  # type: ignore[arg-type]
        assert white.mean() == pytest.approx(0.0, abs=1e-12)
        assert white.std(ddof=ddof) == pytest.approx(1.0)
    np.testing.assert_allclose(whiten(np.array([1.0, 3.0]), "population", eps=1.0), [-0.5, 0.5])
    np.testing.assert_allclose(whiten(np.array([1.0, 3.0])), [-(0.5**0.5), 0.5**0.5], rtol=1e-7)
    assert whiten(np.array([1.0, 3.0]), "none").tolist() == [1.0, 3.0]
    assert whiten(np.array([3.0])).tolist() == whiten(np.array([3.0]), "population").tolist() == [0.0]
    np.testing.assert_allclose(at_last_token(np.array([7.0, 8.0, 9.0]), EPISODE), [0.0, 0.0, 7.0, 9.0])
    three = np.array([0, 0, 1, 2, 2])
    np.testing.assert_allclose(at_last_token(np.array([7.0, 8.0, 9.0]), three), [0.0, 7.0, 8.0, 0.0, 9.0])


def test_an_episode_of_several_tokens_may_come_last() -> None:
    advantage, _ = gae(np.ones(5), np.zeros(5), np.array([0, 0, 1, 2, 2]), gamma=1.0, lam=1.0)
    np.testing.assert_allclose(advantage, [2.0, 1.0, 1.0, 2.0, 1.0])


def test_errors_name_the_token() -> None:
    with pytest.raises(AdvantageError, match=r"the reward of token 1 \(episode 0\) is nan"):
        gae(np.array([0.0, np.nan, 0, 0]), VALUE, EPISODE)
    with pytest.raises(AdvantageError, match=r"the value of token 2 \(episode 0\) is inf"):
        gae(VALUE, np.array([0.0, 0, np.inf, 0]), EPISODE)
