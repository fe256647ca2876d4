"""The parts of endpoints by themselves: answers read, stop strings put back, pauses, waits that servers ask for."""

from __future__ import annotations

import asyncio
import json
import re
import time
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
from small_episodes import build_episode

from turngym.agents.endpoint.answer_reader import ChatAnswer, Expected, read_answer
from turngym.agents.endpoint.client import Address, RateGate, pauses
from turngym.agents.endpoint.completion_fields import Noticed, UnreadableAnswer, read_usage
from turngym.agents.endpoint.error_reader import read_failure
from turngym.agents.endpoint.messages import Transcript, add_ids, content_of, response_of
from turngym.agents.endpoint.options import EndpointOptions
from turngym.agents.endpoint.profile import NO_ANSWER, NO_TEXT, EndpointProfile
from turngym.agents.endpoint.usage import NOTE, Prices, Usage
from turngym.agents.named_agent import open_agent
from turngym.agents.resolve_play import resolve_agent
from turngym.core.errors import AgentError, SettingsError, TurngymError
from turngym.core.http_client import retry_after
from turngym.core.tools import ToolSpec
from turngym.envs.channels import TextChannel, ToolChannel

VERBS = TextChannel(tags=("search", "answer"))
TOOL = ToolChannel(tool=ToolSpec(name="t", description="", argument="query", argument_description=""))


def body(message: Any, **choice: Any) -> dict[str, Any]:
    return {"choices": [{"message": message, "finish_reason": "stop", **choice}]}


def test_thoughts_come_in_several_fields() -> None:
    for name in ("reasoning_content", "reasoning"):
        answer = read_answer(body({"content": "x", name: "hm"}))
        assert (answer.content, answer.reasoning, answer.thoughts) == ("x", "hm", {name: "hm"})
    parts = [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}, {"type": "text", "text": "x"}]
    answer = read_answer(body({"content": parts}))
    assert (answer.content, answer.reasoning, answer.thoughts) == ("x", "hm", {"content": parts[:1]})
    assert read_answer(body({"content": None, "refusal": "no"})).content == "no"
    assert read_answer(body({"content": "x", "reasoning": None})).reasoning is None


@pytest.mark.parametrize(
    "bad",
    [
        *(None, [], {}, "x", {"choices": []}, {"choices": None}, {"choices": {}}, {"choices": [None]}, body(None)),
        *(body("x"), body([]), body({"content": 5}), body({"content": {"text": "x"}}), body({"content": [5]})),
        *(body({"content": "", "tool_calls": {}}), body({"content": "", "tool_calls": "x"})),
    ],
)
def test_what_is_no_completion(bad: Any) -> None:
    with pytest.raises(UnreadableAnswer):
        read_answer(bad)


@pytest.mark.parametrize(
    ("word", "finish"),
    [
        *(
            (word, "stop")
            for word in ("stop", "tool_calls", "function_call", "end_turn", "eos_token", "STOP", "COMPLETE")
        ),
        *((word, "length") for word in ("length", "max_tokens", "MAX_TOKENS", "model_length")),
        *((word, "content_filter") for word in ("content_filter", "content_filter: SAFETY", "sensitive", "SAFETY")),
        *((word, None) for word in ("error", "abort", "aborted", "insufficient_system_resource", "network_error")),
        *(
            (word, None)
            for word in ("ERROR", "cancelled", "USER_CANCEL", "timeout", "engine_overloaded", "engine_error")
        ),
    ],
)
def test_what_ends_an_answer(word: str, finish: str | None) -> None:
    """An answer that broke off is none, however much of it there is; one that a filter or a limit ended is one."""
    for text in ("", "Go. <action>look"):
        if finish is None:
            with pytest.raises(UnreadableAnswer, match=f"the answer broke off: finish_reason '{word}'"):
                read_answer(body({"content": text}, finish_reason=word))
        else:
            answer = read_answer(body({"content": text}, finish_reason=word))
            assert (answer.content, answer.finish, answer.ending) == (text, finish, word)
            # a model is seldom silent, and servers lose texts
            assert answer.noticed == (() if text or finish != "stop" else (Noticed.EMPTY,))


def test_endings_that_nobody_knows() -> None:
    """With something in the answer it counts, and the word is said; an empty one was not ended by the model."""
    unknown, other = "unknown finish_reason missing", "choice.finish_reason of another type"
    for word, noticed in (
        (None, (unknown,)),
        ("vibes", ("unknown finish_reason 'vibes'",)),
        (7, (other, unknown)),
        ({"reason": "stop"}, (other, unknown)),
    ):
        answer = read_answer(body({"content": "x"}, finish_reason=word))
        assert (answer.finish, answer.noticed) == ("stop", noticed)
        with pytest.raises(UnreadableAnswer):
            read_answer(body({"content": ""}, finish_reason=word))
    for full in (
        body({"content": ""}, finish_reason="model_context_window_exceeded"),
        {**body({"content": None}, finish_reason="length"), "usage": {"prompt_tokens": 9, "completion_tokens": 0}},
    ):
        with pytest.raises(UnreadableAnswer) as caught:
            read_answer(full)
        assert caught.value.full
    for thought in (usage(31, 0, 0, 0, 1055), usage(31, 0, 0, 1024, 31), usage(31, 0, 0, 1024, None)):
        answer = read_answer({**body({}, finish_reason="length"), "usage": thought})
        assert (answer.finish, answer.usage.completion_tokens) == ("length", 1024)
    cut = body({"content": "Go"}, finish_reason="model_context_window_exceeded")
    assert read_answer(cut).finish == "length"


def test_calls_get_ids_that_differ() -> None:
    """Of nine letters and digits, as Mistral's models demand."""
    made = [{"id": "a"}, {"id": "a"}, {}, None, {"id": 3}]
    transcript = Transcript()
    for given in (made, [{}]):
        transcript.answer(read_answer(body({"tool_calls": given})), "")
        transcript.observe("", "Done.")
    asked = [call["id"] for message in transcript.messages for call in message.get("tool_calls", ())]
    assert asked[0] == "a"
    assert len(set(asked)) == len(made) + 1
    assert all(re.fullmatch("[a-z0-9]{9}", id) for id in asked[1:])
    assert [message["tool_call_id"] for message in transcript.messages if message["role"] == "tool"] == asked
    assert read_answer(body({"content": "x", "tool_calls": None})).calls == ()


def test_what_nobody_knows_goes_back_as_it_came() -> None:
    google = {"google": {"thought_signature": "AbC=="}}
    call = {"id": "a", "type": "function", "index": 0, "extra_content": google}
    call["function"] = {"name": "t", "arguments": "{}", "thought_signature": "x"}
    details = [{"type": "reasoning.encrypted", "data": "x"}]
    message = {"role": "assistant", "content": None, "refusal": None, "annotations": [], "reasoning": "hm"}
    asked = Expected(tools=("t",))
    answer = read_answer(body({**message, "tool_calls": [call], "reasoning_details": details, "other": None}), asked)
    transcript = Transcript()
    transcript.answer(answer, "")
    sent = {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_details": details}
    assert answer.noticed == ()
    assert EndpointProfile().conversation(transcript.messages) == [sent]
    # a turn without a thought carries the field too, where reasoning goes back
    transcript.answer(read_answer(body({"content": "", "tool_calls": [call]})), "")
    assert EndpointProfile(reasoning=True).conversation(transcript.messages) == [
        {**sent, "reasoning": "hm"},
        {"role": "assistant", "content": "", "tool_calls": [call], "reasoning": ""},
    ]
    # and a text stands where it stood
    parts = [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}, {"type": "text", "text": "x"}]
    other = Transcript()
    other.answer(read_answer(body({"content": parts})), "x")
    assert [EndpointProfile(reasoning=back).conversation(other.messages)[0]["content"] for back in (False, True)] == [
        "x",
        parts,
    ]
    # a stranger's field is bounded as all that it says is
    long = read_answer(body({"content": "x", "blob": "y" * 1000}))
    assert long.characters > 1000
    deep: Any = []
    for _ in range(500):
        deep = [deep]
    call = {"id": "a", "function": {"name": "t", "arguments": "{}", "blob": deep}, "blob": deep}
    answer = read_answer(body({"content": "x", "blob": deep, "tool_calls": [call], "reasoning_details": deep}), asked)
    # it would end the conversation, which goes on without it
    places = ("message.blob", "message.reasoning_details", "tool_calls.blob", "function.blob")
    assert sorted(answer.noticed) == sorted(Noticed.TOO_DEEP.format(place) for place in places)
    assert (answer.more, answer.calls[0].more) == ({}, {})
    thought = {"type": "thinking", "thinking": "hm", "blob": deep}
    calls = [{"id": "a", "function": {"name": deep, "arguments": "{}"}}]
    answer = read_answer(body({"content": [thought], "tool_calls": calls}), asked)
    assert answer.noticed == (Noticed.NO_NAME, Noticed.TOO_DEEP.format("message.content"))
    transcript.answer(answer, "")
    assert "[" * 300 not in json.dumps(transcript.messages) + response_of(answer, "", TextChannel())


@pytest.mark.parametrize(
    ("channel", "text", "stopped_at", "whole"),
    [
        (TextChannel(), "<action>go", "</action>", "<action>go</action>"),
        (TextChannel(), "<action>go</action> or <action>stay", None, "<action>go</action> or <action>stay"),
        (TextChannel(), "<action>", None, "<action>"),
        (TextChannel(), "<think><action>go", None, "<think><action>go"),
        (VERBS, "<search>who", "</search>", "<search>who</search>"),
        (VERBS, "<search>", None, "<search>"),
        (VERBS, "<search>a</search><answer>b", None, "<search>a</search><answer>b"),
        (TOOL, '<tool_call>{"name": "t", "arguments": {"query": "x"}}', None, None),
    ],
)
def test_a_dropped_stop_string_is_put_back(channel: Any, text: str, stopped_at: str | None, whole: str | None) -> None:
    found = content_of(ChatAnswer(content=text, stopped_at=stopped_at), channel)
    assert found == (f"{text}</tool_call>" if whole is None else whole)
    assert channel.parse(found) == channel.parse(text)
    assert content_of(ChatAnswer(content=text, finish="length"), channel) == text


def test_pauses_double_and_are_the_streams_own() -> None:
    found = list(islice(pauses(np.random.default_rng(1)), 12))
    assert found == list(islice(pauses(np.random.default_rng(1)), 12))
    assert found != list(islice(pauses(np.random.default_rng(2)), 12))
    nominal = [0.5, 1, 2, 4, 8, 16, 32, 60, 60, 60, 60, 60]
    assert all(0.5 * base <= pause < 1.5 * base for base, pause in zip(nominal, found, strict=True))


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "7"}, 7.0),
        ({"retry-after-ms": "250", "retry-after": "9"}, 0.25),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:10 GMT", "date": "Wed, 21 Oct 2015 07:28:00 GMT"}, 10.0),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:10 GMT"}, 0.0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "-3"}, None),
        ({}, None),
    ],
)
def test_waits_that_servers_ask_for(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after(headers) == seconds


def test_a_gate_is_closed_for_the_longest_wait() -> None:
    gate = RateGate()
    gate.close(0.2, "")
    gate.close(0.05, "")
    start = time.monotonic()
    assert asyncio.run(gate.passed(0.05, start + 60))
    assert time.monotonic() - start >= 0.25
    assert asyncio.run(gate.passed(60.0, start + 60))
    # known at once, without a wait: the deadline comes before the gate opens
    gate.close(90.0, "")
    assert not asyncio.run(gate.passed(0.0, time.monotonic() + 60))
    assert time.monotonic() - start < 30


@pytest.mark.parametrize(
    ("status", "text", "kind"),
    [
        (400, "prompt is too long: 210000 tokens > 200000 maximum", "overflow"),
        (400, "bad request", "final"),
        (500, "oops", "passing"),
        (529, "overloaded", "passing"),
        (429, "rate limit", "limited"),
    ],
)
def test_kinds_of_refusals(status: int, text: str, kind: str) -> None:
    for shape in ({"message": text}, {"error": {"message": text}}):
        failure = read_failure(status, "", shape, {})
        assert failure.overflow == (kind == "overflow")
        assert failure.passing == (kind in ("passing", "limited"))
        assert failure.limited == (kind == "limited")
        assert text in failure.reason
    assert read_failure(404, "Not Found", None, {}).reason == "status 404: Not Found"


@pytest.mark.parametrize(
    "noted", [{"answers": "5"}, {"prompt_tokens": -1}, {"cost": 1e400}, {"noticed": 5}, {"noticed": {"a": "b"}}]
)
def test_the_usage_in_a_record_is_read_by_its_type(noted: Any) -> None:
    episode = replace(build_episode([([1], [2])]), meta={NOTE: {"answers": 1, "of_a_later_version": 3}})
    assert Usage.noted(episode) == Usage(answers=1)
    with pytest.raises(SettingsError, match=f"{next(iter(noted))}.* is "):
        Usage.noted(replace(episode, meta={NOTE: noted}))


def counted(reported: Any) -> Usage:
    return read_usage(reported)[0]


def test_usage_as_servers_word_it() -> None:
    openai = {"prompt_tokens": 10, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}}
    assert counted({**openai, "completion_tokens_details": {"reasoning_tokens": 2}}) == Usage(
        answers=1, prompt_tokens=10, cached_tokens=4, completion_tokens=5, reasoning_tokens=2
    )
    assert counted({"prompt_tokens": 1, "completion_tokens": 2, "reasoning_tokens": 1}).reasoning_tokens == 1
    assert counted({"prompt_tokens": 1, "completion_tokens": 2, "prompt_tokens_details": None}).prompt_tokens == 1
    assert counted(None) == counted({}) == Usage(answers=1, unreported=1)
    prices = Prices.of(1.0, 0.25, 4.0)
    assert prices is not None
    assert prices.cost(counted(openai)) == pytest.approx((6 * 1 + 4 * 0.25 + 5 * 4) / 1e6)
    assert (Usage(answers=1, cost=0.5) + Usage(answers=2)).to_json()["cost"] == 0.5
    assert "cost" not in (Usage() + Usage()).to_json()
    assert Prices.of(None, None, None) is None
    for given in ((1.0, None, None), (None, None, 1.0), (None, 1.0, None)):
        with pytest.raises(AgentError, match="--price-"):
            Prices.of(*given)


def usage(prompt: int, cached: int, completion: int, reasoning: int, total: int | None) -> Any:
    found = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total}
    found |= {"prompt_tokens_details": {"cached_tokens": cached}}
    return {**found, "completion_tokens_details": {"reasoning_tokens": reasoning}}


@pytest.mark.parametrize(
    ("reported", "numbers"),
    [
        (usage(32, 8, 103, 94, 135), (32, 8, 103, 94)),  # OpenAI
        (usage(32, 8, 9, 94, 135), (32, 8, 103, 94)),  # xAI
        (usage(31, 0, 0, 0, 1055), (31, 0, 1024, 0)),  # Gemini
        (usage(5, 2000, 10, 0, 2015), (2005, 2000, 10, 0)),  # Claude
        (usage(0, 2000, 10, 0, None), (2000, 2000, 10, 0)),
        (usage(5, 2000, 9, 94, 14), (2005, 2000, 103, 94)),
        (usage(5, 0, 10, 0, 3), (5, 0, 10, 0)),
    ],
)
def test_what_is_counted_beside_prompt_and_completion(reported: Any, numbers: Any) -> None:
    found, prices = counted(reported), Prices.of(3.0, 0.3, 15.0)
    assert (found.prompt_tokens, found.cached_tokens, found.completion_tokens, found.reasoning_tokens) == numbers
    assert prices is not None
    prompt, cached, completion, _ = numbers
    assert prices.cost(found) == pytest.approx((3.0 * (prompt - cached) + 0.3 * cached + 15.0 * completion) / 1e6)


def test_ids_make_segments_that_only_grow() -> None:
    def answer(prompt: list[int], response: list[int], *logprobs: float) -> Any:
        rows = {"content": [{"token": "", "logprob": value} for value in logprobs]}
        found = read_answer({"prompt_token_ids": prompt} | body({"content": ""}, token_ids=response, logprobs=rows))
        assert found.ids is not None
        return found.ids

    first = answer([1, 2], [3, 4], -0.5, -0.25)
    assert first.logprobs is not None
    assert first.logprobs.tolist() == [-0.5, -0.25]
    history = add_ids(None, first)
    assert (history.segment, history.prompt_span, history.response_span) == (0, (0, 2), (2, 4))
    short = answer([1, 2, 3, 4, 5], [6], -1.0, -2.0)
    assert short.logprobs is None  # another number of them than of ids: nobody knows which is whose
    history = add_ids(history, short)
    assert (history.segment, history.prompt_span, history.response_span) == (0, (4, 5), (5, 6))
    history = add_ids(history, answer([1, 2, 9, 5, 6, 7], [8]))
    assert (history.segment, history.prompt_span, history.response_span) == (1, (0, 6), (6, 7))
    assert [buffer.array().tolist() for buffer in history.segments] == [[1, 2, 3, 4, 5, 6], [1, 2, 9, 5, 6, 7, 8]]
    sglang = body({"content": ""}, token_ids=[3], prompt_token_ids=[1])
    assert read_answer(sglang).ids is not None
    assert read_answer(body({"content": ""}, token_ids=[3])).ids is None
    assert read_answer({"prompt_token_ids": [1.5]} | body({"content": ""}, token_ids=[3])).ids is None


def with_ids(prompt: Any, response: Any, *logprobs: Any) -> Any:
    rows = {"content": [{"token": "", "logprob": value} for value in logprobs]}
    return {"prompt_token_ids": prompt} | body({"content": ""}, token_ids=response, logprobs=rows)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (with_ids([1], [-5], -0.5), "ids of the answer: token 0 has id -5"),
        (with_ids([1, 2**40], [3], -0.5), "ids of the prompt: token 1 has id 1099511627776"),
        (with_ids([1], [3], float("nan")), "log-probability nan"),
        (with_ids([1], [3], 10**400), "log-probability inf"),
    ],
)
def test_numbers_that_cannot_be(answer: Any, words: str) -> None:
    with pytest.raises(UnreadableAnswer, match=words):
        read_answer(answer)


def test_rounding_and_senseless_usage() -> None:
    ids = read_answer(with_ids([1], [3], 1e-7)).ids
    assert ids is not None
    assert ids.logprobs is not None
    assert ids.logprobs.tolist() == [0.0]
    for senseless in (10**400, -3, 1e9, "many", True):
        assert counted({"prompt_tokens": senseless, "completion_tokens": 3}) == Usage(
            answers=1, unreported=1, completion_tokens=3
        )
    assert counted({"prompt_tokens": 2, "completion_tokens": 10**400}).completion_tokens == 0


def test_every_option_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the keywords of `evaluate` to the agent: each setting at its place."""
    monkeypatch.setenv("MY_KEY", "x")
    given: dict[str, Any] = {"base_url": "http://a/v1", "key_env": "MY_KEY", "request_deadline": 9.0}
    given |= {"request_retries": 2, "send_stop": False, "send_seed": False, "reasoning_back": "send"}
    given |= {"handshake": False}
    given |= {
        "token_ids": True,
        "extra_body": '{"top_p": 1, "user": "me"}',
        "price_in": 1.0,
        "price_cached": 0.5,
        "price_out": 2.0,
    }
    assert set(given) == set(EndpointOptions.__struct_fields__)
    player = {"temperature": 0.3, "channel": "tool", "thinking": "off", "max_new_tokens": 7, "max_context": 90}
    spec = resolve_agent({"agent": "openai:org/m:7b", **given, **player, "system": "Go."})
    opened = open_agent(spec, lambda: Room(), slots=5)  # type: ignore[arg-type, return-value]
    agent: Any = opened.agent
    assert (agent.model, agent.temperature, agent.max_tokens, agent.max_context) == ("org/m:7b", 0.3, 7, 90)
    assert agent.options == EndpointOptions(**given)
    assert agent.extra == {"top_p": 1, "user": "me", "chat_template_kwargs": {"enable_thinking": False}}
    assert (agent.address, agent.channel.name) == (Address(base_url="http://a/v1", key_env="MY_KEY"), "tool")
    assert agent._prices == Prices(prompt=1.0, cached=0.5, completion=2.0)
    client = agent._open()[1]
    assert (client.deadline, client.retries, client.parallel, client.ids) == (9.0, 2, 5, True)
    assert (client.expected.model, client.expected.thoughts, client.profile.reasoning) == ("org/m:7b", False, True)
    assert client.expected.tools == ("t",)
    assert (opened.channel, opened.system, opened.temperature) == ("tool", "Go.", 0.3)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"channel": "none"}, "--channel is none.*valid: text, text:verl-agent, tool"),
        ({"channel": "tool:llama"}, "--channel is tool:llama"),
        (
            {"observation_role": "tool"},
            "observation_role is a setting of agent = model or own; agent is openai|observation_role",
        ),
        ({"extra_body": '{"seed": 1}'}, "--extra-body sets seed"),
        ({"price_in": 1.0}, "--price-out is missing"),
    ],
)
def test_settings_that_cannot_be(given: dict[str, Any], problem: str) -> None:
    asked = {"agent": "openai:m", "base_url": "http://a/v1", **given}
    with pytest.raises(TurngymError, match=problem):
        open_agent(resolve_agent(asked), lambda: Room())  # type: ignore[arg-type, return-value]


class Room:
    """All that an agent asks of its environment."""

    env_id = "turngym/ALFWorld-v0"

    tool = TOOL.tool


def test_a_message_without_text_at_a_server_that_refuses_one() -> None:
    """An environment may have nothing to say, too, and white space is no text."""
    made = [{"id": "a", "type": "function", "function": {"name": "t", "arguments": "{}"}}]
    messages = [
        {"role": "user", "content": "\n"},
        {"role": "assistant", "content": " ", "tool_calls": made},
        {"role": "tool", "tool_call_id": "a", "content": ""},
        {"role": "assistant", "content": "\n\n"},
        {"role": "user", "content": "x"},
    ]
    assert EndpointProfile().conversation(messages) == messages
    sent = EndpointProfile(silence="words", blank="null").conversation(messages)
    assert [message["content"] for message in sent] == [NO_TEXT, None, NO_TEXT, NO_ANSWER, "x"]
