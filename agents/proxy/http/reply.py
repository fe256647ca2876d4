"""Completions in the form that OpenAI clients read: whole, or as server-sent events."""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

from turngym.agents.proxy.conversation.answer import Delta
from turngym.agents.proxy.errors import ApiError
from turngym.agents.proxy.inflight import Finished, InflightRequest, answer_id

POLL_SECONDS = 0.5
"""Seconds between keep-alive comments to a client: a lost connection is noticed only on a write."""
DONE = b"data: [DONE]\n\n"


def completion(finished: Finished, inflight: InflightRequest, pieces: Sequence[str] | None) -> dict[str, Any]:
    """The whole answer; `pieces` are the texts of the sampled ids where log-probabilities were asked for."""
    message = {**finished.reply.as_json(), "refusal": None}
    choice = {
        "index": 0,
        "message": message,
        "logprobs": None if pieces is None else _logprobs(_scored(finished), pieces),
        "finish_reason": finished.finish,
    }
    answer = {**_head(finished.number, inflight, "chat.completion"), "choices": [choice], "usage": _usage(finished)}
    if inflight.request.token_ids:
        choice["token_ids"] = finished.record.ids.tolist()
        answer["prompt_token_ids"] = inflight.prompt.ids.tolist()
    return answer


class EventStream:
    """The answer as events while it is being generated: a role, text, calls as they are complete, the end.

    An engine that does not stream gives its text in one event at the end; keep-alive comments come before it. `close`
    (the WSGI server calls it, also for a client that went away) drops an answer that is not there yet, and the engine
    gives it up; one that is there stays recorded.
    """

    def __init__(self, inflight: InflightRequest) -> None:
        self._inflight, self._service = inflight, inflight.service
        self._head = _head(inflight.number, inflight, "chat.completion.chunk")
        self._text, self._reader = self._service.renderer.incremental_decoder(), inflight.reader()
        self._drawn: list[tuple[int, float]] = []
        """Ids whose log-probabilities were not sent yet."""
        self._sent = self._calls = 0
        self._events = self._run()

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        return next(self._events)

    def close(self) -> None:
        self._events.close()
        # not in a `finally` of _run: closing a generator that never began runs nothing of it
        self._inflight.abandon()

    def _run(self) -> Generator[bytes]:
        inflight, finished = self._inflight, None
        yield self._event({"role": "assistant", "content": ""})
        try:
            while finished is None:
                if drawn := inflight.new_tokens(POLL_SECONDS):
                    yield from self._token_events(drawn)
                elif (finished := inflight.wait(0)) is None:
                    yield b": waiting\n\n"
        except ApiError as error:
            yield _data(error.as_json())
            return
        text = finished.record.text
        if not text.startswith(self._text.text):
            # the engine failed on a batch; the retry with a smaller batch sampled other ids than were streamed
            self._service.count("streams_torn")
            torn = ApiError(500, "the engine had to begin again and answered otherwise", code="engine")
            yield _data(torn.as_json())
            return
        rest = text[len(self._text.text) :]
        self._drawn += _scored(finished)[self._sent + len(self._drawn) :]
        for delta in (*self._reader.feed(rest), *self._reader.end()):
            yield from self._delta_events(delta)
        yield self._event({}, finish=finished.finish)
        if inflight.request.usage_in_stream:
            yield _data({**self._head, "choices": [], "usage": _usage(finished)})
        yield DONE

    def _token_events(self, drawn: Sequence[tuple[int, float]]) -> Iterator[bytes]:
        self._drawn += drawn
        stops = self._service.renderer.stop_ids
        text = "".join(self._text.feed(token) for token, _ in drawn if token not in stops)
        for delta in self._reader.feed(text):
            yield from self._delta_events(delta)

    def _delta_events(self, delta: Delta) -> Iterator[bytes]:
        if isinstance(delta, str):
            yield self._event({"content": delta})
            return
        call, place = delta.as_json(), self._calls
        self._calls += 1
        arguments = call["function"].pop("arguments")
        # as OpenAI streams calls: the head first, then arguments, which clients append to its empty ones
        opening = {"index": place, **call, "function": {**call["function"], "arguments": ""}}
        yield self._event({"tool_calls": [opening]})
        yield self._event({"tool_calls": [{"index": place, "function": {"arguments": arguments}}]})

    def _event(self, delta: dict[str, Any], finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": self._logprobs(), "finish_reason": finish}
        # as OpenAI does: null everywhere but in the last event
        usage = {"usage": None} if self._inflight.request.usage_in_stream else {}
        return _data({**self._head, "choices": [choice], **usage})

    def _logprobs(self) -> dict[str, Any] | None:
        """Of the ids that were drawn since the last event, where the client asked for them."""
        if not self._inflight.request.logprobs or not self._drawn:
            return None
        drawn, self._drawn = self._drawn, []
        self._sent += len(drawn)
        return _logprobs(drawn, self._service.renderer.pieces([token for token, _ in drawn]))


def _data(value: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def _head(number: int, inflight: InflightRequest, kind: str) -> dict[str, Any]:
    return {
        "id": answer_id(inflight.service.run_id, number),
        "object": kind,
        "created": int(time.time()),
        "model": inflight.service.name,
    }


def _usage(finished: Finished) -> dict[str, int]:
    sampled = len(finished.record.ids)
    return {
        "prompt_tokens": finished.prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": finished.prompt_tokens + sampled,
    }


def _scored(finished: Finished) -> list[tuple[int, float]]:
    record = finished.record
    return list(zip(record.ids.tolist(), record.logprobs.tolist(), strict=True))


def _logprobs(drawn: Sequence[tuple[int, float]], pieces: Sequence[str]) -> dict[str, Any]:
    rows = [
        {"token": piece, "logprob": logprob, "bytes": list(piece.encode()), "top_logprobs": []}
        for piece, (_, logprob) in zip(pieces, drawn, strict=True)
    ]
    return {"content": rows, "refusal": None}
