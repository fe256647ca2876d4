"""Channels: how an action travels inside a model's response, as tags in the text or as a function call."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from turngym.envs.core import ToolSpec, TurngymError
from turngym.envs.spaces import printable
from turngym.envs.suggest import did_you_mean
from turngym.envs.tags import first_action, tagged


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

    Given several `tags`, the tag is the verb and stays with the action: `<search>query</search>`. Which one counts is
    Search-R1's rule (`tags.first_action`), outside closed thoughts; what stands between the tags may be empty. In a
    thought that is not closed an action counts too: generation stops there, so the thought cannot be closed any more.
    """

    tags: tuple[str, ...] = ("action",)
    name: str = "text"

    @property
    def stop_text(self) -> tuple[str, ...]:
        return tuple(f"</{tag}>" for tag in self.tags)

    def parse(self, response: str) -> Parsed:
        if len(self.tags) > 1:
            return self._parse_verb(printable(response))
        thought, body, reason = split_thought(printable(response), self.tags)
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

    def _parse_verb(self, response: str) -> Parsed:
        thought, body, reason = split_thought(response, self.tags)
        if reason is None:
            action = verb_action(body, self.tags)
            wanted = " or ".join(f"<{tag}>...</{tag}>" for tag in self.tags)
            return Parsed(action=action, thought=thought, reason=None if action else f"the response has no {wanted}")
        unclosed = response.rpartition("<think>")[2]
        action = verb_action(unclosed, self.tags, cut_off=False)
        if action is None:
            return Parsed(thought=thought, reason=reason)
        return Parsed(action=action, thought=unclosed.partition(action.partition(">")[0] + ">")[0].strip())

    def format(self, action: str, thought: str | None = None) -> str:
        body = action.strip() if len(self.tags) > 1 else tagged("action", action)
        return _checked(self, f"{format_thought(thought)}{body}", action, thought)

    def instructions(self, tool: ToolSpec) -> str:
        if len(self.tags) > 1:
            forms = "\nor\n".join(f"<think>your thoughts</think>\n{template}" for template in tool.templates)
            return f"Answer each turn with one action between tags; think first:\n{forms}"
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

    Where the tool has several tags, a call means the first of them and the others are written as text: a search is a
    call, `<answer>...</answer>` is not. What comes first counts.
    """

    tool: ToolSpec
    name: str = "tool"

    @property
    def stop_text(self) -> tuple[str, ...]:
        return ("</tool_call>", *(f"</{tag}>" for tag in self.tool.tags[1:]))

    def parse(self, response: str) -> Parsed:
        spoken = self.tool.tags[1:]
        thought, body, reason = split_thought(printable(response), self.tool.tags)
        if reason is not None:
            return Parsed(thought=thought, reason=reason)
        before, opened, rest = body.partition("<tool_call>")
        # a stop string can only be missing at the end of the response, not where a call follows
        said = verb_action(before, self.tool.tags, cut_off=not opened) if spoken else None
        if said is not None and said.startswith(tuple(f"<{tag}>" for tag in spoken)):
            return Parsed(action=said, thought=thought)
        if not opened:
            spoken_too = "".join(f" and no <{tag}>...</{tag}>" for tag in spoken)
            return Parsed(thought=thought, reason=f"the response has no call of the tool {self.tool.name}{spoken_too}")
        action, reason = self._read_call(rest.lstrip(), may_be_empty=bool(spoken))
        if action is not None and spoken:
            return self._with_verb(action, thought)
        return Parsed(action=action, thought=thought, reason=reason)

    def format(self, action: str, thought: str | None = None) -> str:
        argument = action.strip()
        if len(self.tool.tags) > 1:
            verb = first_action(argument, self.tool.tags)
            if verb is None or verb[0] != self.tool.tags[0]:
                return _checked(self, f"{format_thought(thought)}{argument}", action, thought)
            argument = verb[1]
        call = json.dumps({"name": self.tool.name, "arguments": {self.tool.argument: argument}}, ensure_ascii=False)
        # "<\/" is "</" in JSON: a closing tag inside the action must not end the call or the generation
        call = call.replace("</", "<\\/")
        response = f"{format_thought(thought)}<tool_call>\n{call}\n</tool_call>"
        return _checked(self, response, action, thought)

    def instructions(self, tool: ToolSpec) -> str:
        call = f"Act by calling the tool {tool.name} exactly once each turn; you may think before the call."
        spoken = " or ".join(tool.templates[1:])
        return f"{call} Instead of a call, the last turn is text: {spoken}" if spoken else call

    def _with_verb(self, argument: str, thought: str | None) -> Parsed:
        tag = self.tool.tags[0]
        action = tagged(tag, argument)
        if first_action(action, self.tool.tags) != (tag, argument):
            return Parsed(thought=thought, reason=f'the argument "{self.tool.argument}" must not contain </{tag}>')
        return Parsed(action=action, thought=thought)

    def _read_call(self, text: str, *, may_be_empty: bool) -> tuple[str | None, str | None]:
        try:
            # no search for </tool_call>, which may stand inside a JSON string
            call, end = json.JSONDecoder().raw_decode(text)
        # a few thousand open brackets are enough for a RecursionError
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
                # the guard adds the full stop
                f"there is no tool {json.dumps(call['name'][:80])}; the tool is {self.tool.name}.{hint}".rstrip("."),
            )
        return self._read_arguments(call.get("arguments"), may_be_empty)

    def _read_arguments(self, arguments: Any, may_be_empty: bool) -> tuple[str | None, str | None]:
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
        return (action, None) if action or may_be_empty else (None, f"the argument {wanted} is empty")


def make_channel(name: str, tool: ToolSpec) -> Channel:
    """The channel called `name`: `text` or `tool`."""
    if name == "text":
        return TextChannel(tags=tool.tags)
    if name == "tool":
        return ToolChannel(tool=tool)
    raise TurngymError(f"unknown channel {name!r}; channels are: text, tool.{did_you_mean(name, ['text', 'tool'])}")


def verb_action(text: str, tags: Sequence[str], *, cut_off: bool = True) -> str | None:
    """The action in `text` where the tag is the verb, in canonical form; None if there is none.

    With `cut_off`, a last action that was never closed counts if no other does: engines may drop the stop string.
    """
    found = first_action(text, tags)
    if found is None and cut_off:
        closed = (first_action(f"{text}</{tag}>", tags) for tag in tags)
        # an open tag with nothing behind it is no action: generation stopped before there was one
        found = next((action for action in closed if action is not None and action[1]), None)
    return None if found is None else tagged(*found)


def split_thought(response: str, tags: Sequence[str] = ("action",)) -> tuple[str | None, str, str | None]:
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
            if any(_has_call(part, tags) for part in body):  # an action came first; what follows it does not matter
                return "\n".join(thoughts), "".join(body), None
            return "\n".join(thoughts), "".join(body), "the thought is not closed with </think>"


def format_thought(thought: str | None) -> str:
    """The thought as Qwen-style templates write it, or nothing."""
    return "" if thought is None else f"<think>\n{thought.strip()}\n</think>\n\n"


def _has_call(text: str, tags: Sequence[str]) -> bool:
    return "<tool_call>" in text or any(f"<{tag}>" in text for tag in tags)


def _checked(channel: Channel, response: str, action: str, thought: str | None) -> str:
    parsed = channel.parse(response)
    if parsed.action != action.strip() or parsed.thought != (None if thought is None else thought.strip()):
        raise TurngymError(
            f"the {channel.name} channel cannot carry the action {action[:200]!r} with the thought "
            f"{None if thought is None else thought[:200]!r}: actions must not be empty, and neither may contain the "
            f"channel's tags or lone surrogates"
        )
    return response
