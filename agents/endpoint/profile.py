"""What a server takes and what it answers: the `EndpointProfile` that `handshake` finds and the client keeps to.

A conversation is kept whole (`messages.Transcript`): with the thoughts, the names of tools and the unknown fields of
the server's own answers. `EndpointProfile.request` turns it into what this server takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from turngym.agents.endpoint.calls import own_id
from turngym.agents.endpoint.completion_fields import REASONING

NO_ANSWER, NO_TEXT = "(no answer)", "(no text)"
"""What stands for a turn without any text at servers that refuse one: the model's own, and any other."""
NOT_TRIED = "not tried"
"""What a profile says of a server with which nobody shook hands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointProfile:
    """A server as an endpoint's client meets it. The defaults are those of most servers."""

    # What it takes.

    limit: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """What a request calls its limit of tokens."""
    temperature: bool = True
    """Whether requests may say one; else the model samples at its own."""
    seed: bool = True
    stop: bool = True
    """Whether requests have stop strings; actions are read without them, too."""
    system: Literal["system", "user"] = "system"
    """Where the rules stand: in a message of role system, or in front of the first message of the user."""
    tool_name: bool = False
    """Whether messages of role tool name the tool."""
    blank: Literal["as it came", "empty", "null", "left out", "words"] = "as it came"
    """Content of an own turn that has calls and no text."""
    silence: Literal["empty", "words"] = "empty"
    """Content of a message without text and calls."""
    call_ids: bool = True
    """Whether ids of calls go back as they came; else they have nine letters and digits."""
    own_fields: bool = True
    """Whether fields that came with its own answers may go back."""
    reasoning: bool = False
    """Whether the reasoning of earlier turns goes back."""

    # What it answers.

    model: str = ""
    """The name that it gives the model."""
    finish: tuple[str, ...] = ()
    """Its words for the end of an answer."""
    usage: tuple[str, ...] = ()
    """Names of the fields of its usage; none: it reports none."""
    thoughts: str = ""
    """The field with the reasoning; empty: none came."""
    calls: str = NOT_TRIED
    """How calls come: `parsed`, `function_call`, `in another choice`, `in the text (DIALECT)`, `none came`."""
    ids: str = NOT_TRIED
    """Token ids and log-probabilities: `not asked for`, `with log-probabilities`, `without log-probabilities`."""
    noticed: tuple[str, ...] = ()
    """What is unknown or contradictory in its answers."""
    used: Mapping[str, Any] = field(default_factory=dict)
    """What the handshake used, as `Usage` has it: it is not counted among the episodes' tokens."""

    def to_json(self) -> dict[str, Any]:
        """All fields, as results keep them."""
        values = {member.name: getattr(self, member.name) for member in fields(self)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    def rows(self) -> list[list[str]]:
        """(what, what was found) of everything, for people."""
        rows = []
        for name, label in LABELS.items():
            value = getattr(self, name)
            if isinstance(value, bool):
                value = "yes" if value else "no"
            rows.append([label, ", ".join(value) if isinstance(value, tuple) else value])
        return rows

    def request(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """`body`, with a whole conversation as `messages` and its limit as `max_tokens`, as this server takes it."""
        sent = {name: value for name, value in body.items() if name != "max_tokens"}
        sent |= {"stream": False, self.limit: body["max_tokens"], "messages": self.conversation(body["messages"])}
        for name, accepted in (("temperature", self.temperature), ("seed", self.seed), ("stop", self.stop)):
            if not accepted:
                sent.pop(name, None)
        return sent

    def conversation(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The messages as this server takes them."""
        thought_fields = [name for name in REASONING if any(name in message for message in messages)]
        converted = [self._message(message, thought_fields or [self.thoughts or REASONING[0]]) for message in messages]
        converted = converted if self.call_ids else _renamed(converted)
        if self.system == "user" and converted and converted[0]["role"] == "system":
            rules, *converted = converted
            first = next((index for index, message in enumerate(converted) if message["role"] == "user"), None)
            if first is None:
                return [{**rules, "role": "user"}, *converted]
            converted[first] = {**converted[first], "content": f"{rules['content']}\n\n{converted[first]['content']}"}
        return converted

    def _message(self, message: Mapping[str, Any], thought_fields: Sequence[str]) -> dict[str, Any]:
        sent = dict(message)
        if sent["role"] == "tool" and not self.tool_name:
            sent.pop("name", None)
        if sent["role"] != "assistant":
            return sent if sent["content"].strip() or self.silence == "empty" else {**sent, "content": NO_TEXT}
        if not self.own_fields:
            sent = _bare(sent)
        calls = bool(sent.get("tool_calls"))
        if not self.reasoning:
            sent = {name: value for name, value in sent.items() if name not in REASONING}
            if isinstance(sent["content"], list):
                sent["content"] = "".join(part["text"] for part in sent["content"] if part.get("type") == "text")
        elif calls:
            # DeepSeek demands the field of every turn with calls, those without a thought included
            sent = {**dict.fromkeys(thought_fields, ""), **sent}
        silent = not sent["content"] or (isinstance(sent["content"], str) and not sent["content"].strip())
        if silent and calls and self.blank != "as it came":
            sent["content"] = {"empty": "", "null": None, "words": NO_ANSWER}.get(self.blank)
            if self.blank == "left out":
                del sent["content"]
        elif silent and not calls and self.silence == "words":
            sent["content"] = NO_ANSWER
        return sent


LABELS = {
    "limit": "limit of tokens",
    "temperature": "takes a temperature",
    "seed": "takes a seed",
    "stop": "is sent stop strings",
    "system": "rules stand in role",
    "tool_name": "results name their tool",
    "blank": "content beside calls",
    "silence": "content of a silent turn",
    "call_ids": "takes its own ids of calls",
    "own_fields": "takes its own fields back",
    "reasoning": "reasoning goes back",
    "model": "answers as model",
    "finish": "ends answers with",
    "usage": "counts",
    "thoughts": "reasoning comes in",
    "calls": "calls come",
    "ids": "token ids",
    "noticed": "noticed",
}


DECIDING = (*LABELS,)[: (*LABELS,).index("finish")]
"""What a server takes, and its model: with another of them episodes are others'."""


def changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The differences between two profiles that decide what is played, a clause each."""
    return [
        f"{LABELS[name]}: {now.get(name)!r}, before {before.get(name)!r}"
        for name in DECIDING
        if now.get(name) != before.get(name)
    ]


def _renamed(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with our own ids of calls, and of their results."""
    renamed, ids = list[dict[str, Any]](), dict[str, str]()
    for number, message in enumerate(messages):
        if calls := message.get("tool_calls"):
            ids = {call["id"]: own_id(number, index) for index, call in enumerate(calls)}
            message = {**message, "tool_calls": [{**call, "id": ids[call["id"]]} for call in calls]}
        elif message["role"] == "tool":
            message = {**message, "tool_call_id": ids[message["tool_call_id"]]}
        renamed.append(message)
    return renamed


def _bare(message: Mapping[str, Any]) -> dict[str, Any]:
    """An own turn without the fields that are not of the API."""
    bare = {name: value for name, value in message.items() if name in ("role", "content", "tool_calls", *REASONING)}
    if calls := message.get("tool_calls"):
        bare["tool_calls"] = [
            {
                "id": call["id"],
                "type": call["type"],
                "function": {name: call["function"][name] for name in ("name", "arguments")},
            }
            for call in calls
        ]
    return bare
