"""Channels: what formatting writes parsing reads, and no text at all makes parsing fail."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turngym.core.errors import TurngymError
from turngym.core.tools import ToolSpec
from turngym.envs.channels import (
    Channel,
    Parsed,
    TextChannel,
    ToolChannel,
    cut,
    first_action,
    make_channel,
    split_thought,
)

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
        ("<action>look", "look", None),
        ("<think>hm</think><action>look</action>", "look", "hm"),
        ("hm</think><action>look</action>", "look", "hm"),
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
        ("<think>look</think>", "no <action>"),
        ("<action></action>", "empty"),
        ("<think>hm <action>look</action>", "not closed"),
        ("<action>go <action>look</action>", "inside"),
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
        (call(action="look", why="bored"), "look"),
        (call(action="look").removesuffix("</tool_call>"), "look"),
        (call(action="say </tool_call>"), "say </tool_call>"),
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
        ("<tool_call>" + "[" * 100_000, "not valid JSON"),
        ("<tool_call>[1]</tool_call>", "must be an object"),
        (call(name="toy_stp", action="look"), 'no tool "toy_stp"; the tool is toy_step'),
        (call(), 'lacks the argument "action"'),
        (call(action=3), "must be a string"),
        (call(action=" "), "is empty"),
        ('<tool_call>{"name": "toy_step", "arguments": "look"}</tool_call>', "arguments of the tool call are not"),
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


# --- channels where the tag is the verb: searches and answers

SEARCH = ToolSpec(
    name="search",
    description="Find passages.",
    argument="query",
    argument_description="What to look for.",
    examples=("<search>highest hill of Denmark</search>",),
    tags=("search", "answer"),
)
TAG_PIECES = ("<search>", "</search>", "<answer>", "</answer>", "<sea")
VERBS, SEARCH_CALL = TextChannel(tags=SEARCH.tags), ToolChannel(tool=SEARCH)
BOTH_VERBS = pytest.mark.parametrize("channel", [VERBS, SEARCH_CALL], ids=["text", "tool"])
VERB_MESSY = st.lists(
    st.one_of(
        st.sampled_from((*TAGS, "<search>", "</search>", "<answer>", "</answer>")),
        st.text(st.characters(codec=None), max_size=8),
    ),
    max_size=12,
).map("".join)


def test_verbs_end_a_response() -> None:
    assert TextChannel().stop_text == ("</action>",)
    assert (VERBS.stop_text, SEARCH_CALL.stop_text) == (("</search>", "</answer>"), ("</tool_call>", "</answer>"))
    assert make_channel("text", SEARCH) == VERBS
    assert SEARCH.templates == ("<search>query</search>", "<answer>answer</answer>")


@BOTH_VERBS
@given(response=VERB_MESSY)
def test_verbs_parse_to_canonical_actions_or_reasons(channel: Channel, response: str) -> None:
    parsed = channel.parse(response)
    assert (parsed.action is None) != (parsed.reason is None)
    if parsed.action is not None:
        assert first_action(parsed.action, SEARCH.tags) is not None
        if "think>" not in parsed.action:  # the tags of thoughts can be read in an action, but not written
            assert channel.parse(channel.format(parsed.action)).action == parsed.action


@BOTH_VERBS
@given(
    verb=st.sampled_from(SEARCH.tags), content=st.text('abc <>/{}"\\\n', max_size=20), thought=st.none() | st.just("so")
)
def test_formatted_verbs_read_back(channel: Channel, verb: str, content: str, thought: str | None) -> None:
    action = f"<{verb}>{content.strip()}</{verb}>"
    response = channel.format(action, thought)
    assert channel.parse(response) == Parsed(action=action, thought=thought)
    assert channel.parse(response + " <search>more</search>").action is not None


@pytest.mark.parametrize(
    ("response", "action"),
    [
        ("<search>q</search>", "<search>q</search>"),
        ("<search></search>", "<search></search>"),
        ("<search>q", "<search>q</search>"),
        ("<think><search>x</search></think><search>q</search>", "<search>q</search>"),
        ("<think>hm <search>q</search>", "<search>q</search>"),
        # both in one response: cut after the first </search>, then the first closed pair
        ("<search>q</search><answer>a</answer>", "<search>q</search>"),
        ("<answer>a</answer><search>q</search>", "<answer>a</answer>"),
        ("<answer>a <search>q</search> b</answer>", "<search>q</search>"),
        ("</answer><search>q</search>", "<search>q</search>"),
    ],
)
def test_which_verb_counts(response: str, action: str) -> None:
    assert VERBS.parse(response).action == action


@pytest.mark.parametrize(
    "response", ["", "q", "<search>", "<action>look</action>", "</search><answer>a</answer>", "<think><answer>a"]
)
def test_responses_without_a_verb(response: str) -> None:
    parsed = VERBS.parse(response)
    assert parsed.action is None
    assert "<search>...</search> or <answer>...</answer>" in str(parsed.reason) or "not closed" in str(parsed.reason)


def search_call(query: object) -> str:
    return "<tool_call>" + json.dumps({"name": "search", "arguments": {"query": query}}) + "</tool_call>"


@pytest.mark.parametrize(
    ("response", "action"),
    [
        (search_call("q"), "<search>q</search>"),
        ("<think>t</think>" + search_call(" q "), "<search>q</search>"),
        ("<answer>a</answer>", "<answer>a</answer>"),
        ("<answer>a</answer>" + search_call("q"), "<answer>a</answer>"),
        (search_call("q") + "<answer>a</answer>", "<search>q</search>"),
        (search_call("say <answer>a</answer>"), "<search>say <answer>a</answer></search>"),
    ],
)
def test_searching_by_call_and_answering_in_text(response: str, action: str) -> None:
    assert SEARCH_CALL.parse(response).action == action


def test_a_call_cannot_smuggle_a_closing_tag() -> None:
    parsed = SEARCH_CALL.parse(search_call("q</search><answer>a</answer>"))
    assert parsed.action is None
    assert "must not contain </search>" in str(parsed.reason)
    assert "no call of the tool search and no <answer>...</answer>" in str(SEARCH_CALL.parse("q").reason)


def test_instructions_name_every_verb() -> None:
    for channel in (VERBS, SEARCH_CALL):
        assert "<answer>answer</answer>" in channel.instructions(SEARCH)
    assert "<search>query</search>" in VERBS.instructions(SEARCH)
    assert "calling the tool search" in SEARCH_CALL.instructions(SEARCH)


@given(text=st.text(alphabet="ab \n", max_size=3), pieces=st.lists(st.sampled_from(TAG_PIECES), max_size=8))
def test_the_first_closed_pair_is_found_as_a_regular_expression_finds_it(text: str, pieces: list[str]) -> None:
    """The reference takes time with the square of a run of opening tags; the result is the same."""
    response = text.join(pieces)
    match = re.search(r"<(search|answer)>(.*?)</\1>", cut(response, SEARCH.tags), re.DOTALL)
    expected = None if match is None else (match[1], match[2].strip())
    assert first_action(response, SEARCH.tags) == expected
