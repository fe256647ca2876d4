"""Chat messages and tool calls: the OpenAI form, the chat template's form, and equality of messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Tools = tuple[Mapping[str, Any], ...]
"""Functions in the OpenAI form."""
ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One function call; `arguments` is JSON text, as OpenAI clients have it."""

    id: str
    name: str
    arguments: str

    def as_json(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}

    def as_text(self) -> str:
        """The call as Qwen and Hermes templates write it."""
        call = {"name": self.name, "arguments": _value(self.arguments)}
        return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One message with its content as plain text."""

    role: str
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""

    def as_json(self) -> dict[str, Any]:
        """The OpenAI form, without empty fields."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            message |= {"content": self.content or None, "tool_calls": [call.as_json() for call in self.tool_calls]}
        if self.tool_call_id:
            message["tool_call_id"] = self.tool_call_id
        return message

    @classmethod
    def from_json(cls, message: Mapping[str, Any]) -> ChatMessage:
        """What `as_json` wrote."""
        calls = tuple(
            ToolCall(id=call["id"], name=call["function"]["name"], arguments=call["function"]["arguments"])
            for call in message.get("tool_calls", ())
        )
        return cls(
            role=message["role"],
            content=message["content"] or "",
            tool_calls=calls,
            tool_call_id=message.get("tool_call_id", ""),
        )

    @property
    def text(self) -> str:
        """Content and calls as one text, calls in the Hermes form."""
        return "\n".join(part for part in (self.content, *(call.as_text() for call in self.tool_calls)) if part)

    @property
    def identity(self) -> tuple[Any, ...]:
        """Equal for messages that say the same: clients trim what they were sent and write JSON anew."""
        calls = tuple((call.name, json.dumps(_value(call.arguments), sort_keys=True)) for call in self.tool_calls)
        return self.role, self.content.strip(), calls


def common_prefix(left: Sequence[ChatMessage], right: Sequence[ChatMessage]) -> int:
    """Number of leading messages that two conversations share."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a is not b and a.identity != b.identity), min(len(left), len(right)))


def as_observation(messages: Sequence[ChatMessage]) -> str:
    """Messages as one text to read: a single one as it stands, several with their roles."""
    if len(messages) == 1:
        return messages[0].text
    return "\n\n".join(f"[{message.role}]\n{message.text}" for message in messages)


def _value(arguments: str) -> Any:
    """Arguments as data; text that is not JSON stays text."""
    try:
        return json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return arguments
