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

    def __init__(self, reason: str, *, full: bool = False, foreign: bool = False, usage: Usage | None = None) -> None:
        super().__init__(reason)
        self.full, self.foreign, self.usage = full, foreign, usage or Usage()


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
    stop_reason: Any = None
    matched_stop: Any = None
    logprobs: dict[str, Any] = {}
    token_ids: Any = None
    response_token_ids: Any = None
    """What SGLang calls them in a chat."""
    prompt_token_ids: Any = None
    essential = frozenset({"message"})
    known = frozenset(
        {"index", "native_finish_reason", "content_filter_results", "content_filter_result", "seed", "text", "delta"}
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
            if kind.goes_back and deeper(value, DEEPEST):
                self.note(Noticed.TOO_DEEP, shown)
            elif name not in kind.kept:
                self.note(Noticed.UNKNOWN, shown)
        return kind(**found)


def rest_of(kind: type[AnswerTable], table: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `table` that go back with the conversation: the kept and the unknown ones. One of more than
    `DEEPEST` levels, which few servers take, does not."""
    dropped = {*kind.__struct_fields__, *kind.known}
    rest = {name: value for name, value in table.items() if name not in dropped and value not in (None, "", [], {})}
    return {name: value for name, value in rest.items() if not deeper(value, DEEPEST)}


def deeper(value: Any, levels: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels < 0 or any(deeper(item, levels - 1) for item in inner)
