"""GiGPO by hand: returns by turn, both advantages, which turns are compared with which, and where states come from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tiny_runs import with_file

from turngym.agents import load_world
from turngym.agents.playing.rollout import STATES
from turngym.core.episode import Episode
from turngym.core.rollout_request import PlayPlan, RolloutRequest
from turngym.core.task import Verdict
from turngym.scripts import train
from turngym.trainers.algorithm import Scorers
from turngym.trainers.algorithms.gigpo import TurnAdvantage, centered, clusters, episode_advantage
from turngym.trainers.batch import pack
from turngym.trainers.rewards import PAID, turn_rewards
from turngym.trainers.run import build_trainer
from turngym.trainers.targets import TargetError

Make = Callable[..., Episode]
NOBODY = Scorers(student=None)  # type: ignore[arg-type]


def episode(make_episode: Make, group: int, seen: str, paid: Sequence[float], tokens: Sequence[int]) -> Episode:
    """One turn per letter of `seen`, its observation; turn t was paid `paid[t]` and has `tokens[t]` tokens."""
    made = make_episode([([1], [2] * count) for count in tokens], group=group, episode_return=sum(paid))
    turns = [
        replace(turn, observation=text, reward=worth) for turn, text, worth in zip(made.turns, seen, paid, strict=True)
    ]
    return replace(made, turns=tuple(turns))


def attempts(make_episode: Make) -> list[Episode]:
    """Two attempts at one task, that meet in `a` and `b`, and two at another one, whose `a` is another situation."""
    return [
        episode(make_episode, 3, "abc", [0.0, 0.0, 1.0], [1, 2, 1]),
        episode(make_episode, 3, "aab", [0.0, 0.0, 0.0], [1, 1, 1]),
        episode(make_episode, 8, "a", [4.0], [2]),
        episode(make_episode, 8, "ad", [0.0, 2.0], [1, 1]),
    ]


def test_what_a_turn_was_paid(make_episode: Make) -> None:
    made = replace(episode(make_episode, 0, "abc", [0.5, 0.0, 2.0], [1, 1, 1]), success=True, score=0.25)
    made = replace(made, turns=(made.turns[0], replace(made.turns[1], verdict=Verdict.MALFORMED), made.turns[2]))
    assert turn_rewards(made).tolist() == [0.5, 0.0, 2.0]
    assert turn_rewards(made, invalid_cost=0.1).tolist() == [0.5, -0.1, 2.0]
    assert turn_rewards(made, "success").tolist() == [0.0, 0.0, 1.0]
    assert turn_rewards(made, "score", 0.1).tolist() == [0.0, -0.1, 0.25]
    # the run's own reward is one of the whole episode; what the environment paid by turn is another
    assert turn_rewards(replace(made, episode_return=7.0, meta={PAID: 2.5})).tolist() == [0.0, 0.0, 7.0]


def test_steps_are_compared_within_their_anchor_group() -> None:
    returns, anchors = np.array([1.0, 4.0, 3.0, 9.0, 0.0]), np.array([2, 5, 2, 7, 5])
    np.testing.assert_allclose(centered(returns, anchors), [-1.0, 2.0, 1.0, 0.0, -2.0])
    # unbiased deviations sqrt(2) and sqrt(8)
    unit = [2**0.5 + 1e-6, 8**0.5 + 1e-6]
    wanted = [-1 / unit[0], 2 / unit[1], 1 / unit[0], 0.0, -2 / unit[1]]
    np.testing.assert_allclose(centered(returns, anchors, "std"), wanted, rtol=1e-12)
    # 0.1 + 0.2 is not 0.3 in binary, and no contrast
    near = np.array([0.3, 0.1 + 0.2])
    assert centered(near, np.zeros(2, np.int64), "std").tolist() == [0.0, 0.0]


def test_episodes_are_compared_by_episodes_or_by_turns() -> None:
    total, group, depth = np.array([6.0, 0.0, 1.0]), np.array([4, 4, 9]), np.array([1, 3, 2])
    np.testing.assert_allclose(episode_advantage(total, group, depth), [3.0, -3.0, 0.0])
    # over turns the mean is 6 / 4: the long episode counts three times
    np.testing.assert_allclose(episode_advantage(total, group, depth, baseline="turns"), [4.5, -1.5, 0.0])
    # deviations sqrt(18), and of 6 0 0 0 about 1.5: sqrt(27 / 3)
    found = episode_advantage(total, group, depth, "std")
    np.testing.assert_allclose(found, [3 / (18**0.5 + 1e-6), -3 / (18**0.5 + 1e-6), 0.0], rtol=1e-12)
    found = episode_advantage(total, group, depth, "std", "turns")
    np.testing.assert_allclose(found, [4.5 / (3 + 1e-6), -1.5 / (3 + 1e-6), 0.0], rtol=1e-12)


def test_an_episode_without_a_turn_is_in_no_comparison_over_turns() -> None:
    total, group = np.array([6.0, 5.0, 0.0, 7.0]), np.array([4, 4, 4, 4])
    for depth, wanted in (([1, 0, 3, 0], [4.5, 0.0, -1.5, 0.0]), ([0, 0, 0, 0], [0.0] * 4)):
        found = episode_advantage(total, group, np.array(depth), baseline="turns")
        np.testing.assert_allclose(found, wanted)


def test_similar_texts_join_the_first_that_is_near_enough() -> None:
    texts = ["you see a mug", "a shelf", "you see a cup", "a shelf", "you see a mug"]
    assert clusters(texts) == [0, 1, 2, 1, 0]
    # mug and cup share 11 of 13 letters in their order: 22 / 26 = 0.846
    assert clusters(texts, 0.84) == [0, 1, 0, 1, 0]
    assert clusters(texts, 0.85) == [0, 1, 2, 1, 0]
    # abcd and bcde are near (6 / 8), and so are bcde and cdef; but cdef is compared with the first, abcd (4 / 8)
    assert clusters(["abcd", "bcde", "cdef"], 0.7) == [0, 0, 1]
    # the ratio depends on the order: that of tide to diet is 0.25, that of diet to tide 0.5
    assert (clusters(["tide", "diet"], 0.4), clusters(["diet", "tide"], 0.4)) == ([0, 1], [0, 0])
    assert clusters([], 0.5) == []


def test_advantages_by_hand(make_episode: Make) -> None:
    episodes = attempts(make_episode)
    batch = pack(episodes)
    found = TurnAdvantage(gamma=0.5, w_step=2.0)(batch, episodes, NOBODY)
    # episodes: 1 and 0 about 1/2, 4 and 2 about 3. Returns of turns: 1/4 1/2 1 | 0 0 0 || 4 | 1 2
    # a: 1/4 0 0, mean 1/12; b: 1/2 0, mean 1/4; c and d alone; the other task's a: 4 1, mean 5/2
    first = [0.5 + 2 * (1 / 6), *[0.5 + 2 * 0.25] * 2, 0.5]
    second = [-0.5 - 2 / 12, -0.5 - 2 / 12, -0.5 - 2 * 0.25]
    others = [*[1.0 + 2 * 1.5] * 2, -1.0 - 2 * 1.5, -1.0]
    np.testing.assert_allclose(found.advantage_N, [*first, *second, *others], rtol=1e-6)
    assert found.advantage_N is not None
    assert found.advantage_N.dtype == np.float32
    assert found.reward is not None
    assert found.reward.tolist() == [1.0, 0.0, 4.0, 2.0]
    step = np.array([1 / 6, 0.25, 0, -1 / 12, -1 / 12, -0.25, 1.5, -1.5, 0.0])
    own = np.array([0.5] * 3 + [-0.5] * 3 + [1.0, -1.0, -1.0])
    # nine turns in five groups, of which c and d are alone
    assert dict(found.log) == {
        "anchors/size": pytest.approx(9 / 5),
        "anchors/largest": 3,
        "anchors/alone": pytest.approx(2 / 9),
        "anchors/step_std": pytest.approx(step.std()),
        "anchors/episode_std": pytest.approx(own.std()),
    }
    plain = TurnAdvantage(gamma=0.5)(batch, episodes, NOBODY).advantage_N
    np.testing.assert_allclose(plain, (own + step)[[0, 1, 1, 2, 3, 4, 5, 6, 6, 7, 8]], rtol=1e-6)


def test_every_setting_reaches_its_part(make_episode: Make) -> None:
    episodes = attempts(make_episode)
    bad = replace(episodes[1].turns[1], verdict=Verdict.INADMISSIBLE)
    episodes[1] = replace(episodes[1], turns=(episodes[1].turns[0], bad, episodes[1].turns[2]), success=True)
    batch = pack(episodes)

    def found(**options: Any) -> list[float]:
        advantage_N = TurnAdvantage(gamma=0.5, w_step=options.pop("w_step", 0.0), **options)(
            batch, episodes, NOBODY
        ).advantage_N
        assert advantage_N is not None
        return [float(advantage_N[place]) for place in (0, 4, 7, 9)]

    assert found() == [0.5, -0.5, 1.0, -1.0]
    assert found(invalid_cost=0.5) == [0.75, -0.75, 1.0, -1.0]
    assert found(reward="success") == [-0.5, 0.5, 0.0, 0.0]
    assert found(scale="std") == pytest.approx([0.5**0.5, -(0.5**0.5), 0.5**0.5, -(0.5**0.5)], rel=1e-5)
    # three turns each: the same; one turn of 4 and two of 2: 8 / 3
    assert found(baseline="turns") == pytest.approx([0.5, -0.5, 4 / 3, -2 / 3])
    # a and b, c, d are one letter: nothing of one is in the other, so that any similarity keeps them apart
    assert found(w_step=2.0, similarity=0.5) == found(w_step=2.0)
    step = np.array(found(w_step=2.0, scale="std")) - found(scale="std")
    assert step[0] == pytest.approx(2 * (1 / 6) / (np.std([0.25, 0, 0], ddof=1) + 1e-6), rel=1e-5)


def test_turns_of_others_are_in_no_comparison(make_episode: Make) -> None:
    episodes = attempts(make_episode)[:2]
    # the second attempt's first turn is not the policy's: a is compared between two turns, 1/4 and 0
    first = replace(episodes[1].turns[0], origin="noise")
    episodes[1] = replace(episodes[1], turns=(first, *episodes[1].turns[1:]))
    found = TurnAdvantage(gamma=0.5)(pack(episodes), episodes, NOBODY)
    np.testing.assert_allclose(found.advantage_N, [0.5 + 1 / 8, 0.75, 0.75, 0.5, -0.5 - 1 / 8, -0.75], rtol=1e-6)
    assert (found.log["anchors/size"], found.log["anchors/alone"]) == (pytest.approx(5 / 3), pytest.approx(1 / 5))


def test_states_tell_apart_what_reads_alike(make_episode: Make) -> None:
    episodes = [
        replace(made, meta={STATES: states})
        for made, states in zip(attempts(make_episode)[:2], (["s", "t", "u"], ["s", "v", "t"]), strict=True)
    ]
    batch = pack(episodes)
    by_state = TurnAdvantage(gamma=0.5, anchor="state")
    # s: 1/4 and 0; t: 1/2 and 0; the second a is v, alone
    wanted = [0.5 + 1 / 8, 0.75, 0.75, 0.5, -0.5 - 1 / 8, -0.5, -0.75]
    np.testing.assert_allclose(by_state(batch, episodes, NOBODY).advantage_N, wanted, rtol=1e-6)
    # a response that was broken off has no state, and is in no comparison
    broken = replace(episodes[1].turns[2], excluded="broken off")
    cut = [episodes[0], replace(episodes[1], turns=(*episodes[1].turns[:2], broken), meta={STATES: ["s", "v"]})]
    found = by_state(pack(cut), cut, NOBODY).advantage_N
    np.testing.assert_allclose(found, [0.5 + 1 / 8, 0.5, 0.5, 0.5, -0.5 - 1 / 8, -0.5], rtol=1e-6)
    bare = [replace(made, meta={}) for made in episodes]
    with pytest.raises(TargetError, match="task/0 sample 0 has 0 states for 3 turns"):
        by_state(pack(bare), bare, NOBODY)
    # a recorded trace may come from anyone
    odd = [replace(made, meta={STATES: 3}) for made in episodes]
    with pytest.raises(TargetError, match="the states of task/0 sample 0 is 3"):
        by_state(pack(odd), odd, NOBODY)


@pytest.mark.parametrize("anchor", ["state", "observation"])
def test_the_rollout_notes_states_where_they_are_asked_for(tmp_path: Any, anchor: str) -> None:
    """Attempts at one task begin in one state; what an action does not change keeps its state."""
    student = load_world("alfworld").checkpoint("student")
    words = ["gigpo", "--student", str(student), "--out", str(tmp_path / "run"), "--episodes", "4", "--gigpo.n", "4"]
    words += ["--env-kwargs", '{"config": "small", "on_invalid": "noop"}', "--max-turns", "6", "--device", "cpu"]
    words += ["--gigpo.kl-coef", "0", *with_file(tmp_path, [f"gigpo.anchor = '{anchor}'"])]
    made = build_trainer(train.resolved(words).spec)
    asked = RolloutRequest(step=1, episodes=4, max_turns=6, group=4, plan=PlayPlan(states=made.algorithm.states))
    episodes = made.source(asked)
    if anchor == "observation":
        assert not any(STATES in played.meta for played in episodes)
        return
    states = [played.meta[STATES] for played in episodes]
    assert [len(found) for found in states] == [played.depth for played in episodes]
    assert len({found[0] for found in states}) == 1
    moved = [
        (turn.verdict.valid, before != after)
        for played, found in zip(episodes, states, strict=True)
        for turn, before, after in zip(played.turns, found, found[1:], strict=False)
    ]
    assert (True, True) in moved
    assert all(changed == valid for valid, changed in moved if not valid)
