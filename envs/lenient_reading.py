"""How an agent's response is read as an action: to the letter, whatever its letter case, or in any form.

    strict     as the channel says (the default)
    folded     letter case does not count, in tags and in actions: `<Action>Go to Shelf 1</Action>`
    lenient    folded, white space and invisible characters do not count either (`turngym.envs.lookalikes`), and where
               the channel's form is missing, another one is read (tags, a JSON call), else the last line that is a
               possible action (`look`, `Action: look`, a fenced or quoted one)

`lenient` is for models that were never taught a channel. It never replaces an action that was read: one that is not
possible stays refused, however possible something else in the response may be.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal, Protocol

from turngym.core.tools import Tools
from turngym.envs.channels import Channel, Parsed, TextChannel, ToolChannel, fold_tags, tagged
from turngym.envs.dialects import DIALECTS, HERMES
from turngym.envs.lookalikes import LONGEST_COMPARED, alike, plain
from turngym.envs.spaces import printable
from turngym.envs.tool_calls import THINK

Reading = Literal["strict", "folded", "lenient"]
_MOST_LINES = 64
_LONGEST_LINE = 400
"""Lines looked at, from the end, and the most characters of one: reading stays linear in the response."""
_LABEL = re.compile(r"[^:]{0,40}\b(?:action|command)\b[^:]{0,12}:", re.IGNORECASE)
"""`Action:`, `**Action 3:**`, `My next command is:`."""
_NUMBER = re.compile(r"\d{1,3}[.)]\s+")
_TAG = re.compile(r"</?[a-z_]{1,20}>", re.IGNORECASE)
_DECORATION = " \t`*_\"'>-•.;{}"
"""What models put around an action: fences, emphasis, quotation marks, bullets, a full stop, JSON's braces."""


class ActionRules(Protocol):
    """The part of a `TextEnv` that says what is possible; `turngym.envs.base` describes it."""

    @property
    def tool(self) -> Tools: ...
    def canonical(self, action: str) -> str: ...
    def check(self, action: str) -> str | None: ...
    def admissible(self) -> tuple[str, ...] | None: ...


def refusal(env: ActionRules, action: str) -> str | None:
    """Says why a canonical action is not possible now, as a clause for the agent; None if it is possible."""
    return env.tool.refuse(action) or env.check(action)


def read_action(response: str, channel: Channel | None, env: ActionRules, reading: Reading) -> tuple[Parsed, Reading]:
    """The action in `response`, and by which of the readings, at most `reading`, it was found.

    An action that only letter case keeps from being possible is returned as the possible one; so is, leniently, one
    that only white space, invisible characters or its normal form keep from it.

    Args:
        channel: how actions are written; None for bare ones.
        reading: how much is forgiven at most.
    """
    if channel is not None:
        parsed = channel.parse(response)
    else:
        parsed = Parsed(action=response) if response.strip() else Parsed(reason="the action is empty")
    if reading == "strict" or (parsed.action is not None and _fits(env, parsed.action)):
        return parsed, "strict"
    folded = parsed if channel is None else channel.parse(_fold_tags(response, env.tool.tags))
    if folded.action is not None:
        meant = possible(env, folded.action)
        if meant is None and reading == "lenient":
            meant = _looks_possible(env, folded.action) or _in_lines(folded.action, env)
            if meant is not None:
                return replace(folded, action=meant), "lenient"
        return replace(folded, action=meant or folded.action), "folded"
    if reading == "lenient" and (action := _search(response, channel, env)) is not None:
        return replace(folded, action=action, reason=None), "lenient"
    return folded, "folded"


def possible(env: ActionRules, action: str) -> str | None:
    """The possible action that equals `action` but for letter case; None if there is none."""
    canonical = env.canonical(action)
    if _fits(env, action):
        return canonical
    # the first of several that differ in case alone
    same = {text.casefold(): text for text in reversed(env.admissible() or ())}.get(canonical.casefold())
    if same is not None and _fits(env, same):
        return same
    # what no list holds, such as a search; never lower-cased where the action is possible as it stands
    return env.canonical(action.lower()) if _fits(env, action.lower()) else None


def _looks_possible(env: ActionRules, action: str) -> str | None:
    """The one possible action that looks like `action` to a reader; None if there is none, or more than one."""
    if (meant := possible(env, action)) is not None:
        return meant
    if same := alike(action, env.admissible() or ()):
        return same[0] if len(same) == 1 and _fits(env, same[0]) else None
    # what no list holds, such as a search in full-width brackets
    return env.canonical(plain(action)) if len(action) <= LONGEST_COMPARED and _fits(env, plain(action)) else None


def _fits(env: ActionRules, action: str) -> bool:
    return bool(action.strip()) and refusal(env, env.canonical(action)) is None


def _fold_tags(response: str, tags: tuple[str, ...]) -> str:
    """`response` with the tags of channels, and those of the tool, in lower case."""
    return fold_tags(response, ("think", "action", "tool_call", *tags))


def _search(response: str, channel: Channel | None, env: ActionRules) -> str | None:
    """The action in a response from which the channel reads none: one in another form, else the last possible line."""
    text = _fold_tags(printable(response), env.tool.tags)
    forms: list[Channel] = [TextChannel(tags=env.tool.tags)]
    forms += [ToolChannel(tool=env.tool, dialect=dialect) for dialect in (HERMES, DIALECTS["json"])]
    for form in forms:
        if (action := form.parse(text).action) is not None:
            return _looks_possible(env, action) or action
    # a thought that was never closed is searched too: its response has no other text
    thoughts = THINK if channel is None else channel.thoughts
    return _in_lines(text.rpartition(thoughts.closing)[2], env)


def _in_lines(text: str, env: ActionRules) -> str | None:
    """The last line of `text` that is a possible action."""
    lines = [line for line in text.splitlines() if line.strip()]
    for line in reversed(lines[-_MOST_LINES:]):
        if len(line) <= _LONGEST_LINE:
            for candidate in _variants(line, env.tool.tags):
                if (meant := _looks_possible(env, candidate)) is not None:
                    return meant
    return None


def _variants(line: str, tags: tuple[str, ...]) -> Iterator[str]:
    """The line as it stands, without its decoration, and what follows a label in it."""
    yield line
    bare = _NUMBER.sub("", _TAG.sub("", line).strip(_DECORATION), count=1).strip(_DECORATION)
    yield bare
    label = _LABEL.match(bare)
    if label is not None:
        bare = bare[label.end() :].strip(_DECORATION)
        yield bare
    # where the tag is the verb: `Search: capital of Portugal`, `answer[Lisbon]`
    verb, mark, content = bare.partition(":") if "[" not in bare else bare.removesuffix("]").partition("[")
    if len(tags) > 1 and mark and verb.strip().lower() in tags and content.strip():
        yield tagged(verb.strip().lower(), content)
