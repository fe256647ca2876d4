"""What an endpoint means by an answer that is not the model's: `read_failure` reads every error, with whatever status.

Servers agree on little. They say the same in other fields (`_said`), give an error the status 200, and have some thirty
wordings for a full context. So status, codes and numbers are read first and words last (`_is_full`). What cannot be
told from a mistake in the request stays one (`RequestFailed.unclear`), and is said and counted by who asked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from turngym.agents.endpoint.usage import Usage
from turngym.core.http_client import PASSING, retry_after
from turngym.core.http_connection import Cause
from turngym.core.redaction import excerpt

SHOWN_LETTERS, READ_LETTERS = 500, 4000
"""Characters of a server's message that are shown, and those that are read."""


@dataclass(slots=True)
class RequestFailed(Exception):
    """One failed attempt."""

    reason: str
    passing: bool
    """Whether the same request may work later."""
    reached: bool = True
    """Whether a server answered at all."""
    limited: bool = False
    """Whether it was too many requests, which is waited out however often it takes."""
    overflow: bool = False
    """Whether the conversation does not fit the context."""
    after: float | None = None
    """Seconds that the server asks to wait."""
    code: int | None = None
    """The HTTP status, or the one that the error in an answer with status 200 names."""
    param: str = ""
    """The field of the request that is at fault, if the server names it."""
    written: str | None = None
    """What the model wrote, as far as it is known, where the server refuses the model's own words: a call that it could
    not read."""
    filtered: bool = False
    """Whether the service's filter refuses the prompt, which is its answer to it."""
    foreign: bool = False
    """Whether it is an answer with status 200 that is no completion of any kind, and there was never another."""
    usage: Usage = field(default_factory=Usage)
    """What was paid for an answer that could not be used."""
    cause: Cause | None = None
    """Why the server was not reached."""
    tries: int = 1
    """How often the request was sent."""

    @property
    def rejected(self) -> bool:
        """Whether the server says that the request itself is wrong, so that the same one would fail again."""
        return self.code in (400, 422) and not self.overflow and self.written is None and not self.filtered

    @property
    def unclear(self) -> bool:
        """Whether it is rejected and the server does not say for what: the context may be full."""
        return self.rejected and bool(OF_PROMPT.match(self.param.lower()))


MESSAGES = ("message", "msg", "detail", "error", "raw", "reason", "title", "description", "error_msg", "status_msg")
CODES = ("code", "type", "status", "error_code", "error_type", "status_code", "__type")
INSIDE = ("error", "errors", "detail", "details", "metadata", "raw", "base_resp", "innererror", "message", "response")
"""Fields of an error with a message, with a code, and with a further error."""
_DEPTH, _ITEMS = 6, 8
_NUMBER = re.compile(r"(?<![\w.,-])-?\d[\d,_]*(?:\.\d+)?(?![\w-])")
_COUNTED = re.compile(r"token|ctx|context|limit|max|length|size|prompt|input")
_JSON = re.compile(r"[^\[{]{0,80}?([\[{].*)", re.DOTALL)
_SECONDS = re.compile(r"(\d{1,6}(?:\.\d*)?)s")


@dataclass(slots=True)
class _Said:
    """What an error says, wherever it says it."""

    messages: list[str]
    codes: list[str]
    sizes: list[str]
    """Fields with the number of something, as `n_ctx 4096`."""
    param: str = ""
    delay: float | None = None
    written: str | None = None

    def read(self, value: Any, depth: int = 0) -> None:
        """Take in an error, or a list of errors, and the errors in it."""
        if depth > _DEPTH:
            return
        if isinstance(value, list):
            for item in value[:_ITEMS]:
                self.read(item, depth + 1)
        elif isinstance(value, str):
            # a gateway quotes the error of the server behind it as JSON
            match = _JSON.match(value[: 16 * READ_LETTERS])
            try:
                self.read(json.JSONDecoder().raw_decode(match[1])[0] if match else None, depth + 1)
            except (ValueError, RecursionError):
                return
        elif isinstance(value, Mapping):
            self._fields(value)
            for name in INSIDE:
                self.read(value.get(name), depth + 1)

    def _fields(self, fields: Mapping[str, Any]) -> None:
        texts = [text for name in MESSAGES if isinstance(text := fields.get(name), str) and text]
        self.messages += [excerpt(text, READ_LETTERS) for text in texts]
        codes = [fields.get(name) for name in CODES]
        self.codes += [excerpt(code, 80).lower() for code in codes if type(code) in (str, int)]
        sizes = [(name, value) for name, value in fields.items() if type(value) is int and _COUNTED.search(name)]
        self.sizes += [f"{excerpt(name, 80)} {value}" for name, value in sizes[:_ITEMS] if abs(value) < 1 << 53]
        location = fields.get("loc")
        param = location[-1] if isinstance(location, list) and location else fields.get("param")
        # FastAPI says where: ["body", "messages", 3, "content"]
        if isinstance(location, list) and len(location) > 1 and location[0] == "body":
            param = location[1]
        self.param = self.param or (param if isinstance(param, str) else "")
        delay = fields.get("retryDelay")
        if self.delay is None and isinstance(delay, str) and (match := _SECONDS.fullmatch(delay)):
            self.delay = float(match[1])
        # a longer text would be looked at for each of its words
        unread = next(filter(None, (_UNREAD.search(text[: 4 * READ_LETTERS]) for text in (*texts, *self.codes))), None)
        if unread is not None and self.written is None:
            self.written = unread["all"] or unread["raw"] or ""
        if isinstance(text := fields.get("failed_generation"), str):
            self.written = text


_UNREAD = re.compile(
    # an answer that its own server cannot read: llama.cpp and Ollama quote it, Groq may, vLLM does not
    r"tool_use_failed|output_parse_failed|harmonyerror|unexpected tokens? .{0,40}(in message header|start token)"
    r"|failed to parse input at pos \d{1,9}: (?P<all>.*)|error parsing tool call: raw='(?P<raw>.*)', err=",
    re.DOTALL | re.IGNORECASE,
)
SPENT = frozenset({"insufficient_quota", "billing_hard_limit_reached", "insufficient_balance", "insufficient_credits"})
"""Error codes of a 429 that waiting does not cure."""
FILTERS = frozenset(
    {"content_filter", "responsibleaipolicyviolation", "content_policy_violation", "data_inspection_failed"}
)
"""Error codes of a prompt that a filter refuses: Azure, OpenAI, Alibaba."""
_LIMITED = re.compile(
    r"rate.?limit|too many requests|per.?(second|minute|min|hour|day)\b|\b[tr]p[smd]\b|quota|billing|credit|balance"
    r"|overloaded|concurren"
)
_TEMPLATE = re.compile(
    r"jinja|chat.?template|raise_exception|roles? must alternate|\brole\b.{0,20}not supported|tool.?call.?ids?\b"
)
_LIMIT = re.compile(r"limit:? *(\d[\d,]*)\D{1,40}requested:? *(\d[\d,]*)")


def read_failure(status: int, message: str, body: Any, headers: Any) -> RequestFailed:
    """The failure of an answer that is an error: one with status 400 or more, or the `error_in` one with 200.

    Args:
        message: text of the answer, which the failure quotes if the JSON has no message.
    """
    said = _Said([], [], [])
    said.read(body)
    codes = said.codes
    if status < 400:
        # a gateway that began to answer has only the body to say what became of it
        status = next((int(code) for code in codes if re.fullmatch(r"[45]\d\d", code)), 0)
    message_text = " ".join(dict.fromkeys(said.messages)) or (message if body is None else "")
    words = " ".join([excerpt(message_text, READ_LETTERS), *said.sizes]).lower()
    full = _is_full(status, codes, said.param, words)
    limits = bool(_LIMITED.search(" ".join([words, *codes])))
    limited = not full and (status == 429 or (not status and limits))
    # more tokens than the account may ever send in a minute
    hopeless = limited and any(_number(wanted) > _number(most) for most, wanted in _LIMIT.findall(words))
    spent = hopeless or not SPENT.isdisjoint(codes)
    filtered = status in (400, 422) and not FILTERS.isdisjoint(codes)
    # the server's chat template refuses the conversation, or it was started without one that takes tools (llama.cpp)
    unable = status == 500 and _TEMPLATE.search(words) is not None
    text = excerpt(" ".join((message_text or message or "").split()), SHOWN_LETTERS)
    head = f"status {status}" if status else "an error in place of an answer"
    return RequestFailed(
        f"{head}: {text}" if text else head,
        passing=(status in PASSING or not status) and not spent and not full and not unable,
        limited=limited and not spent,
        overflow=full,
        after=retry_after(headers) if said.delay is None else said.delay,
        code=status or None,
        param=said.param,
        written=None if full or limited else said.written,
        filtered=filtered,
    )


# A full context, in the words of some forty servers.

_FULL_CODE = re.compile(
    r"context.?(length|window|size)|(prompt|input|tokens?)_?(length|count|limits?|s)?_?(is_)?(too_?long|exceed|reached)"
    r"|request_?too_?large|payload_?too_?large|string_above_max_length|oversize_?text|max\w*_?prompt_?tokens"
)
_OWN_CODES = frozenset({"1261", "3051"})
"""Codes that say it by number alone: Zhipu, Mistral."""
_SIZE = re.compile(
    r"context[ _-]?(length|window|size|limit|overflow)|n_ctx|session_len"
    r"|(prompt|input|sequence|conversation)s?[ _-]*(token)?s?[ _-]*(length|len|count|size|limit)s?(?![a-z])"
    r"|max\w*[ _-](model|seq|sequence|context|prompt|input|num_tokens)"
)
"""A size that only prompts have."""
_EXCESS = (
    r"(too (?:long|large|big|many)|exceed|longer than|greater than|larger than|over (?:the )?(?:limit|max)|overflow)"
)
_PROMPT = r"(context|prompt|input|messages|conversation|history|sequence|tokens?)\b"
_TOO_LONG = re.compile(
    rf"{_PROMPT}.{{0,80}}?{_EXCESS}|{_EXCESS}.{{0,60}}?{_PROMPT}"
    r"|(messages?|content|text|string|body|request|entity|payload)\b.{0,40}too (long|large|big)"
    r"|tokens?\b.{0,40}more than|context\b.{0,30}\b(full|exhausted)"
    r"|(reduce|shorten|trim|truncate|shorter)\b.{0,30}(prompt|input|messages|context|conversation|history)"
    r"|(no|not enough|insufficient)\b.{0,20}(context|room|space)"
    r"|超长|过长|(超过|超出).{0,16}(长度|上限|限制|token)|(输入|上下文|长度).{0,16}(超过|超出)"
)
_TOKENS = re.compile(r"token|context|prompt|n_ctx|\bseq")
_OUTPUT = re.compile(r"max_?(completion_?|new_?|output_?)?tokens|(completion|output|new|generated) tokens")
_WHOLE = re.compile(r"prompt|input|context|messages?\b|sequence|conversation|history|n_ctx|total|requested|window")
_LEAST = 16
"""Smaller numbers in an error count messages, positions and choices, not tokens."""
OF_PROMPT = re.compile(r"(|messages?(\.?\[?\d+\]?)?(\.content.*)?|prompts?|inputs?|contents?|max_\w*tokens|body)$")
"""Fields of a request that a full context may name; any other is a mistake in that field."""


def _is_full(status: int, codes: list[str], param: str, words: str) -> bool:
    """Whether prompt, or prompt and answer together, are longer than the model's context."""
    if status not in (0, 400, 413, 422, 500) or not OF_PROMPT.match(param.lower()):
        return False
    if any(code in _OWN_CODES or _FULL_CODE.search(code) for code in codes):
        return not _LIMITED.search(" ".join([words, *codes]))
    # pydantic's words for a field of the wrong size, and what an account may send in a minute
    words = re.sub(r"(input|string|list) should (be|have)[^;]*", "", words)
    if _LIMITED.search(" ".join([words, *codes])) or "out of memory" in words:
        return False
    if status == 413:
        return True
    numbers = [_number(digits) for digits in _NUMBER.findall(words)]
    # room for an answer that is less than nothing: the server took the prompt off its context
    if "max_tokens" in words and any(number < -1 for number in numbers):
        return True
    if _OUTPUT.search(words) and not _WHOLE.search(_OUTPUT.sub("", words)):
        # the limit of an answer alone is an option of the user's
        return False
    if _TOO_LONG.search(words):
        return True
    # a broken server may name a size, too
    if status not in (400, 422):
        return False
    if _SIZE.search(words):
        return True
    return bool(_TOKENS.search(words)) and len({number for number in numbers if number >= _LEAST}) > 1


def _number(text: str) -> float:
    return float(text.replace(",", "").replace("_", ""))


def error_in(body: Any) -> Any:
    """The error in an answer with status 200; None if it holds none.

    Gateways begin to answer before the server behind them fails: the error stands beside the choices, inside the first
    one, or alone.
    """
    if isinstance(body, list):
        return next((item for item in body[:1] if isinstance(item, Mapping) and item.get("error")), None)
    if not isinstance(body, Mapping):
        return None
    choices = body.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    places = (body, *((first, first.get("message")) if isinstance(first, Mapping) else ()))
    inside = next((place["error"] for place in places if isinstance(place, Mapping) and place.get("error")), None)
    if inside is not None:
        return {"error": inside}
    # MiniMax: {"choices": null, "base_resp": {"status_code": 1002, "status_msg": "rate limit"}}
    base = body.get("base_resp")
    failed = isinstance(base, Mapping) and base.get("status_code") not in (None, 0, "0")
    failed = failed or body.get("object") == "error" or body.get("success") is False
    has_error = not isinstance(first, Mapping) and any(body.get(name) for name in ("errors", "detail", "message"))
    return body if failed or has_error else None


# What may help.

ADDRESS = "--base-url is the address with the version, for example http://HOST:PORT/v1."
_REFUSED = re.compile(
    r"unsupported|not supported|unknown|unexpected|not permitted|not allowed|unrecognized|extra|invalid"
)
_ORDER = re.compile(
    r"roles? must alternate|alternat\w{1,9} .{0,200}?roles?|(unexpected|expected).{0,200}?\brole\b|after role"
)


def blames(failed: RequestFailed, name: str) -> bool:
    """Whether the server says that the field `name` of a request is at fault."""
    unsupported = re.search(rf"(not |un)support\w*.*\b{name}\b|\b{name}\b.*(not |un)support", failed.reason.lower())
    quoted = re.search(rf"[\"'`]{name}[\"'`]", failed.reason)
    return failed.param == name or quoted is not None or unsupported is not None


def advice(failed: RequestFailed, *, model: str, key_env: str, tools: bool = False, reasoning: bool = False) -> str:
    """A sentence on what may help; empty if nothing is known. `tools` and `reasoning`: whether the request had tools,
    and earlier reasoning in it."""
    text = failed.reason
    lower = text.lower()
    if failed.cause in ("certificate", "scheme", "proxy", "files", "network"):
        return ""
    if not failed.reached:
        return "Is the server running, and is --base-url its address with the version (http://HOST:PORT/v1)?"
    if failed.code in (401, 403):
        return f"The key is read from ${key_env}; --key-env names another variable."
    # a router has the model, and nobody who takes tools for it
    no_tools = tools and "tool" in lower
    if failed.foreign or failed.code == 405 or (failed.code == 404 and model not in text and not no_tools):
        return ADDRESS
    if re.search(r"reasoning|thinking.?(block|content)|\bthoughts?\b", lower) and "reasoning_effort" not in lower:
        if reasoning and _REFUSED.search(lower):
            return "--reasoning-back drop leaves the reasoning of earlier turns out."
        if not reasoning:
            return "--reasoning-back send sends the reasoning of earlier turns back, as some models demand with tools."
    for name, help_text in (
        ("stop", "--no-send-stop leaves it out."),
        ("seed", "--no-send-seed leaves it out."),
        ("temperature", "--temperature 1 is what some models want; the handshake leaves it out where none is taken."),
        ("chat_template_kwargs", "--thinking auto leaves it out."),
        ("return_token_ids", "Leave out --token-ids."),
        ("logprobs", "Leave out --token-ids."),
    ):
        if blames(failed, name):
            return help_text
    if _OUTPUT.search(lower):
        return "--max-new-tokens asks for fewer."
    if _ORDER.search(lower):
        return "--memory window:8 sends every prompt as one message, and --examples.form text examples inside it."
    if no_tools:
        return "--channel text writes actions as text, which needs no tools."
    return ""
