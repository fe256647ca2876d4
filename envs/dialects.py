"""Which dialects of tool calls are known, by name. A new family needs one entry here and one template in the tests.

The classes that read and write them are in `turngym.envs.tool_calls`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from turngym.core.errors import checked_choice
from turngym.envs.tool_calls import (
    COHERE,
    MISTRAL,
    SEED,
    CallDialect,
    GemmaCalls,
    HarmonyCalls,
    JsonCalls,
    NamedCalls,
    PythonicCalls,
    TaggedCalls,
    Thoughts,
)

HERMES = JsonCalls(name="hermes", opening="<tool_call>", closing="</tool_call>", form="<tool_call>\n%s\n</tool_call>")
"""The dialect of Qwen2.5, Qwen3, Qwen-VL, Hermes and Granite 4. It is the default: the channel `tool` means this
one."""
_LLAMA = ("name", "parameters")
_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
_DEEPSEEK_HEAD = r"\s*(?:<｜tool▁calls▁begin｜>)?\s*<｜tool▁call▁begin｜>\s*"
_GLM = TaggedCalls(
    name="glm",
    starts=("<tool_call>",),
    head=r"\s*<tool_call>\s*(?P<name>[^<\n{]{1,200})",
    key=("<arg_key>", "</arg_key>"),
    value=("<arg_value>", "</arg_value>"),
    ends=("</tool_call>",),
    form="<tool_call>%n\n%s</tool_call>",
    argument="<arg_key>%k</arg_key>\n<arg_value>%s</arg_value>\n",
    thoughts=Thoughts(before="", after="", gap="\n"),
)


def _dsml(name: str, section: str) -> TaggedCalls:
    return TaggedCalls(
        name=name,
        starts=(f"<｜DSML｜{section}>", "<｜DSML｜invoke name="),
        head=rf"\s*(?:<｜DSML｜{section}>)?\s*<｜DSML｜invoke name=\"(?P<name>[^\">\n]{{1,200}})\">",
        key=('<｜DSML｜parameter name="', ">"),
        value=("", "</｜DSML｜parameter>"),
        ends=("</｜DSML｜invoke>", f"</｜DSML｜{section}>"),
        form=f'<｜DSML｜{section}>\n<｜DSML｜invoke name="%n">\n%s</｜DSML｜invoke>\n</｜DSML｜{section}>',
        argument='<｜DSML｜parameter name="%k" string="%t">%s</｜DSML｜parameter>\n',
        stop_text=(f"</｜DSML｜{section}>",),
    )


_MISTRAL = JsonCalls(
    name="mistral",
    opening="[TOOL_CALLS]",
    form="[TOOL_CALLS]%s",
    keys=("name", "arguments", "id"),
    listed=True,
    thoughts=MISTRAL,
)
_ALL: tuple[CallDialect, ...] = (
    HERMES,
    TaggedCalls(
        name="qwen-coder",
        starts=("<tool_call>", "<function="),
        head=r"\s*(?:<tool_call>)?\s*<function=(?P<name>[^>\n]{1,200})>",
        key=("<parameter=", ">"),
        value=("", "</parameter>"),
        ends=("</function>", "</tool_call>"),
        form="<tool_call>\n<function=%n>\n%s</function>\n</tool_call>",
        argument="<parameter=%k>\n%s\n</parameter>\n",
        python=True,
    ),
    _GLM,
    replace(
        _GLM,
        name="glm-compact",
        form="<tool_call>%n%s</tool_call>",
        argument="<arg_key>%k</arg_key><arg_value>%s</arg_value>",
        thoughts=Thoughts(before="", after="", gap=""),
    ),
    TaggedCalls(
        name="minimax",
        starts=("<minimax:tool_call>", "<invoke name="),
        head=r"\s*(?:<minimax:tool_call>)?\s*<invoke name=\"(?P<name>[^\">\n]{1,200})\">",
        key=('<parameter name="', '">'),
        value=("", "</parameter>"),
        ends=("</invoke>", "</minimax:tool_call>"),
        form='<minimax:tool_call>\n<invoke name="%n">\n%s</invoke>\n</minimax:tool_call>',
        argument='<parameter name="%k">%s</parameter>\n',
        stop_text=("</minimax:tool_call>",),
    ),
    TaggedCalls(
        name="seed",
        starts=("<seed:tool_call>",),
        head=r"\s*<seed:tool_call>\s*<function=(?P<name>[^>\n]{1,200})>",
        key=("<parameter=", ">"),
        value=("", "</parameter>"),
        ends=("</function>", "</seed:tool_call>"),
        form="<seed:tool_call>\n<function=%n>\n%s</function>\n</seed:tool_call>",
        argument="<parameter=%k>%s</parameter>\n",
        python=True,
        stop_text=("</seed:tool_call>",),
        thoughts=SEED,
    ),
    JsonCalls(name="llama", keys=_LLAMA, prefixes=("<|python_tag|>",)),
    JsonCalls(name="llama4", keys=_LLAMA, prefixes=("<|python_tag|>", "<|python_start|>"), form="%s\n"),
    NamedCalls(
        name="llama-function",
        starts=("<function=",),
        head=r"\s*<function=(?P<name>[^>={\n]{1,200})[>=]?\s*(?=\{)",
        form="<function=%n>%s</function>",
        stop_text=("</function>",),
    ),
    JsonCalls(name="json", keys=("name", "arguments")),
    JsonCalls(name="json-list", keys=("name", "arguments"), listed=True),
    _MISTRAL,
    replace(_MISTRAL, name="mistral-spaced", form="[TOOL_CALLS] %s"),
    NamedCalls(
        name="mistral-args",
        starts=("[TOOL_CALLS]",),
        head=r"\s*\[TOOL_CALLS\]\s*(?P<name>[^\[\{\s]{1,200})\s*(?:\[CALL_ID\][^\[\{]{0,40})?(?:\[ARGS\])?",
        form="[TOOL_CALLS]%n[ARGS]%s",
        thoughts=MISTRAL,
    ),
    NamedCalls(
        name="deepseek",
        starts=_DEEPSEEK,
        head=_DEEPSEEK_HEAD + r"function\s*<｜tool▁sep｜>\s*(?P<name>[^\n`{]{1,200})\s*(?:```(?:json)?)?",
        form="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>%n\n```json\n%s\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        stop_text=("<｜tool▁calls▁end｜>",),
    ),
    NamedCalls(
        name="deepseek-v3.1",
        starts=_DEEPSEEK,
        head=_DEEPSEEK_HEAD + r"(?P<name>[^<\n{]{1,200})\s*<｜tool▁sep｜>",
        form="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>%n<｜tool▁sep｜>%s<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        stop_text=("<｜tool▁calls▁end｜>",),
    ),
    _dsml("deepseek-v3.2", "function_calls"),
    _dsml("deepseek-v4", "tool_calls"),
    NamedCalls(
        name="kimi",
        starts=("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>", "<|tool_call_begin|>"),
        head=r"\s*(?:<\|tool_calls?_section_begin\|>)?\s*<\|tool_call_begin\|>\s*"
        r"(?P<id>(?:functions\.)?(?P<name>[\w./-]{1,200}?)(?::\d{1,9})?)\s*<\|tool_call_argument_begin\|>",
        form="<|tool_calls_section_begin|><|tool_call_begin|>functions.%n:0<|tool_call_argument_begin|>%s"
        "<|tool_call_end|><|tool_calls_section_end|>",
        stop_text=("<|tool_calls_section_end|>",),
    ),
    PythonicCalls(name="lfm2", opening="<|tool_call_start|>", closing="<|tool_call_end|>"),
    PythonicCalls(name="pythonic", double_quotes=True, prefixes=("<|python_start|>",)),
    GemmaCalls(name="gemma4", opening="<|tool_call>", closing="<tool_call|>", quote='<|"|>'),
    GemmaCalls(name="function-gemma", opening="<start_function_call>", closing="<end_function_call>", quote="<escape>"),
    HarmonyCalls(),
    JsonCalls(name="granite", opening="<|tool_call|>", form="<|tool_call|>%s", listed=True, indent=4),
    JsonCalls(
        name="phi4",
        opening="<|tool_call|>",
        closing="<|/tool_call|>",
        form="<|tool_call|>%s<|/tool_call|>",
        listed=True,
    ),
    JsonCalls(
        name="cohere",
        opening="<|START_ACTION|>",
        closing="<|END_ACTION|>",
        form="<|START_ACTION|>[\n    %s\n]<|END_ACTION|>",
        keys=("tool_call_id", "tool_name", "parameters"),
        thoughts=COHERE,
    ),
    JsonCalls(
        name="internlm",
        opening="<|action_start|><|plugin|>",
        closing="<|action_end|>",
        form="<|action_start|><|plugin|>\n%s<|action_end|>",
    ),
)
DIALECTS: Mapping[str, CallDialect] = {dialect.name: dialect for dialect in _ALL}


def find_dialect(name: str) -> CallDialect:
    """The dialect called `name`. Raises TurngymError if there is none."""
    return DIALECTS[checked_choice("the dialect of tool calls", name, DIALECTS)]
