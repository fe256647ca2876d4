"""The one reader of answers: what is unknown is counted and goes back, what contradicts itself is counted and read."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from turngym.agents.endpoint.answer_reader import Expected, read_answer, same_model
from turngym.agents.endpoint.completion_fields import (
    Call,
    Choice,
    Completion,
    Counts,
    Details,
    Function,
    Message,
    Noticed,
    UnreadableAnswer,
    read_usage,
)
from turngym.agents.endpoint.messages import INVALID, Transcript, content_of, response_of
from turngym.agents.endpoint.profile import EndpointProfile
from turngym.agents.endpoint.usage import MOST_NOTICED, Usage
from turngym.core.tools import Tool, ToolSet, ToolSpec, tool_call
from turngym.envs.channels import TextChannel, ToolChannel
from turngym.envs.tool_calls import EVERY_STYLE, Thoughts

TOOL = ToolSpec(name="door", description="", argument="action", argument_description="")
CHANNEL = ToolChannel(tool=TOOL)
ASKED = Expected(model="m", tools=("door",))
ARGUMENTS = '{"action": "open door 1"}'


def call(arguments: Any = ARGUMENTS, **more: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "door", "arguments": arguments}, **more}


def body(*messages: dict[str, Any], finish: Any = "stop", **more: Any) -> dict[str, Any]:
    choices = [{"index": n, "message": message, "finish_reason": finish} for n, message in enumerate(messages)]
    return {"choices": choices, "model": "m", **more}


def played(answer: Any) -> str | None:
    """The action that the environment reads in an answer."""
    return CHANNEL.parse(response_of(answer, content_of(answer, CHANNEL), CHANNEL)).action


@pytest.mark.parametrize("kind", [Completion, Choice, Message, Call, Function, Counts, Details])
def test_every_field_is_used_kept_or_dropped_and_never_two_of_them(kind: Any) -> None:
    used = set(kind.__struct_fields__)
    assert not used & kind.kept
    assert not used & kind.known
    assert not kind.kept & kind.known
    assert kind.essential <= used


def test_an_unknown_field_is_counted_wherever_it_stands() -> None:
    new = {"brand_new": 1}
    made = call(**new)
    made["function"] |= new
    usage = {"prompt_tokens": 3, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 1, **new}} | new
    answer = body({"content": None, "tool_calls": [made], **new}, usage=usage)
    answer["choices"][0] |= new
    found = read_answer(answer | new, ASKED)
    places = ("", "usage.", "usage.prompt_tokens_details.", "choice.", "message.", "tool_calls.", "function.")
    assert sorted(found.noticed) == sorted(f"unknown field {place}brand_new" for place in places)
    transcript = Transcript()
    transcript.answer(found, "")
    (sent,) = EndpointProfile().conversation(transcript.messages)
    assert (sent["brand_new"], sent["tool_calls"][0]["brand_new"]) == (1, 1)
    assert sent["tool_calls"][0]["function"]["brand_new"] == 1
    (bare,) = EndpointProfile(own_fields=False).conversation(transcript.messages)
    assert "brand_new" not in str(bare)
    # nothing is nothing
    assert read_answer(body({"content": "x", "brand_new": None, "other": []}), ASKED).noticed == ()


def test_a_field_of_another_type_is_as_if_it_were_missing() -> None:
    found = read_answer(body({"content": "x", "reasoning": 5, "refusal": ["no"]}, usage=[], id=7), ASKED)
    assert (found.content, found.reasoning, found.usage) == ("x", None, Usage(answers=1, unreported=1))
    other = " of another type"
    assert set(found.noticed) == {f"{name}{other}" for name in ("message.reasoning", "message.refusal", "usage")}
    texts = {"prompt_tokens": 9, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": "5"}}
    assert read_answer(body({"content": "x"}, usage=texts), ASKED).noticed == (
        f"usage.prompt_tokens_details.cached_tokens{other}",
    )


def test_a_call_of_the_api_before_tools_is_played() -> None:
    found = read_answer(body({"content": None, "function_call": call()["function"]}, finish="function_call"), ASKED)
    assert (played(found), found.noticed) == ("open door 1", (Noticed.OLD_CALL,))


def test_a_call_in_another_choice_is_played() -> None:
    found = read_answer(body({"content": "So."}, {"content": None, "tool_calls": [call()]}, finish="tool_calls"), ASKED)
    assert (played(found), found.content) == ("open door 1", "So.")
    assert found.noticed == (Noticed.CHOICES, Noticed.OTHER_CHOICE)
    # two texts: the first counts, and it is said
    two = read_answer(body({"content": "a"}, {"content": "b"}), ASKED)
    assert (two.content, two.noticed) == ("a", (Noticed.CHOICES,))


@pytest.mark.parametrize(
    ("text", "dialect"),
    [
        (f'<tool_call>\n{{"name": "door", "arguments": {ARGUMENTS}}}\n</tool_call>', "hermes"),
        (f'<think>\nWhich?\n</think>\n\n{{"name": "door", "parameters": {ARGUMENTS}}}', "llama"),
        (f'[TOOL_CALLS][{{"name": "door", "arguments": {ARGUMENTS}}}]', "mistral"),
        ('[door(action="open door 1")]', "pythonic"),
        (
            "<tool_call>\n<function=door>\n<parameter=action>\nopen door 1\n</parameter>\n</function>\n</tool_call>",
            "qwen-coder",
        ),
        ('<function=door>{"action": "open door 1"}</function>', "llama-function"),
        (
            '<think>Hm</think><｜DSML｜tool_calls>\n<｜DSML｜invoke name="door">\n'
            '<｜DSML｜parameter name="action" string="true">open door 1</｜DSML｜parameter>\n'
            "</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
            "deepseek-v4",
        ),
    ],
)
def test_a_call_that_the_server_left_in_the_text_is_played(text: str, dialect: str) -> None:
    found = read_answer(body({"content": text}), ASKED)
    assert found.written is not None
    assert (played(found), found.noticed) == ("open door 1", (Noticed.WRITTEN.format(found.written.dialect),))
    assert found.written.dialect == dialect
    # whole at the limit of tokens is whole, too, and some servers call every answer cut
    assert played(read_answer(body({"content": text}, finish="length"), ASKED)) == "open door 1"
    # what went to the server goes back as it came
    transcript = Transcript()
    transcript.answer(found, content_of(found, CHANNEL))
    assert transcript.messages == [{"role": "assistant", "content": text}]


@pytest.mark.parametrize(
    "text",
    [
        f'I could say {{"name": "door", "arguments": {ARGUMENTS}}}, but no.',
        f'{{"name": "window", "arguments": {ARGUMENTS}}}',
        f'<think>{{"name": "door", "arguments": {ARGUMENTS}}}',
        "open door 1",
    ],
)
def test_what_may_be_no_call_stays_text(text: str) -> None:
    found = read_answer(body({"content": text}), ASKED)
    assert (found.written, played(found), found.noticed) == (None, None, ())
    assert read_answer(body({"content": f'{{"name": "door", "arguments": {ARGUMENTS}}}'}), Expected()).written is None


def test_a_call_that_the_server_lost_is_counted() -> None:
    for finish in ("tool_calls", "function_call", "tool_use"):
        assert read_answer(body({"content": "Go."}, finish=finish), ASKED).noticed == (Noticed.NO_CALL,)
    assert read_answer(body({"content": "Go."}, finish="stop"), ASKED).noticed == ()
    # nobody offered a tool
    assert read_answer(body({"content": "Go."}, finish="tool_calls"), Expected()).noticed == ()
    assert read_answer(body({"content": "Go.", "tool_calls": [call()]}), Expected()).noticed == (Noticed.UNASKED,)


@pytest.mark.parametrize(
    "function", [{"arguments": ARGUMENTS}, {"name": "", "arguments": ARGUMENTS}, {"name": 5}, None]
)
def test_a_call_whose_name_the_server_lost_is_counted(function: Any) -> None:
    found = read_answer(body({"content": None, "tool_calls": [call() | {"function": function}]}), ASKED)
    assert (played(found), found.noticed) == (None, (Noticed.NO_NAME,))
    assert read_answer(body({"content": None, "tool_calls": ["door"]}), ASKED).noticed == (
        "tool_calls of another type",
        Noticed.NO_NAME,
    )


@pytest.mark.parametrize(
    "name", ["functions.door", "functions.door:0", "default_api:door", "door<|channel|>commentary", " door "]
)
def test_what_a_parser_leaves_around_a_name_is_no_other_tool(name: str) -> None:
    made = [call() | {"function": {"name": name, "arguments": ARGUMENTS}}]
    found = read_answer(body({"content": None, "tool_calls": made}), ASKED)
    assert (played(found), found.noticed) == ("open door 1", (Noticed.NAME,))
    transcript = Transcript()
    transcript.answer(found, "")
    assert transcript.messages[0]["tool_calls"][0]["function"]["name"] == "door"


def test_arguments_that_are_encoded_twice_go_back_as_they_were_played() -> None:
    made = [call() | {"function": {"name": "door", "arguments": json.dumps(ARGUMENTS)}}]
    found = read_answer(body({"content": None, "tool_calls": made}), ASKED)
    assert (played(found), found.noticed) == ("open door 1", (Noticed.TWICE,))
    transcript = Transcript()
    transcript.answer(found, "")
    assert json.loads(transcript.messages[0]["tool_calls"][0]["function"]["arguments"]) == json.loads(ARGUMENTS)


@pytest.mark.parametrize("name", ["window", "doors", "door_2", "door.door2"])
def test_another_tool_is_another_tool(name: str) -> None:
    asked = Expected(tools=("door", "door2"))
    made = [call() | {"function": {"name": name, "arguments": ARGUMENTS}}]
    found = read_answer(body({"content": None, "tool_calls": made}), asked)
    assert (found.calls[0].name, found.noticed) == (name, ())


@pytest.mark.parametrize(
    "text",
    [
        f'<|python_start|>{{"name": "door", "parameters": {ARGUMENTS}}}<|python_end|>',
        '<|python_start|>[door(action="open door 1")]<|python_end|>',
        f"<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>commentary to=functions.door "
        f"<|constrain|>json<|message|>{ARGUMENTS}<|call|>",
        f"<|tool_call_section_begin|><|tool_call_begin|>functions.door:0<|tool_call_argument_begin|>{ARGUMENTS}"
        "<|tool_call_end|><|tool_call_section_end|>",
    ],
)
def test_control_tokens_around_a_call_that_was_left_in_the_text(text: str) -> None:
    assert played(read_answer(body({"content": text}), ASKED)) == "open door 1"


@pytest.mark.parametrize("end", ["<|eot_id|>", "<|eom_id|>\n", "</s>", " <end_of_turn>", "<|im_end|><|endoftext|>"])
@pytest.mark.parametrize("text", [f'{{"name": "door", "parameters": {ARGUMENTS}}}', "open door 1"])
def test_a_control_token_at_the_end_is_no_text_of_the_model(text: str, end: str) -> None:
    found = read_answer(body({"content": text + end}), ASKED)
    assert (found.content, found.written is None) == (text, text == "open door 1")
    assert found.noticed[0].startswith("control token ")
    # elsewhere it is text
    assert read_answer(body({"content": end + text}), Expected()).content == end + text


@pytest.mark.parametrize("style", EVERY_STYLE[1:], ids=lambda style: style.opening)
@pytest.mark.parametrize("whole", [True, False])
def test_an_action_in_a_thought_that_a_server_left_is_not_played(style: Thoughts, whole: bool) -> None:
    """Whatever the markers of a family are, and where the template has opened the thought, too."""
    opened = style.opening if whole or not style.may_be_open else ""
    text = f"{opened}<action>open door 9</action>?{style.closing}{style.gap}{style.spoken}<action>open door 1</action>"
    found, channel = read_answer(body({"content": text}), Expected(thoughts=False)), TextChannel()
    assert channel.parse(response_of(found, content_of(found, channel), channel)).action == "open door 1"
    assert found.noticed == (f"thoughts left in the text ({style.opening})", Noticed.THOUGHTS)
    # it goes back as it came
    assert found.content == text
    own = TextChannel(name="text:own", thoughts=style)
    assert own.parse(response_of(found, text, own)).action == "open door 1"
    # a call behind it, and one that it would hide
    call_too = read_answer(body({"content": f"{style.opening}Hm", "tool_calls": [call()]}), ASKED)
    assert played(call_too) == "open door 1"


@pytest.mark.parametrize("arguments", [None, "", " ", "{}", "null", {}])
def test_a_tool_without_arguments_is_called_in_many_ways(arguments: Any) -> None:
    tools = ToolSet(tools=(Tool(name="wait", description=""),), examples=(tool_call("wait"),))
    channel, made = ToolChannel(tool=tools), call() | {"function": {"name": "wait", "arguments": arguments}}
    found = read_answer(body({"content": None, "tool_calls": [made]}), Expected(tools=("wait",)))
    assert channel.parse(response_of(found, "", channel)).action == tool_call("wait")
    transcript = Transcript()
    transcript.answer(found, "")
    assert transcript.messages[0]["tool_calls"][0]["function"]["arguments"] == "{}"
    # and so it is in a text
    written = json.dumps({"name": "wait"} | ({} if arguments is None else {"arguments": arguments}))
    assert channel.parse(f"<tool_call>{written}</tool_call>").action == tool_call("wait")


def test_what_no_json_is_does_not_go_back() -> None:
    made = call('{"action": NaN}') | {"score": math.nan}
    found = read_answer(body({"content": None, "tool_calls": [made], "more": [math.inf]}), ASKED)
    transcript = Transcript()
    transcript.answer(found, "")
    sent = json.dumps(transcript.messages, allow_nan=False)
    assert json.loads(json.loads(sent)[0]["tool_calls"][0]["function"]["arguments"]) == {INVALID: '{"action": NaN}'}


@pytest.mark.parametrize(
    ("finish", "native", "found"),
    [
        ("stop", "network_error", None),
        ("error", "MALFORMED_FUNCTION_CALL", "stop"),
        ("stop", "MAX_TOKENS", "length"),
        ("stop", "SAFETY", "content_filter"),
        ("stop", "STOP", "stop"),
        ("tool_calls", "incomplete", "stop"),
    ],
)
def test_the_server_behind_a_router_says_how_it_ended(finish: str, native: str, found: str | None) -> None:
    answer = body({"content": ""}, finish=finish)
    answer["choices"][0]["native_finish_reason"] = native
    if found is None:
        with pytest.raises(UnreadableAnswer, match="network_error"):
            read_answer(answer, Expected())
    else:
        assert read_answer(answer, Expected()).finish == found


def test_a_part_without_text_is_counted() -> None:
    parts = [{"type": "text", "text": "So."}, {"type": "tool_use", "name": "door", "input": {}}]
    found = read_answer(body({"content": parts}), ASKED)
    assert (found.content, found.noticed) == ("So.", ("a part of message.content of another type",))


def test_an_answer_that_a_server_takes_for_a_thought_is_counted() -> None:
    for message in ({"content": None, "reasoning": "<action>look</action>"}, {"content": "", "reasoning_content": "x"}):
        assert read_answer(body(message), Expected()).noticed == (Noticed.ONLY_THOUGHT,)
    # a limit that the thought has used up is no fault of the server's
    assert read_answer(body({"content": None, "reasoning": "x"}, finish="length"), Expected()).noticed == ()


@pytest.mark.parametrize("text", ["<think>Hm", "<tool_call>{}</tool_call>", "<tool_call>", "a</think><think>b"])
def test_a_call_is_not_hidden_by_the_text_beside_it(text: str) -> None:
    found = read_answer(body({"content": text, "tool_calls": [call()]}), ASKED)
    assert (played(found), found.noticed) == ("open door 1", (Noticed.HIDDEN,))
    whole = read_answer(body({"content": "<think>\nHm\n</think>\n\nGo.", "tool_calls": [call()]}), ASKED)
    assert (played(whole), whole.noticed) == ("open door 1", ())


def test_half_a_surrogate_ends_nothing() -> None:
    """Servers refuse it in a history: as it is, and escaped in the text of arguments."""
    half = "\ud83d"
    for arguments in ('{"action": "open \\ud83d"}', {"action": f"open {half}"}, f'{{"action": "open {half}"}}'):
        message = {"content": f"a{half}", "reasoning": half, "blob": [half], "tool_calls": [call(arguments)]}
        found = read_answer(body(message), ASKED)
        transcript = Transcript()
        transcript.answer(found, content_of(found, CHANNEL))
        sent = json.dumps(transcript.messages)
        assert "ud83d" not in sent.lower()
        assert json.loads(transcript.messages[0]["tool_calls"][0]["function"]["arguments"]) == {"action": "open ?"}
        assert played(found) == "open ?"
    emoji = read_answer(body({"content": None, "tool_calls": [call('{"action": "\\ud83d\\ude00"}')]}), ASKED)
    assert played(emoji) == "\U0001f600"


@pytest.mark.parametrize("levels", [33, 200, 900, 5000])
def test_arguments_that_are_nested_deep_are_the_models_mistake(levels: int) -> None:
    for arguments in ("[" * levels + "]" * levels, '{"a":' * levels + "1" + "}" * levels):
        found = read_answer(body({"content": None, "tool_calls": [call(arguments)]}), ASKED)
        assert played(found) is None
        transcript = Transcript()
        transcript.answer(found, "")
        (made,) = transcript.messages[0]["tool_calls"]
        assert json.loads(made["function"]["arguments"]) == {INVALID: arguments}
    if levels < 900:
        value: Any = 1
        for _ in range(levels):
            value = {"a": value}
        found = read_answer(body({"content": None, "tool_calls": [call(value)]}), ASKED)
        assert played(found) is None


def test_numbers_that_do_not_add_up() -> None:
    def noticed(usage: Any) -> tuple[str, ...]:
        return read_answer(body({"content": "x"}, usage=usage), ASKED).noticed

    good = {"prompt_tokens": 10, "completion_tokens": 5}
    assert noticed(good | {"total_tokens": 15}) == noticed(good) == noticed({}) == noticed(None) == ()
    assert noticed(good | {"total_tokens": 12}) == (Noticed.USAGE_SUM,)
    assert noticed({"prompt_tokens": 10}) == noticed({"completion_tokens": 5}) == (Noticed.USAGE_PART,)
    # the total tells what is missing
    assert read_usage({"completion_tokens": 5, "total_tokens": 15})[0].prompt_tokens == 10
    assert read_usage({"prompt_tokens": 10, "total_tokens": 15})[0].completion_tokens == 5


@pytest.mark.parametrize(
    "more",
    [
        {"prompt_tokens_details": {"cached_tokens": 900}},
        {"input_tokens_details": {"cached_tokens": 900}},
        {"cached_tokens": 900},
        {"cached_tokens": 900, "prompt_tokens_details": {"cached_tokens": 0}},
        {"prompt_cache_hit_tokens": 900, "prompt_cache_miss_tokens": 100},
        {"cache_read_input_tokens": 900},
    ],
)
def test_the_names_of_cached_tokens(more: dict[str, Any]) -> None:
    used, names = read_usage({"prompt_tokens": 1000, "completion_tokens": 10, "total_tokens": 1010, **more})
    assert (used.prompt_tokens, used.cached_tokens, used.completion_tokens) == (1000, 900, 10)
    assert set(more) < set(names)


def test_the_words_of_claude() -> None:
    used, _ = read_usage(
        {"input_tokens": 5, "output_tokens": 10, "cache_creation_input_tokens": 70, "total_tokens": 85}
    )
    assert (used.prompt_tokens, used.completion_tokens, used.unreported) == (75, 10, 0)


@pytest.mark.parametrize(
    ("asked", "named", "same"),
    [
        *((asked, named, True) for asked, named in (("gpt-4o", "gpt-4o-2024-08-06"), ("org/m", "m"), ("m", "M"))),
        *(
            (asked, named, True)
            for asked, named in (("claude-x-latest", "claude-x"), ("m-0613", "m"), ("m:latest", "m"))
        ),
        *((asked, named, False) for asked, named in (("gpt-4o", "gpt-4o-mini"), ("a", "b"), ("org/m", "org/m2"))),
    ],
)
def test_another_model(asked: str, named: str, same: bool) -> None:
    assert same_model(asked, named) == same
    found = read_answer(body({"content": "x"}) | {"model": named}, Expected(model=asked))
    assert found.noticed == (() if same else (f"another model: {named}",))


def test_what_was_switched_off_or_asked_for_in_vain() -> None:
    for message in ({"content": "x", "reasoning": "hm"}, {"content": "<think>hm</think>x"}):
        assert read_answer(body(message), Expected(thoughts=False)).noticed == (Noticed.THOUGHTS,)
        assert read_answer(body(message), Expected()).noticed == ()
    # the template opened the thought, or the server hides it
    assert read_answer(body({"content": "hm</think>x"}), Expected(thoughts=False)).noticed == (Noticed.THOUGHTS,)
    used = {"prompt_tokens": 9, "completion_tokens": 8, "completion_tokens_details": {"reasoning_tokens": 7}}
    assert read_answer(body({"content": "x"}, usage=used), Expected(thoughts=False)).noticed == (Noticed.THOUGHTS,)
    ids = body({"content": "x"}, prompt_token_ids=[1])
    ids["choices"][0]["token_ids"] = [2]
    assert read_answer(ids, Expected(logprobs=True)).noticed == (Noticed.NO_LOGPROBS,)


@pytest.mark.parametrize("sglang", [False, True])
def test_ids_by_the_names_that_servers_give_them(sglang: bool) -> None:
    rows = {"content": [{"token": "x", "logprob": -0.5, "top_logprobs": []}]}
    given = body({"content": "x"}) if sglang else body({"content": "x"}, prompt_token_ids=[1, 2])
    inside = {"prompt_token_ids": [1, 2], "response_token_ids": [3]} if sglang else {"token_ids": [3]}
    given["choices"][0] |= {"logprobs": rows, **inside}
    answer = read_answer(given, Expected(logprobs=True))
    assert answer.noticed == ()
    assert answer.ids is not None
    assert (answer.ids.prompt.tolist(), answer.ids.response.tolist()) == ([1, 2], [3])


def test_counts_are_bounded() -> None:
    """A server that invents a field for each answer."""
    total = Usage()
    for number in range(3 * MOST_NOTICED):
        total += Usage(answers=1, noticed={f"unknown field {number}": 1})
    assert len(total.noticed) == MOST_NOTICED
    assert total.answers == 3 * MOST_NOTICED
    assert len(read_answer(body({"content": "x", "y" * 10_000: 1}), ASKED).noticed[0]) < 100
