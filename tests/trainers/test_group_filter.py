"""Which groups are trained on, by the reward that is optimized."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from turngym.core.episode import Episode, Status
from turngym.trainers.group_advantage import ComparableGroups

Make = Callable[..., Episode]


@pytest.fixture(scope="module")
def grouped(make_episode: Make) -> Callable[..., list[Episode]]:
    """Episodes of one group, one for each return; the numbers of later groups go on."""

    def episodes(group: int, returns: Sequence[float], first: int = 0, **more: Any) -> list[Episode]:
        return [
            make_episode([([1], [2])], number=first + place, group=group, episode_return=worth, **more)
            for place, worth in enumerate(returns)
        ]

    return episodes


def names(episodes: Sequence[Episode]) -> list[int]:
    return [int(episode.task.task_id.removeprefix("task/")) for episode in episodes]


def test_partial_rewards_are_contrast_without_any_success(grouped: Callable[..., list[Episode]]) -> None:
    shop = grouped(3, (0.6, 0.0, 0.0, 0.0, 0.2, 0.4, 0.0, 0.0))
    none, all_ = grouped(4, (0.0, 0.0), 8), grouped(5, (1.0, 1.0), 10, success=True)
    mixed = [shop[0], *none, *shop[1:], *all_]
    chosen = ComparableGroups()
    assert names(chosen(mixed)) == list(range(8))
    assert chosen(mixed)[0] is shop[0]
    assert chosen.row(mixed) == {"groups/kept": 1, "groups/lost": 0, "groups/uniform": 2, "groups/uniform_solved": 1}
    assert chosen([]) == []
    assert chosen.row([])["groups/kept"] == 0


def test_the_reward_that_is_optimized_decides(make_episode: Make) -> None:
    def pair(group: int, *, success: tuple[bool, bool], score: tuple[float, float]) -> list[Episode]:
        found = [make_episode([([1], [2])], group=group, success=won, episode_return=0.5) for won in success]
        return [replace(episode, score=worth) for episode, worth in zip(found, score, strict=True)]

    # 1: only success differs; 2: only the score
    episodes = [*pair(1, success=(True, False), score=(0.5, 0.5)), *pair(2, success=(True, True), score=(0.2, 0.3))]
    assert [episode.group for episode in ComparableGroups(reward="success")(episodes)] == [1, 1]
    assert [episode.group for episode in ComparableGroups(reward="score")(episodes)] == [2, 2]
    assert ComparableGroups(reward="return")(episodes) == []
    assert ComparableGroups(reward="success").row(episodes)["groups/uniform_solved"] == 1


def test_failed_episodes_are_no_contrast_and_cut_ones_count(grouped: Callable[..., list[Episode]]) -> None:
    # 1: the only 0 is a failed engine's; 2: a single one is left; 3: none; 4: cut by the limit on turns, worth 0
    episodes = [
        *grouped(1, (1.0, 1.0)),
        *grouped(1, (0.0,), 2, status=Status.ERROR_ENGINE),
        *grouped(2, (1.0,), 3),
        *grouped(2, (0.0,), 4, status=Status.ERROR_ENV),
        *grouped(3, (0.0, 1.0), 5, status=Status.ERROR_TIMEOUT),
        *grouped(4, (1.0,), 7),
        *grouped(4, (0.0,), 8, status=Status.TRUNCATED_TURNS),
    ]
    assert names(ComparableGroups()(episodes)) == [7, 8]
    assert ComparableGroups().row(episodes) == {
        "groups/kept": 1,
        "groups/lost": 2,
        "groups/uniform": 1,
        "groups/uniform_solved": 0,
    }
    kept = ComparableGroups(spread=False)
    assert names(kept(episodes)) == [0, 1, 7, 8]
    assert kept.row(episodes) == {"groups/kept": 2, "groups/lost": 2}


def test_a_split_baseline_needs_an_episode_of_its_own(grouped: Callable[..., list[Episode]]) -> None:
    shown: dict[str, Any] = {"origins": ["demonstration"]}
    # 1: the policy's own episode failed; 2: there is one, and it counts the demonstration's reward as contrast
    episodes = [
        *grouped(1, (1.0, 0.0), **shown),
        *grouped(1, (0.0,), 2, status=Status.ERROR_ENGINE),
        *grouped(2, (1.0,), 3, **shown),
        *grouped(2, (0.0,), 4),
    ]
    assert names(ComparableGroups(own=True)(episodes)) == [3, 4]
    assert ComparableGroups(own=True).row(episodes)["groups/lost"] == 1
    assert names(ComparableGroups()(episodes)) == [0, 1, 3, 4]


def test_an_episode_without_tokens_is_not_compared_where_tokens_are_rewarded(make_episode: Make) -> None:
    episodes = [
        make_episode([([1], [2])], number=0, group=1),
        make_episode([([1], [])], number=1, group=1),
        make_episode([([1], [2])], number=2, group=2),
        make_episode([([1], []), ([1], [2])], number=3, group=2),
    ]
    chosen = ComparableGroups(spread=False, tokens=True)
    assert names(chosen(episodes)) == [2, 3]
    assert chosen.row(episodes) == {"groups/kept": 1, "groups/lost": 1}
    assert names(ComparableGroups(spread=False)(episodes)) == [0, 1, 2, 3]


def test_only_so_many_groups_as_were_asked_for(grouped: Callable[..., list[Episode]]) -> None:
    episodes = [
        *grouped(1, (1.0, 1.0)),
        *grouped(2, (0.0, 1.0), 2),
        *grouped(5, (0.0, 1.0), 4),
        *grouped(7, (0.0, 1.0), 6),
    ]
    assert names(ComparableGroups(most=2)(episodes)) == [2, 3, 4, 5]
    assert ComparableGroups(most=2).row(episodes)["groups/kept"] == 2
    assert names(ComparableGroups(most=9)(episodes)) == [2, 3, 4, 5, 6, 7]
    assert ComparableGroups(most=9).row(episodes)["groups/kept"] == 3
