"""Every dialect reads what it writes and what models make of it, and judges as the usual channel does."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turngym.core.errors import TurngymError
from turngym.core.tools import Argument, Tool, ToolSet, ToolSpec, tool_call
from turngym.envs.channels import TextChannel, ToolChannel, make_channel
from turngym.envs.dialects import DIALECTS
from turngym.envs.tool_calls import STYLES, THINK, ParsedCall, read_calls

TOOL = ToolSpec(
    name="alfworld_step", description="Act.", argument="action", argument_description="what", examples=("look",)
)
SEARCH = ToolSpec(
    name="search", description="Search.", argument="query", argument_description="what", tags=("search", "answer")
)
WRITTEN = {
    "hermes": '<tool_call>\n{"name": "alfworld_step", "arguments": {"action": "look"}}\n</tool_call>',
    "qwen-coder": "<tool_call>\n<function=alfworld_step>\n<parameter=action>\nlook\n</parameter>\n</function>\n"
    "</tool_call>",
    "glm": "<tool_call>alfworld_step\n<arg_key>action</arg_key>\n<arg_value>look</arg_value>\n</tool_call>",
    "llama": '{"name": "alfworld_step", "parameters": {"action": "look"}}',
    "mistral": '[TOOL_CALLS][{"name": "alfworld_step", "arguments": {"action": "look"}, "id": "turngym00"}]',
    "mistral-args": '[TOOL_CALLS]alfworld_step[ARGS]{"action": "look"}',
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>alfworld_step\n"
    '```json\n{"action": "look"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek-v3.1": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>alfworld_step<｜tool▁sep｜>{"action": "look"}'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.alfworld_step:0<|tool_call_argument_begin|>"
    '{"action": "look"}<|tool_call_end|><|tool_calls_section_end|>',
    "lfm2": "<|tool_call_start|>[alfworld_step(action='look')]<|tool_call_end|>",
    "pythonic": '[alfworld_step(action="look")]',
    "gemma4": '<|tool_call>call:alfworld_step{action:<|"|>look<|"|>}<tool_call|>',
    "function-gemma": "<start_function_call>call:alfworld_step{action:<escape>look<escape>}<end_function_call>",
    "harmony": ' to=functions.alfworld_step<|channel|>commentary json<|message|>{"action": "look"}',
    "granite": '<|tool_call|>[\n    {\n        "name": "alfworld_step",\n        "arguments": {\n            "action": '
    '"look"\n        }\n    }\n]',
    "cohere": '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "alfworld_step", "parameters": '
    '{"action": "look"}}\n]<|END_ACTION|>',
    "llama-function": '<function=alfworld_step>{"action": "look"}</function>',
    "deepseek-v3.2": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="alfworld_step">\n'
    '<｜DSML｜parameter name="action" string="true">look</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    "</｜DSML｜function_calls>",
    "minimax": '<minimax:tool_call>\n<invoke name="alfworld_step">\n<parameter name="action">look</parameter>\n'
    "</invoke>\n</minimax:tool_call>",
}
VARIANTS = {
    "qwen-coder": "<function=alfworld_step><parameter=action>look</parameter></function>",
    "glm": "<tool_call>alfworld_step<arg_key>action</arg_key><arg_value>look</arg_value>",
    "llama": '<|python_tag|>{"type": "function", "name": "alfworld_step", "parameters": {"action": "look"}}',
    "mistral": '[TOOL_CALLS] [{"name": "alfworld_step", "arguments": "{\\"action\\": \\"look\\"}"}]',
    "mistral-args": '[TOOL_CALLS]alfworld_step[CALL_ID]aBcDeFgHi[ARGS]{"action": "look", "why": 1}',
    "deepseek": '<｜tool▁call▁begin｜>function<｜tool▁sep｜>alfworld_step\n```json\n{"action": "look"}',
    "llama-function": '<function=alfworld_step={"action": "look"}',
    "lfm2": '<|tool_call_start|>[alfworld_step(action="look", loud=True)]',
    "harmony": "<|start|>assistant<|channel|>commentary to=functions.alfworld_step <|constrain|>json<|message|>"
    '{"action": "look"}',
    "gemma4": '<|tool_call>call:alfworld_step{ action: <|"|>look<|"|>, n: 3}',
    "cohere": '<|START_ACTION|>[{"tool_name": "alfworld_step", "parameters": {"action": "look"}}]',
}
"""Calls that models write otherwise than their template."""


def channel(name: str, tool: ToolSpec = TOOL) -> ToolChannel:
    return ToolChannel(tool=tool, dialect=DIALECTS[name])


@pytest.mark.parametrize("name", WRITTEN)
def test_a_call_is_written_as_the_family_writes_it(name: str) -> None:
    assert channel(name).format("look") == WRITTEN[name]


@pytest.mark.parametrize("name", VARIANTS)
def test_a_model_may_write_it_in_its_own_way(name: str) -> None:
    assert channel(name).parse(VARIANTS[name]).action == "look"


@pytest.mark.parametrize("name", DIALECTS)
def test_text_before_two_calls_and_thoughts_change_nothing(name: str) -> None:
    spoken = channel(name)
    first, second = spoken.format("look"), spoken.format("inventory")
    assert spoken.parse(f"Let me see.\n{first}").action == "look"
    assert spoken.parse(f"{first}\n{second}").action == "look"
    parsed = spoken.parse(spoken.format("look", "hm {x} [y]"))
    assert (parsed.action, parsed.thought) == ("look", "hm {x} [y]")


@pytest.mark.parametrize("name", DIALECTS)
def test_what_is_no_call_of_the_tool_is_refused_by_its_name(name: str) -> None:
    spoken = channel(name)
    renamed = spoken.parse(DIALECTS[name].write("alfworld_stop", {"action": "look"}))
    assert renamed.reason == (
        "there is no tool \"alfworld_stop\"; the tool is alfworld_step. Did you mean 'alfworld_step'?"
    )
    missing = spoken.parse(DIALECTS[name].write("alfworld_step", {"move": "look"}))
    assert missing.reason == 'the tool call lacks the argument "action"'
    empty = spoken.parse(DIALECTS[name].write("alfworld_step", {"action": " "}))
    assert empty.reason == 'the argument "action" is empty'
    assert spoken.parse("look").reason == "the response has no call of the tool alfworld_step"
    begun = spoken.dialect.write("alfworld_step", {"action": "look"})[: -len("look")]
    assert spoken.parse(begun[: begun.index("alfworld")]).action is None


@pytest.mark.parametrize("name", DIALECTS)
def test_answers_beside_the_tool_are_text(name: str) -> None:
    spoken = channel(name, SEARCH)
    assert spoken.parse(spoken.format("<search>who</search>", "hm")).action == "<search>who</search>"
    assert spoken.parse(spoken.format("<answer>me</answer>", "hm")).action == "<answer>me</answer>"
    assert spoken.parse(spoken.format("<answer>me</answer>") + spoken.format("<search>x</search>")).action == (
        "<answer>me</answer>"
    )


@pytest.mark.parametrize("name", DIALECTS)
def test_a_tool_may_have_a_name_with_a_path(name: str) -> None:
    # the published search set-ups call theirs so
    spoken = channel(name, replace(SEARCH, name="search_r1/search"))
    assert spoken.parse(spoken.format("<search>who</search>")).action == "<search>who</search>"


@given(name=st.sampled_from(sorted(DIALECTS)), action=st.text(max_size=40), thought=st.none() | st.text(max_size=20))
def test_what_a_dialect_can_carry_comes_back(name: str, action: str, thought: str | None) -> None:
    spoken = channel(name)
    try:
        response = spoken.format(action, thought)
    except TurngymError:  # what a dialect cannot carry is refused when it is written
        return
    parsed = spoken.parse(response)
    assert (parsed.action, parsed.thought) == (action.strip(), None if thought is None else thought.strip())


@given(name=st.sampled_from(sorted(DIALECTS)), text=st.text(max_size=60), cut=st.integers(0, 80))
def test_nothing_that_a_model_says_raises(name: str, text: str, cut: int) -> None:
    spoken = channel(name)
    for response in (text, spoken.format("look")[:cut] + text, text + spoken.format("look")[cut:]):
        parsed = spoken.parse(response)
        assert (parsed.action is None) != (parsed.reason is None)
        calls = read_calls(DIALECTS[name], response)
        assert calls is None or all(isinstance(call, ParsedCall) for call in calls)


@given(name=st.sampled_from(sorted(DIALECTS)), value=st.text(max_size=20), cut=st.integers(0, 200))
def test_a_call_is_read_whole_or_not_at_all(name: str, value: str, cut: int) -> None:
    dialect = DIALECTS[name]
    written = dialect.write("f", {"x": value})
    whole = read_calls(dialect, written)
    if whole is not None:  # some values cannot be written in some dialects, as one with a closing tag in it
        assert [(call.name, call.arguments) for call in whole] == [("f", whole[0].arguments)]
        assert whole[0].arguments in ({"x": value}, {"x": value.removeprefix("\n").removesuffix("\n")})
    part = read_calls(dialect, written[:cut])
    # what ends a call may be cut off, no more
    assert part is None or part == whole
    assert read_calls(dialect, f"{written} and more") is None


@pytest.mark.parametrize("name", DIALECTS)
def test_reading_takes_time_in_proportion_to_the_length(name: str) -> None:
    # counted in calls of the searching methods of str, which walk over the text once each
    spoken = channel(name)
    head = spoken.format("look")[:12]
    for unit in (head, spoken.dialect.thoughts.opening, spoken.format("look", "hm")):
        counts = []
        for size in (1_000, 2_000):
            text = Counted(unit * size)
            Counted.steps = 0
            spoken.dialect.thoughts.split(text, lambda part: False)
            spoken.dialect.read(text)
            counts.append(Counted.steps)
        assert counts[1] <= 2 * counts[0] + 1_000
    # what regular expressions walk over cannot be counted: were they quadratic, these would take many minutes
    for unit in (head, " ", "[", "<", "{ ", "to=", "<tool_call>", '{"name" :', "<search>", "<think>"):
        spoken.parse(unit * (50_000 // len(unit)))
        read_calls(spoken.dialect, unit * (50_000 // len(unit)))
        read_calls(spoken.dialect, spoken.format("look") * 1000 + unit * (50_000 // len(unit)))


class Counted(str):
    """Text that counts how many of its characters `find` walks over."""

    steps = 0

    def find(self, part, start=0, end=None):  # type: ignore[no-untyped-def,override]
        found = str.find(self, part, start, len(self) if end is None else end)
        Counted.steps += (len(self) if found < 0 else found) - start
        return found

    def __getitem__(self, item):  # type: ignore[no-untyped-def,override]
        return Counted(str.__getitem__(self, item))


@pytest.mark.parametrize("style", STYLES)
def test_tags_after_thoughts_in_the_family_s_own_markers(style: str) -> None:
    spoken = make_channel(f"text:{style}", TOOL)
    said = spoken.format("look", "I <action>doubt</action> it")
    assert said.startswith(STYLES[style].opening)
    assert spoken.parse(said).action == "look"
    assert "<think>" not in spoken.instructions(TOOL)
    assert spoken.parse(STYLES[style].opening + "for ever <action>x</action>").reason == (
        f"the thought is not closed with {STYLES[style].closing}"
    )


def test_channels_are_found_by_name() -> None:
    assert make_channel("tool", TOOL) == make_channel("tool:hermes", TOOL) == ToolChannel(tool=TOOL)
    assert make_channel("tool:glm", TOOL).name == "tool:glm"
    assert make_channel("text", TOOL) == TextChannel(thoughts=THINK)
    for name, hint in (("tool:lama", "Did you mean 'tool:llama'"), ("text:harmoni", "Did you mean 'text:harmony'")):
        with pytest.raises(TurngymError, match="unknown channel") as caught:
            make_channel(name, TOOL)
        assert hint in str(caught.value)


def test_arguments_may_be_json_inside_json() -> None:
    inner = json.dumps({"action": "look"})
    call = json.dumps({"name": "alfworld_step", "parameters": inner})
    assert channel("llama").parse(call).action == "look"


STEPS = ToolSet(
    tools=(
        Tool(
            name="take",
            description="Take.",
            arguments=(
                Argument(name="what", description="A thing."),
                Argument(name="count", description="How many.", type="integer"),
                Argument(name="share", description="How much.", type="number", required=False),
                Argument(name="loud", description="Whether.", type="boolean", required=False),
            ),
        ),
        Tool(name="wait", description="Wait."),
    ),
    examples=(tool_call("wait"),),
)
CALLS = (
    tool_call("take", what="a cup", count=3, share=-0.5, loud=True),
    # what looks like another type
    tool_call("take", what="3", count=0, loud=False),
    tool_call("take", what="true", count=-2, share=2),
    tool_call("take", what='say "it\'s" <b>', count=1),
    tool_call("wait"),
)


@pytest.mark.parametrize("action", CALLS)
@pytest.mark.parametrize("name", DIALECTS)
def test_arguments_keep_their_types(name: str, action: str) -> None:
    spoken = ToolChannel(tool=STEPS, dialect=DIALECTS[name])
    assert STEPS.refuse(action) is None
    assert spoken.parse(spoken.format(action, "hm")).action == action


@pytest.mark.parametrize("name", DIALECTS)
def test_a_call_that_is_not_valid_is_an_action_that_the_tools_refuse(name: str) -> None:
    spoken = ToolChannel(tool=STEPS, dialect=DIALECTS[name])
    for tool, arguments, named in (
        ("tak", {"what": "x", "count": 1}, '"tak"'),
        ("take", {"what": "x", "count": "many"}, '"count"'),
        ("take", {"what": "x"}, '"count"'),
        ("take", {"what": "x", "count": 1, "amount": 2}, '"amount"'),
    ):
        action = spoken.parse(DIALECTS[name].write(tool, arguments)).action
        assert action is not None
        assert named in str(STEPS.refuse(action))
        assert spoken.parse(spoken.format(action)).action == action
