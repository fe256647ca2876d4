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
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

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
    key: str | None = None
    message: Callable[[Body], Body] = lambda body: {"content": door(body)}
    fault: Callable[[int, Body], Fault | None] = lambda number, body: None
    finish: str = "stop"
    usage: bool = True
    extra: Callable[[Body], Body] = lambda body: {}
    requests: list[Body] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    url: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def completion(self, body: Body) -> Body:
        choice = {"index": 0, "message": {"role": "assistant", **self.message(body)}, "finish_reason": self.finish}
        answer: Body = {"id": "x", "object": "chat.completion", "created": 0, "model": self.model}
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

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            self._send(
                200, {"object": "list", "data": [{"id": fake.model, "object": "model", "created": 0, "owned_by": "x"}]}
            )

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with fake.lock:
                fake.requests.append(body)
                fake.times.append(time.monotonic())
                number = len(fake.requests) - 1
                fake.at_once += 1
                fake.most_at_once = max(fake.most_at_once, fake.at_once)
            time.sleep(0.002)
            with fake.lock:  # before the answer: its client may send the next request at once
                fake.at_once -= 1
            self._answer(number, body)

        def _answer(self, number: int, body: Body) -> None:
            given = self.headers.get("Authorization", "")
            if fake.key is not None and given != f"Bearer {fake.key}":
                self._send(401, error(f"Incorrect API key provided: {given}", "invalid_api_key"))
            elif self.path.partition("?")[0] != "/v1/chat/completions":
                self._send(404, {"detail": "Not Found"})
            elif body["model"] != fake.model:
                text = f"The model `{body['model']}` does not exist."
                self._send(404, error(text, "model_not_found", param="model"))
            elif (fault := fake.fault(number, body)) is not None:
                self._fail(fault, body)
            else:
                self._send(200, fake.completion(body))

        def _fail(self, fault: Fault, body: Body) -> None:
            if fault.status != 200 or fault.raw is not None:
                self._send(fault.status, fault.error or error("broken"), fault.headers, fault.raw)
                return
            whole = json.dumps(fake.completion(body)).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(whole)))
            self.end_headers()
            if fault.cut:
                self.wfile.write(whole[: len(whole) // 2])
                self.close_connection = True
                return
            try:
                for place in range(len(whole)):
                    self.wfile.write(whole[place : place + 1])
                    self.wfile.flush()
                    time.sleep(fault.drip / len(whole))
            except OSError:
                self.close_connection = True

        def _send(
            self, status: int, value: Any, headers: Mapping[str, str] | None = None, raw: bytes | None = None
        ) -> None:
            whole = json.dumps(value).encode() if raw is None else raw
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(whole)))
            for name, text in (headers or {}).items():
                self.send_header(name, text)
            self.end_headers()
            self.wfile.write(whole)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    fake.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    try:
        yield fake
    finally:
        server.shutdown()
        thread.join(20)
        server.server_close()
