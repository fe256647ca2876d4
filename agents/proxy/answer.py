"""How sampled ids become the answer that a client gets.

1. `IncrementalDecoder`: ids that come one by one become text; a character is given out when all its bytes are there.
2. `AnswerReader`: the text becomes text and tool calls, the same in one piece or in many.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from turngym.agents.proxy.turn_records import CLOSE, OPEN, ChatMessage, ToolCall, Tools, is_tagged, tool_calls
from turngym.envs.tool_calls import THINK, CallDialect, Thoughts

REPLACEMENT = "\ufffd"
"""The character that a decoder writes for bytes that are no character, or not a complete one yet."""
MOST_HELD_BACK = 8
"""Most ids that are held back for an incomplete character: four of one byte each, and as many that are no text."""
REACH = 256
"""Characters that the beginning of a call takes at most, its head included."""
Delta = str | ToolCall
"""A piece of the answer: text, or one complete tool call."""


class IncrementalDecoder:
    """Decodes ids that come one by one; a character is given out only when all its bytes are there.

    `decode` reads a few ids at a time, so an answer costs time in proportion to its length.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._emitted: list[int] = []
        """The last ids whose text was given out. They are decoded again: a tokenizer may change text at a seam."""
        self._pending: list[int] = []
        self._parts: list[str] = []

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self._parts)

    def feed(self, token: int) -> str:
        """The text that `token` completes."""
        self._pending.append(token)
        return self._emit(patient=len(self._pending) < MOST_HELD_BACK)

    def end(self) -> str:
        """The text that was held back."""
        return self._emit(patient=False) if self._pending else ""

    def _emit(self, *, patient: bool) -> str:
        before = self._decode(self._emitted) if self._emitted else ""
        text = self._decode([*self._emitted, *self._pending])[len(before) :]
        if patient and (not text or text.endswith(REPLACEMENT)):
            return ""
        self._emitted, self._pending = self._pending, []
        self._parts.append(text)
        return text


def text_of(ids: Sequence[int], decode: Callable[[list[int]], str]) -> str:
    """The text of `ids`, as `IncrementalDecoder` gives it."""
    text = decode(list(ids))
    if REPLACEMENT not in text:
        return text
    # some decoders spoil a whole run of ids for one bad byte, but what was streamed before that byte must stay true
    decoder = IncrementalDecoder(decode)
    return "".join([*map(decoder.feed, ids), decoder.end()])


TEXT, THOUGHT, CALL, CALLS = "text", "thought", "call", "calls"
"""Where an answer is: in its text, in a thought, between the tags of a call, or in calls to its end."""


class AnswerReader:
    """Parses a model's text into text and tool calls for the client, however the text is cut into pieces.

    The first stop text to be complete ends it. Control tokens, which a policy may sample anywhere, are left out.
    Thoughts stand between `<think>` and `</think>`, whatever the family writes around them.

    For a client with tools well-formed calls are taken out, and white space at the end of an answer with calls; a call
    inside a thought, or one that cannot be read as a whole, stays text. Between `<tool_call>` and `</tool_call>` calls
    may stand anywhere, and are given out one by one. In other dialects they end an answer, which is held until it is
    over from where the first begins.

    Args:
        stops: texts that end the answer; they are left out.
        tools: the client's tools. In dialects without quotes they say which values are text.
        salt: makes the ids of calls unique among conversations; the same salt gives the same ids.
        thinking: whether the answer begins inside a thought, because the prompt ends with its opening marker.
    """

    def __init__(
        self,
        *,
        stops: Sequence[str] = (),
        control: Iterable[str],
        dialect: CallDialect | None = None,
        tools: Tools = (),
        thoughts: Thoughts = THINK,
        salt: str = "",
        thinking: bool = False,
    ) -> None:
        tagged = dialect is not None and is_tagged(dialect)
        self._dialect, self._tools, self._salt = dialect, tools, salt
        self._whole = None if tagged else dialect
        """The dialect whose calls end an answer."""
        # what tells a thought or an answer apart is taken out, the words beside its control tokens included
        texts = {thoughts.opening: ("<think>", THOUGHT), **dict.fromkeys(_dropped(thoughts), ("", TEXT))}
        self._marks = {
            TEXT: texts | ({OPEN: ("", CALL)} if tagged else {}),
            THOUGHT: {thoughts.closing: ("</think>", TEXT)},
            CALL: {CLOSE: ("", TEXT)},
            CALLS: {},
        }
        """State -> marker -> (what the client gets instead, the state behind it)."""
        begins = () if self._whole is None else self._whole.begins
        self._beginnings = {
            state: _prefixes((*marks, *(begins if state == TEXT else ()))) for state, marks in self._marks.items()
        }
        control = [*control]
        markers = "".join((*self._marks[TEXT], *self._marks[THOUGHT], *_written(dialect)))
        self._control = _any_of([text for text in control if text not in markers])
        self._kept = _any_of([text for text in control if text in markers])
        self._plain = dialect is None and thoughts is THINK
        self._stops, self._prefixes = tuple(stops), _prefixes([*stops, *control])
        self._raw, self._stopped = "", False
        self._state = THOUGHT if thinking else TEXT
        self._rest = self._space = ""
        self._calls = 0

    def feed(self, text: str) -> list[Delta]:
        """The deltas that no later text can change."""
        return self._split(self._clean(text, last=False), last=False)

    def end(self) -> list[Delta]:
        """The deltas that were held back until the end of the answer."""
        return self._split(self._clean("", last=True), last=True)

    def _clean(self, text: str, *, last: bool) -> str:
        """`text` up to a stop text, without control tokens that mean nothing here; a possible beginning of a stop text
        or a control token is held back."""
        if self._stopped:
            return ""
        raw = self._raw + text
        # the stop text that is complete first, not the one that begins first: what was sampled after it is no answer
        ends = [(index + len(stop), index) for stop in self._stops if (index := raw.find(stop)) >= 0]
        self._stopped = bool(ends)
        cut = min(ends)[1] if ends else len(raw) if last else len(raw) - _partial_suffix(raw, self._prefixes)
        if not self._stopped and not last:
            # a control token across the cut would be sent in halves, and not be recognized
            matches = [match for pattern in (self._control, self._kept) if pattern for match in pattern.finditer(raw)]
            cut = min([cut, *(match.start() for match in matches if match.start() < cut < match.end())])
        self._raw = raw[cut:]
        return raw[:cut] if self._control is None else self._control.sub("", raw[:cut])

    def _split(self, text: str, *, last: bool) -> list[Delta]:
        if self._plain:
            return [text] if text else []
        self._rest += text
        deltas: list[Delta] = []
        while self._step(deltas):
            pass
        if last and self._state == CALL:  # cut at a stop text, or at the limit
            self._close(OPEN + self._rest + (CLOSE if self._stopped and CLOSE in self._stops else ""), deltas)
        elif last and self._state == CALLS:
            if not self._take_calls(self._rest, deltas):
                # nothing but text, in which thoughts may begin and end
                self._whole, self._state = None, TEXT
                return [*deltas, *self._split("", last=True)]
        elif last:
            self._emit_text(self._rest, deltas)
        elif self._state in (TEXT, THOUGHT):
            keep = len(self._rest) - _partial_suffix(self._rest, self._beginnings[self._state])
            keep = min(keep, self._possible_call()) if self._state == TEXT else keep
            self._emit_text(self._rest[:keep], deltas)
            self._rest = self._rest[keep:]
        if last and self._space and not self._calls:
            deltas.append(self._space)
        return deltas

    def _step(self, deltas: list[Delta]) -> bool:
        """Consume the text up to the next marker that is valid here. Returns whether there is one."""
        hits = [(index, mark) for mark in self._marks[self._state] if (index := self._rest.find(mark)) >= 0]
        first = min(hits)[0] if hits else len(self._rest)
        # not to the end at every marker, which would take time that grows with the square of the text
        call = self._whole.find(self._rest[: first + REACH]) if self._whole and self._state == TEXT else -1
        if 0 <= call <= first:
            self._emit_text(self._rest[:call], deltas)
            self._rest, self._state = self._rest[call:], CALLS
            return True
        if not hits:
            return False
        index, mark = min(hits)
        before, self._rest = self._rest[:index], self._rest[index + len(mark) :]
        given, state = self._marks[self._state][mark]
        if self._state == CALL:
            self._close(OPEN + before + mark, deltas)
        else:
            self._emit_text(before, deltas)
            self._emit(given, deltas)
        self._state = state
        return True

    def _possible_call(self) -> int:
        """Where a call may begin of which too little is there to tell; the length of the text if nowhere."""
        if self._whole is None:
            return len(self._rest)
        start = max(len(self._rest) - REACH, 0)
        indices = [self._rest.find(text, start) for text in self._whole.begins]
        return min((index for index in indices if index >= 0), default=len(self._rest))

    def _close(self, text: str, deltas: list[Delta]) -> None:
        """Give out the calls that `text` is; as text where it is none."""
        if not self._take_calls(text, deltas):
            self._emit_text(text, deltas)

    def _take_calls(self, text: str, deltas: list[Delta]) -> bool:
        """Give out the calls that `text` is. Returns whether it is any."""
        assert self._dialect is not None
        calls = tool_calls(text, self._salt, self._calls, self._dialect, self._tools)
        self._calls += len(calls)
        deltas += calls
        return bool(calls)

    def _emit_text(self, text: str, deltas: list[Delta]) -> None:
        self._emit(text if self._kept is None else self._kept.sub("", text), deltas)

    def _emit(self, text: str, deltas: list[Delta]) -> None:
        text = self._space + text
        visible = text.rstrip()
        self._space = text[len(visible) :]
        if visible:
            deltas.append(visible)


def _dropped(thoughts: Thoughts) -> list[str]:
    """What a family writes around an answer's text, as `<|start|>assistant` and `<|channel|>final<|message|>`."""
    return [text for text in (thoughts.gap.strip(), thoughts.spoken, thoughts.aside) if text]


def _written(dialect: CallDialect | None) -> tuple[str, ...]:
    """Texts with all markers that calls are made of."""
    return () if dialect is None else (dialect.write("n", {"k": "v"}), *dialect.begins, *dialect.stop_text)


def _any_of(texts: Sequence[str]) -> re.Pattern[str] | None:
    # longest first: of alternatives a regular expression takes the first that fits
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True)))) if texts else None


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
