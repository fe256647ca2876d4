"""One chat completion of any server, read once: `read_answer` is the only place that knows the form of an answer.

Servers contradict themselves: they say that the model called and pass no call on, give a second choice that nobody
asked for, or count tokens that do not add up. What is unambiguous is read as it was meant. Either way it is counted
(`Noticed`), so that nothing that the server lost passes for the model's own mistake.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from turngym.agents.endpoint.calls import (
    AnswerCall,
    WrittenCall,
    calls_of,
    hides_call,
    marked,
    sendable,
    styles_in,
    written_call,
)
from turngym.agents.endpoint.completion_fields import (
    DEEPEST,
    NAME_SHOWN,
    REASONING,
    Choice,
    Completion,
    Message,
    Noticed,
    Reading,
    UnreadableAnswer,
    deeper,
    read_usage,
    rest_of,
)
from turngym.agents.endpoint.usage import Usage
from turngym.core.episode import without_rounding, wrong_numbers
from turngym.core.redaction import excerpt
from turngym.core.spec import changed
from turngym.envs.spaces import printable
from turngym.envs.tool_calls import THINK

MOST_IDS = 1 << 24
"""No vocabulary has as many ids. The endpoint's own is not known here; a trainer checks against the student's."""
MOST_TOP = 20
"""Most alternatives of a token that are read, as many as the API allows."""
MODEL_SHOWN = 100
"""Characters of a model's name that are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a request asked for, as far as its answer can contradict it."""

    model: str = ""
    """The model's name; empty: any."""
    tools: tuple[str, ...] = ()
    """Names of the tools that were offered."""
    thoughts: bool = True
    """False if thinking was switched off."""
    logprobs: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenIds:
    """The ids of one answer: `prompt` int32 [P], `response` int32 [R], `logprobs` float32 [R].

    `logprobs` is None if the server gave another number of them.
    """

    prompt: NDArray[np.int32]
    response: NDArray[np.int32]
    logprobs: NDArray[np.float32] | None
    temperature: float | None = None
    """Temperature of the log-probabilities, if the server says it."""
    alternatives: Mapping[str, float] = field(default_factory=dict)
    """The likeliest tokens in the place of the first, with their log-probabilities, if they were asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAnswer:
    """A chat completion."""

    content: str
    blank: str | None = None
    """Value of `content` in a message that has calls and no text: "" or null."""
    reasoning: str | None = None
    thoughts: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the message with the reasoning, as they came; `content`, if it came in parts of that."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the message that go back with the conversation unread."""
    calls: tuple[AnswerCall, ...] = ()
    written: WrittenCall | None = None
    """The call that the server left in `content`, where a server with a parser would have put it into `calls`."""
    finish: str = "stop"
    """`stop`, `length` or `content_filter`."""
    ending: str = ""
    """The server's own word for the ending."""
    stopped_at: str | None = None
    """The stop string that ended it, if the server reports it."""
    model: str = ""
    """The model's name, as the server says it."""
    usage: Usage = field(default_factory=lambda: Usage(answers=1, unreported=1))
    counted: tuple[str, ...] = ()
    """Names of the fields of its usage."""
    lost: Usage = field(default_factory=Usage)
    """What was paid before for attempts that could not be used."""
    ids: TokenIds | None = None
    noticed: tuple[str, ...] = ()
    """What is unknown or contradictory in it, each once; `Noticed` has the words."""

    @property
    def characters(self) -> int:
        """All that the model said."""
        calls = sum(len(str(call.name)) + len(str(call.arguments)) + _size(call.more) for call in self.calls)
        return len(self.content) + len(self.reasoning or "") + calls + _size(self.more)


def read_answer(body: Any, expected: Expected | None = None) -> ChatAnswer:
    """Read a completion. Raises UnreadableAnswer."""
    reading, expected = Reading(), expected or Expected()
    completion = reading.take(Completion, body, "")
    usage, counted = read_usage(completion.usage, reading)
    try:
        # thoughts that are not shown may have used up the limit
        no_tokens = completion.usage.get("completion_tokens") == 0 and not usage.completion_tokens
        answer = _read_choices(completion, expected, reading, no_tokens=no_tokens)
    except UnreadableAnswer as error:
        error.usage = changed(usage, answers=0, unreported=0)
        raise
    named = excerpt(printable(completion.model), MODEL_SHOWN)
    if expected.model and named and not same_model(expected.model, named):
        reading.note(Noticed.MODEL, named)
    if expected.logprobs and answer.ids is not None and answer.ids.logprobs is None:
        reading.note(Noticed.NO_LOGPROBS)
    # some templates open the thought in the prompt, and some servers count thoughts and hide them
    marked_text = marked(answer.content, THINK)
    written = THINK.closing in marked_text or marked_text.lstrip().startswith(THINK.opening)
    if not expected.thoughts and (answer.reasoning or written or usage.reasoning_tokens):
        reading.note(Noticed.THOUGHTS)
    return replace(answer, model=named, usage=usage, counted=counted, noticed=tuple(reading.noticed))


def _read_choices(completion: Completion, expected: Expected, reading: Reading, *, no_tokens: bool) -> ChatAnswer:
    if not completion.choices:
        raise UnreadableAnswer("the answer has no choices: []", foreign=True)
    choices = [reading.take(Choice, choice, "choice.") for choice in completion.choices[:MOST_TOP]]
    for choice in choices:
        choice.message = sendable(choice.message)
    messages = [reading.take(Message, choice.message, "message.") for choice in choices]

    # What counts: the first choice, and calls of another one where it has none.
    first, message = choices[0], messages[0]
    fields, calls = first.message, calls_of(message, reading, expected.tools)
    if len(choices) > 1:
        reading.note(Noticed.CHOICES)
        # gateways in front of Claude put the text into one choice and the call into the next
        calling = next((index for index, other in enumerate(messages) if calls_of(other, Reading(), ())), 0)
        if not calls and calling:
            reading.note(Noticed.OTHER_CHOICE)
            calls = calls_of(messages[calling], reading, expected.tools)
            fields = {**choices[calling].message, **fields}

    # What the model said and thought; its thoughts go back to the server as they came.
    content, thoughts = _parts(message.content, reading)
    # a refusal is an answer, too
    content = content or message.refusal
    if ending_token := _END.search(content):
        content = content[: ending_token.start()]
        reading.note(Noticed.END_LEFT, ending_token[1])
    thought_fields: dict[str, Any] = {name: fields[name] for name in REASONING if isinstance(fields.get(name), str)}
    for style in styles_in(content):
        if style is not THINK:
            reading.note(Noticed.THOUGHT_LEFT, style.opening)
    reasoning = next((text for text in thought_fields.values() if text), thoughts or None)
    if thoughts and isinstance(message.content, list):
        parts = [part for part in message.content if isinstance(part, Mapping) and part.get("type") == "thinking"]
        if deeper(parts, DEEPEST):
            reading.note(Noticed.TOO_DEEP, "message.content")
        else:
            thought_fields["content"] = parts

    # What ended it, and what is odd about it.
    empty = not (content or reasoning or calls)
    finish, ending = _ending(first.finish_reason, first.native_finish_reason, empty, no_tokens)
    if ending:
        reading.note(Noticed.ENDING, ending)
    written = None
    if expected.tools and not calls and finish != "content_filter":
        written = written_call(content, expected.tools)
        if written is not None:
            reading.note(Noticed.WRITTEN, written.dialect)
        elif first.finish_reason.lower() in CALLED:
            reading.note(Noticed.NO_CALL)
    if calls and not expected.tools:
        reading.note(Noticed.UNASKED)
    if calls and hides_call(content):
        reading.note(Noticed.HIDDEN)
    if not content and not calls and finish == "stop" and Noticed.NO_CALL not in reading.noticed:
        reading.note(Noticed.ONLY_THOUGHT if reasoning else Noticed.EMPTY)

    stops = (first.stop_reason, first.matched_stop)
    return ChatAnswer(
        content=content,
        blank="" if isinstance(message.content, str) else None,
        reasoning=reasoning,
        thoughts=thought_fields,
        more=rest_of(Message, fields),
        calls=calls,
        written=written,
        finish=finish,
        ending=printable(excerpt(first.finish_reason, NAME_SHOWN)),
        stopped_at=next((stop for stop in stops if isinstance(stop, str)), None),
        ids=_ids(completion, first),
    )


_END = re.compile(
    r"(?:\s*(<\|(?:im_end|eot|eot_id|eom|eom_id|end|return|call|python_end|tool_call_section_end|endoftext|end_of_text"
    r"|end_of_turn|END_OF_TURN_TOKEN|user|observation)\|>|</s>|<eos>|<end_of_turn>|<｜end▁of▁sentence｜>))+\s*\Z"
)
"""Tokens with which models end an answer. No dialect of calls needs one of them."""


def _parts(content: Any, reading: Reading) -> tuple[str, str]:
    """(text, thoughts) of a message's content: a text, or a list of parts as Mistral's reasoning models give it."""
    if content is None or isinstance(content, str):
        return content or "", ""
    text, thoughts = [], []
    for part in content if isinstance(content, list) else [content]:
        if isinstance(part, Mapping) and part.get("type") == "thinking":
            inner = part.get("thinking")
            thoughts.append(_parts(inner if isinstance(inner, str | list) else None, reading)[0])
        elif isinstance(part, str):
            text.append(part)
        elif isinstance(part, Mapping):
            piece = next((piece for name in ("text", "refusal") if isinstance(piece := part.get(name), str)), None)
            if piece is None:
                reading.note(Noticed.OTHER_TYPE, "a part of message.content")
            text.append(piece or "")
        else:
            raise UnreadableAnswer(f"a part of the answer's content is no text: {excerpt(part, 200)!r}", foreign=True)
    return "".join(text), "".join(thoughts)


def _size(fields: Mapping[str, Any]) -> int:
    return len(json.dumps(fields)) if fields else 0


# What ended it.

STOPPED = frozenset(
    {"stop", "stop_sequence", "end_turn", "end", "eos", "eos_token", "complete", "completed", "finished"}
)
CALLED = frozenset({"tool_calls", "tool_call", "tool_use", "function_call"})
MISCALLED = frozenset({"malformed_function_call", "unexpected_tool_call", "function_call_filter"})
CUT = frozenset({"length", "max_tokens", "max_output_tokens", "max_new_tokens", "max_length", "model_length"})
FILTERED = frozenset(
    {"content_filter", "sensitive", "refusal", "safety", "recitation", "blocklist", "prohibited_content"}
)
FILTERED |= {"spii", "guardrail_intervened", "error_toxic"}
FULL = frozenset({"model_context_window_exceeded", "context_window_exceeded", "context_length_exceeded", "error_limit"})
"""Words of servers for the end of an answer, in lower case: the model ended it, with a call, or with one that cannot be
read; a limit on tokens ended it; the service took it back, which is its answer to this prompt; the context was full."""
_BROKE = re.compile(
    r"error|abort|cancel|time.?out|insufficient|resource|network|fail|overload|unavailable|interrupt|preempt|connection"
    r"|shut.?down|exception|killed|evicted|incomplete|not_finished"
)


def _ending(reason: str, native: str, empty: bool, no_tokens: bool) -> tuple[str, str]:
    """(`finish`, the word if it is unknown) of an answer that ended with finish_reason `reason`; `native` is the word
    of the server behind a router.

    Raises UnreadableAnswer if the server broke off: that is no answer of the model, whatever it had written by then.
    """
    # Gemini: `content_filter: SAFETY`
    word, native_word = (text.partition(":")[0].strip().lower() for text in (reason, native))
    # a router says `stop` or `error` of what it has no word for
    if word in STOPPED | {"error"} and (native_word in FULL | CUT | FILTERED | MISCALLED or _BROKE.search(native_word)):
        word, reason = native_word, native
    if word in FULL or word in CUT:
        # nothing was drawn: there was no room for it
        if empty and (word in FULL or no_tokens):
            raise UnreadableAnswer(f"the context is full: an empty answer with finish_reason {reason!r}", full=True)
        return "length", ""
    if word in FILTERED:
        return "content_filter", ""
    if word in STOPPED | CALLED | MISCALLED:
        return "stop", ""
    shown_reason = excerpt(repr(printable(reason)), 80) if reason else "missing"
    if empty or _BROKE.search(word):
        raise UnreadableAnswer(f"the answer broke off: finish_reason {shown_reason}")
    return "stop", shown_reason


# Tokens.


def _ids(completion: Completion, choice: Choice) -> TokenIds | None:
    # vLLM has the prompt's ids beside the choices, SGLang inside
    prompt = completion.prompt_token_ids or choice.prompt_token_ids
    response = choice.response_token_ids if choice.token_ids is None else choice.token_ids
    if not _whole_numbers(prompt) or not _whole_numbers(response):
        return None
    rows, temperature = choice.logprobs.get("content"), choice.logprobs.get("temperature")
    values = [row.get("logprob") for row in rows if isinstance(row, Mapping)] if isinstance(rows, list) else []
    logprobs = None
    if len(values) == len(response) and all(type(value) in (int, float) for value in values):
        logprobs = without_rounding(np.array([_float(value) for value in values], np.float32))
    for name, ids, numbers in (("prompt", prompt, None), ("answer", response, logprobs)):
        if (problem := wrong_numbers(np.array(ids), numbers, MOST_IDS)) is not None:
            raise UnreadableAnswer(f"the ids of the {name}: {problem}")
    return TokenIds(
        prompt=np.asarray(prompt, np.int32),
        response=np.asarray(response, np.int32),
        logprobs=logprobs,
        temperature=temperature if isinstance(temperature, float | int) and 0 <= temperature < 1e3 else None,
        alternatives=_alternatives(rows[0]) if isinstance(rows, list) and rows else {},
    )


def _alternatives(row: Any) -> dict[str, float]:
    """The log-probabilities in `top_logprobs` of one token; tokens whose text is not unique are left out."""
    top = row.get("top_logprobs") if isinstance(row, Mapping) else None
    entries = [entry for entry in top[:MOST_TOP] if isinstance(entry, Mapping)] if isinstance(top, list) else []
    alternatives: dict[str, float] = {}
    names = [str((entry.get("token"), entry.get("bytes"))) for entry in entries]
    for name, entry in zip(names, entries, strict=True):
        value = entry.get("logprob")
        if names.count(name) == 1 and type(value) in (int, float) and np.isfinite(_float(value)):
            alternatives[name] = _float(value)
    return alternatives


def _float(value: Any) -> float:
    try:
        return float(value)
    # JSON has integers of any length
    except OverflowError:
        return float("inf")


def _whole_numbers(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


# Names of models.

_VERSION = re.compile(r"[-@:](\d{4}-?\d{2}-?\d{2}|\d{3,4}|latest|\d{2}-\d{2,4}|v\d+)")


def same_model(asked: str, named: str) -> bool:
    """Whether a server that was asked for `asked` may call it `named`: letter case, leading folders, and a date or a
    version at the end may differ."""
    wanted, served = asked.lower().rstrip("/"), named.lower().rstrip("/")
    short, long = sorted((wanted.rpartition("/")[2], served.rpartition("/")[2]), key=len)
    suffix = long.removeprefix(short)
    return long.startswith(short) and (not suffix or _VERSION.fullmatch(suffix) is not None)
