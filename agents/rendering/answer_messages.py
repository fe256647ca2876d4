"""How a response becomes a message of the chat template: as plain content, or as thought, content and tool call."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from turngym.envs.tool_calls import CALL_ID, THINK, Bare, CallDialect, ParsedCall, Thoughts

Message = dict[str, Any]
THOUGHT_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Message keys under which templates look for a thought."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentAnswers:
    """The response is the content of the message, unchanged."""

    prefill: str = ""
    """Text that the generation prompt has already put into the message."""
    structured: ClassVar = False
    """The template writes calls and thoughts itself, so that its output depends on the response."""

    def answer(self, text: str) -> Message:
        return {"role": "assistant", "content": self.prefill + text}

    def observation(self, text: str, role: str, previous: Message | None) -> Message:
        """The message that follows `previous`."""
        return {"role": role, "content": text}


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredAnswers:
    """The response is split into thought, content and call, for templates that show tool results only after a call.

    The template may write these parts differently from what was sampled (other spaces, other quotes). The renderer
    compares the two and opens a new segment if they differ.
    """

    dialect: CallDialect | None
    thoughts: Thoughts = THINK
    opened: bool = False
    """Whether the generation prompt opens a thought, so that a response begins inside it."""
    special: Sequence[str] = ()
    """Special tokens of the tokenizer, which templates may refuse inside content."""
    arguments_as_text: bool = False
    """Whether the template expects arguments as JSON text."""
    structured: ClassVar = True

    def answer(self, text: str) -> Message:
        if self.opened:
            text = self.thoughts.opening + text
        thought, body, _ = self.thoughts.split(text, lambda part: False)
        start = -1 if self.dialect is None else self.dialect.find(body)
        call = self.dialect.read(body[start:]) if self.dialect is not None and start >= 0 else None
        content = body.removeprefix(self.thoughts.gap).removeprefix(self.thoughts.spoken)
        message: Message = {"role": "assistant", "content": self._plain(content)}
        if isinstance(call, ParsedCall) and isinstance(call.name, str):
            spoken, tags = body[:start].removeprefix(self.thoughts.gap), self.thoughts
            if tags.aside and tags.aside in spoken:
                spoken = spoken.replace(tags.aside, "").replace(tags.closing + tags.gap, "")
            return message_with_calls(self._plain(spoken).strip(), thought, [self._call(call)], tags)
        return message | dict.fromkeys(THOUGHT_KEYS if thought else (), thought)

    def observation(self, text: str, role: str, previous: Message | None) -> Message:
        calls = (previous or {}).get("tool_calls")
        if role != "tool" or not calls:
            # a result without a call is refused by most of these templates
            return {"role": "user", "content": text}
        return {"role": "tool", "content": text, "name": calls[0]["function"]["name"], "tool_call_id": calls[0]["id"]}

    def _call(self, call: ParsedCall) -> dict[str, Any]:
        arguments = call.arguments
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                arguments = {}
        arguments = arguments if isinstance(arguments, dict) else {}
        arguments = {name: value.typed if isinstance(value, Bare) else value for name, value in arguments.items()}
        shown_arguments = json.dumps(arguments, ensure_ascii=False) if self.arguments_as_text else arguments
        function = {"name": call.name, "arguments": shown_arguments}
        return {"type": "function", "id": call.id or CALL_ID, "function": function}

    def _plain(self, text: str) -> str:
        for token in self.special:
            text = text.replace(token, "")
        return text


def message_with_calls(content: str, thought: str | None, calls: Sequence[Any], tags: Thoughts) -> Message:
    if tags.aside and content and thought:
        # GPT-OSS's template takes either beside a call, and writes both as a thought
        content, thought = "", f"{thought}\n{content}"
    message = {"role": "assistant", "content": content, "tool_calls": list(calls)}
    return message | dict.fromkeys(THOUGHT_KEYS if thought else (), thought)


AnswerForm = ContentAnswers | StructuredAnswers
"""How a response of the model is passed to its chat template."""
