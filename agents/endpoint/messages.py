"""A conversation as chat messages: what is sent to an endpoint, and what the environment reads in its answers."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from turngym.agents.endpoint.answer import Answer, ToolCall
from turngym.envs.channels import Channel
from turngym.envs.dialects.thoughts import THINK
from turngym.envs.spaces import printable

SKIPPED = "Not carried out: one call is made each turn, and the first of several is the one that counts."
"""The result of every further call of a turn: the API asks for one per call."""
INVALID = "invalid_arguments"
"""Arguments that are no JSON object are sent back under this name: many servers refuse a history that holds others."""


@dataclass(slots=True)
class Transcript:
    """The messages of one conversation, in the form of the API."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    observed: int = 0
    """Observations shown so far."""
    open_calls: tuple[str, ...] = ()
    """Ids of the last answer's calls, which wait for results."""

    def observe(self, system: str, observation: str) -> None:
        """Show an observation: the result of the call that was made, else a message of the user."""
        if not self.messages and system:
            self.messages.append({"role": "system", "content": printable(system)})
        self.observed += 1
        if not self.open_calls:
            self.messages.append({"role": "user", "content": printable(observation)})
            return
        for place, name in enumerate(self.open_calls):
            content = SKIPPED if place else printable(observation)
            self.messages.append({"role": "tool", "tool_call_id": name, "content": content})
        self.open_calls = ()

    def forget(self) -> None:
        """Begin anew, as if nothing had been said."""
        self.messages, self.open_calls = [], ()

    def answer(self, answer: Answer, text: str, *, reasoning: bool = False) -> None:
        """Add what the model said; `text` is its content, `reasoning` says whether its thoughts are sent back."""
        message: dict[str, Any] = {"role": "assistant", "content": text if text or not answer.calls else None}
        if answer.calls:
            message["tool_calls"] = [_sent_back(call) for call in answer.calls]
        if reasoning and answer.reasoning:
            message[answer.reasoning_field] = answer.reasoning
        self.open_calls = tuple(call.id for call in answer.calls)
        self.messages.append(message)


def content_of(answer: Answer, channel: Channel) -> str:
    """The text of an answer, with the stop string that the endpoint cut off where it was one that ended the answer."""
    text = printable(answer.content)
    if answer.finish != "stop" or answer.calls or any(stop in text for stop in channel.stop_text):
        return text
    before = channel.parse(text)
    for stop in channel.stop_text:
        opened = stop.replace("</", "<", 1) in text and answer.stopped_at in (None, stop)
        # an action that stands open is closed; nothing else may change what is read
        if opened and before.action is not None and channel.parse(text + stop) == before:
            return text + stop
    return text


def response_of(answer: Answer, text: str) -> str:
    """What the environment reads: thought, `text`, and the first call as the tool channel has it."""
    thought = None if answer.reasoning is None else _untagged(printable(answer.reasoning))
    if not answer.calls:
        return THINK.write(thought) + text
    said = f"{text.rstrip()}\n" if text.strip() else ""
    return f"{THINK.write(thought)}{said}<tool_call>\n{_call_text(answer.calls[0])}\n</tool_call>"


def _call_text(call: ToolCall) -> str:
    """Name and arguments as they came. Arguments that are JSON stand as JSON; others stay the text that they are."""
    read = _json(call.arguments)
    arguments = call.arguments if read is None else read
    text = json.dumps({"name": call.name, "arguments": arguments}, ensure_ascii=False)
    # the same JSON: no tag inside a call may end it, or be taken for a thought
    return printable(text.replace("</", "<\\/").replace("<think>", "\\u003cthink>"))


def _sent_back(call: ToolCall) -> dict[str, Any]:
    read = _json(call.arguments)
    if isinstance(read, dict):
        arguments = call.arguments if isinstance(call.arguments, str) else json.dumps(read, ensure_ascii=False)
    else:
        arguments = json.dumps({INVALID: call.arguments}, ensure_ascii=False)
    name = call.name if isinstance(call.name, str) else ""
    function = {"name": printable(name), "arguments": printable(arguments)}
    return {"id": printable(call.id), "type": "function", "function": function}


def _json(arguments: Any) -> Any:
    """What a text of JSON says; what is no text as it is; None where the text is no JSON."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    # a few thousand open brackets are enough for a RecursionError
    except (ValueError, RecursionError):
        return None


def _untagged(thought: str) -> str:
    """A thought that cannot end itself."""
    return thought.replace("<think>", "< think>").replace("</think>", "</ think>")
