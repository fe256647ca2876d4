"""Channels where the tag is the verb: searches and answers, as text and as tool calls."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turngym.envs.channels import Channel, Parsed, TextChannel, ToolChannel, cut, first_action, make_channel
from turngym.envs.core.task import ToolSpec

TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "{", "}", '"', '{"name":')
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
        ("<search>\n q </search> bye", "<search>q</search>"),
        ("<search></search>", "<search></search>"),
        ("<search>q", "<search>q</search>"),
        ("<answer>a", "<answer>a</answer>"),
        ("<think>t</think> <answer> a </answer>", "<answer>a</answer>"),
        ("<think><search>x</search></think><search>q</search>", "<search>q</search>"),
        ("<think>hm <search>q</search>", "<search>q</search>"),
        # both in one response: cut after the first </search>, then the first closed pair
        ("<search>q</search><answer>a</answer>", "<search>q</search>"),
        ("<answer>a</answer><search>q</search>", "<answer>a</answer>"),
        ("<answer>a <search>q</search> b</answer>", "<search>q</search>"),
        ("<search>q <answer>a</answer>", "<answer>a</answer>"),
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
        (search_call(""), "<search></search>"),
        ("<think>t</think>" + search_call(" q "), "<search>q</search>"),
        ("<answer>a</answer>", "<answer>a</answer>"),
        ("<answer>a", "<answer>a</answer>"),
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
