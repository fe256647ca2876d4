"""A conversation as chat messages: what is sent to an endpoint, and what the environment reads in its answers.

1. `Usage`, `Prices`: tokens and cost of the answers, noted in each episode and summed for the results.
2. `read_answer`: one chat completion with its text, reasoning, tool calls, usage and token ids. What ended it decides
   whether it is an answer at all.
3. `Transcript`: the messages of one episode. Fields of an answer that nobody here knows go back as they came: servers
   sign calls and thoughts in them, and refuse a conversation without. `response_of`: an answer as the text that the
   environment reads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from turngym.agents.rendering.conversation import Example, IdBuffer, TokenHistory
from turngym.core.episode import Episode, without_rounding, wrong_numbers
from turngym.core.errors import AgentError
from turngym.core.redaction import excerpt
from turngym.core.task import ToolSpec
from turngym.envs.channels import Channel, first_action, with_call
from turngym.envs.spaces import printable
from turngym.envs.tool_calls import THINK

NOTE = "usage"
"""The key of `Usage` in an episode's `meta`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What some answers used. Tokens are counted by the server; failed requests are not counted."""

    answers: int = 0
    unreported: int = 0
    """Answers whose server did not report their usage."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that the server had in its cache."""
    completion_tokens: int = 0
    """Tokens of the answers, reasoning included."""
    reasoning_tokens: int = 0
    """Tokens of the reasoning, if the server reports them."""
    cut_off: int = 0
    """Answers that ended at the limit of tokens."""
    filtered: int = 0
    """Answers that the service's filter took back or cut."""
    retries: int = 0
    """Number of requests that were sent again."""
    refused: int = 0
    """Requests that were refused although others were answered; each ended its episode as an error."""
    stalled: int = 0
    """Answers to prompts that the server seems to have cut."""
    cost: float | None = None
    """Cost in the currency of the prices; None without prices."""

    def __add__(self, other: Usage) -> Usage:
        names = [field.name for field in fields(Usage) if field.name != "cost"]
        costs = [one.cost for one in (self, other) if one.cost is not None]
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        return Usage(**sums, cost=sum(costs) if costs else None)

    def to_json(self) -> dict[str, Any]:
        """The fields that are known."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Prices of a million tokens."""

    prompt: float
    cached: float
    completion: float

    @classmethod
    def of(cls, prompt: float | None, cached: float | None, completion: float | None) -> Prices | None:
        """The prices; None if none is given. Raises AgentError if only one of the two needed prices is given."""
        if prompt is None and completion is None and cached is None:
            return None
        if prompt is None or completion is None:
            missing = "--price-in" if prompt is None else "--price-out"
            raise AgentError(f"a cost needs both --price-in and --price-out; {missing} is missing")
        for name, value in (("--price-in", prompt), ("--price-cached", cached), ("--price-out", completion)):
            if value is not None and value < 0:
                raise AgentError(f"{name} is {value:g}; a price is at least 0")
        return cls(prompt=prompt, cached=prompt if cached is None else cached, completion=completion)

    def cost(self, usage: Usage) -> float:
        """Cost of the reported tokens."""
        fresh = usage.prompt_tokens - usage.cached_tokens
        spent = self.prompt * fresh + self.cached * usage.cached_tokens + self.completion * usage.completion_tokens
        return spent / 1_000_000


def read_usage(reported: Any) -> Usage:
    """Read the `usage` field of one answer; it is `unreported` if there is no readable one.

    OpenAI counts cached tokens in the prompt and reasoning in the completion. Others count them beside those (xAI, and
    gateways to Gemini and Claude), which their total shows. They are added here.
    """
    if not isinstance(reported, Mapping):
        return Usage(answers=1, unreported=1)
    prompt, completion, total = (_count(reported.get(f"{name}_tokens")) for name in ("prompt", "completion", "total"))
    cached = _count(_inside(reported, "prompt_tokens_details", "cached_tokens"))
    reasoning = _count(
        # SGLang reports it beside the other counts
        _inside(reported, "completion_tokens_details", "reasoning_tokens") or reported.get("reasoning_tokens")
    )
    # a part that is larger than its whole was counted beside it
    prompt += cached if cached > prompt else 0
    completion += reasoning if reasoning > completion else 0
    if not prompt:
        return Usage(answers=1, unreported=1)
    beside = total - prompt - completion
    if beside in (cached, cached + reasoning) and beside != reasoning:
        prompt, beside = prompt + cached, beside - cached
    # the rest is reasoning, whether it is reported or not
    completion += max(beside, 0)
    return Usage(
        answers=1,
        prompt_tokens=prompt,
        cached_tokens=cached,
        completion_tokens=completion,
        reasoning_tokens=reasoning,
    )


def usage_of(episodes: Iterable[Episode]) -> Usage | None:
    """The sum over all episodes that have a usage; None if none has."""
    noted = [episode.meta[NOTE] for episode in episodes if isinstance(episode.meta.get(NOTE), Mapping)]
    if not noted:
        return None
    names = {field.name for field in fields(Usage)}
    # a record written by a later version may have more fields
    return sum((Usage(**{k: v for k, v in note.items() if k in names}) for note in noted), start=Usage())


def usage_table(names: Iterable[str], episodes: Iterable[Episode]) -> list[tuple[list[str], list[list[str]]]]:
    """A list with one table (header, rows) for the run called `names`; empty if no usage is known."""
    used = usage_of(episodes)
    if used is None or not used.answers:
        return []
    header = ["run", "prompt tokens", "completion tokens"]
    header += ["cost"] if used.cost is not None else []
    cells = [f"{used.prompt_tokens:,}", f"{used.completion_tokens:,}"]
    return [(header, [[*names, *cells, *([f"{used.cost:.4f}"] if used.cost is not None else [])]])]


def _inside(reported: Mapping[str, Any], table: str, name: str) -> Any:
    inner = reported.get(table)
    return inner.get(name) if isinstance(inner, Mapping) else None


def _count(value: Any) -> int:
    """Returns a number of tokens; 0 for values that are not one."""
    return value if type(value) is int and 0 < value <= MOST_TOKENS else 0


MOST_TOKENS = 1 << 32
"""Most tokens that a server may report for one answer; larger reports are ignored."""
MOST_IDS = 1 << 24
"""No vocabulary has as many ids. The endpoint's own is not known here; a trainer checks against the student's."""
MOST_TOP = 20
"""Most alternatives of a token that are read, as many as the API allows."""
REASONING = ("reasoning_content", "reasoning")
"""Fields with the reasoning: DeepSeek, SGLang and llama.cpp use the first; OpenRouter, Ollama and vLLM the second."""


class UnreadableAnswer(Exception):
    """A body that is no answer: it is no chat completion, or the server broke off before the model had ended.

    `full`: the context had no room for an answer.
    """

    def __init__(self, reason: str, *, full: bool = False) -> None:
        super().__init__(reason)
        self.full = full


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call, exactly as the server gave it."""

    id: str
    name: Any
    arguments: Any
    """JSON text, by the API; some servers give an object."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """The call's other fields, and those of its function under `function`."""


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
    """Fields of the message that are not known here."""
    calls: tuple[ToolCall, ...] = ()
    finish: str = "stop"
    """`stop`, `length` or `content_filter`."""
    ending: str = ""
    """What the server calls the ending, if that is not known here; it counts as `stop`."""
    stopped_at: str | None = None
    """The stop string that ended it, if the server reports it."""
    usage: Usage = Usage(answers=1, unreported=1)
    ids: TokenIds | None = None

    @property
    def characters(self) -> int:
        """All that the model said."""
        calls = sum(len(str(call.name)) + len(str(call.arguments)) + _size(call.more) for call in self.calls)
        return len(self.content) + len(self.reasoning or "") + calls + _size(self.more)


KNOWN = frozenset({"role", "content", "tool_calls", "refusal", "annotations", "audio", "function_call", *REASONING})
"""Fields of an answer's message that are read here, or that belong to no conversation."""
DEEPEST = 32
"""Levels of what is sent back unread; writing JSON of a thousand levels fails."""


def read_answer(body: Any) -> Answer:
    """Read the first choice of a completion. Raises UnreadableAnswer."""
    choices = body.get("choices") if isinstance(body, Mapping) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], Mapping):
        raise UnreadableAnswer(f"the answer has no choices: {excerpt(body, 200)!r}")
    choice = choices[0]
    message = choice.get("message")
    if not isinstance(message, Mapping):
        raise UnreadableAnswer(f"the answer has no message: {excerpt(body, 200)!r}")
    given = message.get("content")
    content, thoughts = _parts(given)
    # a refusal is an answer, too
    content = content or _text(message.get("refusal"))
    back = {name: message[name] for name in REASONING if isinstance(message.get(name), str)}
    reasoning = next((text for text in back.values() if text), thoughts or None)
    if thoughts and isinstance(given, list):
        back["content"] = [part for part in given if isinstance(part, Mapping) and part.get("type") == "thinking"]
    calls, usage = _calls(message.get("tool_calls")), read_usage(body.get("usage"))
    empty = not (content or reasoning or calls)
    # thoughts that are not shown may have used up the limit of tokens
    drew_none = _inside(body, "usage", "completion_tokens") == 0 and not usage.completion_tokens
    finish, ending = _ending(choice.get("finish_reason"), empty, drew_none)
    stopped = next((choice[key] for key in ("stop_reason", "matched_stop") if isinstance(choice.get(key), str)), None)
    more = {name: value for name, value in message.items() if name not in KNOWN and value not in (None, "", [], {})}
    if _deeper([more, *(call.more for call in calls)], DEEPEST):
        raise UnreadableAnswer("the answer has unknown fields that are nested too deep to be sent back")
    return Answer(
        content=content,
        blank="" if isinstance(given, str) else None,
        reasoning=reasoning,
        thoughts=back,
        more=more,
        calls=calls,
        finish=finish,
        ending=ending,
        stopped_at=stopped,
        usage=usage,
        ids=_ids(body, choice),
    )


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


def _ending(given: Any, empty: bool, drew_none: bool) -> tuple[str, str]:
    """(`finish`, `ending`) of an answer that ended with finish_reason `given`.

    Raises UnreadableAnswer if the server broke off: that is no answer of the model, whatever it had written by then.

    Args:
        given: the server's word.
        empty: whether the answer has nothing in it.
        drew_none: whether the server says that the model drew no token.
    """
    # Gemini: `content_filter: SAFETY`
    word = given.partition(":")[0].strip().lower() if isinstance(given, str) else ""
    if word in FULL or word in CUT:
        # nothing was drawn: there was no room for it
        if empty and (word in FULL or drew_none):
            raise UnreadableAnswer(f"the context is full: an empty answer with finish_reason {given!r}", full=True)
        return "length", ""
    if word in FILTERED:
        return "content_filter", ""
    if word in STOPPED | CALLED | MISCALLED:
        return "stop", ""
    if empty or _BROKE.search(word):
        raise UnreadableAnswer(f"the answer broke off: finish_reason {excerpt(repr(given), 80)}")
    return "stop", excerpt(repr(given), 80)


def _parts(content: Any) -> tuple[str, str]:
    """(text, thoughts) of a message's content: a text, or a list of parts as Mistral's reasoning models give it."""
    if content is None or isinstance(content, str):
        return _text(content), ""
    if not isinstance(content, list):
        raise UnreadableAnswer(f"the answer's content is no text: {excerpt(content, 200)!r}")
    text, thoughts = [], []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "thinking":
            inner = part.get("thinking")
            thoughts.append(_parts(inner)[0])
        elif isinstance(part, str):
            text.append(part)
        elif isinstance(part, Mapping):
            text.append(_text(part.get("text")) or _text(part.get("refusal")))
        else:
            raise UnreadableAnswer(f"a part of the answer's content is no text: {excerpt(part, 200)!r}")
    return "".join(text), "".join(thoughts)


def _calls(given: Any) -> tuple[ToolCall, ...]:
    if given is None:
        return ()
    if not isinstance(given, list):
        raise UnreadableAnswer(f"the answer's tool_calls are no list: {excerpt(given, 200)!r}")
    calls: list[ToolCall] = []
    for place, call in enumerate(given):
        call = call if isinstance(call, Mapping) else {}
        function = call.get("function")
        function = function if isinstance(function, Mapping) else {}
        # a result names its call by id, so ids must differ
        given_id, taken = call.get("id"), ("", *(earlier.id for earlier in calls))
        call_id = given_id if isinstance(given_id, str) and given_id not in taken else own_id(place)
        more = {name: value for name, value in call.items() if name not in ("id", "function", "type")}
        inner = {name: value for name, value in function.items() if name not in ("name", "arguments")}
        calls.append(
            ToolCall(
                id=call_id,
                name=function.get("name"),
                arguments=function.get("arguments"),
                more={**more, **({"function": inner} if inner else {})},
            )
        )
    return tuple(calls)


def own_id(place: int, episode: int = 0) -> str:
    """The id of a call that has none: nine letters and digits, which is what Mistral's models demand."""
    return f"c{episode % 10_000:04}{place % 10_000:04}"


def _deeper(value: Any, levels: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels < 0 or any(_deeper(item, levels - 1) for item in inner)


def _size(fields: Mapping[str, Any]) -> int:
    return len(json.dumps(fields)) if fields else 0


def _ids(body: Mapping[str, Any], choice: Mapping[str, Any]) -> TokenIds | None:
    # vLLM has the prompt's ids beside the choices, SGLang inside
    prompt = body.get("prompt_token_ids") or choice.get("prompt_token_ids")
    response = choice.get("token_ids")
    if not _whole_numbers(prompt) or not _whole_numbers(response):
        return None
    given = choice.get("logprobs")
    given = given if isinstance(given, Mapping) else {}
    rows, heat = given.get("content"), given.get("temperature")
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


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


NO_ANSWER = "(no answer)"
"""What stands for a turn without any text at servers that refuse one."""
SKIPPED = "Not carried out: one call is made each turn, and the first of several is the one that counts."
"""The result of all calls of a turn but the first; the API requires one result per call."""
INVALID = "invalid_arguments"
"""Arguments that are no JSON object are sent back under this name, because many servers refuse them in a history."""
TOOL_NAME, UNNAMED = re.compile(r"[a-zA-Z0-9_.-]{1,64}"), "invalid_name"
"""Names of tools that all servers accept, and the one under which a call with any other is sent back."""


@dataclass(slots=True)
class Transcript:
    """The messages of one conversation, in the form of the API."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    observed: int = 0
    """Number of observations so far."""
    open_calls: tuple[str, ...] = ()
    """Ids of the last answer's calls, which have no results yet."""
    examples: Sequence[dict[str, Any]] = ()
    """Messages that stand between the system message and the first observation."""
    thoughts: tuple[str, ...] = ()
    """Names of the fields in which reasoning came so far."""

    def observe(self, system: str, observation: str) -> None:
        """Add an observation: as the result of the last call, else as a message of the user."""
        if not self.messages:
            self.messages += [{"role": "system", "content": printable(system)}] if system else []
            self.messages += self.examples
        self.observed += 1
        if not self.open_calls:
            self.messages.append({"role": "user", "content": printable(observation)})
            return
        for place, name in enumerate(self.open_calls):
            content = SKIPPED if place else printable(observation)
            self.messages.append({"role": "tool", "tool_call_id": name, "content": content})
        self.open_calls = ()

    @property
    def characters(self) -> int:
        """Counts the characters of the texts of all messages."""
        return sum(len(content) for m in self.messages if isinstance(content := m["content"], str))

    def forget(self) -> None:
        """Remove all messages."""
        self.messages, self.open_calls = [], ()

    def answer(self, answer: Answer, text: str, *, reasoning: bool = False) -> None:
        """Add an answer with the content `text`, and with its reasoning if `reasoning`."""
        message: dict[str, Any] = {"role": "assistant", "content": text if text or not answer.calls else answer.blank}
        if answer.calls:
            message["tool_calls"] = [_sent_back(call) for call in answer.calls]
        if reasoning:
            parts = answer.thoughts.get("content")
            fields = {name: value for name, value in answer.thoughts.items() if name != "content"}
            self.thoughts = tuple(fields) or self.thoughts
            # DeepSeek demands the field of every turn with calls, those without a thought included
            message |= fields or dict.fromkeys(self.thoughts if answer.calls else (), "")
            if parts:
                message["content"] = [*parts, *([{"type": "text", "text": text}] if text else [])]
        message |= answer.more
        self.open_calls = tuple(call.id for call in answer.calls)
        self.messages.append(message)


def example_messages(
    examples: Iterable[Example], channel: Channel, tool: ToolSpec, *, reasoning: bool = False
) -> tuple[dict[str, Any], ...]:
    """Episodes as messages of the API; in the tool channel actions are calls, each with its result.

    Args:
        examples: episodes to show, in order.
        channel: how their actions are written.
        tool: the environment's tool, which calls name in the tool channel.
        reasoning: whether calls carry an empty reasoning, as those of a model that thinks carry theirs.
    """
    shown = Transcript(thoughts=REASONING[:1])
    for number, example in enumerate(examples):
        for turn, (observation, response) in enumerate(example.turns):
            shown.observe("", observation)
            action = channel.parse(response).action if channel.name == "tool" else None
            verb = None if action is None else first_action(action, tool.tags)
            # the last answer of a search is text in the tool channel, too
            if action is None or (verb is not None and verb[0] != tool.tags[0]):
                shown.answer(Answer(content=response), response)
                continue
            arguments = json.dumps({tool.argument: action if verb is None else verb[1]}, ensure_ascii=False)
            call = ToolCall(id=own_id(turn, number + 1), name=tool.name, arguments=arguments)
            shown.answer(Answer(content="", calls=(call,)), "", reasoning=reasoning)
        if shown.open_calls:
            shown.observe("", example.final)
    return tuple(shown.messages)


def content_of(answer: Answer, channel: Channel) -> str:
    """The text of an answer, with the stop string at which it ended and which the endpoint cut off."""
    text = printable(answer.content)
    if answer.finish != "stop" or answer.calls or any(stop in text for stop in channel.stop_text):
        return text
    before = channel.parse(text)
    for stop in channel.stop_text:
        opened = stop.replace("</", "<", 1) in text and answer.stopped_at in (None, stop)
        # an open action is closed, but only if the channel then reads the same as before
        if opened and before.action is not None and channel.parse(text + stop) == before:
            return text + stop
    return text


def response_of(answer: Answer, text: str) -> str:
    """What the environment reads: the thought, `text`, and the first call as the tool channel writes it."""
    thought = answer.reasoning
    if thought is not None:
        # a tag inside a thought must not end it
        thought = printable(thought).replace("<think>", "< think>").replace("</think>", "</ think>")
    if not answer.calls:
        return THINK.write(thought) + text
    call = answer.calls[0]
    read = _json(call.arguments)
    return THINK.write(thought) + with_call(text, call.name, call.arguments if read is None else read)


def _sent_back(call: ToolCall) -> dict[str, Any]:
    """The call in the history that is sent with the next request."""
    read = _json(call.arguments)
    if isinstance(read, dict):
        arguments = call.arguments if isinstance(call.arguments, str) else json.dumps(read, ensure_ascii=False)
    else:
        arguments = json.dumps({INVALID: call.arguments}, ensure_ascii=False)
    name = call.name if isinstance(call.name, str) and TOOL_NAME.fullmatch(call.name) else UNNAMED
    function = {"name": name, "arguments": printable(arguments)}
    inner = call.more.get("function", {})
    return {"id": printable(call.id), "type": "function", **call.more, "function": {**inner, **function}}


def bare_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """An answer in a history without the fields that are not known here."""
    bare = {name: value for name, value in message.items() if name in KNOWN}
    if calls := message.get("tool_calls"):
        known = ("id", "type", "function")
        bare["tool_calls"] = [{name: call[name] for name in known} for call in calls]
        for call in bare["tool_calls"]:
            call["function"] = {name: call["function"][name] for name in ("name", "arguments")}
    return bare


def _json(arguments: Any) -> Any:
    """Parses `arguments` if it is a JSON string. Returns other values unchanged and None for invalid JSON."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    # a few thousand open brackets raise RecursionError
    except (ValueError, RecursionError):
        return None


def add_ids(history: TokenHistory | None, ids: TokenIds) -> TokenHistory:
    """Append the prompt and the response of a turn to `history`, and return it; None begins one.

    If the prompt begins with all ids so far, only its rest is appended. Otherwise a new segment begins: templates drop
    earlier thoughts, and an answer that is sent back as text may be tokenized differently.
    """
    history = TokenHistory() if history is None else history
    before = history.buffer.size if history.segments else 0
    if not history.segments or history.buffer.view().tolist() != ids.prompt[:before].tolist():
        history.segments.append(IdBuffer(max(256, len(ids.prompt))))
        before = 0
    history.prompt_span = history.buffer.extend(ids.prompt[before:])
    history.response_span = history.buffer.extend(ids.response)
    return history
