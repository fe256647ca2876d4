"""Whole episodes at servers that refuse a conversation unless it is as their family documents."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from hosted_fake import FAMILIES, assistants
from openai_fake import FakeOpenAI, Fault, error, served

from turngym.agents.endpoint.agent import EndpointAgent
from turngym.agents.endpoint.handshake import MOST_FORMS
from turngym.agents.endpoint.messages import UNNAMED
from turngym.agents.endpoint.options import EndpointOptions
from turngym.agents.playing.rollout import Job, rollout
from turngym.agents.rendering.memory import Example
from turngym.core.episode import Episode, Status
from turngym.core.errors import AgentError
from turngym.envs.channels import make_channel
from turngym.envs.guard import guard_of


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[FakeOpenAI], FakeOpenAI]]:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with ExitStack() as stack:
        yield lambda fake: stack.enter_context(served(fake))


def play(make: Any, fake: FakeOpenAI, channel: str, examples: Any = (), **options: Any) -> Episode:
    tool = guard_of(make()).tool
    agent = EndpointAgent(
        "tiny", EndpointOptions(base_url=fake.url, **options), make_channel(channel, tool), tool, examples=examples
    )
    (episode,) = rollout([Job(task_id="doors/3", seed=7)], make, agent)
    return episode


@pytest.mark.parametrize("channel", ["text", "tool"])
@pytest.mark.parametrize("name", FAMILIES)
def test_an_episode_at_each_family(name: str, channel: str, serve: Any, make_doors: Any) -> None:
    family, make = FAMILIES[name], make_doors(channel)
    fake = serve(family.fake())
    episode = play(make, fake, channel)
    assert (episode.status, episode.success, episode.depth) == (Status.COMPLETED, True, 4)
    # the second turn said nothing, and no family is left because of it
    assert [turn.verdict.value for turn in episode.turns] == ["ok", "malformed", "ok", "ok"]
    # no request of the episode itself was refused
    assert episode.meta["usage"]["retries"] == episode.meta["usage"]["refused"] == 0
    profile = episode.meta["endpoint"]
    assert profile["reasoning"] == (family.reasons and channel == "tool")
    assert profile["calls"] == ("parsed" if channel == "tool" else "not asked for")


def test_a_server_that_refuses_its_own_fields_is_asked_without_them(serve: Any, make_doors: Any, capfd: Any) -> None:
    fake = serve(FAMILIES["groq-compound"].fake())
    play(make_doors("tool"), fake, "tool")
    assert "refuses fields that came with its own answers" in capfd.readouterr().err
    # refused once, in the handshake
    assert ["executed_tools" in str(body["messages"]) for body in fake.requests] == [False, True] + [False] * 5


def test_what_is_refused_in_every_form_is_told_by_the_first(serve: Any, make_doors: Any) -> None:
    fake = FAMILIES["gemini"].fake()
    fake.fault = lambda n, body: Fault(400, error(f"no such city, {n}")) if len(body["messages"]) > 2 else None
    with pytest.raises(AgentError, match=r"handshake, request 2 of 2: .*no such city, 1$"):
        play(make_doors("tool"), serve(fake), "tool")
    # the first request, and the second in many forms, because each refusal says something new
    assert len(fake.requests) == 1 + MOST_FORMS


@pytest.mark.parametrize("back", ["drop", "send"])
def test_reasoning_is_sent_to_no_family_that_refuses_it(back: Any, serve: Any, make_doors: Any) -> None:
    fake = serve(FAMILIES["groq"].fake())
    episode = play(make_doors("tool"), fake, "tool", reasoning_back=back)
    assert episode.status is Status.COMPLETED
    assert episode.meta["endpoint"]["reasoning"] is False
    assert not any("reasoning" in str(body["messages"]) for body in fake.requests[-3:])


@pytest.mark.parametrize("name", ["openai", "gemini", "deepseek"])
def test_examples_are_conversations_too(name: str, serve: Any, make_doors: Any) -> None:
    shown = Example(
        turns=(
            ("You see 1 doors.", '<tool_call>\n{"name": "door", "arguments": {"action": "open door 1"}}\n</tool_call>'),
        ),
        final="open",
    )
    family = FAMILIES[name]
    fake = serve(family.fake())
    episode = play(make_doors("tool"), fake, "tool", (shown,))
    assert not episode.status.is_error, episode.meta


def test_a_name_that_no_server_takes(serve: Any, make_doors: Any) -> None:
    """What the model called is judged as it came, and sent back under a name that does not end the conversation."""
    family = FAMILIES["openai"]
    fake = family.fake()
    inner = fake.message

    def message(body: Any) -> Any:
        said = inner(body)
        if not assistants(body):
            said["tool_calls"][0]["function"]["name"] = "open door!"
        return said

    fake.message = message
    episode = play(make_doors("tool"), serve(fake), "tool")
    assert episode.turns[0].verdict.value == "malformed"
    assert "open door!" in episode.turns[0].response
    assert fake.requests[-2]["messages"][2]["tool_calls"][0]["function"]["name"] == UNNAMED
    assert not episode.status.is_error
