"""A conversation as chat messages: what is sent to an endpoint, and what the environment reads in its answers.

`Transcript` holds the messages of one episode, whole; `profile` makes of them what a server takes. `response_of` is an
answer as the text that the environment reads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from turngym.agents.endpoint.answer_reader import ChatAnswer, TokenIds
from turngym.agents.endpoint.calls import AnswerCall, hides_call, json_of, marked, own_id
from turngym.agents.endpoint.completion_fields import REASONING
from turngym.agents.rendering.memory import Example
from turngym.agents.rendering.token_history import IdBuffer, TokenHistory
from turngym.core.tools import Tools
from turngym.envs.channels import Channel, first_action, with_call
from turngym.envs.dialects import HERMES
from turngym.envs.spaces import printable

SKIPPED = "Not carried out: one call is made each turn, and the first of several is the one that counts."
"""The result of all calls of a turn but the first; the API requires one result per call."""
INVALID = "invalid_arguments"
"""Arguments that are no JSON object are sent back under this name, because many servers refuse them in a history."""
TOOL_NAME, UNNAMED = re.compile(r"[a-zA-Z0-9_.-]{1,64}"), "invalid_name"
"""Names of tools that all servers accept, and the one under which a call with any other is sent back."""


@dataclass(slots=True)
class Transcript:
    """The messages of one conversation, in the form of the API."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    observed: int = 0
    """Number of observations so far."""
    open_calls: tuple[tuple[str, str], ...] = ()
    """(id, name of the tool) of the last answer's calls, which have no results yet."""
    examples: Sequence[dict[str, Any]] = ()
    """Messages that stand between the system message and the first observation."""

    def observe(self, system: str, observation: str) -> None:
        """Add an observation: as the result of the last call, else as a message of the user."""
        if not self.messages:
            self.messages += [{"role": "system", "content": printable(system)}] if system else []
            self.messages += self.examples
        self.observed += 1
        if not self.open_calls:
            self.messages.append({"role": "user", "content": printable(observation)})
            return
        for index, (call_id, name) in enumerate(self.open_calls):
            content = SKIPPED if index else printable(observation)
            self.messages.append({"role": "tool", "tool_call_id": call_id, "name": name, "content": content})
        self.open_calls = ()

    @property
    def characters(self) -> int:
        """Characters of the texts of all messages."""
        return sum(len(text) for message in self.messages if isinstance(text := message["content"], str))

    def answer(self, answer: ChatAnswer, text: str) -> None:
        """Add an answer with the content `text`, its reasoning and the fields that are not known here."""
        message: dict[str, Any] = {"role": "assistant", "content": text if text or not answer.calls else answer.blank}
        if answer.calls:
            number = len(self.messages)
            message["tool_calls"] = [_sent_back(call, own_id(number, i)) for i, call in enumerate(answer.calls)]
        message |= {name: thought for name, thought in answer.thoughts.items() if name in REASONING}
        if parts := answer.thoughts.get("content"):
            message["content"] = [*parts, *([{"type": "text", "text": text}] if text else [])]
        message |= answer.more
        self.open_calls = tuple((call["id"], call["function"]["name"]) for call in message.get("tool_calls", ()))
        self.messages.append(message)


def example_messages(examples: Iterable[Example], channel: Channel, tool: Tools) -> tuple[dict[str, Any], ...]:
    """Episodes as messages of the API; in the tool channel actions are calls, each with its result."""
    transcript = Transcript()
    for example in examples:
        for observation, response in example.turns:
            transcript.observe("", observation)
            action = channel.parse(response).action if channel.name == "tool" else None
            verb = None if action is None else first_action(action, tool.tags)
            # the last answer of a search is text in the tool channel, too
            if action is None or (verb is not None and verb[0] != tool.tags[0]):
                transcript.answer(ChatAnswer(content=response), response)
                continue
            name, arguments = tool.call(action if verb is None else verb[1])
            arguments_text = json.dumps(arguments, ensure_ascii=False)
            call = AnswerCall(id="", name=name, arguments=arguments_text)
            transcript.answer(ChatAnswer(content="", calls=(call,)), "")
        if transcript.open_calls:
            transcript.observe("", example.final)
    return tuple(transcript.messages)


def content_of(answer: ChatAnswer, channel: Channel) -> str:
    """The text of an answer, with the stop string at which it ended and which the endpoint cut off."""
    text = printable(answer.content)
    if answer.finish != "stop" or answer.calls or any(stop in text for stop in channel.stop_text):
        return text
    before = channel.parse(text)
    for stop in channel.stop_text:
        opened = stop.replace("</", "<", 1) in text and answer.stopped_at in (None, stop)
        # an open action is closed, but only if the channel then reads the same as before
        if opened and before.action is not None and channel.parse(text + stop) == before:
            return text + stop
    return text


def response_of(answer: ChatAnswer, text: str, channel: Channel) -> str:
    """The response that the environment reads in `channel`: the thought, `text`, and the first call as the tool channel
    writes it."""
    thought, thoughts = answer.reasoning, channel.thoughts
    if thought is not None:
        thought = printable(thought)
        for tag in (thoughts.opening, thoughts.closing):
            # a tag inside a thought must not end it
            thought = thought.replace(tag, f"{tag[:1]} {tag[1:]}")
    thought_text, text = thoughts.write(thought), marked(text, thoughts)
    if (call := answer.written) is not None:
        # the tool channel reads Hermes's form as it stands
        if call.dialect != HERMES.name:
            text = with_call(call.before, call.name, call.arguments)
        return thought_text + text
    if not answer.calls:
        return thought_text + text
    first_call = answer.calls[0]
    if hides_call(text):
        # what is meant as a call stands beside the text, and is the one that counts
        for tag in ("<think>", "</think>", HERMES.opening):
            text = text.replace(tag, f"{tag[:1]} {tag[1:]}")
    arguments = json_of(first_call.arguments)
    return thought_text + with_call(text, first_call.name, first_call.arguments if arguments is None else arguments)


def _sent_back(call: AnswerCall, id: str) -> dict[str, Any]:
    """The call in the history that is sent with the next request, with `id` if it has none."""
    parsed = json_of(call.arguments)
    if isinstance(parsed, dict):
        arguments = call.arguments if isinstance(call.arguments, str) else json.dumps(parsed, ensure_ascii=False)
    else:
        arguments = json.dumps({INVALID: call.arguments}, ensure_ascii=False)
    name = call.name if isinstance(call.name, str) and TOOL_NAME.fullmatch(call.name) else UNNAMED
    function = {"name": name, "arguments": printable(arguments)}
    inner = call.more.get("function", {})
    return {"id": printable(call.id) or id, "type": "function", **call.more, "function": {**inner, **function}}


def add_ids(history: TokenHistory | None, ids: TokenIds) -> TokenHistory:
    """Append the prompt and the response of a turn to `history`, and return it; None begins one.

    If the prompt begins with all ids so far, only its rest is appended. Otherwise a new segment begins: templates drop
    earlier thoughts, and an answer that is sent back as text may be tokenized differently.
    """
    history = TokenHistory() if history is None else history
    before = history.buffer.size if history.segments else 0
    if not history.segments or history.buffer.view().tolist() != ids.prompt[:before].tolist():
        history.segments.append(IdBuffer(max(256, len(ids.prompt))))
        before = 0
    history.prompt_span = history.buffer.extend(ids.prompt[before:])
    history.response_span = history.buffer.extend(ids.response)
    return history
