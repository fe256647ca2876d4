"""Eight servers as they differ: what each refuses, in its own words, and how it answers.

The game is that of the doors: the model opens one door a turn, in a call where tools are offered.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hosted_fake import COMMON, DEEPSEEK, Rule, reasoned_calls, refuse, signed_calls
from openai_fake import Body, FakeOpenAI, Fault, error

from turngym.agents.endpoint.profile import EndpointProfile

Found = dict[str, Any]


def has(name: str, words: str, **more: Any) -> Rule:
    """Refuses a request with the field `name`."""
    return lambda body: Fault(400, error(words, param=name, **more)) if name in body else None


def at_one(body: Body) -> Fault | None:
    """OpenAI's reasoning models: no temperature but the default one."""
    text = f"Unsupported value: 'temperature' does not support {body.get('temperature')} with this model. "
    wrong = body.get("temperature", 1) != 1
    return Fault(400, error(f"{text}Only the default (1) value is supported.", param="temperature")) if wrong else None


def named_results(body: Body) -> Fault | None:
    """Gemini: a result says of which function it is."""
    for place, message in enumerate(body["messages"]):
        if message["role"] == "tool" and not message.get("name"):
            field = f"GenerateContentRequest.contents[{place}].parts[0].function_response.name"
            text = f"* {field}: Name cannot be empty.\n"
            return Fault(400, raw=json.dumps([{"error": {"code": 400, "message": text}}]).encode())
    return None


def texts_only(body: Body) -> Fault | None:
    """LM Studio: it gives null and refuses it back."""
    for message in body["messages"]:
        if not isinstance(message.get("content"), str):
            return Fault(400, {"error": "Invalid 'content': 'content' field must be a string or an array of objects."})
    return None


def no_system(body: Body) -> Fault | None:
    """Gemma's template, in vLLM: the user and the model take turns, and nobody else speaks."""
    roles = [message["role"] for message in body["messages"]]
    if "system" in roles:
        return refuse("System role not supported", code=400)
    in_turn = roles == (["user", "assistant"] * len(roles))[: len(roles)]
    return None if in_turn else refuse("Conversation roles must alternate user/assistant", code=400)


MAX_TOKENS = (
    "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."
)
NO_SEED = 'Invalid JSON payload received. Unknown name "seed": Cannot find field.'
STOP = "Unsupported parameter: 'stop' is not supported with this model."


def door_of(body: Body) -> int:
    """The next door: as many are open as results say so."""
    said = " ".join(str(m.get("content")) for m in body["messages"] if m["role"] in ("tool", "user"))
    return 1 + sum(f"door {number} is open" in said for number in range(1, 9))


def call_of(body: Body, **more: Any) -> Body:
    arguments = json.dumps({"action": f"open door {door_of(body)}"})
    name = body["tools"][0]["function"]["name"]
    function = {"name": name, "arguments": arguments}
    return {"id": f"call{len(body['messages']):05}", "type": "function", **more, "function": function}


def calls(**more: Any) -> Callable[[Body], Body]:
    """Answers with a call, or with a text where no tool is offered; `more` are further fields of the message."""

    def message(body: Body) -> Body:
        if "tools" in body:
            return {"content": None, "tool_calls": [call_of(body)], **more}
        return {"content": f"<action>open door {door_of(body)}</action>", **more}

    return message


def signed(body: Body) -> Body:
    google = {"extra_content": {"google": {"thought_signature": "sig"}}}
    return {"content": None, "tool_calls": [call_of(body, **google)]} if "tools" in body else calls()(body)


def bare_json(body: Body) -> Body:
    """A server without a parser for the model's calls, which stand in the text without their wrapper."""
    if "tools" not in body:
        return calls()(body)
    call = call_of(body)["function"]
    written = json.dumps({"name": call["name"], "parameters": json.loads(call["arguments"])})
    return {"content": f"```json\n{written}\n```"}


def usage(**more: Any) -> Callable[[Body], Body]:
    return lambda body: {"usage": {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110, **more}}


def second_choice(body: Body) -> Body:
    """A gateway in front of Claude: the text in one choice, the call in the next."""
    answer = {**usage()(body), "model": "anthropic/claude-haiku", "provider": "Somebody", "routing_score": 0.5}
    if "tools" in body:
        both = [{"role": "assistant", "content": "So."}, {"role": "assistant", "tool_calls": [call_of(body)]}]
        answer["choices"] = [{"index": n, "message": m, "finish_reason": "tool_calls"} for n, m in enumerate(both)]
    return answer


FILTER = {"content_filter_results": {"violence": {"filtered": False, "severity": "safe"}}}


@dataclass(frozen=True)
class Server:
    """One server, and what a handshake in the tool channel finds out."""

    said: Callable[[Body], Body]
    rules: Sequence[Rule]
    finds: Found
    """Fields of the profile that differ from those of most servers, and some more."""
    in_text: Found = field(default_factory=dict)
    """Those of them that are otherwise in the text channel."""
    extra: Callable[[Body], Body] = field(default_factory=usage)
    model: str = "tiny"

    def fake(self) -> FakeOpenAI:
        def fault(number: int, body: Body) -> Fault | None:
            return next((refusal for rule in self.rules if (refusal := rule(body)) is not None), None)

        return FakeOpenAI(model="", message=self.said, fault=fault, extra=self.extra, usage=False)


NEWER = (has("max_tokens", MAX_TOKENS, code="unsupported_parameter"), at_one, has("stop", STOP), *COMMON)
SERVERS = {
    "openai reasoning": Server(
        calls(refusal=None, annotations=[]),
        NEWER,
        {"limit": "max_completion_tokens", "temperature": False, "calls": "parsed"},
        {"stop": False, "calls": "not asked for"},
        extra=usage(completion_tokens_details={"reasoning_tokens": 5}),
    ),
    "gemini": Server(
        signed,
        (has("seed", NO_SEED), named_results, signed_calls, *COMMON),
        {"seed": False, "tool_name": True, "calls": "parsed"},
        {"tool_name": False, "calls": "not asked for"},
        extra=lambda body: {"usage": {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 1110}},
    ),
    "deepseek": Server(
        calls(reasoning_content="hm"),
        (*COMMON, reasoned_calls(DEEPSEEK)),
        {"reasoning": True, "thoughts": "reasoning_content", "calls": "parsed"},
        {"reasoning": False, "calls": "not asked for", "stop": False},
        extra=usage(prompt_cache_hit_tokens=64, prompt_cache_miss_tokens=36),
    ),
    "lm studio": Server(
        calls(),
        (*COMMON, texts_only),
        {"blank": "empty", "calls": "parsed"},
        {"blank": "as it came", "calls": "not asked for"},
        extra=lambda body: {**usage()(body), "stats": {"tokens_per_second": 51}},
    ),
    "ollama": Server(
        calls(reasoning="hm"),
        COMMON,
        {"thoughts": "reasoning", "calls": "parsed"},
        {"calls": "not asked for", "stop": False},
    ),
    "gemma behind vllm": Server(
        bare_json, (no_system,), {"system": "user", "calls": "in the text (llama)"}, {"calls": "not asked for"}
    ),
    "azure": Server(
        calls(refusal=None),
        (has("max_tokens", MAX_TOKENS), *COMMON),
        {"limit": "max_completion_tokens", "calls": "parsed", "model": "tiny-2024-08-06", "noticed": []},
        {"calls": "not asked for"},
        extra=lambda body: {
            **usage()(body),
            "model": "tiny-2024-08-06",
            "choice": FILTER,
            "prompt_filter_results": [{"prompt_index": 0, **FILTER}],
        },
    ),
    "router": Server(
        calls(),
        COMMON,
        {
            "model": "anthropic/claude-haiku",
            "calls": "in another choice",
            "noticed": [
                "unknown field routing_score",
                "several choices",
                "call in another choice than the first",
                "another model: anthropic/claude-haiku",
            ],
        },
        {"calls": "not asked for", "noticed": ["unknown field routing_score", "another model: anthropic/claude-haiku"]},
        extra=second_choice,
    ),
}


def refused(fake: FakeOpenAI) -> list[bool]:
    """Which of the requests were refused."""
    return [fake.fault(number, body) is not None for number, body in enumerate(fake.requests)]


def page_row(name: str, profile: EndpointProfile) -> str:
    """The line of docs/research/handshakes.md about a server."""
    usual, rows = dict(EndpointProfile().rows()), dict(profile.rows())
    takes = [f"{label}: {rows[label]}" for label in [*usual][:11] if rows[label] != usual[label]]
    cells = (name, "; ".join(takes), *(rows[label] for label in ("calls come", "reasoning comes in", "noticed")))
    return f"| {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |")
