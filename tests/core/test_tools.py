"""Tools with typed arguments: what is a call, what is none, and why."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turngym.core.errors import TurngymError
from turngym.core.tools import Argument, Tool, ToolSet, ToolSpec, Untyped, tool_call

COUNT = Argument(name="count", description="How many.", type="integer")
SHARE = Argument(name="share", description="How much.", type="number", required=False)
LOUD = Argument(name="loud", description="Whether.", type="boolean", required=False)
SIDE = Argument(name="side", description="Where.", choices=("left", "right"))
LEVEL = Argument(name="level", description="1 or 2.", type="integer", choices=(1, 2))
TEXT = Argument(name="text", description="Anything.")
TOOLS = ToolSet(
    tools=(
        Tool(name="take", description="Take some.", arguments=(COUNT, SHARE, LOUD)),
        Tool(name="turn", description="Turn.", arguments=(SIDE,)),
        Tool(name="wait", description="Wait."),
        Tool(name="say", description="Say.", arguments=(TEXT,)),
    ),
    examples=(tool_call("take", count=2, share=0.5, loud=True), tool_call("wait")),
)


@pytest.mark.parametrize(
    ("argument", "given", "value"),
    [
        (COUNT, 3, 3),
        (COUNT, 3.0, 3),
        (COUNT, -(10**30), -(10**30)),
        (COUNT, Untyped(" 3 "), 3),
        (SHARE, Untyped("-0.5"), -0.5),
        (LOUD, Untyped("True"), True),
        (LOUD, Untyped("false"), False),
        (SIDE, "left", "left"),
        (LEVEL, 2, 2),
        (TEXT, Untyped("3"), "3"),
    ],
)
def test_a_value_is_read_in_its_type(argument: Argument, given: Any, value: Any) -> None:
    found = argument.read(given)
    assert (type(found), found) == (type(value), value)


@pytest.mark.parametrize(
    ("argument", "value", "named"),
    [
        (COUNT, "3", '"3"'),
        (COUNT, True, "true"),
        (COUNT, float("inf"), "Infinity"),
        (COUNT, None, "null"),
        (SHARE, float("nan"), "NaN"),
        (LOUD, Untyped("yes"), '"yes"'),
        (SIDE, "up", '"up"'),
        (LEVEL, 3, "3"),
        (LEVEL, True, "true"),
        (TEXT, ["a"], '["a"]'),
    ],
)
def test_a_value_of_another_type_is_named(argument: Argument, value: Any, named: str) -> None:
    with pytest.raises(ValueError, match="must be") as refused:
        argument.read(value)
    assert str(refused.value).endswith(f"not {named}")


@pytest.mark.parametrize(
    ("action", "canonical"),
    [
        ('{"arguments": {"count": 2.0}, "name": "take"}', tool_call("take", count=2)),
        ('  {"name":"take","arguments":{"loud":true,"count":2}} \n', tool_call("take", count=2, loud=True)),
        ('{"name": "take", "arguments": {"count": 2, "share": null}}', tool_call("take", count=2)),
        ('{"name": "wait"}', tool_call("wait")),
        (tool_call("say", text="漢字 </action> \ud800"), tool_call("say", text="漢字 </action> ?")),
    ],
)
def test_equal_calls_are_one_action(action: str, canonical: str) -> None:
    assert TOOLS.canonical(action) == canonical == TOOLS.canonical(canonical)
    assert TOOLS.refuse(canonical) is None
    assert "<" not in canonical


@pytest.mark.parametrize(
    ("action", "named"),
    [
        ("wait", "wait"),
        ("[" * 100_000, "no call"),
        ('{"arguments": {}}', "no call"),
        ('{"name": 3, "arguments": {}}', "no call"),
        ('{"name": "wait", "arguments": []}', "no call"),
        (tool_call("wiat"), '"wiat"'),
        (tool_call("take"), '"count"'),
        (tool_call("take", count=1, cuont=2), '"cuont"'),
        (tool_call("wait", long=True), '"long"'),
        (tool_call("turn", side="up"), '"side"'),
    ],
)
def test_what_is_no_valid_call_is_refused_and_stays(action: str, named: str) -> None:
    assert named in str(TOOLS.refuse(TOOLS.canonical(action)))
    assert TOOLS.canonical(TOOLS.canonical(action)) == TOOLS.canonical(action)


@given(st.text(max_size=40) | st.lists(st.floats() | st.integers() | st.text()).map(json.dumps))
def test_any_text_is_judged(text: str) -> None:
    for action in (text, f'{{"name": "say", "arguments": {{"text": {text}}}}}', tool_call("say", text=text)):
        canonical = TOOLS.canonical(action)
        assert TOOLS.canonical(canonical) == canonical
        if TOOLS.refuse(canonical) is None:
            assert tool_call(*TOOLS.call(canonical)[:1], **TOOLS.call(canonical)[1]) == canonical
    assert TOOLS.call(tool_call("say", text=text)) == ("say", {"text": text.encode("utf-8", "replace").decode()})


def test_the_schema_says_types_choices_and_what_may_be_left_out() -> None:
    take, turn, wait, _ = (schema["function"]["parameters"] for schema in TOOLS.schemas())
    assert {name: kind["type"] for name, kind in take["properties"].items()} == {
        "count": "integer", "share": "number", "loud": "boolean",
    }  # fmt: skip
    assert (take["required"], turn["properties"]["side"]["enum"]) == (["count"], ["left", "right"])
    assert wait == {"type": "object", "properties": {}, "required": []}
    said = TOOLS.said
    assert all(tool.name in said and tool.description in said for tool in TOOLS.tools)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tools": ()}, "at least one tool"),
        ({"examples": ()}, "one example"),
        ({"examples": ("wait",)}, "wait"),
        ({"examples": ('{"name":"wait"}',)}, "canonical form"),
        ({"examples": (tool_call("take", count="2"),)}, '"count"'),
        ({"tools": (*TOOLS.tools, Tool(name="take", description=""))}, "'take' is there twice"),
        ({"tools": (*TOOLS.tools, Tool(name="_look", description=""))}, "'_look'"),
        ({"tools": (*TOOLS.tools, Tool(name="look", description="", arguments=(TEXT, TEXT)))}, "'text' is there twice"),
    ],
)
def test_a_set_that_cannot_be_offered_is_refused(change: dict[str, Any], named: str) -> None:
    whole: dict[str, Any] = {"tools": TOOLS.tools, "examples": TOOLS.examples}
    with pytest.raises(TurngymError, match=named):
        ToolSet(**{**whole, **change})


def test_an_argument_that_cannot_be_is_refused() -> None:
    changes: list[dict[str, Any]] = [{"type": "list"}, {"type": "integer", "choices": (1, "2")}, {"choices": (True,)}]
    for change in changes:
        with pytest.raises(TurngymError, match="'side'"):
            Argument(name="side", description="", **change)


def test_one_tool_with_one_text_is_that_text() -> None:
    tool = ToolSpec(name="go", description="Go.", argument="where", argument_description="A door.")
    assert tool.canonical(" door 1 ") == "door 1" == tool.called("go", {"where": " door 1 "})
    assert (tool.refuse("anything"), tool.call("door 1")) == (None, ("go", {"where": "door 1"}))
    assert tool.schemas() == [
        {
            "type": "function",
            "function": {
                "name": "go",
                "description": "Go.",
                "parameters": {
                    "type": "object",
                    "properties": {"where": {"type": "string", "description": "A door."}},
                    "required": ["where"],
                },
            },
        }
    ]
