"""The calls of an answer: those that the server has read (`calls_of`), and one that it left in the text."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from turngym.agents.endpoint.completion_fields import (
    DEEPEST,
    Call,
    Function,
    Message,
    Noticed,
    Reading,
    deeper,
    rest_of,
)
from turngym.core.redaction import excerpt
from turngym.envs.dialects import DIALECTS
from turngym.envs.spaces import printable
from turngym.envs.tool_calls import EVERY_STYLE, THINK, Thoughts, read_calls


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerCall:
    """One call as the server gave it. Half surrogate pairs are replaced, in the text of its arguments too."""

    id: str
    """Empty if the server gave none, or one that another call of the answer has."""
    name: Any
    arguments: Any
    """JSON text, by the API; some servers give an object."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """The call's other fields, and those of its function under `function`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenCall:
    """A call in the text of an answer."""

    before: str
    """The text before it."""
    name: str
    arguments: Any
    dialect: str


def calls_of(message: Message, reading: Reading, tools: Collection[str]) -> tuple[AnswerCall, ...]:
    """The calls of a message, those of the API before `tools` included; `tools` are the names that were offered."""
    tables = message.tool_calls
    if not tables and message.function_call:
        reading.note(Noticed.OLD_CALL)
        tables = [{"function": message.function_call}]
    calls: list[AnswerCall] = []
    for table in tables:
        call = reading.take(Call, table, "tool_calls.")
        function = reading.take(Function, call.function, "function.")
        if not isinstance(function.name, str) or not function.name.strip():
            reading.note(Noticed.NO_NAME)
        elif (name := _tool_in(function.name, tools)) != function.name:
            reading.note(Noticed.NAME)
            function.name = name
        # a result names its call by id, so ids must differ
        used_ids = ("", *(earlier.id for earlier in calls))
        inner = rest_of(Function, call.function)
        more = rest_of(Call, table) if isinstance(table, Mapping) else {}
        calls.append(
            AnswerCall(
                id=call.id if call.id not in used_ids else "",
                name=excerpt(function.name, 200) if deeper(function.name, DEEPEST) else function.name,
                arguments=_arguments(function.arguments, reading),
                more={**more, **({"function": inner} if inner else {})},
            )
        )
    return tuple(calls)


def _tool_in(name: str, tools: Collection[str]) -> str:
    """The one tool in a name to which a parser has added more: `functions.look:0`, `look<|channel|>commentary`."""
    matching = {part.strip() for part in re.split(r"[.:]|<\|", name)} & {*tools}
    return matching.pop() if name not in tools and len(matching) == 1 else name


def own_id(message: int, place: int) -> str:
    """An id for the call at `place` of the message of this number: nine letters and digits, which every server takes,
    and no other of its conversation."""
    return f"c{message % 100_000:05}{place % 1000:03}"


def _arguments(arguments: Any, reading: Reading) -> Any:
    """`arguments` without half surrogate pairs. Their text may escape them (`\\\\ud83d`), and servers that parse a
    conversation refuse them there."""
    # of a tool that needs none, many servers send an empty text or nothing
    if arguments is None or (isinstance(arguments, str) and arguments.strip() in ("", "null")):
        return "{}"
    if not isinstance(arguments, str):
        return excerpt(arguments, 200) if deeper(arguments, DEEPEST) else arguments
    # the channel reads such a call, so that the model must not be told that its arguments were none
    if isinstance(inner := json_of(arguments), str) and isinstance(json_of(inner), dict):
        reading.note(Noticed.TWICE)
        arguments = inner
    if not HALF.search(arguments):
        return arguments
    parsed = json_of(arguments)
    return arguments if parsed is None else json.dumps(sendable(parsed), ensure_ascii=False)


def json_of(text: Any) -> Any:
    """Parses `text` if it is a JSON string. Returns other values unchanged, and None for invalid JSON and for one of
    more than `DEEPEST` levels, which few servers take back."""
    value = text
    if isinstance(text, str):
        try:
            value = json.loads(text, parse_constant=_no_json)
        # a few thousand open brackets raise RecursionError
        except (ValueError, RecursionError):
            return None
    return None if deeper(value, DEEPEST) else value


def _no_json(word: str) -> None:
    # Python reads and writes NaN and Infinity, and servers refuse a conversation with one
    raise ValueError(f"{word} is no JSON")


def written_call(text: str, tools: Collection[str]) -> WrittenCall | None:
    """The first of the calls that end `text`, if the server has left them in it; None if there are none.

    Only whole calls of `tools`, with nothing behind them, are no ambiguity. They may stand without their wrapper:
    dialects whose calls are bare JSON read those.
    """
    _, body, reason = THINK.split(marked(text, THINK), lambda part: False)
    body = _FENCE.sub(r"\1", body.strip())
    candidates: list[WrittenCall] = []
    for dialect in DIALECTS.values() if reason is None else ():
        start = dialect.find(body)
        calls = read_calls(dialect, body[start:]) if start >= 0 else None
        if calls and calls[0].name in tools:
            call = calls[0]
            candidates.append(
                WrittenCall(before=body[:start], name=call.name, arguments=call.arguments, dialect=dialect.name)
            )
    # the one that leaves the least before it: without its marker a call may be another dialect's, too
    return min(candidates, key=lambda candidate: len(candidate.before), default=None)


_FENCE = re.compile(r"\A```(?:json|tool_call|xml)?\s*\n(.*)\n```\Z", re.DOTALL)


def hides_call(text: str) -> bool:
    """Whether the tool channel would not see a call behind `text`, because `text` opens a thought or begins a call."""
    _, body, reason = THINK.split(marked(text, THINK), lambda part: False)
    return reason is not None or DIALECTS["hermes"].find(body) >= 0


# Thoughts that a server has left in the text.


def styles_in(text: str) -> list[Thoughts]:
    """The ways in which thoughts are marked in `text`."""
    return [style for style in EVERY_STYLE if style.opening in text or (style.may_be_open and style.closing in text)]


def marked(text: str, thoughts: Thoughts) -> str:
    """`text` with all its thoughts between the markers of `thoughts`, so that the channel reads no action in them."""
    for style in styles_in(text):
        text = text.replace(style.opening, thoughts.opening).replace(style.closing, thoughts.closing)
    return text


# What Python takes for text and for numbers, and servers do not: half a surrogate pair, NaN.

HALF = re.compile(r"\\u[dD][89abAB]|\\u[dD][c-fC-F]|[\ud800-\udfff]")


def sendable(value: Any, levels: int = 2 * DEEPEST) -> Any:
    """`value` with `?` in place of half surrogate pairs and null in place of NaN and infinity; values deeper than
    `levels` stay unchanged."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if levels and isinstance(value, list):
        return [sendable(item, levels - 1) for item in value]
    if levels and isinstance(value, dict):
        return {printable(name): sendable(item, levels - 1) for name, item in value.items()}
    return value
