"""Agents without a model, on the toy environment."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turngym.agents.playing.rollout import Job, rollout
from turngym.agents.playing.scripted import ExpertAgent, RandomAgent, ReplayAgent
from turngym.agents.rendering.renderer import ChatRenderer
from turngym.envs.core.episode import Status
from turngym.envs.core.errors import AgentError


def test_the_expert_wins_with_and_without_tokens(make_doors: Any, make_tokenizer: Any) -> None:
    renderer = ChatRenderer(make_tokenizer())
    for agent in (ExpertAgent(), ExpertAgent(renderer)):
        episode = rollout([Job(task_id="doors/3")], make_doors(), agent)[0]
        assert (episode.success, episode.depth, episode.episode_return) == (True, 3, 1.0)
        assert {t.origin for t in episode.turns} == {"demonstration"}
    spoken = renderer.template.decode(episode.response_ids(episode.turns[2]).tolist())
    assert spoken == "<action>open door 3</action><|im_end|>"
    assert rollout([Job(task_id="doors/3")], make_doors(), ExpertAgent())[0].segments == ()
    assert rollout([Job(task_id="doors/3")], make_doors(channel=None), ExpertAgent())[0].success


def test_noise_is_marked_and_the_expert_goes_on(make_doors: Any) -> None:
    jobs = [Job(task_id="doors/5", sample=n) for n in range(40)]
    episodes = rollout(jobs, make_doors(max_turns=50), ExpertAgent(noise=0.5))
    origins = [t.origin for e in episodes for t in e.turns]
    assert all(e.success for e in episodes)
    assert 0.4 < origins.count("noise") / len(origins) < 0.6
    assert {t.action for e in episodes for t in e.turns if t.origin == "demonstration"} <= {
        f"open door {n}" for n in range(1, 6)
    }
    shares = [
        sum(t.origin == "noise" for t in e.turns) / e.depth
        for e in rollout(jobs, make_doors(max_turns=50), ExpertAgent(noise=(0.0, 0.5)))
    ]
    assert min(shares) == 0.0
    assert max(shares) > 0.4
    with pytest.raises(AgentError, match=r"noise is 1\.5"):
        ExpertAgent(noise=1.5)


def test_an_expert_of_ones_own_and_one_that_gives_up(make_doors: Any) -> None:
    class Lazy:
        def __init__(self, env: Any) -> None:
            self.left = ["open door 1"]

        def observe(self, action: str) -> None:
            assert action == "open door 1"

        def act(self) -> str | None:
            return self.left.pop() if self.left else None

    episode = rollout([Job(task_id="doors/2")], make_doors(), ExpertAgent(expert=Lazy))[0]
    assert (episode.depth, episode.status) == (1, Status.ERROR_ENGINE)
    assert episode.meta["error"] == "the expert knows no action at turn 1"


@settings(max_examples=20, deadline=None)
@given(slots=st.integers(1, 9), seed=st.integers(0, 2**40))
def test_random_episodes_depend_on_their_job_alone(make_doors: Any, slots: int, seed: int) -> None:
    jobs = [Job(task_id=f"doors/{n}", sample=s, seed=seed) for n in (2, 3) for s in range(3)]
    plays = [
        [[t.response for t in e.turns] for e in rollout(jobs, make_doors(), RandomAgent(), slots=k)]
        for k in (slots, 64)
    ]
    assert plays[0] == plays[1]


def test_replay_repeats_recorded_episodes_letter_by_letter(make_doors: Any) -> None:
    jobs = [Job(task_id=f"doors/{n}", sample=s, seed=5) for n in (2, 3) for s in range(3)]
    first = rollout(jobs, make_doors(), RandomAgent())
    again = rollout(jobs, make_doors(), ReplayAgent(first, verify=True))
    assert [e.turns for e in again] == [e.turns for e in first]
    bare = rollout(jobs, make_doors(channel=None), ReplayAgent(first))
    assert [[t.action for t in e.turns] for e in bare] == [[t.action for t in e.turns] for e in first]
    assert bare[0].turns[0].response == first[0].turns[0].action


def test_replay_of_actions_stops_where_the_list_stops(make_doors: Any) -> None:
    episode = rollout([Job(task_id="doors/3")], make_doors(), ReplayAgent(["open door 1", "open door 9"]))[0]
    assert [t.verdict.value for t in episode.turns] == ["ok", "inadmissible"]
    assert episode.status is Status.TRUNCATED_DEPTH
    with pytest.raises(AgentError, match="no recording of doors/4 sample 0; recorded are: doors/3 sample 0"):
        rollout([Job(task_id="doors/4")], make_doors(), ReplayAgent([episode]))
    with pytest.raises(AgentError, match="either recorded episodes or a list of actions"):
        ReplayAgent([])
