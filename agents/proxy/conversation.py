"""How a chat session becomes token ids, and the sampled ids an answer.

1. `IncrementalDecoder`: ids that come one by one become text; a character is given out when all its bytes are there.
2. `AnswerReader`: the text becomes text and tool calls for the client, the same in one piece or in many.
3. `ChatListRenderer`: a list of messages becomes a prompt. What a session has sampled stays as it is, and only new
   messages are tokenized: `ChatHistory` is what is known, `Prompt` how a request extends it.
"""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from turngym.agents.proxy.api_errors import invalid
from turngym.agents.proxy.turn_records import (
    CLOSE,
    OPEN,
    READ,
    ChatMessage,
    ToolCall,
    Tools,
    TurnRecord,
    common_prefix,
    is_read,
    read_call,
    tool_text,
)
from turngym.agents.rendering.chat_template import ChatTemplate, RenderError, TemplateCostError
from turngym.agents.rendering.conversation import IdBuffer, Message
from turngym.agents.rendering.renderer import BORDER
from turngym.agents.rendering.template_dialect import UnknownDialectError, dialect_of_template
from turngym.agents.rendering.text_encoder import Shielded, TextEncoder
from turngym.envs.core.episode import Span
from turngym.envs.core.task import ToolSpec
from turngym.envs.dialects import HERMES
from turngym.envs.tool_calls import CALL_ID, Dialect
from turngym.retrieval.redaction import brief

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
THINK, THOUGHT = "<think>", "</think>"
TOOL = ToolSpec(name="turngymtool", description="d", argument="turngymargument", argument_description="d")
"""A tool with which the chat template is tried out."""
UNKNOWN = "\ufffd"
"""The character that a decoder writes for bytes that are no character, or not a complete one yet."""
LONGEST = 8
"""Most ids that are held back for an incomplete character: four of one byte each, and as many that are no text."""
LONG = 20_000
"""Most characters of a text that others wait for while it is tokenized, some 10 ms. Longer ones do not hold them up."""
SUSPICIOUS = 8
"""Characters for each token of the context from which a text is counted before it is tokenized as a whole."""
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
    # some decoders spoil a whole run of ids for one bad byte, but what was streamed before that byte must stay true
    decoder = IncrementalDecoder(decode)
    return "".join([*map(decoder.feed, ids), decoder.end()])


class AnswerReader:
    """Parses a model's text into text and tool calls for the client, however the text is cut into pieces.

    The first stop text to be complete ends it. Control tokens, which a policy may sample anywhere, are left out. For a
    client with tools, well-formed calls between `<tool_call>` and `</tool_call>` are taken out, and white space at the
    end of an answer with calls; a call inside a thought, or one that cannot be read as a whole, stays text.

    Args:
        stops: texts that end the answer; they are left out.
        control: texts of control tokens.
        tools: whether the client gave tools, so that calls are taken out of the text.
        read: what stands between the tags and a salt become a call; None where it is not one.
        salt: makes the ids of calls unique among conversations; the same salt gives the same ids.
        thinking: whether the answer begins inside a thought, because the prompt ends with `<think>`.
    """

    def __init__(
        self,
        *,
        stops: Sequence[str] = (),
        control: Iterable[str] = (),
        tools: bool = False,
        read: Callable[[str, str], ToolCall | None] = read_call,
        salt: str = "",
        thinking: bool = False,
    ) -> None:
        # longest first: of alternatives a regular expression takes the first that fits
        controls = sorted(control, key=len, reverse=True)
        self._stops, self._tools, self._read, self._salt = tuple(stops), tools, read, salt
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
        """`text` up to a stop text, without control tokens; a possible beginning of either is held back."""
        if self._stopped:
            return ""
        raw = self._raw + text
        # the stop text that is complete first, not the one that begins first: what was sampled after it is no answer
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
        """Consume the text up to the next tag that is valid here. Returns whether there is one."""
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
        call = self._read(inside, f"{self._salt}/{self._calls}")
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
"""Maps the tag that is open to the tags that mean something then, and their beginnings."""


@dataclass(slots=True)
class ChatHistory:
    """One chat session so far: its token ids, and the messages that they stand for."""

    segments: list[IdBuffer] = field(default_factory=list)
    client_messages: list[ChatMessage] = field(default_factory=list)
    """The conversation as the client has it, the last answer included."""
    template_messages: list[Message] = field(default_factory=list)
    """The same conversation for the chat template, with answers as they were sampled."""
    tools: Tools = ()
    last_id: int | None = None
    """The stop id that ended the last answer; None if the answer was cut."""
    text: str | None = None
    """The current segment as text; None if it must be rendered again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The prompt of one request, and how it extends the history."""

    ids: NDArray[np.int32]
    """The whole prompt, int32 [P]."""
    added: NDArray[np.int32]
    """The part of the prompt that is not in the history yet; all of it if a segment opens."""
    opens: bool
    """Whether a new segment opens: at the start, and when the client or the template rewrote earlier messages."""
    retry: bool
    """Whether the client asks again for its last answer."""
    kept: int
    """Number of messages that the request repeats from the start of the history."""
    new_messages: tuple[ChatMessage, ...]
    """Messages after the repeated ones."""
    tools: Tools
    text: str
    """The whole prompt as text."""


class ChatListRenderer:
    """Renders lists of chat messages into prompts for one tokenizer. Safe for several threads.

    Agents use `ChatRenderer` of agents/rendering, which appends one observation at a time. Clients of the proxy
    send the whole conversation with every request, so here it is compared with the history.

    A request that repeats the history word for word and goes on extends its ids; any other opens a new segment. What
    messages and tools say is text (`TextEncoder`), and where it spells a special token the client is told so by a
    refusal.

    Raises RenderError for a tokenizer without a usable chat template.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, thinking: bool | None = None, stop_ids: Sequence[int] = ()
    ) -> None:
        self.template = ChatTemplate(tokenizer, thinking=thinking)
        self.stop_ids = tuple(dict.fromkeys((*self.template.stop_ids, *stop_ids)))
        """Ids that end an answer."""
        self.tokenizer: Any = tokenizer
        # fast tokenizers refuse to be used by two threads at once; long texts get a copy, so that no other waits
        self._lock, self._long_lock = threading.Lock(), threading.Lock()
        self._long_encoder: TextEncoder | None = None
        self.longest_token = max(map(len, tokenizer.get_vocab()), default=1)
        """Characters of the longest token: no text of n tokens has more than n times as many."""
        self.control = tuple(sorted(self.template.encoder.special))
        """Texts that stand for special tokens."""
        # some templates ignore tools and their results; both are then written into other messages
        given = ([_user("x")], self.template.opening("x", "x"))
        shown = [TOOL.name in self.template.render(messages, tools=[TOOL.schema()]) for messages in given]
        self._shows_tools = shown[0]
        # some show tools behind a system message alone
        self.dialect, self._unread = self._find_dialect() if any(shown) else (HERMES, "")
        call: Message = {"role": "assistant", "content": "turngymanswer"}
        try:
            told = self.template.render([_user("x"), call, {"role": "tool", "content": "turngymresult"}])
        except RenderError:
            told = ""
        self._shows_results = "turngymresult" in told

    def _find_dialect(self) -> tuple[Dialect, str]:
        """(The dialect in which the template writes calls; its name if it is not read here, else "".)"""
        try:
            dialect, _ = dialect_of_template(self.tokenizer, TOOL)
        except UnknownDialectError:
            return HERMES, "a dialect of its own"
        except RenderError:
            warnings.warn(
                "this chat template shows tools and writes no calls: they are read and written as hermes", stacklevel=3
            )
            return HERMES, ""
        return dialect, "" if is_read(dialect) else f"the dialect {dialect.name!r}"

    def prompt(
        self, history: ChatHistory, messages: Sequence[ChatMessage], tools: Tools = (), *, most: int | None = None
    ) -> Prompt:
        """The prompt for `messages` after `history`, which is not changed.

        Raises ApiError (400) for control tokens in the text, roles that the template refuses, tools and calls where
        the template's dialect is not read, and far too long a text.

        Args:
            history: the session's turns so far; an empty one for a side turn.
            messages: all messages of the request, those that it repeats included.
            tools: the request's tools, as OpenAI function schemas.
            most: ids that the model holds. A text of more than `SUSPICIOUS` characters for each of them is refused as
                soon as twice as many tokens are counted in it; other prompts are returned, however long they are.
                None: no text is refused for its length.
        """
        known, common = len(history.client_messages), common_prefix(history.client_messages, messages)
        follows = 0 < known == common < len(messages)
        # only what is new: repeated messages hold answers, in which the policy may have sampled anything
        self.refuse_control(messages[common:], tools, start=common)
        self._refuse_calls(messages[common:], tools, start=common)
        given = (*history.template_messages[:common], *map(self.template_message, messages[common:]))
        with self._lock:
            text = self._render(given, tools)
            before = self._history_text(history) if follows and history.segments and tools == history.tools else None
        extends = before is not None and text.startswith(before)
        if most is not None and len(text) > SUSPICIOUS * most:
            self._check_beginning(text, most)
        if before is not None and extends:
            added = self._encode(text[len(before) :], before[-BORDER:])
        else:
            added = self._encode(text)
        ids = np.concatenate((history.segments[-1].view(), added)) if extends else added
        return Prompt(
            ids=ids,
            added=added,
            opens=not extends,
            retry=0 < common == len(messages) == known - 1,
            kept=common,
            new_messages=tuple(messages[common:]),
            tools=tools,
            text=text,
        )

    def refuse_control(self, messages: Sequence[ChatMessage], tools: Tools = (), *, start: int = 0) -> None:
        """Raises ApiError (400) for a special token that `messages`, numbered from `start`, or `tools` spell."""
        texts = [(f"messages[{place}].content", message.text) for place, message in enumerate(messages, start)]
        texts += [(f"tools[{place}]", text) for place, tool in enumerate(tools) for text in _texts(tool)]
        for where, text in texts:
            if token := self.template.encoder.spells_control(text, self.template.encoder.special):
                raise invalid(f"{where} holds {token!r}, a control token of this model", where, "control_token")

    def _refuse_calls(self, messages: Sequence[ChatMessage], tools: Tools, *, start: int) -> None:
        """Raises ApiError (400) for tools and calls that the template's dialect leaves unread or unwritten."""
        places = enumerate(messages, start)
        calls = [(f"messages[{place}].tool_calls", call) for place, one in places for call in one.tool_calls]
        if self._unread and (tools or calls):
            where = "tools" if tools else calls[0][0]
            valid = f"read are {', '.join(READ)}: leave {where} out"
            said = f"{where}: this model's chat template writes calls in {self._unread}, which is not read; {valid}"
            raise invalid(said, where, "unsupported_value")
        for where, call in calls:
            if self.dialect is not HERMES and not isinstance(call.values, dict):
                raise invalid(f"{where}: arguments is {brief(call.arguments, 60)}; it must be a JSON object", where)

    def apply(self, history: ChatHistory, record: TurnRecord, text: str | None = None) -> tuple[Span, Span]:
        """Append a turn to the history; returns the spans of prompt and answer. `text` is the prompt's, if known."""
        if record.opens:
            history.segments.append(IdBuffer())
        spans = history.segments[-1].extend(record.prompt_ids), history.segments[-1].extend(record.ids)
        history.client_messages = [*history.client_messages[: record.kept], *record.messages, record.reply]
        answer = self.answer(record.ids.tolist(), record.text)
        added = [*map(self.template_message, record.messages), answer]
        history.template_messages = [*history.template_messages[: record.kept], *added]
        history.tools = history.tools if record.tools is None else record.tools
        history.last_id = int(record.ids[-1]) if len(record.ids) and int(record.ids[-1]) in self.stop_ids else None
        with self._lock:
            history.text = None if text is None else text + self._raw(answer) + self._stop_text(history.last_id)
        return spans

    def answer(self, ids: list[int], text: str) -> Message:
        """The template's message of an answer: the sampled `ids`, decoded to `text`."""
        with self._lock:
            return self.template.answer(self.template.said(ids, text))

    def ids(self, given: Sequence[Message], tools: Tools = ()) -> NDArray[np.int32]:
        """A whole prompt, int32 [P]."""
        return self._encode(self._render(given, tools))

    def decode(self, ids: NDArray[np.int32]) -> tuple[str, int | None]:
        """(The answer as text without the stop id that ended it, that id or None.)"""
        listed = ids.tolist()
        last = listed[-1] if listed and listed[-1] in self.stop_ids else None
        with self._lock:
            return text_of(listed if last is None else listed[:-1], self._decode), last

    def incremental_decoder(self) -> IncrementalDecoder:
        """A decoder for the ids of one answer as they are sampled; it gives the same text as `decode`."""

        def decode(ids: list[int]) -> str:
            with self._lock:
                return self._decode(ids)

        return IncrementalDecoder(decode)

    def reader(self, prompt: Prompt, *, stops: Sequence[str] = (), tools: bool = False, salt: str = "") -> AnswerReader:
        """A reader for the text of an answer to `prompt`.

        Args:
            prompt: its end says whether the answer begins inside a thought.
            stops: texts that end the answer.
            tools: whether calls are taken out of the text, for a client that has tools.
            salt: makes the ids of calls unique among conversations; the same salt gives the same ids.
        """
        thinking = prompt.text.rstrip().endswith(THINK)
        read = partial(read_call, dialect=self.dialect, tools=prompt.tools)
        return AnswerReader(stops=stops, control=self.control, tools=tools, read=read, salt=salt, thinking=thinking)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text of each id by itself."""
        with self._lock:
            return [self._decode([token]) for token in ids]

    def _history_text(self, history: ChatHistory) -> str:
        if history.text is None:
            *given, answer = history.template_messages
            history.text = self._render(given, history.tools) + self._raw(answer) + self._stop_text(history.last_id)
        return history.text

    def _raw(self, answer: Message) -> str:
        """The text of an answer behind its prompt, which ends with the prefill already."""
        return str(answer["content"]).removeprefix(self.template.prefill)

    def _render(self, given: Sequence[Message], tools: Tools) -> str:
        messages, shield = list(given), self.template.encoder.shield_all
        system = messages[0]["content"] if messages and messages[0]["role"] == "system" else None
        if tools and not self._shows_tools:
            messages = messages if system is None else messages[1:]
            # what the client says of its tools is text, the form of a call is not
            parts = (shield(system or ""), tool_text(shield(list(tools))))
            system = Shielded("\n\n".join(filter(None, parts)))
            messages = [{"role": "system", "content": system}, *messages]
        if system is not None and len(messages) > 1 and messages[1]["role"] == "user":
            # a template without system messages gets both in one
            messages = [*self.template.opening(system, messages[1]["content"]), *messages[2:]]
        try:
            return self.template.render(messages, tools=list(tools) or None)
        except (RenderError, TemplateCostError) as error:
            raise invalid(str(error), "messages") from error

    def template_message(self, message: ChatMessage) -> Message:
        """The message for the chat template."""
        if message.role == "tool" and not self._shows_results:
            return _user(f"<tool_response>\n{message.content}\n</tool_response>")
        # an answer that this client has from elsewhere: only its thoughts and calls are more than text
        if self.dialect is not HERMES and message.tool_calls:
            # the template writes the calls itself; what they say is text
            calls = [
                {
                    "type": "function",
                    "id": call.id or CALL_ID,
                    "function": {"name": call.name, "arguments": call.values},
                }
                for call in message.tool_calls
            ]
            said = self.template.encoder.shield_all(calls)
            return {"role": message.role, "content": self.template.written(message.content), "tool_calls": said}
        text = self.template.written(message.text) if message.role == "assistant" else message.text
        return {"role": message.role, "content": text}

    def _stop_text(self, last: int | None) -> str:
        return "" if last is None else self.template.text_of(last)

    def _check_beginning(self, text: str, most: int) -> None:
        """Raises ApiError (400) once the pieces of `text` so far have more than twice `most` tokens.

        Twice, because pieces may have a few tokens more than the whole. Others get their turn between two pieces.
        """
        count = 0
        for start in range(0, len(text), LONG):
            count += len(self._encode(text[start : start + LONG]))
            if count > 2 * most:
                said = f"the messages are more than {2 * most} tokens; with an answer this model holds {most}"
                raise invalid(said, "messages", "context_length_exceeded")

    def _encode(self, text: str, after: str = "") -> NDArray[np.int32]:
        # not the template's own cache: prompts are long, all different, and a server runs for weeks
        with self._long_lock if len(text) > LONG else self._lock:
            if len(text) <= LONG:
                return self.template.encoder.encode_new(text, after)
            if self._long_encoder is None:
                self._long_encoder = self.template.encoder.copy()
            return self._long_encoder.encode_new(text, after)

    def _decode(self, ids: list[int]) -> str:
        decoded = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(decoded)


def _texts(value: Any) -> Iterator[str]:
    """Every text in a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from (text for pair in value.items() for part in pair for text in _texts(part))
    elif isinstance(value, (list, tuple)):
        yield from (text for part in value for text in _texts(part))


def _user(content: str) -> Message:
    return {"role": "user", "content": content}
