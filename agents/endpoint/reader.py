"""One chat completion of any server, read once: `read_answer` is the only place that knows the form of an answer.

Each table of the wire is a `Wire` below. A field of it is used (an annotated field, read as its type), known (`kept`
fields go back with the conversation, `known` ones are dropped), or unknown: it is counted, and goes back as it came.

Servers contradict themselves, too: they say that the model called and pass no call on, give a second choice that nobody
asked for, or count tokens that do not add up. What is unambiguous is read as it was meant. Either way it is counted
(`Noticed`), so that nothing that the server lost passes for the model's own mistake.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeGuard, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from turngym.agents.endpoint.usage import Usage
from turngym.core.episode import without_rounding, wrong_numbers
from turngym.core.redaction import excerpt
from turngym.envs.dialects import DIALECTS
from turngym.envs.spaces import printable
from turngym.envs.tool_calls import STYLES, THINK, read_calls

MOST_TOKENS = 1 << 32
"""Most tokens that a server may report for one answer; larger reports are ignored."""
MOST_IDS = 1 << 24
"""No vocabulary has as many ids. The endpoint's own is not known here; a trainer checks against the student's."""
MOST_TOP = 20
"""Most alternatives of a token that are read, as many as the API allows."""
REASONING = ("reasoning_content", "reasoning")
"""Fields with the reasoning: DeepSeek, SGLang and llama.cpp use the first; OpenRouter, Ollama and vLLM the second."""
DEEPEST = 32
"""Levels of what is read or sent back: JSON of a thousand levels cannot be written, and servers refuse far less."""
NAME_SHOWN, MODEL_SHOWN, MOST_NAMES = 60, 100, 40
"""Characters of a server's own name for something that are kept, and of its model's; most names of fields."""
T = TypeVar("T", bound="Wire")


class UnreadableAnswer(Exception):
    """A body that is no answer.

    Args:
        full: whether the context had no room for an answer.
        foreign: whether the body is no chat completion at all; else the server broke off before the model had ended.
        usage: what was paid for it.
    """

    def __init__(self, reason: str, *, full: bool = False, foreign: bool = False, usage: Usage | None = None) -> None:
        super().__init__(reason)
        self.full, self.foreign, self.usage = full, foreign, usage or Usage()


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a request asked for, as far as its answer can contradict it."""

    model: str = ""
    """The model's name; empty: any."""
    tool: str = ""
    """Name of the tool that was offered; empty: none was."""
    thoughts: bool = True
    """False if thinking was switched off."""
    logprobs: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call as the server gave it. Half surrogate pairs are replaced, in the text of its arguments too."""

    id: str
    name: Any
    arguments: Any
    """JSON text, by the API; some servers give an object."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """The call's other fields, and those of its function under `function`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenCall:
    """A call in the text of an answer."""

    before: str
    """The text before it."""
    name: str
    arguments: Any
    dialect: str


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
class Answer:
    """A chat completion."""

    content: str
    blank: str | None = None
    """Value of `content` in a message that has calls and no text: "" or null."""
    reasoning: str | None = None
    thoughts: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the message with the reasoning, as they came; `content`, if it came in parts of that."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the message that go back with the conversation unread."""
    calls: tuple[ToolCall, ...] = ()
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


class Noticed:
    """What is noticed in an answer, in the words with which results count it."""

    UNKNOWN = "unknown field {}"
    OTHER_TYPE = "{} of another type"
    CHOICES = "several choices"
    OTHER_CHOICE = "call in another choice than the first"
    OLD_CALL = "call in function_call"
    WRITTEN = "call left in the text ({})"
    NO_CALL = "finish_reason of a call without a call"
    NO_NAME = "call without a name"
    UNASKED = "call though no tool was offered"
    ONLY_THOUGHT = "reasoning and nothing else"
    TOO_DEEP = "field {} that is nested too deep"
    HIDDEN = "text beside a call that would hide it"
    USAGE_PART = "usage in part"
    USAGE_SUM = "usage that does not add up"
    MODEL = "another model: {}"
    THOUGHTS = "thoughts though switched off"
    NO_LOGPROBS = "ids without their log-probabilities"
    ENDING = "unknown finish_reason {}"

    @classmethod
    def said(cls, words: str) -> str:
        """A clause that says what was noticed, and what becomes of it."""
        heads = {form.partition("{}")[0].rstrip(" ("): effect for form, effect in cls._EFFECTS.items()}
        effect = next((effect for head, effect in heads.items() if head and words.startswith(head)), "it is left out")
        return f"answers have: {words} ({effect})"

    _EFFECTS: ClassVar[Mapping[str, str]] = {
        UNKNOWN: "messages and calls take it back as it came",
        CHOICES: "one was asked for; the first counts",
        OTHER_CHOICE: "it is played",
        OLD_CALL: "it is played; the server speaks the API before `tools`",
        WRITTEN: "it is played; the server has no parser for the model's calls",
        NO_CALL: "the server says that the model called, and passes no call on: does it have the model's tool parser? "
        "--channel text needs none",
        NO_NAME: "it is malformed; the server's parser may have lost the name",
        UNASKED: "it is malformed; the server took a text for a call",
        ONLY_THOUGHT: "the turn is malformed; does the server have another model's reasoning parser?",
        TOO_DEEP: "it does not go back with the conversation",
        HIDDEN: "the call counts",
        USAGE_PART: "tokens and cost are too low",
        USAGE_SUM: "they are taken as they are",
        MODEL: "another one than was asked for plays",
        THOUGHTS: "--thinking off has no effect",
        NO_LOGPROBS: "they cannot be trained on as they were sampled",
        ENDING: "it is taken as whole",
    }


# The tables of the wire.


class Wire(msgspec.Struct, kw_only=True):
    """One table of an answer. The annotated fields are used."""

    essential: ClassVar[frozenset[str]] = frozenset()
    """Fields without which, or with another type of which, a body is no answer."""
    kept: ClassVar[frozenset[str]] = frozenset()
    """Known fields that go back with the conversation."""
    known: ClassVar[frozenset[str]] = frozenset()
    """Known fields that are dropped."""
    goes_back: ClassVar[bool] = False
    """Whether it is a part of the conversation, which is sent back with its kept and unknown fields."""


class Function(Wire):
    name: Any = None
    arguments: Any = None
    goes_back = True
    kept = frozenset({"thought_signature"})


class Call(Wire):
    id: str = ""
    function: dict[str, Any] = {}
    goes_back = True
    kept = frozenset({"index", "extra_content"})
    known = frozenset({"type"})


class Message(Wire):
    content: str | list[Any] | None = None
    refusal: str = ""
    reasoning_content: str = ""
    reasoning: str = ""
    tool_calls: list[Any] = []
    function_call: dict[str, Any] = {}
    essential = frozenset({"content", "tool_calls"})
    goes_back = True
    kept = frozenset({"reasoning_details", "thinking_blocks", "provider_specific_fields", "executed_tools"})
    known = frozenset({"role", "annotations", "audio", "images", "parsed", "citations", "context", "name", "prefix"})


class Choice(Wire):
    message: dict[str, Any]
    finish_reason: str = ""
    stop_reason: Any = None
    matched_stop: Any = None
    logprobs: dict[str, Any] = {}
    token_ids: Any = None
    prompt_token_ids: Any = None
    essential = frozenset({"message"})
    known = frozenset(
        {"index", "native_finish_reason", "content_filter_results", "content_filter_result", "seed", "text", "delta"}
        | {"hidden_states", "routed_experts", "error", "provider_specific_fields", "stop_sequence"}
    )


class Details(Wire):
    """Parts of a number of tokens, those of the prompt or those of the answer."""

    cached_tokens: int | None = None
    reasoning_tokens: int | None = None
    known = frozenset(
        {f"{kind}_tokens" for kind in ("audio", "text", "image", "video", "file", "citation", "tool", "image_url")}
        | {"accepted_prediction_tokens", "rejected_prediction_tokens", "cached_tokens_details", "cache_write_tokens"}
        | {"cache_creation_tokens", "cache_creation_token_details", "cached_creation_tokens"}
        | {"cache_creation_input_tokens", "cache_type", "web_search_requests", "speculative_decoding_tokens"}
    )


class Counts(Wire):
    """Usage. Each number has several names; the first that is there counts."""

    prompt_tokens: int | None = None
    input_tokens: int | None = None
    completion_tokens: int | None = None
    output_tokens: int | None = None
    total_tokens: int | None = None
    prompt_tokens_details: dict[str, Any] = {}
    input_tokens_details: dict[str, Any] = {}
    completion_tokens_details: dict[str, Any] = {}
    output_tokens_details: dict[str, Any] = {}
    cached_tokens: int | None = None
    prompt_cache_hit_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None
    reasoning_tokens: int | None = None
    known = frozenset(
        {
            "prompt_cache_miss_tokens",
            "cache_creation",
            "cost",
            "cost_details",
            "is_byok",
            "num_sources_used",
            "iterations",
        }
        | {
            "queue_time",
            "prompt_time",
            "completion_time",
            "total_time",
            "prompt_audio_seconds",
            "service_tier",
            "speed",
        }
        | {"server_tool_use", "inference_geo", "num_search_queries", "search_context_size", "cost_in_usd_ticks"}
    )


class Completion(Wire):
    choices: list[Any]
    model: str = ""
    usage: dict[str, Any] = {}
    prompt_token_ids: Any = None
    essential = frozenset({"choices"})
    known = frozenset(
        {"id", "object", "created", "system_fingerprint", "service_tier", "provider", "error", "metadata", "message"}
        | {
            "prompt_filter_results",
            "prompt_logprobs",
            "kv_transfer_params",
            "timings",
            "stats",
            "runtime",
            "model_info",
        }
        | {"x_groq", "citations", "search_results", "prompt", "request_id", "warnings", "base_resp", "input_sensitive"}
        | {"output_sensitive", "input_sensitive_type", "output_sensitive_type", "input_sensitive_int", "safety_ratings"}
        | {"usage_breakdown", "prompt_text", "output_sensitive_int", "success", "detail", "errors", "mcp_list_tools"}
        | {"__verbose", "generation_settings", "extra_fields", "status"}
    )


@dataclass(slots=True)
class _Reading:
    """One answer while it is read."""

    noticed: dict[str, None] = field(default_factory=dict)
    """In the order in which it was noticed."""

    def note(self, words: str, name: str = "") -> None:
        self.noticed[words.format(name)] = None

    def take(self, kind: type[T], given: Any, where: str) -> T:
        """The table `given`. Fields of another type count as absent. Raises UnreadableAnswer for an essential one."""
        table = given if isinstance(given, Mapping) else {}
        if table is not given and given is not None:
            self.note(Noticed.OTHER_TYPE, where.rstrip(".") or "body")
        found: dict[str, Any] = {}
        for each in msgspec.structs.fields(kind):
            value = table.get(each.name)
            try:
                if value is not None:
                    found[each.name] = msgspec.convert(value, each.type)
            except (msgspec.ValidationError, OverflowError):
                if each.name in kind.essential:
                    raise UnreadableAnswer(
                        f"the answer's {where}{each.name} is of another type: {excerpt(value, 200)!r}", foreign=True
                    ) from None
                self.note(Noticed.OTHER_TYPE, where + each.name)
            if each.required and each.name not in found:
                raise UnreadableAnswer(f"the answer has no {where}{each.name}: {excerpt(given, 200)!r}", foreign=True)
        for name, value in table.items():
            if name in kind.__struct_fields__ or name in kind.known or value in (None, "", [], {}):
                continue
            shown = where + printable(excerpt(name, NAME_SHOWN))
            if kind.goes_back and _deeper(value, DEEPEST):
                self.note(Noticed.TOO_DEEP, shown)
            elif name not in kind.kept:
                self.note(Noticed.UNKNOWN, shown)
        return kind(**found)


def rest_of(kind: type[Wire], table: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `table` that go back with the conversation: the kept and the unknown ones. One of more than
    `DEEPEST` levels, which few servers take, does not."""
    dropped = {*kind.__struct_fields__, *kind.known}
    rest = {name: value for name, value in table.items() if name not in dropped and value not in (None, "", [], {})}
    return {name: value for name, value in rest.items() if not _deeper(value, DEEPEST)}


def read_answer(body: Any, expected: Expected | None = None) -> Answer:
    """Read a completion. Raises UnreadableAnswer."""
    reading, expected = _Reading(), expected or Expected()
    completion = reading.take(Completion, body, "")
    usage, counted = read_usage(completion.usage, reading)
    try:
        answer = _read_choices(completion, expected, reading, no_tokens=_drew_none(completion, usage))
    except UnreadableAnswer as error:
        error.usage = replace(usage, answers=0, unreported=0)
        raise
    named = excerpt(printable(completion.model), MODEL_SHOWN)
    if expected.model and named and not same_model(expected.model, named):
        reading.note(Noticed.MODEL, named)
    if expected.logprobs and answer.ids is not None and answer.ids.logprobs is None:
        reading.note(Noticed.NO_LOGPROBS)
    # some templates open the thought in the prompt, and some servers count thoughts and hide them
    written = THINK.closing in answer.content or answer.content.lstrip().startswith(THINK.opening)
    if not expected.thoughts and (answer.reasoning or written or usage.reasoning_tokens):
        reading.note(Noticed.THOUGHTS)
    return replace(answer, model=named, usage=usage, counted=counted, noticed=tuple(reading.noticed))


def _read_choices(completion: Completion, expected: Expected, reading: _Reading, *, no_tokens: bool) -> Answer:
    if not completion.choices:
        raise UnreadableAnswer("the answer has no choices: []", foreign=True)
    choices = [reading.take(Choice, given, "choice.") for given in completion.choices[:MOST_TOP]]
    for choice in choices:
        choice.message = _without_halves(choice.message)
    messages = [reading.take(Message, choice.message, "message.") for choice in choices]
    first, message = choices[0], messages[0]
    table, calls = first.message, _calls(message, reading)
    if len(choices) > 1:
        reading.note(Noticed.CHOICES)
        # gateways in front of Claude put the text into one choice and the call into the next
        other = next((place for place, one in enumerate(messages) if _calls(one, _Reading())), 0)
        if not calls and other:
            reading.note(Noticed.OTHER_CHOICE)
            calls, table = _calls(messages[other], reading), {**choices[other].message, **table}
    content, thoughts = _parts(message.content)
    # a refusal is an answer, too
    content = content or message.refusal
    back: dict[str, Any] = {name: table[name] for name in REASONING if isinstance(table.get(name), str)}
    reasoning = next((text for text in back.values() if text), thoughts or None)
    if thoughts and isinstance(message.content, list):
        back["content"] = [part for part in message.content if isinstance(part, Mapping) and _kind(part) == "thinking"]
    empty = not (content or reasoning or calls)
    finish, ending = _ending(first.finish_reason, empty, no_tokens)
    if ending:
        reading.note(Noticed.ENDING, ending)
    written = None
    if expected.tool and not calls and finish == "stop":
        written = written_calls(content, expected.tool)
        if written is not None:
            reading.note(Noticed.WRITTEN, written.dialect)
        elif first.finish_reason.lower() in CALLED:
            reading.note(Noticed.NO_CALL)
    if calls and not expected.tool:
        reading.note(Noticed.UNASKED)
    if calls and hides_call(content):
        reading.note(Noticed.HIDDEN)
    if reasoning and not content and not calls and finish == "stop":
        reading.note(Noticed.ONLY_THOUGHT)
    more = rest_of(Message, table)
    stops = (first.stop_reason, first.matched_stop)
    return Answer(
        content=content,
        blank="" if isinstance(message.content, str) else None,
        reasoning=reasoning,
        thoughts=back,
        more=more,
        calls=calls,
        written=written,
        finish=finish,
        ending=printable(excerpt(first.finish_reason, NAME_SHOWN)),
        stopped_at=next((stop for stop in stops if isinstance(stop, str)), None),
        ids=_ids(completion, first),
    )


# Texts, thoughts and calls.


def _parts(content: Any) -> tuple[str, str]:
    """(text, thoughts) of a message's content: a text, or a list of parts as Mistral's reasoning models give it."""
    if content is None or isinstance(content, str):
        return content or "", ""
    text, thoughts = [], []
    for part in content if isinstance(content, list) else [content]:
        if isinstance(part, Mapping) and _kind(part) == "thinking":
            inner = part.get("thinking")
            thoughts.append(_parts(inner if isinstance(inner, str | list) else None)[0])
        elif isinstance(part, str):
            text.append(part)
        elif isinstance(part, Mapping):
            text.append(next((said for name in ("text", "refusal") if isinstance(said := part.get(name), str)), ""))
        else:
            raise UnreadableAnswer(f"a part of the answer's content is no text: {excerpt(part, 200)!r}", foreign=True)
    return "".join(text), "".join(thoughts)


def _kind(part: Mapping[str, Any]) -> Any:
    return part.get("type")


def _calls(message: Message, reading: _Reading) -> tuple[ToolCall, ...]:
    """The calls of a message, those of the API before `tools` included."""
    given = message.tool_calls
    if not given and message.function_call:
        reading.note(Noticed.OLD_CALL)
        given = [{"function": message.function_call}]
    calls: list[ToolCall] = []
    for place, table in enumerate(given):
        call = reading.take(Call, table, "tool_calls.")
        function = reading.take(Function, call.function, "function.")
        if not isinstance(function.name, str) or not function.name.strip():
            reading.note(Noticed.NO_NAME)
        # a result names its call by id, so ids must differ
        taken = ("", *(earlier.id for earlier in calls))
        inner = rest_of(Function, call.function)
        more = rest_of(Call, table) if isinstance(table, Mapping) else {}
        calls.append(
            ToolCall(
                id=call.id if call.id not in taken else own_id(place),
                name=function.name,
                arguments=_arguments(function.arguments),
                more={**more, **({"function": inner} if inner else {})},
            )
        )
    return tuple(calls)


def own_id(place: int, episode: int = 0) -> str:
    """The id of a call that has none: nine letters and digits, which is what Mistral's models demand."""
    return f"c{episode % 10_000:04}{place % 10_000:04}"


def _arguments(given: Any) -> Any:
    """`given` without half surrogate pairs. Its text may escape them (`\\\\ud83d`), and servers that parse a
    conversation refuse them there."""
    if not isinstance(given, str):
        return excerpt(given, 200) if _deeper(given, DEEPEST) else given
    if not HALF.search(given):
        return given
    read = json_of(given)
    return given if read is None else json.dumps(_without_halves(read), ensure_ascii=False)


def json_of(text: Any) -> Any:
    """Parses `text` if it is a JSON string. Returns other values unchanged, and None for invalid JSON and for one of
    more than `DEEPEST` levels, which few servers take back."""
    read = text
    if isinstance(text, str):
        try:
            read = json.loads(text)
        # a few thousand open brackets raise RecursionError
        except (ValueError, RecursionError):
            return None
    return None if _deeper(read, DEEPEST) else read


def written_calls(text: str, tool: str) -> WrittenCall | None:
    """The first of the calls that end `text`, where the server has left them; None if there are none.

    Only whole calls of `tool`, with nothing behind them, are no ambiguity. They may stand without their wrapper:
    dialects whose calls are bare JSON read those.
    """
    style = next((style for style in (THINK, *STYLES.values()) if style.closing in text), THINK)
    _, body, reason = style.split(text, lambda part: False)
    body = _FENCE.sub(r"\1", body.strip())
    found: list[WrittenCall] = []
    for dialect in DIALECTS.values() if reason is None else ():
        start = dialect.find(body)
        calls = read_calls(dialect, body[start:]) if start >= 0 else None
        if calls and calls[0].name == tool:
            call = calls[0]
            found.append(
                WrittenCall(before=body[:start], name=call.name, arguments=call.arguments, dialect=dialect.name)
            )
    # the one that leaves the least before it: without its marker a call may be another dialect's, too
    return min(found, key=lambda one: len(one.before), default=None)


_FENCE = re.compile(r"\A```(?:json|tool_call|xml)?\s*\n(.*)\n```\Z", re.DOTALL)


def hides_call(text: str) -> bool:
    """Whether the tool channel would not see a call behind `text`: it opens a thought, or begins a call of its own."""
    _, body, reason = THINK.split(text, lambda part: False)
    return reason is not None or DIALECTS["hermes"].find(body) >= 0


# Surrogates: half a pair is text for Python, and for nobody else.

HALF = re.compile(r"\\u[dD][89abAB]|\\u[dD][c-fC-F]|[\ud800-\udfff]")


def _without_halves(value: Any, levels: int = 2 * DEEPEST) -> Any:
    """`value` with `?` for half surrogate pairs in its texts; what lies deeper than `levels` is left alone."""
    if isinstance(value, str):
        return printable(value)
    if levels and isinstance(value, list):
        return [_without_halves(item, levels - 1) for item in value]
    if levels and isinstance(value, dict):
        return {printable(name): _without_halves(item, levels - 1) for name, item in value.items()}
    return value


def _deeper(value: Any, levels: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels < 0 or any(_deeper(item, levels - 1) for item in inner)


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


def _ending(given: str, empty: bool, drew_none: bool) -> tuple[str, str]:
    """(`finish`, the word if it is unknown) of an answer that ended with finish_reason `given`.

    Raises UnreadableAnswer if the server broke off: that is no answer of the model, whatever it had written by then.

    Args:
        given: the server's word; empty for none.
        empty: whether the answer has nothing in it.
        drew_none: whether the server says that the model drew no token.
    """
    # Gemini: `content_filter: SAFETY`
    word = given.partition(":")[0].strip().lower()
    if word in FULL or word in CUT:
        # nothing was drawn: there was no room for it
        if empty and (word in FULL or drew_none):
            raise UnreadableAnswer(f"the context is full: an empty answer with finish_reason {given!r}", full=True)
        return "length", ""
    if word in FILTERED:
        return "content_filter", ""
    if word in STOPPED | CALLED | MISCALLED:
        return "stop", ""
    shown = excerpt(repr(printable(given)), 80) if given else "missing"
    if empty or _BROKE.search(word):
        raise UnreadableAnswer(f"the answer broke off: finish_reason {shown}")
    return "stop", shown


# Tokens.


def read_usage(reported: Any, reading: _Reading | None = None) -> tuple[Usage, tuple[str, ...]]:
    """(the usage of one answer, names of its fields); it is `unreported` if a number is missing.

    OpenAI counts cached tokens in the prompt and reasoning in the completion. Others count them beside those (xAI, and
    gateways to Gemini and Claude), which their total shows. They are added here.
    """
    reading = reading or _Reading()
    counts = reading.take(Counts, reported, "usage.")
    given = [_count(counts.prompt_tokens, counts.input_tokens), _count(counts.completion_tokens, counts.output_tokens)]
    total = _count(counts.total_tokens)
    of_prompt, of_completion = (
        [reading.take(Details, getattr(counts, name), f"usage.{name}.") for name in names]
        for names in (
            ("prompt_tokens_details", "input_tokens_details"),
            ("completion_tokens_details", "output_tokens_details"),
        )
    )
    cached = _most(
        *(table.cached_tokens for table in of_prompt),
        *(counts.cached_tokens, counts.prompt_cache_hit_tokens, counts.cache_read_input_tokens),
    )
    # SGLang reports it beside the other counts
    reasoning = _most(*(table.reasoning_tokens for table in of_completion), counts.reasoning_tokens)
    names = [printable(excerpt(name, NAME_SHOWN)) for name, value in (reported or {}).items() if value is not None]
    named = tuple(sorted(names)[:MOST_NAMES])
    prompt, completion = (number or 0 for number in given)
    made = _most(counts.cache_creation_input_tokens)
    if total is not None and total < prompt + completion:
        reading.note(Noticed.USAGE_SUM)
    # the total tells the number that is missing
    if total and given[0] is None and completion:
        prompt = max(total - completion, 0)
    part = given[1] is None and not total
    # a part that is larger than its whole was counted beside it
    prompt += cached if cached > prompt else 0
    completion += reasoning if reasoning > completion else 0
    if not prompt or part:
        if named:
            reading.note(Noticed.USAGE_PART)
        return Usage(answers=1, unreported=1, prompt_tokens=prompt, completion_tokens=completion), named
    beside = (total or 0) - prompt - completion
    # Claude: what was written into the cache is counted beside the prompt, too
    if made and beside in (made, made + cached):
        prompt, beside = prompt + made, beside - made
    if beside in (cached, cached + reasoning) and beside != reasoning:
        prompt, beside = prompt + cached, beside - cached
    # the rest is reasoning, whether it is reported or not
    completion += max(beside, 0)
    return (
        Usage(
            answers=1,
            prompt_tokens=prompt,
            cached_tokens=cached,
            completion_tokens=completion,
            reasoning_tokens=reasoning,
        ),
        named,
    )


def _count(*given: Any) -> int | None:
    """The first of `given` that is a number of tokens; None if none is."""
    return next((value for value in given if type(value) is int and 0 <= value <= MOST_TOKENS), None)


def _most(*given: Any) -> int:
    """The largest number of tokens in `given`; 0 if there is none: the names of one number differ, not its value."""
    return max((number for value in given if (number := _count(value)) is not None), default=0)


def _drew_none(completion: Completion, usage: Usage) -> bool:
    """Whether the server says that no token was drawn. Thoughts that are not shown may have used up the limit."""
    return completion.usage.get("completion_tokens") == 0 and not usage.completion_tokens


def _ids(completion: Completion, choice: Choice) -> TokenIds | None:
    # vLLM has the prompt's ids beside the choices, SGLang inside
    prompt, response = completion.prompt_token_ids or choice.prompt_token_ids, choice.token_ids
    if not _whole_numbers(prompt) or not _whole_numbers(response):
        return None
    rows, heat = choice.logprobs.get("content"), choice.logprobs.get("temperature")
    known = [row.get("logprob") for row in rows if isinstance(row, Mapping)] if isinstance(rows, list) else []
    logprobs = None
    if len(known) == len(response) and all(type(value) in (int, float) for value in known):
        logprobs = without_rounding(np.array([_float(value) for value in known], np.float32))
    for name, ids, logp in (("prompt", prompt, None), ("answer", response, logprobs)):
        if (problem := wrong_numbers(np.array(ids), logp, MOST_IDS)) is not None:
            raise UnreadableAnswer(f"the ids of the {name}: {problem}")
    return TokenIds(
        prompt=np.asarray(prompt, np.int32),
        response=np.asarray(response, np.int32),
        logprobs=logprobs,
        temperature=heat if isinstance(heat, float | int) and 0 <= heat < 1e3 else None,
        alternatives=_alternatives(rows[0]) if isinstance(rows, list) and rows else {},
    )


def _alternatives(row: Any) -> dict[str, float]:
    """The log-probabilities in `top_logprobs` of one token; tokens whose text is not unique are left out."""
    top = row.get("top_logprobs") if isinstance(row, Mapping) else None
    found: dict[str, float] = {}
    pieces = [one for one in (top if isinstance(top, list) else [])[:MOST_TOP] if isinstance(one, Mapping)]
    names = [str((one.get("token"), one.get("bytes"))) for one in pieces]
    for name, one in zip(names, pieces, strict=True):
        value = one.get("logprob")
        if names.count(name) == 1 and type(value) in (int, float) and np.isfinite(_float(value)):
            found[name] = _float(value)
    return found


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
    """Whether a server that was asked for `asked` may call it `named`: with a date or a version behind it, without the
    folders before it, or in other letters."""
    one, other = asked.lower().rstrip("/"), named.lower().rstrip("/")
    short, long = sorted((one.rpartition("/")[2], other.rpartition("/")[2]), key=len)
    rest = long.removeprefix(short)
    return long.startswith(short) and (not rest or _VERSION.fullmatch(rest) is not None)
