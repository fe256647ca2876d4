"""Before the first episode a client finds out what its server takes and answers, and keeps to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from eight_servers import SERVERS, door_of, page_row, refused
from openai_fake import FakeOpenAI, Fault, error, served
from toy_evaluation import toy_evaluation

from turngym.agents.endpoint.agent import EndpointAgent
from turngym.agents.endpoint.handshake import SAID
from turngym.agents.endpoint.options import EndpointOptions
from turngym.agents.endpoint.profile import EndpointProfile
from turngym.agents.evaluation.play_panel import RecordedEpisodes
from turngym.agents.playing.rollout import Job, rollout
from turngym.core.episode import Status
from turngym.core.errors import AgentError
from turngym.envs.channels import make_channel
from turngym.envs.guard import guard_of
from turngym.envs.panels import collect_tasks

PAGE = Path(__file__).parents[2] / "docs" / "research" / "handshakes.md"
JOBS = [Job(task_id=f"doors/{number}", seed=7) for number in (2, 3)]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[FakeOpenAI], FakeOpenAI]]:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with ExitStack() as stack:
        yield lambda fake: stack.enter_context(served(fake))


def agent_for(make: Any, fake: FakeOpenAI, channel: str = "tool", temperature: float = 0.85, **more: Any) -> Any:
    tool = guard_of(make()).tool
    options = {name: more.pop(name) for name in list(more) if name in EndpointOptions.__struct_fields__}
    opened = EndpointOptions(base_url=fake.url, **options)
    return EndpointAgent("tiny", opened, make_channel(channel, tool), tool, temperature=temperature, **more)


@pytest.mark.filterwarnings("ignore:.*answers have")
@pytest.mark.parametrize("channel", ["tool", "text"])
@pytest.mark.parametrize("name", SERVERS)
def test_eight_servers(name: str, channel: str, serve: Any, make_doors: Any) -> None:
    """Each is met as it is, plays whole episodes, and refuses no request after the handshake."""
    server, make = SERVERS[name], make_doors(channel)
    fake, usual = serve(server.fake()), EndpointProfile().to_json()
    agent = agent_for(make, fake, channel)
    profile = agent.shake_hands()
    found, asked = profile.to_json(), len(fake.requests)
    assert refused(fake).count(False) == 2
    if channel == "tool":
        assert page_row(name, profile) in PAGE.read_text(encoding="utf-8").splitlines()
    expected = {**server.finds, **(server.in_text if channel == "text" else {})}
    takes = (
        "limit",
        "temperature",
        "seed",
        "stop",
        "system",
        "tool_name",
        "blank",
        "silence",
        "call_ids",
        "own_fields",
        "reasoning",
    )
    assert {one: found[one] for one in takes} == {one: expected.get(one, usual[one]) for one in takes}
    assert {one: found[one] for one in expected} == expected
    assert {"completion_tokens", "prompt_tokens", "total_tokens"} <= set(found["usage"])
    episodes = rollout(JOBS, make, agent)
    assert [(e.status, e.success, e.depth) for e in episodes] == [(Status.COMPLETED, True, e.depth) for e in episodes]
    assert {turn.verdict.value for e in episodes for turn in e.turns} == {"ok"}
    assert not any(refused(fake)[asked:])
    assert len(fake.requests) == asked + sum(e.depth for e in episodes)
    assert episodes[0].meta["endpoint"] == agent.profile.to_json()


def test_the_conversation_is_fixed(serve: Any, make_doors: Any) -> None:
    fake, make = serve(SERVERS["ollama"].fake()), make_doors("tool")
    rollout(JOBS[:1], make, agent_for(make, fake, extra_body='{"top_p": 0.9}'))
    first, second = fake.requests[:2]
    assert [m["role"] for m in first["messages"]] == ["system", "user"]
    assert [m["role"] for m in second["messages"]] == ["system", "user", "assistant", "tool", "assistant", "user"]
    assert second["messages"][4]["content"] == ""
    for body in (first, second):
        assert (body["max_tokens"], body["temperature"], body["top_p"], body["stream"]) == (4096, 0.85, 0.9, False)
        assert [tool["function"]["name"] for tool in body["tools"]] == ["door"]
        assert "seed" in body
    again = serve(SERVERS["ollama"].fake())
    rollout(JOBS[1:], make, agent_for(make, again, extra_body='{"top_p": 0.9}'))
    assert again.requests[:2] == fake.requests[:2]


def test_nothing_is_asked_without_it_or_twice(serve: Any, make_doors: Any) -> None:
    fake, make = serve(SERVERS["ollama"].fake()), make_doors("tool")
    agent = agent_for(make, fake)
    depth = sum(e.depth for _ in range(2) for e in rollout(JOBS, make, agent))
    assert len(fake.requests) == 2 + depth
    fake.requests.clear()
    episodes = rollout(JOBS, make, agent_for(make, fake, handshake=False))
    assert len(fake.requests) == sum(e.depth for e in episodes)
    assert "endpoint" not in episodes[0].meta
    picky = serve(SERVERS["openai reasoning"].fake())
    with pytest.raises(AgentError, match="max_completion_tokens"):
        rollout(JOBS, make, agent_for(make, picky, handshake=False))


def test_what_was_found_is_in_the_results(serve: Any, make_doors: Any, capfd: Any) -> None:
    fake, make = serve(SERVERS["openai reasoning"].fake()), make_doors("text")
    tasks = collect_tasks(make(), ["doors/2"])
    agent = agent_for(make, fake, "text", price_in=1.0, price_out=1.0)
    result = toy_evaluation(tasks, make, agent, temperature=0.85, samples=1).run()
    profile = result.to_json()["endpoint"]
    assert profile["temperature"] is False
    assert profile["limit"] == "max_completion_tokens"
    # the temperature that was asked for is not the one at which the model drew
    assert result.title.endswith(", the server's own temperature")
    assert replace(result, profile={**profile, "temperature": True}).title.endswith(", temperature 0.85")
    # the handshake's price stands beside the episodes'
    assert profile["used"]["cost"] == pytest.approx(220 / 1e6)
    assert result.to_json()["usage"]["cost"] == pytest.approx(110 * len(result.episodes[0].turns) / 1e6)
    assert "openai tiny: the server calls the limit of tokens max_completion_tokens; takes no" in capfd.readouterr().err


def test_what_cannot_work_is_refused_in_one_line(serve: Any, make_doors: Any) -> None:
    make = make_doors("tool")
    silent = FakeOpenAI(usage=False, message=SERVERS["ollama"].said)
    for options, words in (
        ({"price_in": 1.0, "price_out": 1.0}, "--price-in cannot hold, because the server reports no usage"),
        ({"max_context": 5000}, "--max-context cannot hold"),
        ({"token_ids": True}, "no token ids"),
    ):
        with pytest.raises(AgentError, match=words) as caught:
            agent_for(make, serve(FakeOpenAI(usage=False, message=silent.message)), **options).shake_hands()
        assert "\n" not in str(caught.value)
    # half of the numbers is no cost
    half = FakeOpenAI(usage=False, message=silent.message, extra=lambda body: {"usage": {"prompt_tokens": 5}})
    with (
        pytest.warns(UserWarning, match="usage in part"),
        pytest.raises(AgentError, match="--price-in cannot hold, because the server reports only a part of its usage"),
    ):
        agent_for(make, serve(half), price_in=1.0, price_out=1.0).shake_hands()
    without = {"prompt_token_ids": [1], "choice": {"token_ids": [2]}}
    ids = FakeOpenAI(message=SERVERS["ollama"].said, extra=lambda body: without)
    with (
        pytest.warns(UserWarning, match="ids without their log-probabilities"),
        pytest.raises(
            AgentError, match="--token-ids cannot hold, because the server gives ids without log-probabilities"
        ),
    ):
        agent_for(make, serve(ids), temperature=1.0, token_ids=True).shake_hands()


def test_a_call_that_the_server_lost_is_no_mistake_of_the_models(serve: Any, make_doors: Any) -> None:
    make = make_doors("tool")
    fake = FakeOpenAI(message=lambda body: {"content": ""}, finish="tool_calls")
    with pytest.warns(UserWarning, match="without a call.*--channel text") as said:
        (episode,) = rollout(JOBS[:1], make, agent_for(make, serve(fake)), max_turns=3)
    assert len(said) == 1
    assert episode.meta["endpoint"]["calls"] == "none came"
    assert episode.meta["usage"]["noticed"] == {"finish_reason of a call without a call": 3}


def test_an_endpoint_that_is_another_when_a_run_goes_on_is_said(serve: Any, make_doors: Any) -> None:
    make = make_doors("tool")
    first, second = rollout(JOBS, make, agent_for(make, serve(SERVERS["ollama"].fake())))
    recorded = RecordedEpisodes()
    recorded.pay(first)
    # what was noticed, and what it cost, differ by chance
    recorded.pay(replace(second, meta=second.meta | {"endpoint": first.meta["endpoint"] | {"noticed": ["x"]}}))
    for name, value in (("temperature", False), ("model", "another")):
        with pytest.warns(UserWarning, match=f"not as it was .*{value}'?, before"):
            recorded.pay(replace(second, meta=second.meta | {"endpoint": first.meta["endpoint"] | {name: value}}))
        recorded.profile = first.meta["endpoint"]


@pytest.mark.parametrize(
    "words",
    [
        "Unknown parameter: 'max_tokens'.",
        "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead.",
    ],
)
def test_a_limit_that_is_refused_by_its_name_has_the_other(words: str, serve: Any, make_doors: Any) -> None:
    fake = serve(FakeOpenAI(fault=lambda n, body: Fault(400, error(words)) if "max_tokens" in body else None))
    assert agent_for(make_doors("text"), fake, "text").shake_hands().limit == "max_completion_tokens"
    assert len(fake.requests) == 3


REFUSES: dict[str, Callable[[Any], bool]] = {
    "temperature": lambda body: "temperature" in body,
    "seed": lambda body: "seed" in body,
    "system": lambda body: body["messages"][0]["role"] == "system",
    "tool_name": lambda body: any(m["role"] == "tool" and "name" not in m for m in body["messages"]),
    "blank": lambda body: any(m.get("content", 0) is None for m in body["messages"]),
    "silence": lambda body: any(m.get("content") == "" for m in body["messages"]),
    "call_ids": lambda body: any(len(c["id"]) > 9 for m in body["messages"] for c in m.get("tool_calls") or ()),
}
"""What a server may refuse, by the field of the profile that meets it."""


@pytest.mark.parametrize(
    "names", [("temperature", "seed"), ("system", "seed", "temperature"), ("tool_name", "silence")]
)
@pytest.mark.parametrize("words", ["Bad request", "Bad request: {}"])
def test_several_things_that_are_refused_are_found_and_nothing_else(
    names: tuple[str, ...], words: str, serve: Any, make_doors: Any
) -> None:
    """In the same words, or one after the other."""

    def fault(number: int, body: Any) -> Fault | None:
        wrong = next((name for name in names if REFUSES[name](body)), None)
        return None if wrong is None else Fault(400, error(words.format(names.index(wrong))))

    fake, usual = serve(FakeOpenAI(fault=fault, message=SERVERS["lm studio"].said)), EndpointProfile()
    found = agent_for(make_doors("tool"), fake).shake_hands()
    assert {one for one in SAID if getattr(found, one) != getattr(usual, one)} == set(names)
    assert len(fake.requests) < 40


def test_refusals_are_the_same_whatever_their_number(serve: Any, make_doors: Any) -> None:
    """Gateways put the number of the request into each: what did not help is taken back all the same."""

    def fault(number: int, body: Any) -> Fault | None:
        words = f"Bad request (request id: 2026112919{number:04}-x{number})"
        return Fault(400, error(words)) if "stop" in body else None

    fake = serve(FakeOpenAI(fault=fault))
    found = agent_for(make_doors("text"), fake, "text").shake_hands()
    assert (found.stop, found.temperature, found.seed) == (False, True, True)


def test_a_refusal_that_is_no_matter_of_form_ends_it_at_once(serve: Any, make_doors: Any) -> None:
    make = make_doors("tool")
    for fault, words in (
        # drawn at the server's own temperature it would be another model
        *(
            (Fault(400, error(f"temperature {said}", param="temperature")), f"temperature {said}")
            for said in ("must be between 0 and 0.5", "must be less than or equal to 0.5", "> 0.5", "out of range")
        ),
        (Fault(400, error("`temperature` and `top_p` cannot both be specified for this model.")), "both be specified"),
        (Fault(404, error("No endpoints found that support tool use")), "--channel text"),
        (Fault(401, error("no")), "status 401"),
        (Fault(404, error("The model `tiny` does not exist")), "status 404"),
        (Fault(400, error('"auto" tool choice requires --enable-auto-tool-choice')), "--channel text"),
    ):
        fake = serve(FakeOpenAI(fault=lambda n, body, fault=fault: fault))  # type: ignore[misc]
        with pytest.raises(AgentError, match=words):
            agent_for(make, fake).shake_hands()
        assert len(fake.requests) == 1


def test_a_template_that_refuses_with_status_500_is_not_waited_for(serve: Any, make_doors: Any) -> None:
    """llama.cpp: what its template raises is a failure of the server."""
    server = SERVERS["gemma behind vllm"]

    def fault(number: int, body: Any) -> Fault | None:
        found = next((found for rule in server.rules if (found := rule(body)) is not None), None)
        return None if found is None else replace(found, status=500)

    fake = serve(FakeOpenAI(fault=fault, message=server.said))
    with pytest.warns(UserWarning, match="call left in the text"):
        assert agent_for(make_doors("tool"), fake).shake_hands().system == "user"
    assert len(fake.requests) == 3


def test_a_stop_string_ends_no_thought(serve: Any, make_doors: Any) -> None:
    """SGLang, llama.cpp and vLLM look for it in all that is drawn: a model that quotes an action never comes to one."""

    def message(body: Any) -> Any:
        action = f"<action>open door {door_of(body)}</action>"
        if "stop" in body:
            return {"content": None, "reasoning": action.removesuffix(body["stop"][0])}
        return {"content": action, "reasoning": f"I could say {action}."}

    make, fake = make_doors("text"), serve(FakeOpenAI(message=message))
    agent = agent_for(make, fake, "text")
    with pytest.warns(UserWarning, match="did a stop string end the thought"):
        episodes = rollout(JOBS, make, agent)
    assert {turn.verdict.value for one in episodes for turn in one.turns} == {"ok"}
    assert agent.profile.stop is False
    # where nobody thinks, an answer ends with its action
    assert agent_for(make, serve(FakeOpenAI()), "text").shake_hands().stop is True


def test_a_small_context_is_enough(serve: Any, make_doors: Any) -> None:
    """What one answer tells is known, where a second turn does not fit."""

    def full(number: int, body: Any) -> Fault | None:
        long = len(body["messages"]) > 2 or body["max_tokens"] > 256
        return Fault(400, error("too long", "context_length_exceeded")) if long else None

    make = make_doors("tool")
    fake = serve(FakeOpenAI(fault=full, message=SERVERS["ollama"].said))
    assert agent_for(make, fake).shake_hands().calls == "parsed"


def test_reasoning_cannot_go_back_in_a_window(make_doors: Any) -> None:
    from turngym.agents.rendering.memory import Memory

    make, nobody = make_doors("tool"), FakeOpenAI(url="http://127.0.0.1:9/v1")
    with pytest.raises(AgentError, match=r"--reasoning-back send .*--memory window:2"):
        agent_for(make, nobody, reasoning_back="send", memory=Memory("window:2"))
