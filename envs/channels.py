"""Channels: how an action travels inside a model's response, as tags in the text or as a function call."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Protocol

from turngym.envs.core import ToolSpec, TurngymError
from turngym.envs.spaces import printable
from turngym.envs.suggest import did_you_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """What a response says. Exactly one of `action` and `reason` is None."""

    action: str | None = None
    thought: str | None = None
    reason: str | None = None
    """Why no action could be read, as a sentence for the agent."""


class Channel(Protocol):
    """Reads actions from responses and writes responses for known actions (demonstrations)."""

    @property
    def name(self) -> str: ...

    @property
    def stop_text(self) -> tuple[str, ...]:
        """Strings after which a response is complete; generation may stop there, with or without the string."""

    def parse(self, response: str) -> Parsed:
        """Read any text; never raises."""

    def format(self, action: str, thought: str | None = None) -> str:
        """The response from which `parse` reads exactly this stripped action and thought; raises if there is none."""

    def instructions(self, tool: ToolSpec) -> str:
        """The part of the system message that explains the form of a response."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextChannel:
    """`<think>...</think><action>...</action>`; the thought is optional, text around the tags is ignored.

    The first action outside the thought counts: generation that stops at `</action>` never gets to a second one, so
    engines with and without stop strings read the same action. An action still open at the end of the response is
    accepted, because some engines cut the stop string off. A `</think>` without its opening tag closes a thought that
    the chat template opened.
    """

    name: str = "text"
    stop_text: tuple[str, ...] = ("</action>",)

    def parse(self, response: str) -> Parsed:
        thought, body, reason = split_thought(printable(response))
        if reason is not None:
            return Parsed(thought=thought, reason=reason)
        _, opened, rest = body.partition("<action>")
        if not opened:
            return Parsed(thought=thought, reason="the response has no <action>...</action>")
        action = rest.partition("</action>")[0].strip()
        if "<action>" in action:
            return Parsed(thought=thought, reason="the response has an <action> inside an <action>")
        if not action:
            return Parsed(thought=thought, reason="the action is empty")
        return Parsed(action=action, thought=thought)

    def format(self, action: str, thought: str | None = None) -> str:
        response = f"{format_thought(thought)}<action>{action.strip()}</action>"
        return _checked(self, response, action, thought)

    def instructions(self, tool: ToolSpec) -> str:
        example = tool.examples[0] if tool.examples else "..."
        return (
            "Answer each turn with one action between tags; you may think first:\n"
            f"<think>your thoughts</think>\n<action>{example}</action>\n"
            f"The action: {tool.argument_description}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChannel:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>` as Qwen and Hermes chat templates write it.

    The first call outside the thought counts, well-formed or not (see TextChannel for why). Arguments may also be a
    string that holds JSON; other arguments beside the action are ignored.
    """

    tool: ToolSpec
    name: str = "tool"
    stop_text: tuple[str, ...] = ("</tool_call>",)

    def parse(self, response: str) -> Parsed:
        thought, body, reason = split_thought(printable(response))
        if reason is not None:
            return Parsed(thought=thought, reason=reason)
        _, opened, rest = body.partition("<tool_call>")
        if not opened:
            return Parsed(thought=thought, reason=f"the response has no call of the tool {self.tool.name}")
        action, reason = self._read_call(rest.lstrip())
        return Parsed(action=action, thought=thought, reason=reason)

    def format(self, action: str, thought: str | None = None) -> str:
        call = json.dumps(
            {"name": self.tool.name, "arguments": {self.tool.argument: action.strip()}}, ensure_ascii=False
        )
        # "<\/" is "</" in JSON: a closing tag inside the action must not end the call or the generation
        call = call.replace("</", "<\\/")
        response = f"{format_thought(thought)}<tool_call>\n{call}\n</tool_call>"
        return _checked(self, response, action, thought)

    def instructions(self, tool: ToolSpec) -> str:
        return f"Act by calling the tool {tool.name} exactly once each turn; you may think before the call."

    def _read_call(self, text: str) -> tuple[str | None, str | None]:
        try:
            call, end = json.JSONDecoder().raw_decode(text)
        except (ValueError, RecursionError):
            return None, "the tool call is not valid JSON"
        tail = text[end:].lstrip()
        if tail and not tail.startswith("</tool_call>"):
            return None, "the tool call has text after its JSON"
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return None, 'the tool call must be an object with "name" and "arguments"'
        if call["name"] != self.tool.name:
            hint = did_you_mean(call["name"], [self.tool.name])
            return (
                None,
                f"there is no tool {json.dumps(call['name'][:80])}; the tool is {self.tool.name}.{hint}".rstrip("."),
            )
        return self._read_arguments(call.get("arguments"))

    def _read_arguments(self, arguments: Any) -> tuple[str | None, str | None]:
        wanted = f'"{self.tool.argument}"'
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                return None, "the arguments of the tool call are not valid JSON"
        if not isinstance(arguments, dict) or self.tool.argument not in arguments:
            return None, f"the tool call lacks the argument {wanted}"
        action = arguments[self.tool.argument]
        if not isinstance(action, str):
            return None, f"the argument {wanted} must be a string"
        action = printable(action).strip()
        return (action, None) if action else (None, f"the argument {wanted} is empty")


def make_channel(name: str, tool: ToolSpec) -> Channel:
    """The channel called `name`: `text` or `tool`."""
    if name == "text":
        return TextChannel()
    if name == "tool":
        return ToolChannel(tool=tool)
    raise TurngymError(f"unknown channel {name!r}; channels are: text, tool.{did_you_mean(name, ['text', 'tool'])}")


def split_thought(response: str) -> tuple[str | None, str, str | None]:
    """(thought, the rest, why the rest cannot be read); several thoughts are joined by a newline."""
    if "<think>" not in response and "</think>" not in response:
        return None, response, None
    thoughts: list[str] = []
    before, closed, after = response.partition("</think>")
    if closed and "<think>" not in before:
        thoughts, response = [before.strip()], after
    body: list[str] = []
    while True:
        outside, opened, rest = response.partition("<think>")
        body.append(outside)
        if not opened:
            return "\n".join(thoughts), "".join(body), None
        thought, closed, response = rest.partition("</think>")
        thoughts.append(thought.strip())
        if not closed:
            if any(_has_call(part) for part in body):  # an action came first; what follows it does not matter
                return "\n".join(thoughts), "".join(body), None
            return "\n".join(thoughts), "".join(body), "the thought is not closed with </think>"


def format_thought(thought: str | None) -> str:
    """The thought as Qwen-style templates write it, or nothing."""
    return "" if thought is None else f"<think>\n{thought.strip()}\n</think>\n\n"


def _has_call(text: str) -> bool:
    return "<action>" in text or "<tool_call>" in text


def _checked(channel: Channel, response: str, action: str, thought: str | None) -> str:
    parsed = channel.parse(response)
    if parsed.action != action.strip() or parsed.thought != (None if thought is None else thought.strip()):
        raise TurngymError(
            f"the {channel.name} channel cannot carry the action {action[:200]!r} with the thought "
            f"{None if thought is None else thought[:200]!r}: actions must not be empty, and neither may contain the "
            f"channel's tags or lone surrogates"
        )
    return response
