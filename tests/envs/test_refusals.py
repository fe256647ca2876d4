"""A model that does what a refusal says gets out of the refusals, in both channels of every environment."""

from __future__ import annotations

import json
import re
from typing import Any

import gymnasium as gym
import pytest

import turngym.envs  # noqa: F401  (registers the ids)
from turngym.core.errors import TurngymError
from turngym.core.tools import Tools
from turngym.envs.dialects import DIALECTS
from turngym.envs.guard import ActionGuard
from turngym.envs.search.turn_protocol import INVALID
from turngym.envs.tool_calls import STYLES


def made(env_id: str, **kwargs: Any) -> ActionGuard:
    env: Any = gym.make(env_id, **kwargs)
    assert isinstance(env, ActionGuard)
    return env


def literal(refusal: str, tool: Tools, action: str) -> str:
    """What somebody writes who knows nothing but the refusal and the schema of the tool that it names, if it does."""
    if "tool" in refusal and tool.name in refusal:
        named = re.search(r"its argument (\w+)", refusal)
        argument = tool.argument if named is None else named[1]
        call = {"name": tool.name, "arguments": {argument: action}}
        return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
    tags = re.findall(r"<(\w+)>", refusal)
    assert tags, refusal
    return f"<{tags[0]}>{action}</{tags[0]}>"


@pytest.mark.parametrize("channel", ["text", "tool"])
@pytest.mark.parametrize(
    ("env_id", "action"),
    [
        ("turngym/ALFWorld-v0", "look"),
        ("turngym/WebShop-v0", "search[red shoes]"),
        ("turngym/Search-v0", "capital of Portugal"),
    ],
)
@pytest.mark.parametrize("wrong", ["I do not know.", '<tool_call>{"name": "x"}</tool_call>', "<think>hm"])
def test_following_a_refusal_helps(env_id: str, action: str, channel: str, wrong: str) -> None:
    env = made(env_id, channel=channel)
    env.reset(seed=0)
    for _ in range(3):
        refusal, *_, info = env.step(wrong)
        assert info["verdict"] == "malformed"
        if "tool" not in refusal and "<" not in refusal:  # broken JSON: the reason speaks of the call that was made
            continue
        if "</think>" in refusal:  # the thought must be closed first; then comes another refusal
            wrong = "<think>hm</think>"
            continue
        wrong = literal(refusal, env.tool, action)
        *_, info = env.step(wrong)
        assert info["verdict"] in ("ok", "no_effect")
        return
    raise AssertionError(f"the refusals do not say how to act: {refusal}")


def test_the_published_text_stays_in_the_text_channel() -> None:
    for channel in (None, "text", *(f"text:{style}" for style in STYLES)):
        env = made("turngym/Search-v0", channel=channel)
        env.reset(seed=0)
        assert env.step("hm")[0] == INVALID


def test_the_tool_channel_names_the_tool_and_says_when_no_search_is_left() -> None:
    env = made("turngym/Search-v0", channel="tool", max_turns=3, max_searches=1, tool_name="search_r1/search")
    env.reset(seed=0)
    assert env.step("<search>x</search>")[0] == (
        "\nMy previous action is invalid. To search, I must call the tool search_r1/search and put the query into its "
        "argument query. To give the final answer, I must put it between <answer> and </answer>. Let me try again.\n"
    )
    call = '<tool_call>{"name": "search_r1/search", "arguments": {"query": "Yeithra"}}</tool_call>'
    assert "<information>" in env.step(call)[0]
    observation, *_ = env.step(call)
    assert observation == (
        "\nMy previous action is invalid. No search is left. To give the final answer, I must put it between <answer> "
        "and </answer>. Let me try again.\n"
    )


def test_the_tool_channel_of_every_dialect_names_the_tool() -> None:
    for dialect in DIALECTS:
        env = made("turngym/Search-v0", channel=f"tool:{dialect}")
        env.reset(seed=0)
        assert "I must call the tool search and put the query into its argument query." in env.step("hm")[0]


def test_the_reward_reads_what_the_agent_was_told() -> None:
    env = made("turngym/Search-v0", channel="tool")
    env.reset(seed=0)
    refusal = env.step("hm")[0]
    env.step("<answer>x</answer>")
    log: Any = env.unwrapped
    assert log._log[0] == ("hm", refusal)


def test_a_tool_goes_by_the_name_that_is_asked_for() -> None:
    env = made("turngym/Search-v0", channel="tool", tool_name="search_r1/search", tool_argument="q")
    assert env.tool.schemas()[0]["function"]["name"] == "search_r1/search"
    assert list(env.tool.schemas()[0]["function"]["parameters"]["properties"]) == ["q"]
    env.reset(seed=0)
    call = '<tool_call>{"name": "search", "arguments": {"query": "Yeithra"}}</tool_call>'
    assert env.step(call)[4]["verdict"] == "malformed"
    call = call.replace('"search"', '"search_r1/search"').replace('"query"', '"q"')
    assert env.step(call)[4]["verdict"] == "ok"
    # another environment of the same class keeps its own
    assert made("turngym/Search-v0").tool.name == "search"
    assert made("turngym/WebShop-v0", tool_name="shop/act").tool.name == "shop/act"


@pytest.mark.parametrize("name", ["", "a b", 'x"', "é"])
def test_a_name_that_no_call_could_carry_is_refused(name: str) -> None:
    with pytest.raises(TurngymError, match=r"tool_name is .*; valid: letters, digits"):
        made("turngym/Search-v0", tool_name=name)
