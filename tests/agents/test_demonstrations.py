"""Demonstrations in literal numbers: who is asked, what counts, which ids are replayed, where a response is cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from turngym.agents.demonstrations import (
    APART,
    DemonstrationFilter,
    DemonstrationPlan,
    Demonstrations,
    LiveDemonstrator,
    RecordedDemonstrator,
    left_out,
)
from turngym.agents.model_agent import ModelAgent
from turngym.agents.playing.rollout import Job, rollout
from turngym.agents.playing.scripted import ExpertAgent
from turngym.agents.rendering.renderer import ChatRenderer, Shown, TextEpisodes, begun_response, read_exactly
from turngym.agents.rollout_sources import LiveSource
from turngym.core.episode import Episode, Status
from turngym.core.errors import AgentError
from turngym.core.protocols import GenerateRequest, Generation, Sampling
from turngym.core.rollout_request import PlayPlan, RolloutRequest
from turngym.core.tools import ToolSpec
from turngym.envs.channels import TextChannel, make_channel

TOOL = ToolSpec(name="door", description="Open a door.", argument="action", argument_description="what to do")
SAID = "<action>open door 1</action>"
"""28 bytes, each one id, and the end id."""


@pytest.fixture
def renderer(make_tokenizer: Any) -> ChatRenderer:
    return ChatRenderer(make_tokenizer())


@pytest.fixture
def writer(renderer: ChatRenderer) -> TextEpisodes:
    return TextEpisodes(renderer=renderer, channel=TextChannel(), tool=TOOL, system="Open.")


def played(make_doors: Any, task: str = "doors/3", agent: Any = None, channel: str | None = "text") -> Episode:
    (episode,) = rollout([Job(task_id=task)], make_doors(channel=channel), agent or ExpertAgent())
    return episode


def demonstrations(make_doors: Any, writer: TextEpisodes | None, **more: Any) -> Demonstrations:
    source = LiveDemonstrator(agent=ExpertAgent(), make_env=make_doors(channel=None))
    return Demonstrations(source=source, writer=writer, **more)


def text(renderer: ChatRenderer, ids: Sequence[int]) -> str:
    return renderer.template.decode(list(ids))


def test_a_plan_is_what_the_student_would_have_said(make_doors: Any, writer: TextEpisodes) -> None:
    (plan,) = demonstrations(make_doors, writer).plans([Job(task_id="doors/2")])
    end = writer.renderer.template.end_id
    assert [turn.response for turn in plan.turns if isinstance(turn, Shown)] == [SAID, SAID.replace("1", "2")]
    for turn in plan.turns:
        assert isinstance(turn, Shown)
        assert (len(turn.ids), turn.ids[-1], turn.exact, turn.origin) == (29, end, False, "demonstration")
        assert text(writer.renderer, turn.ids[:-1]) == turn.response
    assert (plan.reason, plan.exact, DemonstrationPlan().exact) == ("used", False, False)
    assert plan.sha256 == played(make_doors, "doors/2").task.sha256
    (bare,) = demonstrations(make_doors, None).plans([Job(task_id="doors/2")])
    assert bare.turns == ("open door 1", "open door 2")
    assert demonstrations(make_doors, writer).plans([]) == []


@pytest.mark.parametrize(
    ("ids", "whole", "begun"),
    [
        (0, [], ""),
        (5, [], "<acti"),
        (14, [], "<action>open d"),
        (19, [], "<action>open door 1"),
        (24, [], "<action>open door 1"),  # within </action>: engines would miss the rest of it
        (27, [], "<action>open door 1"),
        (28, [28], ""),  # the action stands there, only the end id is missing
        (29, [29], ""),
        (30, [29], ""),  # "<" may be the beginning of </action>
        (31, [29], "<a"),
        (43, [29], "<action>open d"),
        (58, [29, 29], ""),
        (86, [29, 29, 28], ""),
        (87, [29, 29, 29], ""),
    ],
)
def test_a_prefix_in_tokens(make_doors: Any, writer: TextEpisodes, ids: int, whole: list[int], begun: str) -> None:
    """Three responses of 29 ids: the first `ids` of 87."""
    shown = demonstrations(make_doors, writer)
    (plan,) = shown.plans([Job(task_id="doors/3")])
    job = shown.begun(Job(task_id="doors/3"), plan, (ids + 0.5) / 87 if ids < 87 else 1.0, "tokens")
    assert [len(turn.ids) for turn in job.demonstration if isinstance(turn, Shown)] == whole
    assert text(writer.renderer, job.begun) == begun
    assert job.sha256 == (plan.sha256)


def test_a_prefix_in_turns(make_doors: Any, writer: TextEpisodes) -> None:
    shown = demonstrations(make_doors, writer)
    (plan,) = shown.plans([Job(task_id="doors/3")])
    jobs = [shown.begun(Job(task_id="doors/3"), plan, ratio) for ratio in (1.0, 0.67, 0.6, 0.01, 0.0)]
    assert [len(job.demonstration) for job in jobs] == [3, 2, 1, 1, 0]
    assert all(job.begun == () for job in jobs)
    assert (
        jobs[4]
        == Job(task_id="doors/3")
        == shown.begun(Job(task_id="doors/3"), DemonstrationPlan(reason="failed"), 1.0)
    )
    bare = demonstrations(make_doors, None)
    (actions,) = bare.plans([Job(task_id="doors/3")])
    with pytest.raises(AgentError, match="needs the student's tokens"):
        bare.begun(Job(task_id="doors/3"), actions, 0.5, "tokens")


def test_where_a_response_may_be_cut(renderer: ChatRenderer) -> None:
    shown = Shown(response="a</x>b", ids=tuple(renderer.template.encode("a</x>b").tolist()))
    cut = [begun_response(renderer, shown, count, ("</x>", "</yy>")) for count in range(7)]
    assert [(text(renderer, ids), over) for ids, over in cut] == [
        ("", False),
        ("a", False),
        ("a", False),
        ("a", False),
        ("a", False),
        ("a</x>", True),
        ("a</x>b", True),
    ]


class Begun:
    """A policy that says what it was asked, and ends every answer."""

    def __init__(self, renderer: ChatRenderer, answer: str) -> None:
        self.renderer, self.answer = renderer, answer
        self.asked: list[GenerateRequest] = []

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        self.asked += requests
        ids = self.renderer.template.encode(self.answer)
        logprobs = np.full(len(ids), -0.5, np.float32)
        spans = ((3, 0, 1), (4, 1, len(ids)))
        return [Generation(ids=ids, logprobs=logprobs, finish="stop", version_spans=spans) for _ in requests]

    def release(self, session: str) -> None:
        pass


def test_the_student_goes_on_within_a_response(make_doors: Any, writer: TextEpisodes) -> None:
    renderer = writer.renderer
    policy = Begun(renderer, "oor 2</action>")
    shown = demonstrations(make_doors, writer)
    (plan,) = shown.plans([Job(task_id="doors/3")])
    job = shown.begun(Job(task_id="doors/3"), plan, 43.5 / 87, "tokens")
    agent = ModelAgent(policy, renderer, TextChannel(), Sampling(max_new_tokens=20))
    (episode,) = rollout([job], make_doors(), agent, max_turns=3)
    first, second, third = episode.turns
    assert [turn.origin for turn in episode.turns] == ["demonstration", "policy", "policy"]
    assert [(turn.begun, turn.response_length) for turn in episode.turns] == [(0, 29), (14, 28), (0, 14)]
    assert (first.response, second.response) == (SAID, SAID.replace("1", "2"))
    assert (second.action, second.verdict.valid) == ("open door 2", True)
    assert second.logprobs is not None
    assert np.isnan(second.logprobs[:14]).all()
    assert second.logprobs[14:].tolist() == [-0.5] * 14
    assert second.version_spans == ((3, 14, 15), (4, 15, 28))
    assert (first.version_spans, third.version_spans) == ((), ((3, 0, 1), (4, 1, 14)))
    # what was begun is prompt to the engine, and part of the response to its length
    assert text(renderer, policy.asked[0].prompt_ids.tolist()).endswith("<|im_start|>assistant\n<action>open d")
    assert [request.sampling.max_new_tokens for request in policy.asked] == [6, 20]
    known = len(policy.asked[0].prompt_ids) + 14
    assert policy.asked[1].prompt_ids.tolist()[:known] == episode.segments[0].tolist()[:known]
    # the context counts what was begun
    size = len(policy.asked[0].prompt_ids)
    for room, wanted in ((1, [1]), (0, [])):
        tight = Begun(renderer, "o")
        agent = ModelAgent(tight, renderer, TextChannel(), Sampling(max_new_tokens=20), max_context=size + room)
        (full,) = rollout([job], make_doors(), agent, max_turns=2)
        assert [request.sampling.max_new_tokens for request in tight.asked] == wanted
    assert (full.status, full.depth) == (Status.TRUNCATED_TOKENS, 1)


def test_the_reasons_in_their_order(make_doors: Any) -> None:
    won = played(make_doors)
    lost = replace(won, success=False, episode_return=-1.0)
    broken = replace(lost, status=Status.ERROR_ENGINE)
    asked: list[Episode] = []
    strict = DemonstrationFilter(success=True, least=0.5, fits=lambda episode: bool(asked.append(episode)))
    assert [strict.reason(episode) for episode in (broken, lost, won)] == ["failed", "unsolved", "too_long"]
    assert asked == [won]
    assert strict.reason(replace(won, episode_return=0.4)) == "low_reward"
    assert DemonstrationFilter(least=0.5).reason(replace(won, episode_return=0.5)) == "used"
    paid = DemonstrationFilter(least=0.5, reward=lambda episode: 0.1 * episode.depth)
    assert (paid.reason(won), paid.reason(played(make_doors, "doors/5"))) == ("low_reward", "used")
    assert [DemonstrationFilter().reason(episode) for episode in (broken, lost, won)] == ["failed", "used", "used"]
    assert DemonstrationFilter().reason(replace(won, turns=(), segments=())) == "failed"


def test_the_line_says_how_many_and_why(make_doors: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert left_out({"used": 3}) == "3 of 3 demonstrations are used"
    said = left_out({"too_long": 2, "used": 3, "unsolved": 1})
    assert said == "3 of 6 demonstrations are used; left out: 1 not solved, 2 longer than the context"
    shown = demonstrations(make_doors, None, name="demonstrations of expert", keep=DemonstrationFilter(least=2.0))
    assert [reason for _, reason in shown.episodes([Job(task_id="doors/3")])] == ["low_reward"]
    shown.episodes([Job(task_id="doors/3")])
    err = capsys.readouterr().err
    assert err == (
        "demonstrations of expert, first step: 0 of 1 demonstrations are used; left out: 1 worth too little\n"
    )
    demonstrations(make_doors, None, name="x").episodes([Job(task_id="doors/3")])
    assert capsys.readouterr().err == ""


def test_recorded_demonstrations_are_found_by_task(make_doors: Any) -> None:
    episodes = [replace(played(make_doors, task), sample=n) for n, task in enumerate(["doors/2"] + ["doors/3"] * 3)]
    lost = replace(episodes[0], success=False)
    found = RecordedDemonstrator.of([*episodes, lost], DemonstrationFilter(success=True))
    assert found.counts == {"used": 4, "unsolved": 1}
    jobs = [Job(task_id=task, seed=seed, sample=7) for seed in range(30) for task in ("doors/2", "doors/3", "doors/4")]
    chosen = found(jobs)
    assert [None if one is None else one.task.task_id for one in chosen] == ["doors/2", "doors/3", None] * 30
    assert {one.sample for one in chosen[1::3] if one is not None} == {1, 2, 3}
    assert found(jobs[::-1])[::-1] == chosen
    assert [one.sample for one in chosen[1:31:3] if one is not None] == [2, 2, 2, 3, 3, 1, 1, 3, 2, 1]
    two = RecordedDemonstrator.of(episodes[1:3], DemonstrationFilter())
    assert {one.sample for one in two(jobs[1::3]) if one is not None} == {1, 2}
    assert Demonstrations(source=found).tasks(["doors/4", "doors/3", "doors/1", "doors/2"]) == ["doors/3", "doors/2"]
    with pytest.raises(AgentError, match="--demonstrated-tasks plays"):
        demonstrations(make_doors, None).tasks(["doors/3"])
    (plan,) = Demonstrations(source=found).plans([Job(task_id="doors/4")])
    assert plan == DemonstrationPlan(reason="missing")


def test_who_demonstrates_draws_apart_from_the_student(make_doors: Any, make_tokenizer: Any, make_policy: Any) -> None:
    """Also: its tasks and seeds are the student's, its turns are not cut, and it is spoken to in its own words."""
    asked: list[Any] = []

    def play(jobs: Any, make_env: Any, agent: Any, **more: Any) -> Any:
        asked.append(SimpleNamespace(jobs=list(jobs), **more))
        return rollout(jobs, make_env, agent, **more)

    renderer = ChatRenderer(make_tokenizer())
    agent = ModelAgent(make_policy(make_tokenizer(), renderer.stop_ids[0]), renderer, TextChannel())
    source = LiveDemonstrator(agent=agent, make_env=make_doors(), slots=5, system="Teach.", apart=APART, play=play)
    (episode,) = source([Job(task_id="doors/3", seed=4, sample=2, max_turns=1, group=1)])
    assert asked[0].jobs == [Job(task_id="doors/3", seed=4, sample=2 + APART, group=1)]
    assert (asked[0].slots, asked[0].system) == (5, "Teach.")
    assert episode is not None
    assert (episode.system, episode.depth > 1) == ("Teach.", True)


def test_ids_of_a_model_that_speaks_alike_are_replayed_as_they_were_drawn(
    make_doors: Any, make_tokenizer: Any, make_policy: Any, writer: TextEpisodes
) -> None:
    tokenizer = make_tokenizer()
    renderer = ChatRenderer(tokenizer)
    agent = ModelAgent(make_policy(tokenizer, renderer.stop_ids[0], doors=1), renderer, TextChannel())
    episode = played(make_doors, "doors/2", agent)
    turn = episode.turns[0]
    found = writer.shown(episode, turn)
    assert (found.exact, found.ids) == (True, tuple(episode.response_ids(turn).tolist()))
    (plan,) = Demonstrations(source=lambda jobs: [episode], writer=writer).plans([Job(task_id="doors/2")])
    assert plan.exact
    # without the end id, as engines leave it where a stop text ended the response
    cut = episode.segments[0][: turn.response_span[1] - 1]
    short = replace(turn, response_span=(turn.response_span[0], turn.response_span[1] - 1), logprobs=None)
    assert writer.shown(replace(episode, turns=(short,), segments=(cut,)), short).ids == found.ids[:-1]
    # another tokenizer's ids, that mean something else here, or nothing
    for other in (episode.segments[0] + 1, episode.segments[0] + 5000):
        strange = writer.shown(replace(episode, segments=(other.astype(np.int32),)), turn)
        assert (strange.exact, strange.response, strange.ids) == (False, SAID, found.ids)
    # another template, whose prompts end otherwise
    ended = episode.segments[0].copy()
    ended[turn.response_span[0] - 1] = 40
    assert not writer.shown(replace(episode, segments=(ended,)), turn).exact
    # another channel: the same action in the student's words
    called = replace(writer, channel=make_channel("tool", TOOL)).shown(episode, turn)
    assert not called.exact
    assert "tool_call" in called.response
    assert writer.shown(episode, replace(turn, origin="noise")).origin == "noise"


def test_ids_that_are_read_exactly(renderer: ChatRenderer) -> None:
    ids, end = renderer.template.encode(SAID).tolist(), renderer.stop_ids[0]
    assert read_exactly(renderer, ids, SAID)
    assert renderer.template.encode("!").tolist() == [0]
    assert read_exactly(renderer, [0], "!")
    assert read_exactly(renderer, [*ids, end], SAID)
    assert not read_exactly(renderer, [*ids, end, end], SAID)
    assert not read_exactly(renderer, [end, *ids], SAID)
    assert not read_exactly(renderer, ids[:-1], SAID)
    assert not read_exactly(renderer, [], "")
    assert not read_exactly(renderer, [-1, *ids], SAID)
    assert not read_exactly(renderer, [10**6], SAID)


def test_what_fits(make_doors: Any, writer: TextEpisodes) -> None:
    episode = played(make_doors, "doors/2", channel=None)
    size = writer.rewrite(episode).turns[-1].response_span[1]
    assert [replace(writer, max_context=most).fits(episode) for most in (size, size - 1, None)] == [True, False, True]


class Silent(ExpertAgent):
    """Fails for every second sample, as an endpoint that does not answer."""

    def _one(self, conversation: Any) -> Any:
        reply = super()._one(conversation)
        lost = conversation.sample % 2
        return replace(reply, ends=Status.ERROR_ENGINE, error="no answer", text="") if lost else reply


def test_a_demonstration_that_failed_leaves_the_attempt_to_the_student(make_doors: Any, writer: TextEpisodes) -> None:
    source = LiveDemonstrator(agent=Silent(), make_env=make_doors(channel=None))
    player: Any = SimpleNamespace(
        settings=SimpleNamespace(system=None, channel=None), agent=lambda temperature: ExpertAgent()
    )
    collect = LiveSource(
        player=player,
        make_env=make_doors(),
        task_ids=("doors/3",),
        demonstrations=Demonstrations(source=source, writer=writer),
    )
    ratios = ((0.4, 0.4), (0.4, 0.4))
    request = RolloutRequest(step=1, episodes=6, max_turns=9, group=3, plan=PlayPlan(prefix_ratios=ratios))
    episodes = collect(request)
    assert [episode.meta.get("demonstration") for episode in episodes] == [
        "used",
        "failed",
        None,
        "failed",
        "used",
        None,
    ]
    assert [episode.meta.get("demonstration_exact") for episode in episodes][:3] == [False, False, None]
    assert all(episode.success for episode in episodes)


@pytest.mark.parametrize("finish", ["length", "content_filter"])
def test_what_was_cut_gets_no_end_id(finish: str, make_doors: Any, writer: TextEpisodes) -> None:
    """It would teach to stop in mid-sentence. A cut answer whose action was read is written anew, and whole."""
    episode, end = played(make_doors, "doors/3"), writer.renderer.template.end_id
    thought = replace(episode.turns[0], response="The door must be in the", action=None, finish=finish)
    written = writer.rewrite(replace(episode, turns=(thought, *episode.turns[1:])))
    ids = [written.response_ids(turn).tolist() for turn in written.turns]
    assert text(writer.renderer, ids[0]) == "The door must be in the"
    assert [one[-1] == end for one in ids] == [False, True, True]
    # what the template puts between the two is prompt
    assert int(written.segments[0][written.turns[1].prompt_span[0]]) == end
    bare = replace(episode.turns[0], response="open door 1", action="open door 1", finish=finish)
    shown = writer.shown(episode, bare)
    assert (shown.response, shown.ids[-1]) == (SAID, end)
