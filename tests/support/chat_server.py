"""A chat-completions server on this machine that says what was recorded after the same conversation."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from turngym.envs.core.episode import Episode


class Recorded:
    """Responses by what was said before them: the observations so far and the responses between them."""

    def __init__(self, episodes: Sequence[Episode]) -> None:
        self.said: dict[tuple[str, ...], str] = {}
        self.systems: set[str] = set()
        for episode in episodes:
            before: tuple[str, ...] = ()
            self.systems.add(episode.system)
            for turn in episode.turns:
                before += (turn.observation,)
                assert self.said.setdefault(before, turn.response) == turn.response, "two answers to one conversation"
                before += (turn.response,)

    def answer(self, messages: Sequence[tuple[str, str]]) -> str:
        """What was said after `messages`, (role, text) each."""
        texts = tuple(text for role, text in messages if role not in ("system", "developer"))
        assert {text for role, text in messages if role in ("system", "developer")} <= self.systems
        return self.said[texts]


@contextmanager
def chat_server(recorded: Recorded) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """(base URL, requests so far) of a server that answers as `recorded` says."""
    requests: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append(body)
            try:
                text = recorded.answer([(m["role"], _text(m["content"])) for m in body["messages"]])
                status, reply = 200, _completion(body["model"], text)
            except (KeyError, AssertionError) as error:
                status, reply = 400, {"error": {"message": f"nothing was recorded after this: {error}", "code": "x"}}
            data = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", requests
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _completion(model: str, text: str) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    return {
        "id": "chatcmpl-0",
        "object": "chat.completion",
        "created": 0,
        "model": model,
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10},
    }
