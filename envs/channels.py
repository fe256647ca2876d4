"""Channels: how an action travels inside a model's response, as tags in the text or as a function call.

    TextChannel    <think>The door is shut.</think><action>open door 1</action>
    (verb tags)    <think>I need the author.</think><search>who wrote Hamlet</search>
    (a ToolSet)    <action>{"name": "heat", "arguments": {"degrees": 220}}</action>
    ToolChannel    <tool_call>{"name": "alfworld_step", "arguments": {"action": "open door 1"}}</tool_call>

    VerlAgentChannel   the same tags, read as verl-agent reads them

`make_channel` finds a channel by name. Reading a response never raises and takes time linear in its length.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from turngym.core.errors import SettingsError, TurngymError, did_you_mean
from turngym.core.redaction import excerpt
from turngym.core.tools import Tools, ToolSpec
from turngym.envs.dialects import DIALECTS, HERMES, find_dialect
from turngym.envs.spaces import printable
from turngym.envs.tool_calls import STYLES, THINK, CallDialect, Thoughts

VERL_AGENT = "text:verl-agent"
"""Name of the channel that reads as verl-agent does."""
_CHINESE = re.compile("[\u4e00-\u9fff]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """What was read from a response. An action with a `reason` was read although the response has not the form."""

    action: str | None = None
    thought: str | None = None
    reason: str | None = None
    """Why no action could be read, or why the response has not the form, as a sentence for the agent."""


class Channel(Protocol):
    """Reads actions from responses, and writes responses for known actions (demonstrations)."""

    @property
    def name(self) -> str: ...

    @property
    def thoughts(self) -> Thoughts:
        """How thoughts are marked."""

    @property
    def stop_text(self) -> tuple[str, ...]:
        """Strings after which a response is complete; generation may stop there, with or without the string."""

    def parse(self, response: str) -> Parsed:
        """Reads any text and never raises."""

    def format(self, action: str, thought: str | None = None) -> str:
        """The response from which `parse` reads this stripped action and thought. Raises TurngymError if none does."""

    def instructions(self, tool: Tools) -> str:
        """The part of the system message that explains how to write a response."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextChannel:
    """`<think>...</think><action>...</action>`. The thought is optional, and text around the tags is ignored.

    - The first action outside the thought counts. Generation that stops at `</action>` never gets to a second one, so
      engines with and without stop strings read the same action.
    - An action that is still open at the end of the response counts, because some engines cut the stop string off.
    - A `</think>` without its opening tag closes a thought that the chat template opened.

    With several `tags`, the tag is the verb and belongs to the action: `<search>query</search>`.

    - Search-R1's rule (`first_action`) decides which action counts, outside closed thoughts; its text may be empty.
    - In a thought that is not closed an action counts too, because generation stops there and cannot close the thought.
    """

    tags: tuple[str, ...] = ("action",)
    name: str = "text"
    thoughts: Thoughts = THINK

    @property
    def stop_text(self) -> tuple[str, ...]:
        return tuple(f"</{tag}>" for tag in self.tags)

    def parse(self, response: str) -> Parsed:
        if len(self.tags) > 1:
            return self._parse_verb(printable(response))
        thought, body, reason = self.thoughts.split(printable(response), self._begins)
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
        thought, body, reason = self.thoughts.split(response, self._begins)
        if reason is None:
            action = verb_action(body, self.tags)
            wanted = " or ".join(f"<{tag}>...</{tag}>" for tag in self.tags)
            return Parsed(action=action, thought=thought, reason=None if action else f"the response has no {wanted}")
        unclosed = response.rpartition(self.thoughts.opening)[2]
        action = verb_action(unclosed, self.tags, cut_off=False)
        if action is None:
            return Parsed(thought=thought, reason=reason)
        return Parsed(action=action, thought=unclosed.partition(action.partition(">")[0] + ">")[0].strip())

    def format(self, action: str, thought: str | None = None) -> str:
        body = action.strip() if len(self.tags) > 1 else tagged("action", action)
        return _checked(self, f"{self.thoughts.write(thought)}{self.thoughts.spoken}{body}", action, thought)

    def _begins(self, text: str) -> bool:
        return any(f"<{tag}>" in text for tag in self.tags)

    def instructions(self, tool: Tools) -> str:
        # the chat templates of other families teach how to think
        thought = "<think>your thoughts</think>\n" if self.thoughts is THINK else ""
        if len(self.tags) > 1:
            forms = "\nor\n".join(f"{thought}{template}" for template in tool.templates)
            return f"Answer each turn with one action between tags{'; think first' if thought else ''}:\n{forms}"
        example = tool.examples[0] if tool.examples else "..."
        return (
            f"Answer each turn with one action between tags{'; you may think first' if thought else ''}:\n"
            f"{thought}<action>{example}</action>\n"
            f"The action: {tool.said}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChannel:
    """A call of one of the environment's tools, written as the model's family writes it (`turngym.envs.dialects`).

    The first call outside the thought counts, well-formed or not (`TextChannel` says why). The arguments may also be a
    string that holds JSON. Of the one tool of a `ToolSpec`, arguments other than the action are ignored.

    If the tool has several tags, a call means the first of them and the others are written as text: a search is a call,
    `<answer>...</answer>` is text. Whichever comes first counts.
    """

    tool: Tools
    dialect: CallDialect = HERMES

    @property
    def name(self) -> str:
        return "tool" if self.dialect is HERMES else f"tool:{self.dialect.name}"

    @property
    def thoughts(self) -> Thoughts:
        return self.dialect.thoughts

    @property
    def stop_text(self) -> tuple[str, ...]:
        return (*self.dialect.stop_text, *(f"</{tag}>" for tag in self.tool.tags[1:]))

    def parse(self, response: str) -> Parsed:
        spoken = self.tool.tags[1:]
        thought, body, reason = self.thoughts.split(printable(response), self._begins)
        if reason is not None:
            return Parsed(thought=thought, reason=reason)
        start = self.dialect.find(body)
        # a stop string can only be missing at the end of the response, not where a call follows
        before = body if start < 0 else body[:start]
        verb = verb_action(before, self.tool.tags, cut_off=start < 0) if spoken else None
        if verb is not None and verb.startswith(tuple(f"<{tag}>" for tag in spoken)):
            return Parsed(action=verb, thought=thought)
        if start < 0:
            spoken_too = "".join(f" and no <{tag}>...</{tag}>" for tag in spoken)
            return Parsed(thought=thought, reason=f"the response has no call of {self.tool.named}{spoken_too}")
        call, action, reason = self.dialect.read(body[start:]), None, None
        try:
            if isinstance(call, str):
                raise ValueError(call)
            action = printable(self.tool.called(call.name, call.arguments))
        except ValueError as error:
            reason = str(error)
        if action is not None and spoken:
            tag, argument = self.tool.tags[0], action
            action = tagged(tag, argument)
            if first_action(action, self.tool.tags) != (tag, argument):
                (named,) = self.tool.tools[0].arguments
                action, reason = None, f'the argument "{named.name}" must not contain </{tag}>'
        return Parsed(action=action, thought=thought, reason=reason)

    def format(self, action: str, thought: str | None = None) -> str:
        action = argument = self.tool.canonical(action)
        written = self.thoughts.write(thought)
        if len(self.tool.tags) > 1:
            verb = first_action(argument, self.tool.tags)
            if verb is None or verb[0] != self.tool.tags[0]:
                return _checked(self, f"{written}{self.thoughts.spoken}{argument}", action, thought)
            argument = verb[1]
        call = self.dialect.write(*self.tool.call(argument))
        return _checked(self, f"{written}{call}", action, thought)

    def instructions(self, tool: Tools) -> str:
        call = f"Act by calling {tool.named} exactly once each turn; you may think before the call."
        spoken = " or ".join(tool.templates[1:])
        return f"{call} Instead of a call, the last turn is text: {spoken}" if spoken else call

    def _begins(self, text: str) -> bool:
        return self.dialect.find(text) >= 0 or any(f"<{tag}>" in text for tag in self.tool.tags)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerlAgentChannel:
    """Tags as verl-agent reads them: whatever a response holds, something of it is played.

    - One tag: everything is lower-cased, and the action stands between the first `<action>` and the first `</action>`.
      Without both, the last characters of the response are the action (30; in WebShop 20, `ToolSpec.tail`). The
      response has the form if it has both tags, `<think>` and `</think>`, and no Chinese character.
    - Search: the response is cut at its first `</search>`, else at its first `</answer>`. The first search counts, else
      the first answer; tags may be in any letter case. The response has the form if it has one of the two, once.

    Nothing but the end of the response ends it: verl-agent stops at no text.
    """

    tool: ToolSpec
    name: str = VERL_AGENT
    thoughts: Thoughts = THINK
    stop_text: tuple[str, ...] = ()

    def parse(self, response: str) -> Parsed:
        text = printable(response)
        thought = text.partition("<think>")[2].partition("</think>")[0].strip() or None
        if len(self.tool.tags) > 1:
            return self._parse_verb(text, thought)
        lower = text.lower()
        start, end = lower.find("<action>"), lower.find("</action>")
        if start < 0 or end < 0:
            return Parsed(
                action=lower[-self.tool.tail :], thought=thought, reason="the response has no <action>...</action>"
            )
        reason = None
        if "<think>" not in text or "</think>" not in text:
            reason = "the response has no <think>...</think>"
        elif _CHINESE.search(text):
            reason = "the response has Chinese characters"
        return Parsed(action=lower[start + len("<action>") : end].strip(), thought=thought, reason=reason)

    def _parse_verb(self, text: str, thought: str | None) -> Parsed:
        folded = fold_tags(text, self.tool.tags)
        # it is cut at tags in lower case alone
        action = next(filter(None, (first_of(cut(text, self.tool.tags), tag) for tag in self.tool.tags)), None)
        counts = [folded.count(f"<{tag}>") for tag in self.tool.tags]
        wanted = " or ".join(f"<{tag}>...</{tag}>" for tag in self.tool.tags)
        if action is None:
            return Parsed(thought=thought, reason=f"the response has no {wanted}")
        reason = f"the response has more than one {wanted}" if sum(counts) > 1 else None
        return Parsed(action=action, thought=thought, reason=reason)

    def format(self, action: str, thought: str | None = None) -> str:
        # an empty thought has the form, too
        body = action.strip() if len(self.tool.tags) > 1 else tagged("action", action)
        response = f"{THINK.write(thought or '')}{body}"
        parsed, wanted = self.parse(response), action.strip()
        if parsed.reason is not None or (parsed.action or "").casefold() != wanted.casefold():
            raise TurngymError(f"the {self.name} channel cannot carry the action {excerpt(action, 200)!r}")
        return response

    def instructions(self, tool: Tools) -> str:
        example = tool.examples[0] if tool.examples else "..."
        actions = tool.templates if len(tool.tags) > 1 else [f"<action>{example}</action>"]
        forms = "\nor\n".join(f"<think>your thoughts</think>{action}" for action in actions)
        return f"Answer each turn with a thought and one action between tags:\n{forms}"


def first_of(text: str, tag: str) -> str | None:
    """The first `<tag>...</tag>` in `text` in canonical form, whatever the letter case of its tags; None without."""
    inside = next(blocks(fold_tags(text, (tag,)), tag), None)
    return None if inside is None else tagged(tag, inside)


def fold_tags(text: str, tags: tuple[str, ...]) -> str:
    """`text` with these tags, opening and closing, in lower case."""
    return _any_case(tags).sub(lambda match: match[0].lower(), text)


@lru_cache(maxsize=16)
def _any_case(tags: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(rf"</?(?:{'|'.join(map(re.escape, tags))})>", re.IGNORECASE)


def make_channel(name: str, tool: Tools) -> Channel:
    """The channel called `name`: `text` or `tool`, or `tool:DIALECT` for another dialect (`tool:llama`).

    `text:STYLE` is for families that mark thoughts in their own way (`turngym.envs.tool_calls.STYLES`),
    `text:verl-agent` reads as that harness does, which knows no `ToolSet`. Raises TurngymError for other names.
    """
    require_channel(name)
    kind, _, dialect = name.partition(":")
    if name == VERL_AGENT:
        if not isinstance(tool, ToolSpec):
            raise TurngymError(f"channel {name!r} reads one text in lower case, no calls; valid here: text, tool")
        return VerlAgentChannel(tool=tool)
    if kind == "text":
        return TextChannel(tags=tool.tags, name=name, thoughts=STYLES.get(dialect, THINK))
    return ToolChannel(tool=tool, dialect=find_dialect(dialect) if dialect else HERMES)


def require_channel(name: str) -> None:
    """Raises SettingsError for a name that no channel has."""
    styles, dialects = (f"text:{style}" for style in STYLES), (f"tool:{dialect}" for dialect in DIALECTS)
    valid = ["text", "tool", VERL_AGENT, *styles, *dialects]
    if name not in valid:
        raise SettingsError(f"unknown channel {name!r}; channels are: {', '.join(valid)}.{did_you_mean(name, valid)}")


def split_thought(response: str, tags: Sequence[str] = ("action",)) -> tuple[str | None, str, str | None]:
    """(thought, the rest, why the rest cannot be read) of a response in either channel's usual form."""
    return THINK.split(response, lambda part: "<tool_call>" in part or any(f"<{tag}>" in part for tag in tags))


# Actions whose tag is the verb, such as `<search>query</search>`.


def tagged(tag: str, content: str) -> str:
    """The action in canonical form."""
    return f"<{tag}>{content.strip()}</{tag}>"


def with_call(text: str, name: Any, arguments: Any) -> str:
    """A response of `text` and a call of the tool `name`, as the tool channel reads and judges it.

    `arguments` are an object, or what the model wrote for one; a wrong name and wrong arguments stay visible.
    """
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    # escaped within JSON: a tag inside a call must not end it, or be taken for a thought
    call = printable(call.replace("</", "<\\/").replace("<think>", "\\u003cthink>"))
    before = f"{text.rstrip()}\n" if text.strip() else ""
    return f"{before}<tool_call>\n{call}\n</tool_call>"


def verb_action(text: str, tags: Sequence[str], *, cut_off: bool = True) -> str | None:
    """The first action in `text`, in canonical form; None if there is none.

    With `cut_off`, a last action that was never closed counts if no other does, because engines may drop the stop
    string.
    """
    action = first_action(text, tags)
    if action is None and cut_off:
        closed = (first_action(f"{text}</{tag}>", tags) for tag in tags)
        # an open tag with nothing behind it is no action: generation stopped before there was one
        action = next((candidate for candidate in closed if candidate is not None and candidate[1]), None)
    return None if action is None else tagged(*action)


def first_action(response: str, tags: Sequence[str]) -> tuple[str, str] | None:
    """(tag, stripped content) of the first closed pair of tags in the cut response; None if there is none."""
    text = cut(response, tags)
    # known beforehand, so that a long run of opening tags is walked over only once
    last = {tag: text.rfind(f"</{tag}>") for tag in tags}
    for match in _opening(tuple(tags)).finditer(text):
        tag, start = match[1], match.end()
        if start <= last[tag]:
            return tag, text[start : text.find(f"</{tag}>", start)].strip()
    return None


def cut(response: str, tags: Sequence[str]) -> str:
    """`response` up to the first closing tag of the first of `tags` that is closed at all.

    This is Search-R1's rule: cut after the first `</search>`, and only without one after the first `</answer>`.
    """
    for tag in tags:
        before, closed, _ = response.partition(f"</{tag}>")
        if closed:
            return before + closed
    return response


def blocks(text: str, tag: str) -> Iterator[str]:
    """Yields the text of every `<tag>...</tag>` as `re.findall` would, but in time linear in `text`."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    position = 0
    while (start := text.find(opening, position)) >= 0 and (end := text.find(closing, start)) >= 0:
        yield text[start + len(opening) : end]
        position = end + len(closing)


@lru_cache(maxsize=16)
def _opening(tags: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(rf"<({'|'.join(map(re.escape, tags))})>")


def _checked(channel: Channel, response: str, action: str, thought: str | None) -> str:
    parsed = channel.parse(response)
    if parsed.action != action.strip() or parsed.thought != (None if thought is None else thought.strip()):
        raise TurngymError(
            f"the {channel.name} channel cannot carry the action {excerpt(action, 200)!r} with the thought "
            f"{None if thought is None else excerpt(thought, 200)!r}: actions must not be empty, and "
            "neither may contain the channel's tags or lone surrogates"
        )
    return response
