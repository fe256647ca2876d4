"""What hosted families demand of a conversation, as they document it, enforced by a server on this machine.

Each `Family` answers in its own form (`message`) and refuses what it refuses (`rules`), in its own words and status.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from openai_fake import Body, FakeOpenAI, Fault, error

Rule = Callable[[Body], Fault | None]


def refuse(message: str, status: int = 400, **more: Any) -> Fault:
    return Fault(status, {"error": {"message": message, "type": "invalid_request_error", **more}})


def assistants(body: Body) -> list[tuple[int, Body]]:
    return [(place, m) for place, m in enumerate(body["messages"]) if m["role"] == "assistant"]


def answered_calls(body: Body) -> Fault | None:
    """OpenAI and most others: every call has its result right behind it, and nothing else stands between."""
    messages = body["messages"]
    for place, message in assistants(body):
        wanted = [call["id"] for call in message.get("tool_calls") or ()]
        behind = messages[place + 1 : place + 1 + len(wanted)]
        answered = [message.get("tool_call_id") for message in behind if message["role"] == "tool"]
        if sorted(wanted) != sorted(answered):
            return refuse("An assistant message with 'tool_calls' must be followed by tool messages for each call.")
    return None


def named_calls(body: Body) -> Fault | None:
    """OpenAI, Anthropic: names of at most 64 letters, digits, underscores and hyphens."""
    for place, message in assistants(body):
        for call in message.get("tool_calls") or ():
            if not re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", call["function"]["name"]):
                return refuse("string does not match pattern", param=f"messages[{place}].tool_calls[0].function.name")
    return None


def signed_calls(body: Body) -> Fault | None:
    """Gemini 3: the first call of each step since the user's last text carries its signature."""
    for place, message in assistants(body):
        for call in (message.get("tool_calls") or ())[:1]:
            later = any(m["role"] == "user" for m in body["messages"][place:])
            if not later and not call.get("extra_content", {}).get("google", {}).get("thought_signature"):
                text = f"Function call is missing a thought_signature in functionCall parts, position {place}."
                return Fault(400, raw=json.dumps([error(text)]).encode())
    return None


def reasoned_calls(words: str) -> Rule:
    """DeepSeek, Kimi: the reasoning of every turn with calls, an empty one included."""

    def rule(body: Body) -> Fault | None:
        for place, message in assistants(body):
            if message.get("tool_calls") and "reasoning_content" not in message:
                return refuse(words.format(place), code="invalid_request_error")
        return None

    return rule


def detailed_calls(field: str) -> Rule:
    """OpenRouter, MiniMax, Anthropic behind LiteLLM: blocks of reasoning, signed, go back as they came."""

    def rule(body: Body) -> Fault | None:
        for number, (_, message) in enumerate(assistants(body)):
            if message.get("tool_calls") and message.get(field) != [{"type": "x", "signature": f"s{number}"}]:
                return refuse("messages: Expected `thinking`, but found `tool_use`. Blocks must not be changed.")
        return None

    return rule


def known_fields(*names: str, words: str) -> Rule:
    """Groq, Mistral: a field of a message that is not theirs is an error."""

    def rule(body: Body) -> Fault | None:
        for place, message in enumerate(body["messages"]):
            for name in message:
                if name not in ("role", "content", "tool_calls", "tool_call_id", "name", *names):
                    return refuse(words.format(place=place, name=name), 422)
        return None

    return rule


def never_empty(words: str) -> Rule:
    """Anthropic, Bedrock, Mistral, Moonshot: a turn of the assistant has a text or calls."""

    def rule(body: Body) -> Fault | None:
        for place, message in assistants(body):
            if not message["content"] and not message.get("tool_calls"):
                return refuse(words.format(place))
        return None

    return rule


def mistral_order(body: Body) -> Fault | None:
    """Mistral: after results comes the assistant; ids are nine letters and digits."""
    roles = [m["role"] for m in body["messages"]]
    if ("tool", "user") in pairwise(roles):
        words = {"message": "Unexpected role 'user' after role 'tool'", "type": "invalid_request_message_order"}
        return Fault(400, {"object": "error", **words, "param": None, "code": "3230"})
    for _, message in assistants(body):
        for call in message.get("tool_calls") or ():
            if not re.fullmatch(r"[a-zA-Z0-9]{9}", call["id"]):
                text = f"Tool call id was {call['id']} but must be a-z, A-Z, 0-9, with a length of 9."
                return Fault(400, {"object": "error", "message": text, "type": "invalid_request_error", "code": "3280"})
    return None


def call(body: Body, number: int, **more: Any) -> Body:
    name = body["tools"][0]["function"]["name"]
    function = {"name": name, "arguments": f'{{"action": "open door {number + 1}"}}'}
    return {"id": f"call{number:05}", "type": "function", "function": function, **more}


@dataclass(frozen=True)
class Family:
    """A hosted family. `said(body, n)` is the message of its n-th turn."""

    said: Callable[[Body, int], Body]
    rules: Sequence[Rule] = (answered_calls, named_calls)
    reasons: bool = False
    """Whether it refuses a conversation with calls that lacks the reasoning."""

    def fake(self) -> FakeOpenAI:
        """Its server. The model opens one door a turn, but says nothing at all in its second turn."""

        def message(body: Body) -> Body:
            number = len(assistants(body)) if "connection" not in str(body["messages"][0]["content"]) else 0
            said = {"role": "assistant", "content": "", "tool_calls": None} if number == 1 else self.said(body, number)
            if "tools" not in body and number != 1:
                said = {"role": "assistant", "content": f"<action>open door {number + (number == 0)}"}
            return said

        def fault(number: int, body: Body) -> Fault | None:
            return next((refusal for rule in self.rules if (refusal := rule(body)) is not None), None)

        return FakeOpenAI(message=message, fault=fault)


def with_call(**more: Any) -> Callable[[Body, int], Body]:
    """Turns that are one call, with further fields."""

    def said(body: Body, number: int) -> Body:
        calls = [call(body, max(number - 1, 0))] if "tools" in body else None
        return {"role": "assistant", "content": None, "tool_calls": calls, **more}

    return said


def renamed(said: Body) -> Body:
    """A message with ids as a UUID has them."""
    calls = said["tool_calls"] and [{**call, "id": f"call-{call['id']}-0f0f-0f0f"} for call in said["tool_calls"]]
    return {**said, "tool_calls": calls}


def signed(body: Body, number: int) -> Body:
    google = {"google": {"thought_signature": f"sig{number}"}}
    calls = [call(body, max(number - 1, 0), extra_content=google)] if "tools" in body else None
    return {"role": "assistant", "content": None, "tool_calls": calls}


def thinking(body: Body, number: int) -> Body:
    """DeepSeek leaves a turn without a thought now and then; the field stays."""
    return with_call(content="", reasoning_content="" if number == 2 else "hm")(body, number)


def detailed(field: str) -> Callable[[Body, int], Body]:
    return lambda body, n: with_call(**{field: [{"type": "x", "signature": f"s{n}"}], "reasoning": "hm"})(body, n)


DEEPSEEK = "Missing `reasoning_content` field in the assistant message at message index {}."
KIMI = "thinking is enabled but reasoning_content is missing in assistant tool call message at index {}"
COMMON = (answered_calls, named_calls)
FAMILIES = {
    "openai": Family(with_call(refusal=None, annotations=[]), COMMON),
    "gemini": Family(signed, (*COMMON, signed_calls)),
    "deepseek": Family(thinking, (*COMMON, reasoned_calls(DEEPSEEK)), True),
    "kimi": Family(
        thinking,
        (*COMMON, reasoned_calls(KIMI), never_empty("message {} with role 'assistant' is empty")),
        True,
    ),
    "minimax": Family(detailed("reasoning_details"), (*COMMON, detailed_calls("reasoning_details"))),
    "openrouter": Family(detailed("reasoning_details"), (*COMMON, detailed_calls("reasoning_details"))),
    "litellm-anthropic": Family(
        detailed("thinking_blocks"),
        (*COMMON, detailed_calls("thinking_blocks"), never_empty("messages.{}: text content blocks must be non-empty")),
    ),
    "mistral": Family(
        with_call(),
        (
            *COMMON,
            mistral_order,
            known_fields("prefix", words="messages.{place}.{name}: Extra inputs are not permitted"),
            never_empty("Assistant message must have either content or tool_calls, but not none."),
        ),
    ),
    # it refuses its own ids, with the one status that it has
    "mlx": Family(
        lambda body, number: renamed(with_call()(body, number)),
        (*COMMON, lambda body: mistral_order(body) and refuse("Tool call IDs should have length 9!", 404)),
    ),
    "groq": Family(
        with_call(reasoning="hm"),
        (*COMMON, known_fields(words="'messages.{place}' : for 'role:assistant' property '{name}' is unsupported")),
    ),
    # it refuses what it sent itself
    "groq-compound": Family(
        with_call(executed_tools=[{"index": 0}]),
        (*COMMON, known_fields(words="'messages.{place}' : for 'role:assistant' property '{name}' is unsupported")),
    ),
    "bedrock": Family(
        with_call(), (*COMMON, never_empty("The text field in the ContentBlock at messages.{} is blank"))
    ),
}
