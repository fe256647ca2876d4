"""Which dialect of tool calls and thoughts a chat template writes, learned from the template itself."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from turngym.agents.rendering.chat_settings import ChatSettings
from turngym.agents.rendering.chat_template import USER, ChatTemplate
from turngym.agents.rendering.template_text import SYSTEM, RenderError
from turngym.envs.core import ToolSpec
from turngym.envs.dialects.dialect import Call, Dialect
from turngym.envs.dialects.json_calls import CALL_ID
from turngym.envs.dialects.known import DIALECTS, HERMES
from turngym.envs.dialects.thoughts import STYLES

VALUE = "turngymvalue"


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """The dialect of a template, and how well it is known."""

    dialect: Dialect
    exact: bool
    """Whether our writing is the template's, letter by letter; else it is only read."""


def with_dialect(settings: ChatSettings, tokenizer: Any, tool: ToolSpec) -> ChatSettings:
    """`settings` with the channel that the tokenizer's chat template calls for (`tool` becomes `tool:glm`).

    A channel that names a dialect (`tool:hermes`) is taken at its word.

    Raises:
        RenderError: the template knows no tools, or writes calls in a dialect that is not known here.
    """
    if settings.channel == "text":
        style = thought_style(tokenizer, tool)
        return replace(settings, channel=f"text:{style}") if style else settings
    if settings.channel != "tool":
        return settings
    learned = learn_dialect(tokenizer, tool)
    if not learned.exact:
        warnings.warn(
            f"this chat template's calls are read as {learned.dialect.name}, but it writes them a little otherwise "
            "than we do: answers are read and kept as they were said, demonstrations (sft, luffy) differ from it",
            stacklevel=2,
        )
    return settings if learned.dialect is HERMES else replace(settings, channel=f"tool:{learned.dialect.name}")


def learn_dialect(tokenizer: Any, tool: ToolSpec) -> Learned:
    """The dialect in which the chat template writes a call of `tool`: rendered once, and compared with every known one.

    Raises RenderError as `with_dialect` does.
    """
    template = ChatTemplate(tokenizer, tool=tool)
    written = list(_written_calls(template, tool))
    for text in written:
        exact = [d for d in DIALECTS.values() if d.write(tool.name, tool.argument, VALUE) in text]
        if exact:
            # bare JSON stands inside many others
            longest = max(exact, key=lambda dialect: len(dialect.write(tool.name, tool.argument, VALUE)))
            return Learned(dialect=longest, exact=True)
    for text in written:
        for dialect in DIALECTS.values():
            if _reads(dialect, text, tool):
                return Learned(dialect=dialect, exact=False)
    if written:
        raise RenderError(
            f"the chat template of {template.name!r} writes tool calls in a dialect that is not known here: "
            f"{written[0].strip()[:120]!r}; use the text channel (--channel text)"
        )
    raise RenderError(
        f"the chat template of {template.name!r} knows no tools: use the text channel (--channel text), or "
        "--channel tool:hermes for a model that was trained to call tools without its template's help"
    )


def thought_style(tokenizer: Any, tool: ToolSpec) -> str | None:
    """The style of thoughts (`turngym.envs.dialects.thoughts.STYLES`) that the template names; None: `<think>`."""
    source = ChatTemplate(tokenizer).source
    for name, thoughts in STYLES.items():
        # the plain word behind a marker may be put together elsewhere in the template
        if thoughts.opening.rpartition("<|message|>")[0] in source if name == "harmony" else thoughts.opening in source:
            return name
    return None


def _written_calls(template: ChatTemplate, tool: ToolSpec) -> Iterator[str]:
    """What the template writes for an assistant message with a call, in the forms that templates accept."""
    opening = template.opening(SYSTEM, USER)
    before = template.render(opening, generate=False)
    argument = {tool.argument: VALUE}
    forms = product((CALL_ID, f"functions.{tool.name}:0"), (argument, json.dumps(argument)), ("", None))
    for id, arguments, content in forms:
        call = {"type": "function", "id": id, "function": {"name": tool.name, "arguments": arguments}}
        message = {"role": "assistant", "content": content, "tool_calls": [call]}
        try:
            text = template.render([*opening, message], generate=False)
        except RenderError:
            continue
        # the system message may show an example call: what it has in common with the bare opening goes
        same = next((i for i, (a, b) in enumerate(zip(before, text, strict=False)) if a != b), len(before))
        text = text[same:]
        if VALUE in text and tool.name in text:
            yield text


def _reads(dialect: Dialect, text: str, tool: ToolSpec) -> bool:
    start = dialect.find(text)
    call = dialect.read(text[start:]) if start >= 0 else None
    if not isinstance(call, Call) or call.name != tool.name or not isinstance(call.arguments, dict):
        return False
    return call.arguments.get(tool.argument) == VALUE
