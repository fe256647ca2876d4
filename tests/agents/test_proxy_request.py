"""Reading chat requests: what is taken, and what exactly is said about a bad one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from turngym.agents.proxy.api_errors import ApiError
from turngym.agents.proxy.config import ProxySettings
from turngym.agents.proxy.openai_api import ignored_fields, read_request
from turngym.core.errors import SettingsError

USER = {"role": "user", "content": "hi"}


def read(headers: dict[str, str] | None = None, **fields: Any) -> Any:
    return read_request({"messages": [USER], **fields}, headers or {}, ProxySettings(), "tiny")


@pytest.mark.parametrize(
    ("headers", "fields", "main", "done"),
    [
        ({}, {"session_id": "a"}, True, False),
        ({"X-Session-Id": "a"}, {}, True, False),
        ({"X-Session-Id": "a", "X-Turn-Type": "side"}, {"turn_type": "main"}, False, False),
        ({}, {"session_id": "a", "turn_type": "side"}, False, False),
        ({}, {}, True, False),
        ({"X-Turn-Type": "side"}, {}, False, False),
        ({"X-Session-Done": "1"}, {"session_id": "a"}, True, True),
        ({"X-Session-Done": "false"}, {"session_id": "a", "session_done": True}, True, False),
        ({}, {"session_id": "a", "session_done": True}, True, True),
    ],
)
def test_sessions_and_turn_types(headers: dict[str, str], fields: dict[str, Any], main: bool, done: bool) -> None:
    request = read(headers, **fields)
    assert (request.main, request.done) == (main, done)
    assert request.session_id == ("a" if headers.get("X-Session-Id") or "session_id" in fields else None)


def test_developers_are_systems_and_parts_are_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
    ]
    found = read(messages=messages).messages
    assert [(m.role, m.content) for m in found] == [
        ("system", "be brief"),
        ("user", "a\nb"),
        ("assistant", ""),
        ("tool", "42"),
    ]
    assert found[2].text == '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    assert found[3].as_json() == messages[3]


def test_what_is_ignored_is_named_and_what_is_harmless_is_not() -> None:
    harmless = {"user": "me", "store": True, "verbosity": None, "top_p": 1.0, "top_logprobs": 0}
    assert ignored_fields({"reasoning_effort": "high", **harmless, "thinking": {}}) == ["reasoning_effort", "thinking"]


@pytest.mark.parametrize(
    ("fields", "valid"),
    [
        ({"top_p": 0.9}, ", or send 1"),
        ({"logit_bias": {"5": 1}}, ", or send {}"),
        ({"allowed_token_ids": [1]}, ""),
        ({"chat_template_kwargs": {"enable_thinking": False}}, ", or send {}"),
        ({"response_format": {"type": "json_object"}}, ', or send {"type": "text"}'),
        ({"tool_choice": "required"}, ', or send "auto"'),
        # what is asked for in the answer would be missing there
        ({"top_logprobs": 5}, ", or send 0"),
        ({"modalities": ["text", "audio"]}, ', or send ["text"]'),
        ({"web_search_options": {}}, ""),
    ],
)
def test_what_the_engine_does_not_do_is_refused(fields: dict[str, Any], valid: str) -> None:
    (name,) = fields
    with pytest.raises(ApiError) as caught:
        read(**fields)
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "unsupported_value", name)
    assert str(caught.value).endswith(f"leave {name} out{valid}")


def test_what_changes_nothing_is_taken() -> None:
    fields = {"top_p": 1, "top_k": -1, "min_p": 0.0, "logit_bias": {}, "response_format": {"type": "text"}}
    more = {"min_tokens": 0, "ignore_eos": False, "stop_token_ids": [], "guided_json": None, "chat_template_kwargs": {}}
    assert not ignored_fields({**fields, **more, "repetition_penalty": 1.0, "tool_choice": "none"})
    assert read(**fields, **more, repetition_penalty=1.0, tool_choice="none").tools == ()


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"metadata": {"session_id": "a"}}, "a"),
        ({"metadata": {"conversation_id": "b"}}, "b"),
        ({"conversation": "c"}, "c"),
        ({"conversation": {"id": "d"}}, "d"),
        ({"conversation_id": "e"}, "e"),
        ({"session_id": "f", "metadata": {"session_id": "a"}}, "f"),
        ({"metadata": {"topic": "x"}}, None),
    ],
)
def test_other_names_of_a_session(fields: dict[str, Any], name: str | None) -> None:
    assert read(**fields).session_id == name
    assert read({"X-Session-Id": "h"}, **fields).session_id == "h"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"metadata": "x"}, "metadata is"),
        ({"metadata": {"session_id": 5}}, "metadata.session_id is 5"),
        ({"conversation": {"id": ""}}, "conversation is"),
        ({"user": "x" * 257}, "user is"),
    ],
)
def test_names_that_are_none(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ApiError, match=text):
        read(**fields)


def test_a_main_turn_needs_a_session_where_nothing_else_tells_it() -> None:
    with pytest.raises(ApiError, match="needs a session"):
        read_request({"messages": [USER], "turn_type": "main"}, {}, ProxySettings(unnamed="side"), "tiny")
    assert not read_request({"messages": [USER]}, {}, ProxySettings(unnamed="side"), "tiny").main


def test_whose_conversation_it_is() -> None:
    assert [read(user="ann").user, read(metadata={"user_id": "bob"}).user, read().user] == ["ann", "bob", ""]
    assert read({"User-Agent": "OpenAI/Python 2\x07" + "x" * 99}).user_agent == "OpenAI/Python 2 " + "x" * 44
    assert read().user_agent == "a client without a name"


def test_limits_of_answers() -> None:
    request = read(max_tokens=7, max_completion_tokens=5, temperature=0, stop="END", seed=3)
    assert (request.max_tokens, request.temperature, request.stop, request.seed) == (5, 0.0, ("END",), 3)
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert len(read(tools=tools).tools) == 1
    assert read(tools=tools, tool_choice="none").tools == ()


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"stream": True, "return_token_ids": True}, "return_token_ids", "is not for streams"),
        ({"messages": []}, "messages", "at least one message"),
        ({"messages": ["hi"]}, "messages[0]", "an object with role and content"),
        ({"messages": [{"role": "usr", "content": "x"}]}, "messages[0].role", "Did you mean 'user'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]", "text parts"),
        (
            {"messages": [{"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": ""}}]},
            "messages[0].function_call",
            "the newer form: send tool_calls",
        ),
        ({"messages": [{**USER, "tool_calls": [{"function": {"name": "f"}}]}]}, "messages[0]", "only the assistant"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]},
            "messages[0].tool_calls[0]",
            '"arguments" as JSON text',
        ),
        ({"session_id": "x" * 257}, "session_id", "1 to 256"),
        ({"stream": "yes"}, "stream", "true or false"),
        ({"temperature": 3}, "temperature", "from 0 to 2"),
        ({"n": 2}, "n", "it must be 1"),
        ({"stop": [""]}, "stop", "none empty"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "no name"),
        ({"messages": [USER] * 4097}, "messages", "at most 4096"),
    ],
)
def test_bad_fields(fields: dict[str, Any], param: str, text: str) -> None:
    with pytest.raises(ApiError) as caught:
        read(**fields)
    body = caught.value.as_json()["error"]
    assert caught.value.status == 400
    assert (body["type"], body["param"]) == ("invalid_request_error", param)
    assert text in body["message"]


def test_another_model() -> None:
    with pytest.raises(ApiError, match=r'the model "tyni" does not exist.*\'tiny\'.*mean') as caught:
        read(model="tyni")
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")
    assert read(model="tiny").messages


def test_a_huge_value_is_shown_short() -> None:
    with pytest.raises(ApiError) as caught:
        read(temperature="9" * 10_000)
    assert len(json.dumps(caught.value.as_json())) < 400


def test_a_name_is_text_that_can_be_shown() -> None:
    with pytest.raises(SettingsError, match="proxy setting name is"):
        ProxySettings(name="")
