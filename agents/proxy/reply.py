"""Completions in the form that OpenAI clients read: whole, or as server-sent events."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

from turngym.agents.proxy.errors import ApiError
from turngym.agents.proxy.ongoing import Finished, Ongoing

BEAT = 0.5
"""Seconds between signs of life while a client waits; only then can a lost connection be noticed."""
PIECE = 48
"""Letters in one event of a streamed answer."""
DONE = b"data: [DONE]\n\n"


def completion(finished: Finished, ongoing: Ongoing, pieces: Sequence[str] | None) -> dict[str, Any]:
    """The whole answer; `pieces` are the texts of the sampled ids where log-probabilities were asked for."""
    message = {**finished.reply.as_json(), "refusal": None}
    choice = {
        "index": 0,
        "message": message,
        "logprobs": None if pieces is None else _logprobs(finished, pieces),
        "finish_reason": finished.finish,
    }
    return {**_head(finished.number, ongoing, "chat.completion"), "choices": [choice], "usage": _usage(finished)}


class EventStream:
    """The answer as events: a role, signs of life while it is being generated, the text in pieces, the calls, the end.

    The engine answers as a whole, so pieces come together at the end. `close` (the WSGI server calls it, also for a
    client that went away) drops an answer that is not there yet; one that is there stays recorded.
    """

    def __init__(self, ongoing: Ongoing, pieces_of: Any) -> None:
        self._ongoing = ongoing
        self._events = self._run(pieces_of)

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        return next(self._events)

    def close(self) -> None:
        self._events.close()
        self._ongoing.abandon()

    def _run(self, pieces_of: Any) -> Any:
        ongoing = self._ongoing
        head = _head(ongoing.number, ongoing, "chat.completion.chunk")
        yield _event(head, {"role": "assistant", "content": ""})
        try:
            while (finished := ongoing.wait(BEAT)) is None:
                yield b": waiting\n\n"
        except ApiError as error:
            yield b"data: " + json.dumps(error.as_json()).encode() + b"\n\n"
            return
        content = finished.reply.content
        for start in range(0, len(content), PIECE):
            yield _event(head, {"content": content[start : start + PIECE]})
        if finished.reply.tool_calls:
            calls = [{"index": i, **call.as_json()} for i, call in enumerate(finished.reply.tool_calls)]
            yield _event(head, {"tool_calls": calls})
        logprobs = _logprobs(finished, pieces_of(finished)) if ongoing.request.logprobs else None
        yield _event(head, {}, finish=finished.finish, logprobs=logprobs)
        if ongoing.request.usage_in_stream:
            yield b"data: " + json.dumps({**head, "choices": [], "usage": _usage(finished)}).encode() + b"\n\n"
        yield DONE


def _event(
    head: dict[str, Any], delta: dict[str, Any], finish: str | None = None, logprobs: dict[str, Any] | None = None
) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
    return b"data: " + json.dumps({**head, "choices": [choice]}).encode() + b"\n\n"


def _head(number: int, ongoing: Ongoing, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{ongoing.service.run_id}-{number}",
        "object": kind,
        "created": int(time.time()),
        "model": ongoing.service.name,
    }


def _usage(finished: Finished) -> dict[str, int]:
    sampled = len(finished.record.ids)
    return {
        "prompt_tokens": finished.prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": finished.prompt_tokens + sampled,
    }


def _logprobs(finished: Finished, pieces: Sequence[str]) -> dict[str, Any]:
    rows = [
        {"token": piece, "logprob": float(logprob), "bytes": list(piece.encode()), "top_logprobs": []}
        for piece, logprob in zip(pieces, finished.record.logprobs, strict=True)
    ]
    return {"content": rows, "refusal": None}
