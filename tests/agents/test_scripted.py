"""Agents without a model, on the toy environment."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turngym.agents.playing.env_maker import env_maker
from turngym.agents.playing.rollout import Job, rollout
from turngym.agents.playing.scripted import DrawnPlayer, ExpertAgent, MixedAgent, PlayerMix, RandomAgent, ReplayAgent
from turngym.agents.rendering.chat_settings import ChatSettings
from turngym.agents.rendering.renderer import ChatRenderer
from turngym.agents.rollout_sources import ExpertSource
from turngym.core.episode import Status
from turngym.core.errors import AgentError, TurngymError
from turngym.core.rollout_request import RolloutRequest
from turngym.trainers.algorithms.sft import TRAIN_ON
from turngym.trainers.batch import pack


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
    again = rollout(jobs, make_doors(), ReplayAgent(first))
    assert [e.turns for e in again] == [e.turns for e in first]
    bare = rollout(jobs, make_doors(channel=None), ReplayAgent(first))
    assert [[t.action for t in e.turns] for e in bare] == [[t.action for t in e.turns] for e in first]
    assert bare[0].turns[0].response == first[0].turns[0].action


def test_replay_of_actions_stops_where_the_list_stops(make_doors: Any) -> None:
    episode = rollout([Job(task_id="doors/3")], make_doors(), ReplayAgent(["open door 1", "open door 9"]))[0]
    assert [t.verdict.value for t in episode.turns] == ["ok", "inadmissible"]
    assert episode.status is Status.TRUNCATED_DEPTH
    with pytest.raises(AgentError, match=r"doors/4 sample 0 .*; recorded are: doors/3 sample 0"):
        rollout([Job(task_id="doors/4")], make_doors(), ReplayAgent([episode]))
    other = replace(episode, task=replace(episode.task, sha256="0" * 64))
    with pytest.raises(AgentError, match=r"doors/3 sample 0 .*; recorded are: doors/3 sample 0 \(00000000\)"):
        rollout([Job(task_id="doors/3")], make_doors(), ReplayAgent([other]))
    with pytest.raises(AgentError, match="either recorded episodes or a list of actions"):
        ReplayAgent([])


JOBS = [Job(task_id=f"doors/{n}", sample=sample, seed=4) for n in (7, 8) for sample in range(12)]


class Fixed:
    """A mix that always draws the same part."""

    def __init__(self, part: DrawnPlayer, loop_slips: float = 0.0) -> None:
        self.part, self.loop_slips = part, loop_slips

    def draw(self, rng: np.random.Generator) -> DrawnPlayer:
        return self.part


def actions(make_doors: Any, part: DrawnPlayer, turns: int = 8, noise: float = 0.0) -> list[tuple[str, str]]:
    mix: Any = Fixed(part)
    agent = MixedAgent(mix, noise=noise)
    episode = rollout([Job(task_id="doors/9", seed=1)], make_doors(max_turns=turns), agent)[0]
    return [(turn.action or "", turn.origin) for turn in episode.turns]


def opened(*doors: int) -> list[tuple[str, str]]:
    return [(f"open door {n}", "demonstration") for n in doors]


def again(*doors: int) -> list[tuple[str, str]]:
    return [(f"open door {n}", "policy") for n in doors]


def test_players_say_what_they_say(make_doors: Any) -> None:
    assert actions(make_doors, DrawnPlayer("expert")) == opened(1, 2, 3, 4, 5, 6, 7, 8)
    assert actions(make_doors, DrawnPlayer("noisy")) == opened(1, 2, 3, 4, 5, 6, 7, 8)
    assert actions(make_doors, DrawnPlayer("repeat", 2, 1)) == opened(1, 2) + again(2, 2, 2, 2, 2, 2)
    assert actions(make_doors, DrawnPlayer("repeat", 1, 1)) == opened(1) + again(1, 1, 1, 1, 1, 1, 1)
    assert actions(make_doors, DrawnPlayer("cycle", 3, 2)) == opened(1, 2, 3) + again(2, 3, 2, 3, 2)
    assert actions(make_doors, DrawnPlayer("cycle", 4, 3)) == opened(1, 2, 3, 4) + again(2, 3, 4, 2)


def test_who_wanders_plays_what_the_environments_player_does(make_doors: Any) -> None:
    mix: Any = Fixed(DrawnPlayer("wander", 1), loop_slips=0.2)
    shop = env_maker("turngym/WebShop-v0", split="train", profile="embedded-small", oracle_query="instruction")
    jobs = [Job(task_id="embedded-small/0", seed=seed) for seed in range(8)]
    played = rollout(jobs, shop, MixedAgent(mix), max_turns=9)
    assert {episode.turns[0].origin for episode in played} == {"demonstration"}
    later = [turn for episode in played for turn in episode.turns[1:]]
    assert {turn.origin for turn in later} == {"policy", "noise"}
    back_and_forth = {"click[next >]", "click[< prev]", "click[description]"}
    searches = {episode.turns[0].action for episode in played}
    assert {turn.action for turn in later if turn.origin == "policy"} <= back_and_forth | searches
    with pytest.raises(TurngymError, match="has no player 'wander' now"):
        rollout([Job(task_id="doors/9")], make_doors(), MixedAgent(mix))


def test_noise_is_context_and_its_repetition_is_imitated(make_doors: Any) -> None:
    assert actions(make_doors, DrawnPlayer("expert"), 3, noise=1.0) == opened(1, 2, 3)
    first, *rest = actions(make_doors, DrawnPlayer("repeat", 1, 1), 6, noise=1.0)
    assert first[1] == "noise"
    assert rest == [(first[0], "policy")] * 5
    assert {origin for _, origin in actions(make_doors, DrawnPlayer("noisy"), 6, noise=1.0)} == {"noise"}


def test_a_loop_goes_on_after_a_slip(make_doors: Any) -> None:
    mix: Any = Fixed(DrawnPlayer("cycle", 3, 2), loop_slips=0.4)
    jobs = [Job(task_id="doors/9", seed=seed) for seed in range(20)]
    slips = 0
    for episode in rollout(jobs, make_doors(max_turns=12), MixedAgent(mix)):
        for turn in episode.turns[3:]:
            slips += turn.origin == "noise"
            # doors 2 and 3 in turn, whatever came between
            if turn.origin != "noise":
                assert (turn.origin, turn.action) == ("policy", f"open door {2 + (turn.index - 3) % 2}")
        assert {turn.origin for turn in episode.turns[:3]} == {"demonstration"}
    assert slips / (20 * 9) == pytest.approx(0.4, abs=0.1)
    with pytest.raises(AgentError, match=r"loop-slips is 1\.0;"):
        PlayerMix.parse("repeat:1", loop_slips=1.0)


@pytest.mark.parametrize("train_on", ["demonstration", "both"])
def test_loops_are_supervised_where_policies_are_and_noise_never(
    make_doors: Any, make_tokenizer: Any, train_on: str
) -> None:
    mix: Any = Fixed(DrawnPlayer("cycle", 3, 2))
    agent = MixedAgent(mix, ChatRenderer(make_tokenizer()), noise=0.5)
    episodes = rollout([Job(task_id="doors/9", seed=seed) for seed in range(6)], make_doors(max_turns=6), agent)
    batch = pack(episodes, origins=TRAIN_ON[train_on])
    for number, episode in enumerate(episodes):
        supervised = {*batch.turn_N[batch.episode_N == number].tolist()}
        shown = {turn.index for turn in episode.turns if turn.origin == "demonstration" and turn.verdict.valid}
        assert supervised == shown | ({3, 4, 5} if train_on == "both" else set())
    assert any(not turn.verdict.valid for episode in episodes for turn in episode.turns[3:])
    assert {turn.origin for episode in episodes for turn in episode.turns[:3]} == {"demonstration", "noise"}


def test_shares_and_lengths_of_loops_are_what_was_asked_for() -> None:
    mix = PlayerMix.parse("expert:.35,noisy:.2,repeat:.2,cycle:.25")
    rng = np.random.default_rng(0)
    parts = [mix.draw(rng) for _ in range(20_000)]
    names = [part.player for part in parts]
    assert [names.count(name) / 20_000 for name in ("expert", "noisy", "repeat", "cycle")] == pytest.approx(
        [0.35, 0.2, 0.2, 0.25], abs=0.01
    )
    starts = [part.loop_from for part in parts if part.player == "repeat"]
    assert (min(starts), np.mean(starts)) == (1, pytest.approx(2.3, abs=0.1))
    cycles = [part for part in parts if part.player == "cycle"]
    assert {part.period for part in cycles} == {2, 3}
    assert np.mean([part.period == 2 for part in cycles]) == pytest.approx(0.5, abs=0.03)
    assert all(part.loop_from >= part.period for part in cycles)
    assert {(part.loop_from, part.period) for part in parts if part.player in ("expert", "noisy")} == {(0, 0)}
    late = PlayerMix.parse("repeat:1", loop_after=10.0)
    assert np.mean([late.draw(rng).loop_from for _ in range(5_000)]) == pytest.approx(10.0, abs=0.4)


def test_a_job_fixes_its_player(make_doors: Any) -> None:
    mix = PlayerMix.parse("expert:1,noisy:1,repeat:1,cycle:1")

    def played(jobs: list[Job], slots: int) -> list[list[str]]:
        episodes = rollout(jobs, make_doors(max_turns=9), MixedAgent(mix, noise=(0.0, 0.5)), slots=slots)
        return [[turn.response for turn in episode.turns] for episode in episodes]

    first = played(JOBS, 64)
    assert played(JOBS, 3) == first
    assert played(JOBS[::-1], 5) == first[::-1]
    # no two of a dozen samples of a task would be alike only if the player were drawn from the task
    assert len({tuple(row) for row in first[:12]}) > 4


def test_the_noisy_player_alone_is_the_expert_with_noise(make_doors: Any) -> None:
    alone = rollout(JOBS, make_doors(max_turns=20), ExpertAgent(noise=(0.1, 0.6)))
    mixed = rollout(JOBS, make_doors(max_turns=20), MixedAgent(PlayerMix.parse("noisy:1"), noise=(0.1, 0.6)))
    assert [episode.turns for episode in mixed] == [episode.turns for episode in alone]


def test_the_mix_reaches_the_episodes_of_a_step(make_doors: Any, make_tokenizer: Any) -> None:
    collect = ExpertSource(
        renderer=ChatRenderer(make_tokenizer()),
        settings=ChatSettings(system="Open the doors."),
        make_env=make_doors(max_turns=12),
        task_ids=("doors/9",),
        players=PlayerMix(shares=(("repeat", 1.0),), loop_after=1.0),
    )
    request = RolloutRequest(step=1, episodes=6, max_turns=5, temperature=1.0)
    for episode in collect(request):
        assert [turn.action for turn in episode.turns] == ["open door 1"] * 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("expert:1,lop:2", r"players: 'lop'; known are expert, noisy, repeat, cycle"),
        ("expert:-1", r"the share of expert is -1\.0; valid: 0 or more"),
        ("expert:0", r"no player has a share above 0"),
        ("expert:.5,expert:.5", r"each may be named once"),
    ],
)
def test_a_mix_that_cannot_be_is_explained(text: str, message: str) -> None:
    with pytest.raises(AgentError, match=message):
        PlayerMix.parse(text)


def test_a_loop_cannot_begin_before_there_is_anything_to_repeat() -> None:
    with pytest.raises(AgentError, match=r"loop-after is 0\.5; valid: 1 or more turns"):
        PlayerMix.parse("repeat:1", loop_after=0.5)
