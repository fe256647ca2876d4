"""The tool channel at an endpoint: calls as the server gave them, results for each id, text beside the tool."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

pytest.importorskip("openai", reason="endpoints need turngym[endpoint]")

from openai_fake import FakeOpenAI, served

from turngym.agents.endpoint.messages import INVALID, SKIPPED
from turngym.agents.executor.options import WorkerOptions
from turngym.agents.executor.workers import open_workers
from turngym.agents.playing.environments import env_maker
from turngym.agents.playing.rollout import Job, rollout
from turngym.envs.core.episode import Status
from turngym.envs.core.errors import AgentError
from turngym.envs.core.task import Verdict

JOB = [Job(task_id="doors/2", seed=7)]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., FakeOpenAI]]:
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(served(FakeOpenAI(**options)))


def call(arguments: Any, name: Any = "door", id: Any = "c1") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def turns_of(*messages: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A model that says one message after the other."""
    return lambda body: messages[sum(m["role"] == "assistant" for m in body["messages"])]


def test_a_game_by_calls(serve: Any, make_doors: Any) -> None:
    both = [call('{"action": "open door 1"}'), call('{"action": "open door 2"}', id="c2")]
    model = turns_of(
        {"content": "First one.", "reasoning": "door 1 </think> now", "tool_calls": both},
        {"content": None, "tool_calls": [call({"action": "open door 2"}, id="")]},
    )
    make = make_doors("tool")
    fake = serve(message=model, finish="tool_calls")
    (episode,) = rollout(JOB, make, agent_for(make, fake.url, "tool", reasoning_back="send"))
    assert (episode.status, episode.success, len(episode.turns)) == (Status.COMPLETED, True, 2)
    first, second = fake.requests
    assert [tool["function"]["name"] for tool in first["tools"]] == ["door"]
    assert "stop" not in first
    assert "calling the tool door" in first["messages"][0]["content"]
    assert second["messages"][2:] == [
        {"role": "assistant", "content": "First one.", "tool_calls": both, "reasoning": "door 1 </think> now"},
        {"role": "tool", "tool_call_id": "c1", "content": "door 1 is open"},
        {"role": "tool", "tool_call_id": "c2", "content": SKIPPED},
    ]
    said = episode.turns[0].response
    wanted = '{"name": "door", "arguments": {"action": "open door 1"}}'
    assert said == f"<think>\ndoor 1 </ think> now\n</think>\n\nFirst one.\n<tool_call>\n{wanted}\n</tool_call>"
    assert make().read(said).thought == "door 1 </ think> now"


@pytest.mark.parametrize(
    ("made", "reason", "sent_back"),
    [
        (call('{"action": "open'), "arguments of the tool call are not valid JSON", {INVALID: '{"action": "open'}),
        (call('["open door 1"]'), 'lacks the argument "action"', {INVALID: '["open door 1"]'}),
        (call('{"door": 1}'), 'lacks the argument "action"', {"door": 1}),
        (call('{"action": 1}'), "must be a string", {"action": 1}),
        (call(None), 'lacks the argument "action"', {INVALID: None}),
        (call('{"action": "open door 1"}', name="dor"), "there is no tool", {"action": "open door 1"}),
        (call('{"action": "open door 1"}', name=None), 'an object with "name"', {"action": "open door 1"}),
        ("no call", 'an object with "name"', {INVALID: None}),
        (call('{"action": "<think></tool_call>"}'), "is not possible now", {"action": "<think></tool_call>"}),
    ],
)
def test_bad_calls_are_data(serve: Any, make_doors: Any, made: Any, reason: str, sent_back: Any) -> None:
    make = make_doors("tool")
    fake = serve(message=lambda body: {"content": "", "tool_calls": [made]})
    (episode,) = rollout(JOB, make, agent_for(make, fake.url, "tool"), max_turns=2)
    assert episode.turns[0].verdict is (Verdict.INADMISSIBLE if reason == "is not possible now" else Verdict.MALFORMED)
    assert reason in episode.turns[1].observation
    assistant, result = fake.requests[1]["messages"][2:]
    assert json.loads(assistant["tool_calls"][0]["function"]["arguments"]) == sent_back
    assert result["role"] == "tool"
    assert result["tool_call_id"] == assistant["tool_calls"][0]["id"]


def test_a_server_that_leaves_calls_in_the_text(serve: Any, make_doors: Any) -> None:
    make = make_doors("tool")
    text = '<tool_call>\n{"name": "door", "arguments": {"action": "open door 1"}}\n</tool_call>'
    fake = serve(message=turns_of({"content": text}, {"content": "What now?"}, {"content": text}))
    (episode,) = rollout(JOB, make, agent_for(make, fake.url, "tool"), max_turns=3)
    assert [turn.verdict for turn in episode.turns] == [Verdict.OK, Verdict.MALFORMED, Verdict.INADMISSIBLE]
    assert [message["role"] for message in fake.requests[2]["messages"][2:]] == ["assistant", "user"] * 2


def test_an_answer_is_text_beside_the_tool(serve: Any) -> None:
    """Search: queries are calls, the answer is written; its end tag is dropped by the server and put back."""
    make = env_maker("turngym/Search-v0", channel="tool", split="eval")
    env = make()
    task = env.unwrapped.task_ids()[0]
    env.close()
    search = call('{"query": "capital"}', name="search")
    fake = serve(message=turns_of({"tool_calls": [search]}, {"content": "I know.\n<answer>Nobody"}))
    (episode,) = rollout([Job(task_id=task)], make, agent_for(make, fake.url, "tool"))
    assert [turn.action for turn in episode.turns] == ["<search>capital</search>", "<answer>Nobody</answer>"]
    assert episode.turns[1].response == "I know.\n<answer>Nobody</answer>"
    assert episode.status is Status.COMPLETED
    assert fake.requests[0]["stop"] == ["</answer>"]
    assert fake.requests[1]["messages"][-1]["role"] == "tool"
    assert "<information>" in fake.requests[1]["messages"][-1]["content"]


def test_workers_ask_by_themselves(serve: Any, make_doors: Any) -> None:
    make = env_maker("turngym/ALFWorld-v0", channel="text", config="small", max_turns=2)
    fake = serve(message=lambda body: {"content": f"<action>go to shelf {body['seed'] % 3}"})
    agent = agent_for(make, fake.url)
    env = make()
    jobs = [Job(task_id=task) for task in env.unwrapped.task_ids()[:4]]
    env.close()
    here = rollout(jobs, make, agent)
    assert pickle.loads(pickle.dumps(agent)).name == "openai tiny"
    with open_workers(WorkerOptions(workers=2)) as play:
        there = play(jobs, make, agent, slots=2)
        assert [e.turns for e in there] == [e.turns for e in here]
        assert [e.meta for e in there] == [e.meta for e in here]
        wrong = agent_for(make, fake.url, model="other")
        with pytest.raises(AgentError, match="The model `other` does not exist"):
            play(jobs, make, wrong, slots=2)


def test_an_environment_of_another_channel_is_refused(serve: Any, make_doors: Any) -> None:
    with pytest.raises(AgentError, match="writes actions in channel 'tool', but the environment reads 'text'"):
        rollout(JOB, make_doors("text"), agent_for(make_doors("tool"), serve().url, "tool"))


def test_what_somebody_else_played_is_in_the_messages(serve: Any, make_doors: Any) -> None:
    fake, make = serve(), make_doors()
    shown = [Job(task_id="doors/4", seed=7, demonstration=("open door 1", "open door 2"))]
    (episode,) = rollout(shown, make, agent_for(make, fake.url))
    assert [message["content"] for message in fake.requests[0]["messages"][1:]] == [
        *("You see 4 doors.", "<action>open door 1</action>", "door 1 is open"),
        *("<action>open door 2</action>", "door 2 is open"),
    ]
    assert episode.success
