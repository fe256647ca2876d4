"""A conversation as chat messages: what is sent to an endpoint, and what the environment reads in its answers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turngym.agents.rendering.conversation import IdBuffer, TokenHistory
from turngym.envs.channels import Channel
from turngym.envs.core.episode import Episode
from turngym.envs.core.errors import AgentError
from turngym.envs.spaces import printable
from turngym.envs.tool_calls import THINK

# What an endpoint's answers used: tokens, retries, cost; per episode in its record, and summed for results.

NOTE = "usage"
"""Where it stands in an episode's `meta`."""
MILLION = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Sums over answers. Tokens are the server's own count; requests that failed are not in it."""

    answers: int = 0
    unreported: int = 0
    """Answers whose server did not say what they used."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompt tokens, those that the server had computed before."""
    completion_tokens: int = 0
    """Reasoning included."""
    reasoning_tokens: int = 0
    """Of the completion tokens, where the server tells."""
    cut_off: int = 0
    """Answers that ended at the limit of tokens."""
    retries: int = 0
    """Requests sent again."""
    cost: float | None = None
    """In the currency of the prices; None without prices."""

    def __add__(self, other: Usage) -> Usage:
        counts = {field.name: getattr(self, field.name) + getattr(other, field.name) for field in _COUNTS}
        costs = [one.cost for one in (self, other) if one.cost is not None]
        return Usage(**counts, cost=sum(costs) if costs else None)

    def to_json(self) -> dict[str, Any]:
        """Without what is unknown."""
        return {name: value for name, value in asdict(self).items() if value is not None}


_COUNTS = tuple(field for field in fields(Usage) if field.name != "cost")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Per million tokens."""

    prompt: float
    cached: float
    completion: float

    @classmethod
    def of(cls, prompt: float | None, cached: float | None, completion: float | None) -> Prices | None:
        """None where no price is given. Raises AgentError where one of the two that are needed is missing."""
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
        """Of tokens that were reported."""
        fresh = usage.prompt_tokens - usage.cached_tokens
        spent = self.prompt * fresh + self.cached * usage.cached_tokens + self.completion * usage.completion_tokens
        return spent / MILLION


def read_usage(reported: Any) -> Usage:
    """One answer's `usage` field as servers word it; `unreported` where there is none that can be read."""
    if not isinstance(reported, Mapping) or "prompt_tokens" not in reported:
        return Usage(answers=1, unreported=1)
    return Usage(
        answers=1,
        prompt_tokens=_count(reported.get("prompt_tokens")),
        cached_tokens=_count(_inside(reported, "prompt_tokens_details", "cached_tokens")),
        completion_tokens=_count(reported.get("completion_tokens")),
        reasoning_tokens=_count(
            # SGLang has it beside the others
            _inside(reported, "completion_tokens_details", "reasoning_tokens") or reported.get("reasoning_tokens")
        ),
    )


def usage_of(episodes: Iterable[Episode]) -> Usage | None:
    """The sum over episodes that say what they used; None where none does."""
    noted = [episode.meta[NOTE] for episode in episodes if isinstance(episode.meta.get(NOTE), Mapping)]
    if not noted:
        return None
    names = {field.name for field in fields(Usage)}
    # a record that a later version wrote may know more
    return sum((Usage(**{k: v for k, v in note.items() if k in names}) for note in noted), start=Usage())


def usage_table(names: Iterable[str], episodes: Iterable[Episode]) -> list[tuple[list[str], list[list[str]]]]:
    """A table with one row, of the run that `names` names, as results are shown; none where nothing is known."""
    used = usage_of(episodes)
    if used is None or not used.answers:
        return []
    header = ["run", "prompt tokens", "completion tokens", "answers cut off %"]
    header += ["cost"] if used.cost is not None else []
    cells = [f"{used.prompt_tokens:,}", f"{used.completion_tokens:,}", f"{100 * used.cut_off / used.answers:.1f}"]
    return [(header, [[*names, *cells, *([f"{used.cost:.4f}"] if used.cost is not None else [])]])]


def _inside(reported: Mapping[str, Any], table: str, name: str) -> Any:
    inner = reported.get(table)
    return inner.get(name) if isinstance(inner, Mapping) else None


def _count(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


# Reads a chat completion: text, reasoning, tool calls, why it ended, what it used, and token ids if there are any.

REASONING = ("reasoning_content", "reasoning")
"""Where servers put it: DeepSeek, SGLang and llama.cpp in the first; OpenRouter, Ollama and vLLM in the second."""


class UnreadableAnswer(Exception):
    """A body that is no chat completion: cut off, or from something else than a chat endpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call as the server gave it: nothing is repaired."""

    id: str
    name: Any
    arguments: Any
    """By the API a text that holds JSON; some servers give an object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenIds:
    """What a server says about the ids of one answer."""

    prompt: NDArray[np.int32]
    """int32 [P]."""
    response: NDArray[np.int32]
    """int32 [R]."""
    logprobs: NDArray[np.float32] | None
    """float32 [R]; None where the server gave another number of them."""


UNREPORTED = Usage(answers=1, unreported=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A chat completion."""

    content: str
    reasoning: str | None = None
    reasoning_field: str = REASONING[0]
    calls: tuple[ToolCall, ...] = ()
    finish: str = "stop"
    """`stop` or `length`."""
    stopped_at: str | None = None
    """The stop string that ended it, where the server tells."""
    usage: Usage = UNREPORTED
    ids: TokenIds | None = None


def read_answer(body: Any) -> Answer:
    """The first choice of a completion. Raises UnreadableAnswer."""
    choices = body.get("choices") if isinstance(body, Mapping) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], Mapping):
        raise UnreadableAnswer(f"the answer has no choices: {str(body)[:200]!r}")
    choice = choices[0]
    message = choice.get("message")
    if not isinstance(message, Mapping):
        raise UnreadableAnswer(f"the answer has no message: {str(body)[:200]!r}")
    content, thoughts = _parts(message.get("content"))
    name, reasoning = _reasoning(message)
    stopped = next((choice[key] for key in ("stop_reason", "matched_stop") if isinstance(choice.get(key), str)), None)
    return Answer(
        # what a model says when it declines is its answer
        content=content or _text(message.get("refusal")),
        reasoning=reasoning or thoughts or None,
        reasoning_field=name,
        calls=_calls(message.get("tool_calls")),
        finish="length" if choice.get("finish_reason") == "length" else "stop",
        stopped_at=stopped,
        usage=read_usage(body.get("usage")),
        ids=_ids(body, choice),
    )


def _parts(content: Any) -> tuple[str, str]:
    """(text, thoughts) of content that is a text, or a list of parts as Mistral's reasoning models give it."""
    if not isinstance(content, Sequence) or isinstance(content, str):
        return _text(content), ""
    text, thoughts = [], []
    for part in content:
        if isinstance(part, Mapping) and part.get("type") == "thinking":
            thoughts.append(_parts(part.get("thinking"))[0])
        elif isinstance(part, Mapping):
            text.append(_text(part.get("text")))
    return "".join(text), "".join(thoughts)


def _reasoning(message: Mapping[str, Any]) -> tuple[str, str]:
    for name in REASONING:
        if text := _text(message.get(name)):
            return name, text
    return REASONING[0], ""


def _calls(given: Any) -> tuple[ToolCall, ...]:
    if not isinstance(given, list):
        return ()
    calls: list[ToolCall] = []
    for place, call in enumerate(given):
        call = call if isinstance(call, Mapping) else {}
        function = call.get("function")
        function = function if isinstance(function, Mapping) else {}
        # a result must name its call, so every call needs a name of its own
        known = call.get("id") if call.get("id") not in ("", *(earlier.id for earlier in calls)) else None
        named = known if isinstance(known, str) else f"call_{place}"
        calls.append(ToolCall(id=named, name=function.get("name"), arguments=function.get("arguments")))
    return tuple(calls)


def _ids(body: Mapping[str, Any], choice: Mapping[str, Any]) -> TokenIds | None:
    # vLLM has the prompt beside the choices, SGLang inside
    prompt = body.get("prompt_token_ids") or choice.get("prompt_token_ids")
    response = choice.get("token_ids")
    if not _whole_numbers(prompt) or not _whole_numbers(response):
        return None
    assert isinstance(response, list)
    rows = choice.get("logprobs")
    rows = rows.get("content") if isinstance(rows, Mapping) else None
    known = [row.get("logprob") for row in rows if isinstance(row, Mapping)] if isinstance(rows, list) else []
    usable = len(known) == len(response) and all(isinstance(value, int | float) for value in known)
    return TokenIds(
        prompt=np.asarray(prompt, np.int32),
        response=np.asarray(response, np.int32),
        logprobs=np.asarray(known, np.float32) if usable else None,
    )


def _whole_numbers(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


SKIPPED = "Not carried out: one call is made each turn, and the first of several is the one that counts."
"""The result of every further call of a turn: the API asks for one per call."""
INVALID = "invalid_arguments"
"""Arguments that are no JSON object are sent back under this name: many servers refuse a history that holds others."""


@dataclass(slots=True)
class Transcript:
    """The messages of one conversation, in the form of the API."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    observed: int = 0
    """Observations shown so far."""
    open_calls: tuple[str, ...] = ()
    """Ids of the last answer's calls, which wait for results."""

    def observe(self, system: str, observation: str) -> None:
        """Show an observation: the result of the call that was made, else a message of the user."""
        if not self.messages and system:
            self.messages.append({"role": "system", "content": printable(system)})
        self.observed += 1
        if not self.open_calls:
            self.messages.append({"role": "user", "content": printable(observation)})
            return
        for place, name in enumerate(self.open_calls):
            content = SKIPPED if place else printable(observation)
            self.messages.append({"role": "tool", "tool_call_id": name, "content": content})
        self.open_calls = ()

    def forget(self) -> None:
        """Begin anew, as if nothing had been said."""
        self.messages, self.open_calls = [], ()

    def answer(self, answer: Answer, text: str, *, reasoning: bool = False) -> None:
        """Add what the model said; `text` is its content, `reasoning` says whether its thoughts are sent back."""
        message: dict[str, Any] = {"role": "assistant", "content": text if text or not answer.calls else None}
        if answer.calls:
            message["tool_calls"] = [_sent_back(call) for call in answer.calls]
        if reasoning and answer.reasoning:
            message[answer.reasoning_field] = answer.reasoning
        self.open_calls = tuple(call.id for call in answer.calls)
        self.messages.append(message)


def content_of(answer: Answer, channel: Channel) -> str:
    """The text of an answer, with the stop string that the endpoint cut off where it was one that ended the answer."""
    text = printable(answer.content)
    if answer.finish != "stop" or answer.calls or any(stop in text for stop in channel.stop_text):
        return text
    before = channel.parse(text)
    for stop in channel.stop_text:
        opened = stop.replace("</", "<", 1) in text and answer.stopped_at in (None, stop)
        # an action that stands open is closed; nothing else may change what is read
        if opened and before.action is not None and channel.parse(text + stop) == before:
            return text + stop
    return text


def response_of(answer: Answer, text: str) -> str:
    """What the environment reads: thought, `text`, and the first call as the tool channel has it."""
    thought = None if answer.reasoning is None else _untagged(printable(answer.reasoning))
    if not answer.calls:
        return THINK.write(thought) + text
    said = f"{text.rstrip()}\n" if text.strip() else ""
    return f"{THINK.write(thought)}{said}<tool_call>\n{_call_text(answer.calls[0])}\n</tool_call>"


def _call_text(call: ToolCall) -> str:
    """Name and arguments as they came. Arguments that are JSON stand as JSON; others stay the text that they are."""
    read = _json(call.arguments)
    arguments = call.arguments if read is None else read
    text = json.dumps({"name": call.name, "arguments": arguments}, ensure_ascii=False)
    # the same JSON: no tag inside a call may end it, or be taken for a thought
    return printable(text.replace("</", "<\\/").replace("<think>", "\\u003cthink>"))


def _sent_back(call: ToolCall) -> dict[str, Any]:
    read = _json(call.arguments)
    if isinstance(read, dict):
        arguments = call.arguments if isinstance(call.arguments, str) else json.dumps(read, ensure_ascii=False)
    else:
        arguments = json.dumps({INVALID: call.arguments}, ensure_ascii=False)
    name = call.name if isinstance(call.name, str) else ""
    function = {"name": printable(name), "arguments": printable(arguments)}
    return {"id": printable(call.id), "type": "function", "function": function}


def _json(arguments: Any) -> Any:
    """What a text of JSON says; what is no text as it is; None where the text is no JSON."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    # a few thousand open brackets are enough for a RecursionError
    except (ValueError, RecursionError):
        return None


def _untagged(thought: str) -> str:
    """A thought that cannot end itself."""
    return thought.replace("<think>", "< think>").replace("</think>", "</ think>")


# Token ids that an endpoint gave, as the token side of a conversation.


def add_ids(history: TokenHistory | None, ids: TokenIds) -> TokenHistory:
    """`history` with the prompt and the response of one more turn.

    A prompt that begins with everything so far adds its rest; any other opens a segment (templates drop earlier
    thoughts, and answers that are sent as text may be tokenized otherwise than they were drawn).
    """
    history = TokenHistory() if history is None else history
    before = history.buffer.size if history.segments else 0
    if not history.segments or history.buffer.view().tolist() != ids.prompt[:before].tolist():
        history.segments.append(IdBuffer(max(256, len(ids.prompt))))
        before = 0
    history.prompt_span = history.buffer.extend(ids.prompt[before:])
    history.response_span = history.buffer.extend(ids.response)
    return history
