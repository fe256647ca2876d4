"""Tool calls in what a model wrote, in the form of Qwen and Hermes templates; and tools for templates without them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from turngym.agents.proxy.conversation.messages import ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def tool_text(tools: Sequence[Mapping[str, Any]]) -> str:
    """What a system message says about `tools` where the chat template says nothing."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        f"You can call these functions:\n{listed}\n"
        f'To call one, write {OPEN}\n{{"name": the function, "arguments": an object}}\n{CLOSE}'
    )


def read_call(inside: str, salt: str) -> ToolCall | None:
    """Parse the text between the tags as a call; None where it is not one. The same salt gives the same id."""
    try:
        call = json.loads(inside)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    name = f"call_{hashlib.sha256(salt.encode()).hexdigest()[:24]}"
    return ToolCall(id=name, name=call["name"], arguments=text)
