"""Reads the messages of a request: roles, content in parts, tool calls."""

from __future__ import annotations

import json
from typing import Any

from turngym.agents.proxy.conversation.messages import ROLES, ChatMessage, ToolCall
from turngym.agents.proxy.errors import invalid
from turngym.agents.proxy.settings import ProxySettings
from turngym.envs.suggest import did_you_mean


def read_messages(messages: Any, settings: ProxySettings) -> tuple[ChatMessage, ...]:
    """Checked messages: developers are systems, content is text. Raises ApiError naming message and field."""
    if not isinstance(messages, list) or not messages:
        raise invalid(f"messages is {shown(messages)}; it must be a list of at least one message", "messages")
    if len(messages) > settings.max_messages:
        raise invalid(f"{len(messages)} messages; at most {settings.max_messages} are read", "messages")
    return tuple(_message(message, f"messages[{place}]") for place, message in enumerate(messages))


def shown(value: Any) -> str:
    """A value of the client's, short enough for an error text."""
    text = json.dumps(value, ensure_ascii=True, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


def _message(message: Any, where: str) -> ChatMessage:
    if not isinstance(message, dict):
        raise invalid(f"{where} is {shown(message)}; it must be an object with role and content", where)
    role = message.get("role")
    if role not in ROLES:
        hint = did_you_mean(str(role), ROLES)
        raise invalid(f"{where}.role is {shown(role)}; valid: {', '.join(ROLES)}.{hint}", f"{where}.role")
    calls = _calls(message.get("tool_calls"), f"{where}.tool_calls")
    if calls and role != "assistant":
        raise invalid(f"{where} has tool calls, but its role is {role}; only the assistant calls", where)
    content = message.get("content")
    if content is None and role != "assistant":
        raise invalid(f"{where} has no content", f"{where}.content")
    call_id = message.get("tool_call_id")
    if call_id is not None and not isinstance(call_id, str):
        raise invalid(f"{where}.tool_call_id is {shown(call_id)}; it must be text", f"{where}.tool_call_id")
    return ChatMessage(
        role="system" if role == "developer" else role,
        content="" if content is None else _content(content, f"{where}.content"),
        tool_calls=calls,
        tool_call_id=call_id or "",
    )


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return _clean(content, where)
    if not isinstance(content, list):
        raise invalid(f"{where} is {shown(content)}; it must be text or a list of text parts", where)
    texts = []
    for place, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text", part.get("refusal")) if isinstance(part, dict) else part
        if kind not in (None, "text", "input_text", "output_text", "refusal") or not isinstance(text, str):
            raise invalid(f"{where}[{place}] is {shown(part)}; this policy reads text parts only", f"{where}[{place}]")
        texts.append(_clean(text, f"{where}[{place}]"))
    return "\n".join(texts)


def _clean(text: str, where: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise invalid(f"{where} has a lone surrogate at character {error.start}; it is not text", where) from None
    return text


def _calls(calls: Any, where: str) -> tuple[ToolCall, ...]:
    if calls is None:
        return ()
    if not isinstance(calls, list):
        raise invalid(f"{where} is {shown(calls)}; it must be a list of calls", where)
    return tuple(_call(call, f"{where}[{place}]") for place, call in enumerate(calls))


def _call(call: Any, where: str) -> ToolCall:
    function = call.get("function") if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    arguments = function.get("arguments", "") if isinstance(function, dict) else None
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    if not isinstance(name, str) or not name or not isinstance(arguments, str):
        raise invalid(f'{where} is {shown(call)}; it must have function: {{"name", "arguments" as JSON text}}', where)
    identity = call.get("id", "")
    return ToolCall(id=identity if isinstance(identity, str) else "", name=name, arguments=_clean(arguments, where))
