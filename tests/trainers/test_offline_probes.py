"""Recorded episodes as a step of TurnOPD takes them: cut at its depth cap, and the rest of a partial probe marked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from turngym.core.episode import SHORT, Episode, Status
from turngym.core.rollout_request import PlayPlan, RolloutRequest
from turngym.trainers.recorded_source import RecordedSource


def test_the_rest_of_a_partial_probe_is_cut_and_marked(make_episode: Callable[..., Episode]) -> None:
    turns = [([1], [2]), ([3], [4]), ([5], [6]), ([7], [8])]
    # recorded by a partial probe: what stood in its meta then says nothing about this step
    recorded = [replace(make_episode(turns, number=n), meta={SHORT: 9, "agent": "a"}) for n in range(4)]
    asked = RolloutRequest(step=1, episodes=4, max_turns=3, plan=PlayPlan(short_episodes=1, short_turns=2))
    played = RecordedSource(episodes=recorded, cut=True)(asked)
    assert [episode.depth for episode in played] == [3, 3, 3, 2]
    assert all(episode.status is Status.TRUNCATED_DEPTH for episode in played)
    assert [dict(episode.meta) for episode in played] == [{"agent": "a"}] * 3 + [{"agent": "a", SHORT: 2}]
    whole = RecordedSource(episodes=recorded)(asked)
    assert [(episode.depth, SHORT in episode.meta) for episode in whole] == [(4, False)] * 4
    (mine,) = RecordedSource(episodes=recorded, cut=True)(replace(asked, share=(3, 4)))
    assert (mine.depth, mine.meta[SHORT]) == (2, 2)
