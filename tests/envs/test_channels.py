"""Channels: what formatting writes parsing reads, and no text at all makes parsing fail."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turngym.envs.channels import Channel, Parsed, TextChannel, ToolChannel, split_thought
from turngym.envs.core.errors import TurngymError
from turngym.envs.core.task import ToolSpec

TOOL = ToolSpec(
    name="toy_step",
    description="One step.",
    argument="action",
    argument_description="What to do, in words.",
    examples=("look", "go left"),
)
TEXT, CALL = TextChannel(), ToolChannel(tool=TOOL)
BOTH = pytest.mark.parametrize("channel", [TEXT, CALL], ids=["text", "tool"])

TAGS = ("<think>", "</think>", "<action>", "</action>", "<tool_call>", "</tool_call>", "{", "}", '"', '{"name":', "\\u")
MESSY = st.lists(st.one_of(st.sampled_from(TAGS), st.text(st.characters(codec=None), max_size=8)), max_size=12).map(
    "".join
)


@BOTH
@given(response=MESSY)
def test_parsing_never_raises_and_always_decides(channel: Channel, response: str) -> None:
    parsed = channel.parse(response)
    assert (parsed.action is None) != (parsed.reason is None)
    if parsed.action is not None:
        assert parsed.action == parsed.action.strip() != ""
        parsed.action.encode("utf-8")


@BOTH
@given(action=st.text(min_size=1), thought=st.none() | st.text())
def test_formatted_responses_read_back(channel: Channel, action: str, thought: str | None) -> None:
    try:
        response = channel.format(action, thought)
    except TurngymError:
        bad = [tag for tag in TAGS if tag.startswith("<") and (tag in action or tag in (thought or ""))]
        assert bad or not action.strip(), f"{action!r} with {thought!r} was refused for no reason"
        return
    parsed = channel.parse(response)
    assert parsed == Parsed(action=action.strip(), thought=None if thought is None else thought.strip())


@BOTH
@given(action=st.text('abc <>/{}"\\', min_size=1).filter(lambda text: text.strip()))
def test_stopping_at_the_stop_text_changes_nothing(channel: Channel, action: str) -> None:
    response = channel.format(action, "so")
    stop = channel.stop_text[0]
    assert response.count(stop) == 1
    assert channel.parse(response.removesuffix(stop)) == channel.parse(response)
    assert channel.parse(response + " and then <action>look</action>") == channel.parse(response)


@pytest.mark.parametrize(
    ("response", "action", "thought"),
    [
        ("<action>look</action>", "look", None),
        ("  <action>\n look \n</action> bye", "look", None),
        ("<action>look", "look", None),
        ("<think>hm</think><action>look</action>", "look", "hm"),
        ("hm</think><action>look</action>", "look", "hm"),
        ("<think></think><action>look</action>", "look", ""),
        ("<think><action>wave</action></think><action>look</action>", "look", "<action>wave</action>"),
        ("<action>look</action><action>wave</action>", "look", None),
        ("<think>a</think>x<think>b</think><action>look</action>", "look", "a\nb"),
        ("<action>look</action><think>after", "look", "after"),
        ("<action>say \ud800</action>", "say ?", None),
    ],
)
def test_text_responses(response: str, action: str, thought: str | None) -> None:
    assert TEXT.parse(response) == Parsed(action=action, thought=thought)


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("", "no <action>"),
        ("look", "no <action>"),
        ("<think>look</think>", "no <action>"),
        ("<action></action>", "empty"),
        ("<action> \n </action>", "empty"),
        ("<think>hm <action>look</action>", "not closed"),
        ("<action>go <action>look</action>", "inside"),
        ("<Action>look</Action>", "no <action>"),
    ],
)
def test_malformed_text_responses(response: str, reason: str) -> None:
    parsed = TEXT.parse(response)
    assert parsed.action is None
    assert reason in str(parsed.reason)


def call(name: object = "toy_step", **arguments: object) -> str:
    return "<tool_call>" + json.dumps({"name": name, "arguments": arguments}) + "</tool_call>"


@pytest.mark.parametrize(
    ("response", "action"),
    [
        (call(action="look"), "look"),
        (call(action=" look "), "look"),
        (call(action="look", why="bored"), "look"),
        ("I think. " + call(action="look") + call(action="wave"), "look"),
        (call(action="look").removesuffix("</tool_call>"), "look"),
        (call(action="say </tool_call>"), "say </tool_call>"),
        (call(action="漢字 🚪"), "漢字 🚪"),
        (call(action="say \ud800"), "say ?"),
        ('<tool_call>{"name": "toy_step", "arguments": "{\\"action\\": \\"look\\"}"}</tool_call>', "look"),
        ("<think>" + call(action="wave") + "</think>" + call(action="look"), "look"),
    ],
)
def test_tool_calls(response: str, action: str) -> None:
    assert CALL.parse(response).action == action


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("look", "no call of the tool toy_step"),
        ("<tool_call>look</tool_call>", "not valid JSON"),
        ('<tool_call>{"name": "toy_step", "arguments": {"action": "lo', "not valid JSON"),
        ("<tool_call>" + "[" * 100_000, "not valid JSON"),
        ("<tool_call>" + "9" * 10_000, "JSON"),
        ("<tool_call>[1]</tool_call>", "must be an object"),
        ("<tool_call>{}</tool_call>", "must be an object"),
        (call(name=3, action="look"), "must be an object"),
        (call(name="toy_stp", action="look"), 'no tool "toy_stp"; the tool is toy_step'),
        (call(), 'lacks the argument "action"'),
        (call(text="look"), 'lacks the argument "action"'),
        (call(action=3), "must be a string"),
        (call(action=None), "must be a string"),
        (call(action=["look"]), "must be a string"),
        (call(action=" "), "is empty"),
        ('<tool_call>{"name": "toy_step"}</tool_call>', "lacks the argument"),
        (
            '<tool_call>{"name": "toy_step", "arguments": "look"}</tool_call>',
            "arguments of the tool call are not",
        ),
        ('<tool_call>{"name": "toy_step", "arguments": [1]}</tool_call>', "lacks the argument"),
        (call(action="look").replace("</", "} </"), "text after its JSON"),
        ("<tool_call>oops</tool_call>" + call(action="look"), "not valid JSON"),
    ],
)
def test_malformed_tool_calls(response: str, reason: str) -> None:
    parsed = CALL.parse(response)
    assert parsed.action is None
    assert reason in str(parsed.reason)


@BOTH
@pytest.mark.parametrize(("action", "thought"), [("", None), (" ", None), ("\ud800", None), ("look", "a </think> b")])
def test_what_cannot_be_carried_is_refused(channel: Channel, action: str, thought: str | None) -> None:
    with pytest.raises(TurngymError, match="cannot carry"):
        channel.format(action, thought)


def test_text_actions_cannot_hold_their_tags_but_tool_calls_can_hold_any() -> None:
    with pytest.raises(TurngymError, match="cannot carry"):
        TEXT.format("say </action>")
    assert CALL.parse(CALL.format("say </action></tool_call>")).action == "say </action></tool_call>"


def test_a_closing_tag_in_an_action_does_not_end_the_call() -> None:
    response = CALL.format("say </tool_call> now")
    assert response.count("</tool_call>") == 1
    assert CALL.parse(response.partition("</tool_call>")[0]).action == "say </tool_call> now"


def test_instructions_tell_the_form_and_an_example() -> None:
    assert "<action>look</action>" in TEXT.instructions(TOOL)
    assert TOOL.argument_description in TEXT.instructions(TOOL)
    assert "toy_step" in CALL.instructions(TOOL)


def test_thoughts_are_split_off() -> None:
    assert split_thought("no thought") == (None, "no thought", None)
    assert split_thought("<think> a </think> b") == ("a", " b", None)
    thought, _, reason = split_thought("<think> a")
    assert thought == "a"
    assert "not closed" in str(reason)
