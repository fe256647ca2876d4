"""Parses a model's answer into text and tool calls, incrementally: the same result in one piece or id by id."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from turngym.agents.proxy.conversation.messages import ChatMessage, ToolCall
from turngym.agents.proxy.conversation.tools import CLOSE, OPEN, read_call

THINK, THOUGHT = "<think>", "</think>"
UNKNOWN = "\ufffd"
"""What a decoder writes for bytes that are no character, or not yet."""
LONGEST = 8
"""Most ids that are held back for an incomplete character: four of one byte each, and as many that are no text."""

Delta = str | ToolCall
"""A piece of the answer: text, or one complete tool call."""


class IncrementalDecoder:
    """Decodes ids that come one by one; a character is given out only when all its bytes are there.

    `decode` reads a few ids at a time, so an answer costs time in proportion to its length.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._emitted: list[int] = []
        """The last ids whose text was given: what a tokenizer does at the seam must not show."""
        self._pending: list[int] = []
        self._parts: list[str] = []

    @property
    def text(self) -> str:
        """All that was given so far."""
        return "".join(self._parts)

    def feed(self, token: int) -> str:
        """The text that `token` completes."""
        self._pending.append(token)
        return self._emit(patient=len(self._pending) < LONGEST)

    def end(self) -> str:
        """The text that was held back."""
        return self._emit(patient=False) if self._pending else ""

    def _emit(self, *, patient: bool) -> str:
        before = self._decode(self._emitted) if self._emitted else ""
        text = self._decode([*self._emitted, *self._pending])[len(before) :]
        if patient and (not text or text.endswith(UNKNOWN)):
            return ""
        self._emitted, self._pending = self._pending, []
        self._parts.append(text)
        return text


def text_of(ids: Sequence[int], decode: Callable[[list[int]], str]) -> str:
    """The text of `ids`, as `IncrementalDecoder` gives it."""
    whole = decode(list(ids))
    if UNKNOWN not in whole:
        return whole
    # Some decoders spoil a whole run for one bad byte; what was streamed before it came must stay true.
    decoder = IncrementalDecoder(decode)
    return "".join([*map(decoder.feed, ids), decoder.end()])


class AnswerReader:
    """Parses a model's text into text and tool calls for the client, however the text is cut into pieces.

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
        # longest first: of alternatives a regular expression takes the first that fits
        controls = sorted(control, key=len, reverse=True)
        self._stops, self._tools, self._salt = tuple(stops), tools, salt
        self._control = re.compile("|".join(map(re.escape, controls))) if controls else None
        self._prefixes = _prefixes([*stops, *controls])
        self._raw, self._stopped = "", False
        self._open_tag = THINK if thinking else ""
        """The tag that is open: `<think>`, `<tool_call>`, or none."""
        self._rest = self._space = ""
        self._calls = 0

    def feed(self, text: str) -> list[Delta]:
        """The deltas that no later text can change."""
        return self._split(self._clean(text, last=False), last=False)

    def end(self) -> list[Delta]:
        """The deltas that were held back until the end of the answer."""
        return self._split(self._clean("", last=True), last=True)

    def _clean(self, text: str, *, last: bool) -> str:
        """`text` without control tokens, up to a stop text; what may become either is held back."""
        if self._stopped:
            return ""
        raw = self._raw + text
        # the first to be complete, not the first to begin: what was sampled after it is not the answer
        ends = [(place + len(stop), place) for stop in self._stops if (place := raw.find(stop)) >= 0]
        self._stopped = bool(ends)
        cut = min(ends)[1] if ends else len(raw) if last else len(raw) - _partial_suffix(raw, self._prefixes)
        found = [] if self._control is None else list(self._control.finditer(raw))
        if not self._stopped and not last:
            # a control token across the cut would be sent in halves, and not be recognized
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
        if last and self._open_tag == OPEN:
            self._close(self._rest, "", deltas)  # cut at a stop text, or at the limit
        elif last:
            self._emit_text(self._rest, deltas)
        elif self._open_tag != OPEN:
            keep = len(self._rest) - _partial_suffix(self._rest, TAGS[self._open_tag][1])
            self._emit_text(self._rest[:keep], deltas)
            self._rest = self._rest[keep:]
        if last and self._space and not self._calls:
            deltas.append(self._space)
        return deltas

    def _step(self, deltas: list[Delta]) -> bool:
        """Consume the text up to the next tag that is valid here; whether there is one."""
        found = [(place, tag) for tag in TAGS[self._open_tag][0] if (place := self._rest.find(tag)) >= 0]
        if not found:
            return False
        place, tag = min(found)
        before, self._rest = self._rest[:place], self._rest[place + len(tag) :]
        if tag == CLOSE:
            self._close(before, tag, deltas)
        elif tag == OPEN:
            self._emit_text(before, deltas)
        else:
            self._emit_text(before + tag, deltas)
        self._open_tag = tag if tag in (THINK, OPEN) else ""
        return True

    def _close(self, inside: str, tag: str, deltas: list[Delta]) -> None:
        call = read_call(inside, f"{self._salt}/{self._calls}")
        if call is None:
            self._emit_text(OPEN + inside + tag, deltas)
        else:
            self._calls += 1
            deltas.append(call)

    def _emit_text(self, text: str, deltas: list[Delta]) -> None:
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


def _prefixes(texts: Iterable[str]) -> frozenset[str]:
    """All proper prefixes of `texts`."""
    return frozenset(text[:size] for text in texts for size in range(1, len(text)))


def _partial_suffix(text: str, starts: frozenset[str]) -> int:
    """Length of the longest suffix of `text` that is in `starts`."""
    longest = min(len(text), max(map(len, starts), default=0))
    return next((size for size in range(longest, 0, -1) if text[-size:] in starts), 0)


TAGS = {
    "": ((THINK, OPEN), _prefixes((THINK, OPEN))),
    THINK: ((THOUGHT,), _prefixes((THOUGHT,))),
    OPEN: ((CLOSE,), _prefixes((CLOSE,))),
}
"""By the tag that is open: the tags that mean something, and their beginnings."""
