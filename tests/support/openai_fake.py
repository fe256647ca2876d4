"""A real HTTP server that speaks the OpenAI chat API, plays the door game, and fails as a test says."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from servers import Answer, JsonServer

Body = dict[str, Any]


@dataclass
class Fault:
    """What a request gets instead of a completion."""

    status: int = 200
    error: Mapping[str, Any] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    raw: bytes | None = None
    """Sent as it is."""
    cut: bool = False
    """The connection breaks in the middle of the body."""
    drip: float = 0.0
    """Seconds over which the body comes, byte by byte."""


@dataclass
class FakeOpenAI:
    """`message(body)` makes the assistant's message, `fault(number, body)` what goes wrong with the n-th request."""

    model: str = "tiny"
    """Its only model; empty: every name will do."""
    key: str | None = None
    message: Callable[[Body], Body] = lambda body: {"content": door(body)}
    """May wait, as a slow server does; the request counts as under way."""
    fault: Callable[[int, Body], Fault | None] = lambda number, body: None
    finish: str = "stop"
    usage: bool = True
    extra: Callable[[Body], Body] = lambda body: {}
    requests: list[Body] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    url: str = ""
    stop: Callable[[], None] = lambda: None
    """Listens no more, as a server that has died."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def completion(self, body: Body) -> Body:
        choice = {"index": 0, "message": {"role": "assistant", **self.message(body)}, "finish_reason": self.finish}
        answer: Body = {"id": "x", "object": "chat.completion", "created": 0, "model": self.model or body["model"]}
        answer |= {"choices": [choice | self.extra(body).get("choice", {})]}
        answer |= {name: value for name, value in self.extra(body).items() if name != "choice"}
        if self.usage:
            prompt = sum(len(str(message.get("content") or "")) for message in body["messages"])
            answer["usage"] = {"prompt_tokens": prompt, "completion_tokens": 10, "total_tokens": prompt + 10}
            answer["usage"] |= {"prompt_tokens_details": {"cached_tokens": 4}}
            answer["usage"] |= {"completion_tokens_details": {"reasoning_tokens": 3}}
        return answer


def draw(body: Body, sides: int) -> int:
    """A number that the request alone decides: its seed and its messages."""
    text = json.dumps([body.get("seed"), body["messages"]], sort_keys=True)
    return int(hashlib.sha256(text.encode()).hexdigest(), 16) % sides


def door(body: Body) -> str:
    """The next door, or with chance 1/4 another one, in the text channel; the end tag is dropped as servers do."""
    opened = sum(bool(re.match(r"door \d+ is open", str(m.get("content")))) for m in body["messages"])
    wanted = opened + 1 if draw(body, 4) else opened + 7
    return f"<action>open door {wanted}"


def error(message: str, code: str | None = None, kind: str = "invalid_request_error", param: str | None = None) -> Body:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


@contextmanager
def served(fake: FakeOpenAI) -> Iterator[FakeOpenAI]:
    """`fake` on a free port of this machine, at `fake.url`."""

    def reply(path: str, body: Any, headers: Mapping[str, str]) -> Answer:
        if body is None and path.partition("?")[0] != "/v1/models":
            return Answer({"detail": "Not Found"}, 404)
        if body is None:
            return Answer({"object": "list", "data": [{"id": fake.model, "object": "model"}]})
        with fake.lock:
            fake.requests.append(body)
            fake.times.append(time.monotonic())
            number = len(fake.requests) - 1
            fake.at_once += 1
            fake.most_at_once = max(fake.most_at_once, fake.at_once)
        time.sleep(0.002)
        try:
            return answer(path, body, headers, number)
        finally:
            with fake.lock:  # before the answer is sent: its client may send the next request at once
                fake.at_once -= 1

    def answer(path: str, body: Body, headers: Mapping[str, str], number: int) -> Answer:
        given = headers.get("Authorization", "")
        if fake.key is not None and given != f"Bearer {fake.key}":
            return Answer(error(f"Incorrect API key provided: {given}", "invalid_api_key"), 401)
        if path.partition("?")[0] != "/v1/chat/completions":
            return Answer({"detail": "Not Found"}, 404)
        if fake.model not in ("", body["model"]):
            text = f"The model `{body['model']}` does not exist."
            return Answer(error(text, "model_not_found", param="model"), 404)
        fault = fake.fault(number, body) or Fault()
        if fault.raw is not None or fault.status != 200:
            whole = fault.raw if fault.raw is not None else fault.error or error("broken")
            return Answer(whole, fault.status, fault.headers)
        return Answer(fake.completion(body), cut=fault.cut, drip=fault.drip)

    server = JsonServer(reply)
    fake.url, fake.stop = f"{server.url}/v1", server.stop
    try:
        yield fake
    finally:
        server.stop()
