"""What a client gets of an answer, read as it comes: the same in one piece or id by id."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from turngym.agents.proxy.conversation.messages import ChatMessage, ToolCall
from turngym.agents.proxy.conversation.tools import CLOSE, OPEN, read_call

THINK, THOUGHT = "<think>", "</think>"
UNKNOWN = "\ufffd"
"""What a decoder writes for bytes that are no character, or not yet."""
LONGEST = 8
"""Ids that may wait for the rest of a character: four bytes, one each, and as many again that are none."""

Delta = str | ToolCall
"""What is new: text, or a call that is complete."""


class GrowingText:
    """The text of ids that come one by one, never with half a character at its end.

    `decode` reads a few ids at a time, so an answer costs time in proportion to its length.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._shown: list[int] = []
        """The last ids whose text was given: what a tokenizer does at the seam must not show."""
        self._waiting: list[int] = []
        self._parts: list[str] = []

    @property
    def text(self) -> str:
        """All that was given so far."""
        return "".join(self._parts)

    def feed(self, token: int) -> str:
        """What `token` adds."""
        self._waiting.append(token)
        return self._give(patient=len(self._waiting) < LONGEST)

    def end(self) -> str:
        """What was held back."""
        return self._give(patient=False) if self._waiting else ""

    def _give(self, *, patient: bool) -> str:
        before = self._decode(self._shown) if self._shown else ""
        text = self._decode([*self._shown, *self._waiting])[len(before) :]
        if patient and (not text or text.endswith(UNKNOWN)):
            return ""
        self._shown, self._waiting = self._waiting, []
        self._parts.append(text)
        return text


def text_of(ids: Sequence[int], decode: Callable[[list[int]], str]) -> str:
    """The text of `ids`, as `GrowingText` gives it."""
    whole = decode(list(ids))
    if UNKNOWN not in whole:
        return whole
    # Some decoders spoil a whole run for one bad byte; what was streamed before it came must stay true.
    growing = GrowingText(decode)
    return "".join([*map(growing.feed, ids), growing.end()])


class AnswerReader:
    """Turns a model's text into what the client gets. Any cut of the text into pieces gives the same answer.

    The first stop text to be complete ends it. Control tokens, which a policy may sample anywhere, are left out. For a
    client with tools, well-formed calls in the form of Qwen and Hermes are taken out, and white space at the end of an
    answer with calls; a call inside a thought, or one that cannot be read, stays text.

    Args:
        control: texts of control tokens.
        salt: makes the ids of calls unique among conversations; the same salt gives the same ids.
        thinking: whether the answer begins inside a thought, because the prompt ends with `<think>`.
    """

    def __init__(
        self,
        *,
        stops: Sequence[str] = (),
        control: Iterable[str] = (),
        tools: bool = False,
        salt: str = "",
        thinking: bool = False,
    ) -> None:
        controls = sorted(control, key=len, reverse=True)
        self._stops, self._tools, self._salt = tuple(stops), tools, salt
        self._control = re.compile("|".join(map(re.escape, controls))) if controls else None
        self._starts = _starts([*stops, *controls])
        self._raw, self._stopped = "", False
        self._where = THINK if thinking else ""
        """The tag that is open: `<think>`, `<tool_call>`, or none."""
        self._rest = self._space = ""
        self._calls = 0

    def feed(self, text: str) -> list[Delta]:
        """What is certain now."""
        return self._split(self._clean(text, last=False), last=False)

    def end(self) -> list[Delta]:
        """What was held back until the answer was over."""
        return self._split(self._clean("", last=True), last=True)

    def _clean(self, text: str, *, last: bool) -> str:
        """`text` without control tokens, up to a stop text; what may become either is held back."""
        if self._stopped:
            return ""
        raw = self._raw + text
        ends = [(place + len(stop), place) for stop in self._stops if (place := raw.find(stop)) >= 0]
        self._stopped = bool(ends)
        cut = min(ends)[1] if ends else len(raw) if last else len(raw) - _held(raw, self._starts)
        found = [] if self._control is None else list(self._control.finditer(raw))
        if not self._stopped and not last:
            cut = min([cut, *(match.start() for match in found if match.start() < cut < match.end())])
        self._raw = raw[cut:]
        return raw[:cut] if self._control is None else self._control.sub("", raw[:cut])

    def _split(self, text: str, *, last: bool) -> list[Delta]:
        if not self._tools:
            return [text] if text else []
        self._rest += text
        deltas: list[Delta] = []
        while self._step(deltas):
            pass
        if last and self._where == OPEN:
            self._close(self._rest, "", deltas)  # cut at a stop text, or at the limit
        elif last:
            self._say(self._rest, deltas)
        elif self._where != OPEN:
            keep = len(self._rest) - _held(self._rest, TAGS[self._where][1])
            self._say(self._rest[:keep], deltas)
            self._rest = self._rest[keep:]
        if last and self._space and not self._calls:
            deltas.append(self._space)
        return deltas

    def _step(self, deltas: list[Delta]) -> bool:
        """Go past the next tag that means something here; whether there is one."""
        found = [(place, tag) for tag in TAGS[self._where][0] if (place := self._rest.find(tag)) >= 0]
        if not found:
            return False
        place, tag = min(found)
        before, self._rest = self._rest[:place], self._rest[place + len(tag) :]
        if tag == CLOSE:
            self._close(before, tag, deltas)
        elif tag == OPEN:
            self._say(before, deltas)
        else:
            self._say(before + tag, deltas)
        self._where = tag if tag in (THINK, OPEN) else ""
        return True

    def _close(self, inside: str, tag: str, deltas: list[Delta]) -> None:
        call = read_call(inside, f"{self._salt}/{self._calls}")
        if call is None:
            self._say(OPEN + inside + tag, deltas)
        else:
            self._calls += 1
            deltas.append(call)

    def _say(self, text: str, deltas: list[Delta]) -> None:
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            deltas.append(shown)


def reply_of(deltas: Sequence[Delta]) -> ChatMessage:
    """The whole answer as a message."""
    text = "".join(delta for delta in deltas if isinstance(delta, str))
    calls = tuple(delta for delta in deltas if isinstance(delta, ToolCall))
    return ChatMessage(role="assistant", content=text, tool_calls=calls)


def _starts(texts: Iterable[str]) -> frozenset[str]:
    """All that one of `texts` may begin with, itself left out."""
    return frozenset(text[:size] for text in texts for size in range(1, len(text)))


def _held(text: str, starts: frozenset[str]) -> int:
    """How many letters at the end of `text` may be the beginning of more."""
    longest = min(len(text), max(map(len, starts), default=0))
    return next((size for size in range(longest, 0, -1) if text[-size:] in starts), 0)


TAGS = {
    "": ((THINK, OPEN), _starts((THINK, OPEN))),
    THINK: ((THOUGHT,), _starts((THOUGHT,))),
    OPEN: ((CLOSE,), _starts((CLOSE,))),
}
"""By the tag that is open: the tags that mean something, and their beginnings."""
