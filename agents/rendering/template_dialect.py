"""In which dialect a chat template writes tool calls and thoughts, found by rendering short conversations."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from turngym.agents.rendering.chat_settings import ChatSettings
from turngym.agents.rendering.chat_template import SYSTEM, USER, ChatTemplate, RenderError, probe_call
from turngym.core.redaction import excerpt
from turngym.core.spec import changed
from turngym.core.tools import Tools
from turngym.envs.dialects import DIALECTS, HERMES
from turngym.envs.tool_calls import CALL_ID, STYLES, CallDialect, ParsedCall

VALUE = "turngymvalue"


class UnknownDialectError(RenderError):
    """A chat template that writes tool calls in a dialect that is not known here."""


def with_dialect(settings: ChatSettings, tokenizer: Any, tool: Tools) -> ChatSettings:
    """`settings` with the channel that the tokenizer's chat template writes (`tool` becomes `tool:glm`).

    A channel that names its dialect (`tool:hermes`) stays as it is.

    Raises RenderError if the template knows no tools, or writes calls in a dialect that is not known here.
    """
    if settings.channel == "text":
        style = thought_style(tokenizer)
        return changed(settings, channel=f"text:{style}") if style else settings
    if settings.channel != "tool":
        return settings
    calls = dialect_of_template(tokenizer, tool)
    if not calls.exact:
        warnings.warn(
            f"this chat template's calls are read as {calls.dialect.name}, but it writes them slightly differently "
            "from us: answers are read and kept as they were said, but demonstrations (sft, luffy) differ from it",
            stacklevel=2,
        )
    return settings if calls.dialect is HERMES else changed(settings, channel=f"tool:{calls.dialect.name}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateCalls:
    """How a chat template writes tool calls, and in which form it takes them."""

    dialect: CallDialect
    exact: bool
    """Whether we write calls exactly as the template does; if not, we can only read them."""
    id: str
    """An id that it takes: `CALL_ID`, or `named_id` where it shows the id in place of the tool's name."""
    as_text: bool
    """Whether it takes arguments as JSON text, and not as an object."""


def dialect_of_template(tokenizer: Any, tool: Tools) -> TemplateCalls:
    """The dialect in which the chat template writes a call: one rendering is compared with every known one.

    Raises RenderError as `with_dialect` does, UnknownDialectError for a dialect that is not known.
    """
    template = ChatTemplate(tokenizer, tool=tool)
    call = probe_call(tool, VALUE)
    written = list(_written_calls(template, *call))
    for text, id, as_text in written:
        exact = [dialect for dialect in DIALECTS.values() if dialect.write(*call) in text]
        if exact:
            # the longest match, since bare JSON is part of many other dialects
            dialect = max(exact, key=lambda dialect: len(dialect.write(*call)))
            return TemplateCalls(dialect=dialect, exact=True, id=id, as_text=as_text)
    for text, id, as_text in written:
        for dialect in DIALECTS.values():
            start = dialect.find(text)
            read = dialect.read(text[start:]) if start >= 0 else None
            if isinstance(read, ParsedCall) and (read.name, read.arguments) == call:
                return TemplateCalls(dialect=dialect, exact=False, id=id, as_text=as_text)
    if written:
        raise UnknownDialectError(
            f"the chat template of {template.name!r} writes tool calls in a dialect that is not known here: "
            f"{excerpt(written[0][0].strip(), 120)!r}; use the text channel (--channel text)"
        )
    raise RenderError(
        f"the chat template of {template.name!r} knows no tools: use the text channel (--channel text), or "
        "--channel tool:hermes for a model that was trained to call tools without its template's help"
    )


def thought_style(tokenizer: Any) -> str | None:
    """The style of thoughts (`turngym.envs.tool_calls.STYLES`) that the template names; None means `<think>`."""
    source = ChatTemplate(tokenizer).source
    for name, thoughts in STYLES.items():
        # harmony's template may assemble the text behind its marker elsewhere, so only the marker is looked for
        if thoughts.opening.rpartition("<|message|>")[0] in source if name == "harmony" else thoughts.opening in source:
            return name
    return None


def _written_calls(template: ChatTemplate, name: str, arguments: dict[str, Any]) -> Iterator[tuple[str, str, bool]]:
    """What the template writes for an assistant message with this call, in the forms that templates accept: (text, the
    call's id, whether its arguments were JSON text)."""
    opening = template.opening(SYSTEM, USER)
    before = template.render(opening, generate=False)
    forms = product((CALL_ID, named_id(name, 0)), (False, True), ("", None))
    for id, as_text, content in forms:
        function = {"name": name, "arguments": json.dumps(arguments) if as_text else arguments}
        calls = [{"type": "function", "id": id, "function": function}]
        message = {"role": "assistant", "content": content, "tool_calls": calls}
        try:
            text = template.render([*opening, message], generate=False)
        except RenderError:
            continue
        # the system message may show an example call, so the part that equals the bare opening is cut off
        shared = next((i for i, (a, b) in enumerate(zip(before, text, strict=False)) if a != b), len(before))
        written = text[shared:]
        if VALUE in written and name in written:
            yield written, id, as_text


def named_id(name: str, number: int) -> str:
    """The id of a call whose template writes it in the place of the tool's name (Kimi)."""
    return f"functions.{name}:{number}"
