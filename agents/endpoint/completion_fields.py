"""The tables of a chat completion, as servers write them, and what is noticed while they are read.

Each is an `AnswerTable`. A field of it is used (an annotated field, read as its type), known (`kept` fields go back
with the conversation, `known` ones are dropped), or unknown: it is counted, and goes back as it came.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import msgspec

from turngym.agents.endpoint.usage import Usage
from turngym.core.redaction import excerpt
from turngym.envs.spaces import printable

DEEPEST = 32
"""Levels of what is read or sent back: JSON of a thousand levels cannot be written, and servers refuse far less."""
NAME_SHOWN = 60
"""Characters of a server's own name for something that are kept."""
REASONING = ("reasoning_content", "reasoning")
"""Fields with the reasoning: DeepSeek, SGLang and llama.cpp use the first; OpenRouter, Ollama and vLLM the second."""
T = TypeVar("T", bound="AnswerTable")


class UnreadableAnswer(Exception):
    """A body that is no answer.

    Args:
        full: whether the context had no room for an answer.
        foreign: whether the body is no chat completion at all; else the server broke off before the model had ended.
    """

    def __init__(self, reason: str, *, full: bool = False, foreign: bool = False) -> None:
        super().__init__(reason)
        self.full, self.foreign = full, foreign
        self.usage = Usage()
        """What was paid for it; set by `read_answer`."""


class Notice(str):
    """The words with which results count what is noticed, and what becomes of it."""

    effect: str

    def __new__(cls, words: str, effect: str = "it is left out") -> Notice:
        notice = super().__new__(cls, words)
        notice.effect = effect
        return notice


class Noticed:
    """What is noticed in an answer."""

    UNKNOWN = Notice("unknown field {}", "messages and calls take it back as it came")
    OTHER_TYPE = Notice("{} of another type")
    CHOICES = Notice("several choices", "one was asked for; the first counts")
    OTHER_CHOICE = Notice("call in another choice than the first", "it is played")
    OLD_CALL = Notice("call in function_call", "it is played; the server speaks the API before `tools`")
    WRITTEN = Notice("call left in the text ({})", "it is played; the server has no parser for the model's calls")
    NO_CALL = Notice(
        "finish_reason of a call without a call",
        "the server says that the model called, and passes no call on: does it have the model's tool parser? "
        "--channel text needs none",
    )
    NO_NAME = Notice("call without a name", "it is malformed; the server's parser may have lost the name")
    NAME = Notice("tool's name with more around it", "the tool counts; the server's parser has left that there")
    TWICE = Notice("arguments written as JSON twice", "they are read; once is what goes back with the conversation")
    UNASKED = Notice("call though no tool was offered", "it is malformed; the server took a text for a call")
    ONLY_THOUGHT = Notice(
        "reasoning and nothing else",
        "the turn is malformed; does the server have another model's reasoning parser, or did a stop string end the "
        "thought (--no-send-stop)?",
    )
    EMPTY = Notice("nothing at all", "the turn is malformed; a model is seldom silent, and servers lose texts")
    TOO_DEEP = Notice("field {} that is nested too deep", "it does not go back with the conversation")
    HIDDEN = Notice("text beside a call that would hide it", "the call counts")
    USAGE_PART = Notice("usage in part", "tokens and cost are too low")
    USAGE_SUM = Notice("usage that does not add up", "they are taken as they are")
    MODEL = Notice("another model: {}", "another one than was asked for plays")
    THOUGHTS = Notice("thoughts though switched off", "--thinking off has no effect")
    NO_LOGPROBS = Notice("ids without their log-probabilities", "they cannot be trained on as they were sampled")
    END_LEFT = Notice("control token {} left in the text")
    THOUGHT_LEFT = Notice("thoughts left in the text ({})", "they are read as such; the server has no parser for them")
    UNREAD = Notice("answer that its own server cannot read", "it is read as far as the server tells it")
    CUT = Notice("finish_reason of a call at the limit of tokens", "it counts as cut off")
    ENDING = Notice("unknown finish_reason {}", "it is taken as whole")

    @classmethod
    def said(cls, words: str) -> str:
        """A clause that says what was noticed, and what becomes of it."""
        notices = [notice for notice in vars(cls).values() if isinstance(notice, Notice)]
        heads = {notice.partition("{}")[0].rstrip(" ("): notice.effect for notice in notices}
        effect = next((effect for head, effect in heads.items() if head and words.startswith(head)), "it is left out")
        return f"answers have: {words} ({effect})"


class AnswerTable(msgspec.Struct, kw_only=True):
    """One table of an answer. The annotated fields are used."""

    essential: ClassVar[frozenset[str]] = frozenset()
    """Fields without which, or with another type of which, a body is no answer."""
    kept: ClassVar[frozenset[str]] = frozenset()
    """Known fields that go back with the conversation."""
    known: ClassVar[frozenset[str]] = frozenset()
    """Known fields that are dropped."""
    goes_back: ClassVar[bool] = False
    """Whether it is a part of the conversation, which is sent back with its kept and unknown fields."""


class Function(AnswerTable):
    name: Any = None
    arguments: Any = None
    goes_back = True
    kept = frozenset({"thought_signature"})


class Call(AnswerTable):
    id: str = ""
    function: dict[str, Any] = {}
    goes_back = True
    kept = frozenset({"index", "extra_content"})
    known = frozenset({"type"})


class Message(AnswerTable):
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


class Choice(AnswerTable):
    message: dict[str, Any]
    finish_reason: str = ""
    native_finish_reason: str = ""
    """What the server behind a router said."""
    stop_reason: Any = None
    matched_stop: Any = None
    logprobs: dict[str, Any] = {}
    token_ids: Any = None
    response_token_ids: Any = None
    """What SGLang calls them in a chat."""
    prompt_token_ids: Any = None
    essential = frozenset({"message"})
    known = frozenset(
        {"index", "content_filter_results", "content_filter_result", "seed", "text", "delta"}
        | {"hidden_states", "routed_experts", "error", "provider_specific_fields", "stop_sequence"}
    )


class Details(AnswerTable):
    """Parts of a number of tokens, those of the prompt or those of the answer."""

    cached_tokens: int | None = None
    reasoning_tokens: int | None = None
    known = frozenset(
        {f"{kind}_tokens" for kind in ("audio", "text", "image", "video", "file", "citation", "tool", "image_url")}
        | {"accepted_prediction_tokens", "rejected_prediction_tokens", "cached_tokens_details", "cache_write_tokens"}
        | {"cache_creation_tokens", "cache_creation_token_details", "cached_creation_tokens"}
        | {"cache_creation_input_tokens", "cache_type", "web_search_requests", "speculative_decoding_tokens"}
    )


class Counts(AnswerTable):
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
        {"prompt_cache_miss_tokens", "cache_creation", "cost", "cost_details", "is_byok", "num_sources_used", "speed"}
        | {"queue_time", "prompt_time", "completion_time", "total_time", "prompt_audio_seconds", "service_tier"}
        | {"server_tool_use", "inference_geo", "num_search_queries", "search_context_size", "cost_in_usd_ticks"}
        | {"iterations"}
    )


class Completion(AnswerTable):
    choices: list[Any]
    model: str = ""
    usage: dict[str, Any] = {}
    prompt_token_ids: Any = None
    essential = frozenset({"choices"})
    known = frozenset(
        {"id", "object", "created", "system_fingerprint", "service_tier", "provider", "error", "metadata", "message"}
        | {"prompt_filter_results", "prompt_logprobs", "kv_transfer_params", "timings", "stats", "runtime"}
        | {"x_groq", "citations", "search_results", "prompt", "request_id", "warnings", "base_resp", "input_sensitive"}
        | {"output_sensitive", "input_sensitive_type", "output_sensitive_type", "input_sensitive_int", "safety_ratings"}
        | {"usage_breakdown", "prompt_text", "output_sensitive_int", "success", "detail", "errors", "mcp_list_tools"}
        | {"__verbose", "generation_settings", "extra_fields", "status", "model_info"}
    )


@dataclass(slots=True)
class Reading:
    """One answer while it is read."""

    noticed: dict[str, None] = field(default_factory=dict)
    """What was noticed, in its order."""

    def note(self, words: str, name: str = "") -> None:
        self.noticed[str(words.format(name))] = None

    def take(self, kind: type[T], given: Any, where: str) -> T:
        """The table `given`. Fields of another type count as absent. Raises UnreadableAnswer for an essential one."""
        table = given if isinstance(given, Mapping) else {}
        if table is not given and given is not None:
            self.note(Noticed.OTHER_TYPE, where.rstrip(".") or "body")
        values: dict[str, Any] = {}
        for member in msgspec.structs.fields(kind):
            value = table.get(member.name)
            try:
                if value is not None:
                    values[member.name] = msgspec.convert(value, member.type)
            except (msgspec.ValidationError, OverflowError):
                if member.name in kind.essential:
                    raise UnreadableAnswer(
                        f"the answer's {where}{member.name} is of another type: {excerpt(value, 200)!r}", foreign=True
                    ) from None
                self.note(Noticed.OTHER_TYPE, where + member.name)
            if member.required and member.name not in values:
                raise UnreadableAnswer(f"the answer has no {where}{member.name}: {excerpt(given, 200)!r}", foreign=True)
        for name, value in table.items():
            if name in kind.__struct_fields__ or name in kind.known or value in (None, "", [], {}):
                continue
            path = where + printable(excerpt(name, NAME_SHOWN))
            if kind.goes_back and deeper(value, DEEPEST):
                self.note(Noticed.TOO_DEEP, path)
            elif name not in kind.kept:
                self.note(Noticed.UNKNOWN, path)
        return kind(**values)


def rest_of(kind: type[AnswerTable], table: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `table` that go back with the conversation: the kept and the unknown ones. One of more than
    `DEEPEST` levels, which few servers take, does not."""
    dropped = {*kind.__struct_fields__, *kind.known}
    kept = {name: value for name, value in table.items() if name not in dropped and value not in (None, "", [], {})}
    return {name: value for name, value in kept.items() if not deeper(value, DEEPEST)}


def deeper(value: Any, levels: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels < 0 or any(deeper(item, levels - 1) for item in inner)


# The usage of an answer, whatever a server calls its numbers.

MOST_TOKENS = 1 << 32
"""Most tokens that a server may report for one answer; larger reports are ignored."""
MOST_NAMES = 40
"""Most names of fields that are kept."""


def read_usage(reported: Any, reading: Reading | None = None) -> tuple[Usage, tuple[str, ...]]:
    """(the usage of one answer, names of its fields); it is `unreported` if a number is missing.

    OpenAI counts cached tokens in the prompt and reasoning in the completion. Others count them beside those (xAI, and
    gateways to Gemini and Claude), which their total shows. They are added here.
    """
    reading = reading or Reading()
    counts = reading.take(Counts, reported, "usage.")
    prompt_count = _count(counts.prompt_tokens, counts.input_tokens)
    completion_count = _count(counts.completion_tokens, counts.output_tokens)
    total = _count(counts.total_tokens)
    of_prompt, of_completion = (
        [reading.take(Details, getattr(counts, name), f"usage.{name}.") for name in names]
        for names in (
            ("prompt_tokens_details", "input_tokens_details"),
            ("completion_tokens_details", "output_tokens_details"),
        )
    )
    cached = most(
        *(table.cached_tokens for table in of_prompt),
        *(counts.cached_tokens, counts.prompt_cache_hit_tokens, counts.cache_read_input_tokens),
    )
    # SGLang reports it beside the other counts
    reasoning = most(*(table.reasoning_tokens for table in of_completion), counts.reasoning_tokens)
    names = [printable(excerpt(name, NAME_SHOWN)) for name, value in (reported or {}).items() if value is not None]
    named = tuple(sorted(names)[:MOST_NAMES])
    prompt, completion = prompt_count or 0, completion_count or 0
    created = most(counts.cache_creation_input_tokens)
    if total is not None and total < prompt + completion:
        reading.note(Noticed.USAGE_SUM)
    # the total tells the number that is missing
    if total and prompt_count is None and completion:
        prompt = max(total - completion, 0)
    incomplete = completion_count is None and not total
    # a part that is larger than its whole was counted beside it
    prompt += cached if cached > prompt else 0
    completion += reasoning if reasoning > completion else 0
    if not prompt or incomplete:
        if named:
            reading.note(Noticed.USAGE_PART)
        return Usage(answers=1, unreported=1, prompt_tokens=prompt, completion_tokens=completion), named
    beside = (total or 0) - prompt - completion
    # Claude: what was written into the cache is counted beside the prompt, too
    if created and beside in (created, created + cached):
        prompt, beside = prompt + created, beside - created
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
    """The first of the given values that is a number of tokens; None if none is."""
    return next((value for value in given if type(value) is int and 0 <= value <= MOST_TOKENS), None)


def most(*given: Any) -> int:
    """The largest number of tokens among the given values, 0 without any: servers name one number differently."""
    return max((number for value in given if (number := _count(value)) is not None), default=0)
