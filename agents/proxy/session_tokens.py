"""How a chat session becomes token ids.

A list of messages becomes a prompt. What a session has sampled stays as it is, and only new messages are tokenized:
`ChatHistory` is what is known, `Prompt` how a request extends it.

Read next: agents/proxy/answer.py, where the sampled ids become the client's answer.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
from numpy.typing import NDArray

from turngym.agents.proxy.answer import AnswerReader, IncrementalDecoder, text_of
from turngym.agents.proxy.api_errors import UNSUPPORTED, invalid
from turngym.agents.proxy.turn_records import (
    ChatMessage,
    ToolCall,
    Tools,
    TurnRecord,
    common_prefix,
    is_tagged,
    tool_text,
)
from turngym.agents.rendering.answer_messages import Message, message_with_calls
from turngym.agents.rendering.chat_template import ChatTemplate, ObservationRole, RenderError, TemplateCostError
from turngym.agents.rendering.renderer import BORDER
from turngym.agents.rendering.template_dialect import (
    TemplateCalls,
    UnknownDialectError,
    dialect_of_template,
    named_id,
    thought_style,
)
from turngym.agents.rendering.text_encoder import Shielded, TextEncoder
from turngym.agents.rendering.token_history import IdBuffer
from turngym.core.episode import Span
from turngym.core.redaction import brief
from turngym.core.tools import ToolSpec
from turngym.envs.dialects import HERMES
from turngym.envs.tool_calls import CALL_ID, STYLES, THINK, CallDialect

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
TOOL = ToolSpec(name="turngymtool", description="d", argument="turngymargument", argument_description="d")
"""A tool with which the chat template is tried out."""
LONG = 20_000
"""Most characters of a text that others wait for while it is tokenized, some 10 ms. Longer ones do not hold them up."""
SUSPICIOUS = 8
"""Characters for each token of the context from which a text is counted before it is tokenized as a whole."""
WRITTEN_OUT = TemplateCalls(dialect=HERMES, exact=True, id=CALL_ID, as_text=False)
"""Calls of templates that write none: they are part of an answer's text."""
PROBE = "turngym-probe-{}."
"""Text of a system message, with its number, by which a template shows that it has a place for it."""
CLIENT_ID = "client_id"
"""Key of a call with its id as the client knows it; no template sees it."""
NINE = re.compile(r"[A-Za-z0-9]{9}")
"""Ids of calls as Mistral's templates want them; others show them or not."""


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
    said: str = ""
    """The last answer as it was sampled, without the id that ended it."""
    text: str | None = None
    """The current segment as text; None if it must be rendered again."""

    def asks_again(self, messages: Sequence[ChatMessage]) -> bool:
        """Whether a request asks again for the last answer."""
        count, common = len(self.client_messages), common_prefix(self.client_messages, messages)
        return 0 < common == len(messages) == count - 1

    def forks(self, kept: int, new: Sequence[ChatMessage]) -> bool:
        """Whether `new` messages behind the first `kept` are said to an earlier answer than the last.

        A client that shortens the history drops or rewrites answers as well; here it keeps them up to one, and goes on
        from there.
        """
        earlier = 0 < kept < len(self.client_messages) and self.client_messages[kept - 1].role == "assistant"
        return earlier and bool(new) and all(message.role != "assistant" for message in new)


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
        style = thought_style(tokenizer)
        self._thinking = thinking
        self.template = ChatTemplate(tokenizer, thinking=thinking, thoughts=STYLES.get(style or "", THINK))
        self.tokenizer: Any = tokenizer
        # fast tokenizers refuse to be used by two threads at once; long texts get a copy, so that no other waits
        self._lock, self._long_lock = threading.Lock(), threading.Lock()
        self._long_encoder: TextEncoder | None = None
        self.longest_token = max(map(len, tokenizer.get_vocab()), default=1)
        """Characters of the longest token: no text of n tokens has more than n times as many."""
        self.control = tuple(sorted(self.template.encoder.special))
        """Texts that stand for special tokens."""
        # some templates ignore tools and their results; both are then written into other messages
        probes = ([_user("x")], self.template.opening("x", "x"))
        shows = [TOOL.name in self.template.render(messages, tools=TOOL.schemas()) for messages in probes]
        self._shows_tools = shows[0]
        # some show tools behind a system message alone
        self._calls = self._find_calls() if any(shows) else WRITTEN_OUT
        """How the template takes calls; None where it writes them in a dialect that is not known."""
        self._calling = self._find_calling()
        """The template for answers with calls; None where they are content like others."""
        calls = () if self._calling is None else self._calling.stop_ids
        self.stop_ids = tuple(dict.fromkeys((*self.template.stop_ids, *calls, *stop_ids)))
        """Ids that end an answer."""
        call: Message = {"role": "assistant", "content": "turngymanswer"}
        try:
            rendered = self.template.render([_user("x"), call, {"role": "tool", "content": "turngymresult"}])
        except RenderError:
            rendered = ""
        beside_calls = self._calling is not None and self._calling.role == "tool"
        self._shows_results = beside_calls or "turngymresult" in rendered

    @property
    def dialect(self) -> CallDialect:
        """The dialect in which calls are read."""
        return HERMES if self._calls is None else self._calls.dialect

    def _find_calls(self) -> TemplateCalls | None:
        try:
            return dialect_of_template(self.tokenizer, TOOL)
        except UnknownDialectError:
            return None
        except RenderError:
            warnings.warn(
                "this chat template shows tools and writes no calls: they are read and written as hermes", stacklevel=3
            )
            return WRITTEN_OUT

    def _find_calling(self) -> ChatTemplate | None:
        if self._calls is None or is_tagged(self.dialect):
            return None
        for role in get_args(ObservationRole)[::-1]:
            with suppress(RenderError):
                return ChatTemplate(
                    self.tokenizer,
                    tool=TOOL,
                    thinking=self._thinking,
                    observation_role=role,
                    dialect=self.dialect,
                    thoughts=self.template.thoughts,
                )
        return None

    def prompt(
        self, history: ChatHistory, messages: Sequence[ChatMessage], tools: Tools = (), *, most: int | None = None
    ) -> Prompt:
        """The prompt for `messages` after `history`, which is not changed.

        Raises ApiError (400) for control tokens in the text, roles that the template refuses, tools and calls where
        the template's dialect is not read, and far too long a text.

        Args:
            messages: all messages of the request, those that it repeats included.
            most: ids that the model holds. A text of more than `SUSPICIOUS` characters for each of them is refused as
                soon as twice as many tokens are counted in it; other prompts are returned, however long they are.
                None: no text is refused for its length.
        """
        count, common = len(history.client_messages), common_prefix(history.client_messages, messages)
        follows = 0 < count == common < len(messages)
        # only what is new: repeated messages hold answers, in which the policy may have sampled anything
        self.refuse_control(messages[common:], tools, start=common)
        self._refuse_calls(messages[common:], tools, start=common)
        new = self._template_messages(history, messages[common:], common)
        template_messages = [*history.template_messages[:common], *new]
        with self._lock:
            self._check_shown(template_messages, tools, start=common)
            text = self._render(template_messages, tools)
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
            retry=history.asks_again(messages),
            kept=common,
            new_messages=tuple(messages[common:]),
            tools=tools,
            text=text,
        )

    def refuse_control(self, messages: Sequence[ChatMessage], tools: Tools = (), *, start: int = 0) -> None:
        """Raises ApiError (400) for a special token that `messages`, numbered from `start`, or `tools` spell."""
        texts = [(f"messages[{index}].content", message.text) for index, message in enumerate(messages, start)]
        texts += [(f"tools[{index}]", text) for index, tool in enumerate(tools) for text in _texts(tool)]
        for where, text in texts:
            if token := self.template.encoder.spells_control(text, self.template.encoder.special):
                raise invalid(f"{where} holds {token!r}, a control token of this model", where, "control_token")

    def _refuse_calls(self, messages: Sequence[ChatMessage], tools: Tools, *, start: int) -> None:
        """Raises ApiError (400) for tools and calls that the template's dialect leaves unread or unwritten."""
        numbered = enumerate(messages, start)
        calls = [(f"messages[{index}].tool_calls", call) for index, message in numbered for call in message.tool_calls]
        if self._calls is None and (tools or calls):
            where = "tools" if tools else calls[0][0]
            problem = "this model's chat template writes calls in a dialect of its own, which is not read"
            raise invalid(f"{where}: {problem}; leave {where} out", where, UNSUPPORTED)
        for where, call in calls:
            if self.dialect is not HERMES and not isinstance(call.values, dict):
                raise invalid(f"{where}: arguments is {brief(call.arguments, 60)}; it must be a JSON object", where)

    def apply(self, history: ChatHistory, record: TurnRecord, text: str | None = None) -> tuple[Span, Span]:
        """Append a turn to the history; returns the spans of prompt and answer. `text` is the prompt's, if known."""
        if record.opens:
            history.segments.append(IdBuffer())
        spans = history.segments[-1].extend(record.prompt_ids), history.segments[-1].extend(record.ids)
        answer = self.answer(record.ids.tolist(), record.text, record.reply.tool_calls)
        new = [*self._template_messages(history, record.messages, record.kept), answer]
        history.client_messages = [*history.client_messages[: record.kept], *record.messages, record.reply]
        history.template_messages = [*history.template_messages[: record.kept], *new]
        history.tools = history.tools if record.tools is None else record.tools
        history.last_id = int(record.ids[-1]) if len(record.ids) and int(record.ids[-1]) in self.stop_ids else None
        with self._lock:
            history.said = self.template.said(record.ids.tolist(), record.text)
            history.text = None if text is None else text + history.said + self._stop_text(history.last_id)
        return spans

    def answer(self, ids: list[int], text: str, calls: Sequence[ToolCall] = ()) -> Message:
        """The template's message of an answer: the sampled `ids`, decoded to `text`, in which `calls` were read."""
        template = self.template if self._calling is None or not calls else self._calling
        with self._lock:
            message = template.answer(template.said(ids, text))
        if "tool_calls" in message:
            message["tool_calls"] = self._shown_calls(calls)
        return message

    def ids(self, messages: Sequence[Message], tools: Tools = ()) -> NDArray[np.int32]:
        """A whole prompt, int32 [P]."""
        return self._encode(self._render(messages, tools))

    def decode(self, ids: NDArray[np.int32]) -> tuple[str, int | None]:
        """(The answer as text without the stop id that ended it, that id or None.)"""
        tokens = ids.tolist()
        last = tokens[-1] if tokens and tokens[-1] in self.stop_ids else None
        with self._lock:
            return text_of(tokens if last is None else tokens[:-1], self._decode), last

    def incremental_decoder(self) -> IncrementalDecoder:
        """A decoder for the ids of one answer as they are sampled; it gives the same text as `decode`."""

        def decode(ids: list[int]) -> str:
            with self._lock:
                return self._decode(ids)

        return IncrementalDecoder(decode)

    def reader(self, prompt: Prompt, *, stops: Sequence[str] = (), tools: bool = False, salt: str = "") -> AnswerReader:
        """A reader for the text of an answer to `prompt`.

        Args:
            tools: whether calls are taken out of the text, for a client that has tools.
            salt: makes the ids of calls unique among conversations; the same salt gives the same ids.
        """
        thoughts = self.template.thoughts
        return AnswerReader(
            stops=stops,
            control=self.control,
            dialect=self.dialect if tools else None,
            tools=prompt.tools,
            thoughts=thoughts,
            salt=salt,
            thinking=prompt.text.rstrip().endswith(thoughts.opening),
        )

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text of each id by itself."""
        with self._lock:
            return [self._decode([token]) for token in ids]

    def _history_text(self, history: ChatHistory) -> str:
        if history.text is None:
            *earlier, _ = history.template_messages
            history.text = self._render(earlier, history.tools) + history.said + self._stop_text(history.last_id)
        return history.text

    def _render(self, conversation: Sequence[Message], tools: Tools) -> str:
        messages, shield = list(conversation), self.template.encoder.shield_all
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
            return self.template.render(_joined(messages), tools=list(tools) or None)
        except (RenderError, TemplateCostError) as error:
            raise invalid(str(error), "messages") from error

    def _check_shown(self, messages: Sequence[Message], tools: Tools, *, start: int) -> None:
        """Raises ApiError (400) for a system message, numbered from `start`, that the template leaves out."""
        # the first is put before the user's message where a template has none
        first = 1 if len(messages) > 1 and messages[1]["role"] == "user" else 0
        indices = [index for index in range(max(start, first), len(messages)) if messages[index]["role"] == "system"]
        if not indices:
            return
        probe = list(messages)
        for index in indices:
            probe[index] = {**messages[index], "content": PROBE.format(index)}
        text = self._render(probe, tools)
        for index in indices:
            if PROBE.format(index) not in text:
                problem = "this model's chat template shows no system message there; valid: its text in a user message"
                raise invalid(f"messages[{index}]: {problem}", f"messages[{index}]", UNSUPPORTED)

    def _template_messages(self, history: ChatHistory, new: Sequence[ChatMessage], kept: int) -> list[Message]:
        """`new` messages behind the first `kept` of the history for the template."""
        return [*map(self.template_message, _in_order(history.client_messages[:kept], new))]

    def template_message(self, message: ChatMessage) -> Message:
        """The message for the chat template."""
        if message.role == "tool":
            if not self._shows_results:
                return _user(f"<tool_response>\n{message.content}\n</tool_response>")
            result: Message = {"role": "tool", "content": message.content}
            return result | ({} if self._calling is None else {"tool_call_id": message.tool_call_id})
        if message.role != "assistant":
            return {"role": message.role, "content": message.text}
        # an answer that this client has from elsewhere: only its thoughts and calls are more than text
        if self.dialect is HERMES or not message.tool_calls:
            return self._other_answer(message.text)
        thought, content, tags = None, message.content, self.template.thoughts
        if tags is not THINK:
            thought, content, _ = THINK.split(message.content, bool)
        thought = None if thought is None else self.template.written(thought)
        return message_with_calls(self.template.written(content), thought, self._shown_calls(message.tool_calls), tags)

    def _other_answer(self, text: str) -> Message:
        """The message of an answer that nobody sampled here, its thought between the markers of the family."""
        style = self.template.thoughts
        if style is THINK:
            return {"role": "assistant", "content": self.template.written(text)}
        thought, content, _ = THINK.split(text, bool)
        answer = style.write(thought) + style.spoken + (text if thought is None else content.lstrip())
        return self.template.answer(self.template.written(answer))

    def _shown_calls(self, calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
        """`calls` in the form in which the template takes them. It writes them itself: what they say is text."""
        assert self._calls is not None
        entries = []
        for number, call in enumerate(calls):
            if self._calls.id != CALL_ID:
                # the template shows it in place of the tool's name: as the model wrote it, else with the call's number
                fits = re.fullmatch(rf"(?:functions\.)?{re.escape(call.name)}(?::[0-9]{{1,9}})?", call.id)
                id = call.id if fits else named_id(call.name, number)
            else:
                nine = hashlib.sha256(call.id.encode("utf-8", "replace")).hexdigest()[:9]
                id = call.id if NINE.fullmatch(call.id) else nine
            arguments = json.dumps(call.values, ensure_ascii=False) if self._calls.as_text else call.values
            function = {"name": call.name, "arguments": arguments}
            shielded = self.template.encoder.shield_all({"id": id, "function": function})
            entries.append({"type": "function", **shielded, CLIENT_ID: call.id})
        return entries

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
                problem = f"the messages are more than {2 * most} tokens; with an answer this model holds {most}"
                raise invalid(problem, "messages", "context_length_exceeded")

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


def _joined(messages: Sequence[Message]) -> list[Message]:
    """`messages` as templates take them, each result with the id and the name of its call: of the one that it names,
    else of the first that waits for a result."""
    joined, waiting = list[Message](), list[Any]()
    for message in messages:
        if message["role"] == "assistant":
            waiting = list(message.get("tool_calls", ()))
            if waiting:
                bare = [{key: value for key, value in call.items() if key != CLIENT_ID} for call in waiting]
                message = {**message, "tool_calls": bare}
        elif message["role"] == "tool" and waiting:
            named = [call for call in waiting if call[CLIENT_ID] == message.get("tool_call_id")]
            call = (named or waiting)[0]
            waiting.remove(call)
            message = {**message, "name": call["function"]["name"], "tool_call_id": call["id"]}
        joined.append(message)
    return joined


def _in_order(before: Sequence[ChatMessage], new: Sequence[ChatMessage]) -> list[ChatMessage]:
    """`new` messages with the results of an answer's calls in the order of the calls: many templates show no ids."""
    ordered = [*before[-1:], *new]
    for index, message in enumerate(ordered):
        call_ids = [call.id for call in message.tool_calls]
        end = next((i for i in range(index + 1, len(ordered)) if ordered[i].role != "tool"), len(ordered))
        results = ordered[index + 1 : end]
        if call_ids and {result.tool_call_id for result in results} <= set(call_ids):
            ordered[index + 1 : end] = sorted(results, key=lambda result: call_ids.index(result.tool_call_id))
    return ordered[len(before[-1:]) :]


def _user(content: str) -> Message:
    return {"role": "user", "content": content}
