"""The Flask application of the proxy: its routes, its answers in the OpenAI form, and its page to watch.

    POST /v1/chat/completions   a turn, whole or as server-sent events
    POST /v1/sessions/done      ends a session
    POST /v1/feedback           what a user thinks of a turn
    GET  /v1/models, /v1/models/NAME, /healthz, /metrics (Prometheus), /watch (a page)

Errors are JSON with the four fields that OpenAI clients read. `create_app` at the end puts it together.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turngym.agents.client_keys import ClientKeys
from turngym.agents.proxy.answer import Delta
from turngym.agents.proxy.api_errors import UNSUPPORTED, ApiError, invalid
from turngym.agents.proxy.openai_api import (
    ignored_fields,
    no_such_model,
    read_feedback,
    read_json,
    read_messages,
    read_request,
    read_session,
)
from turngym.agents.proxy.service import InflightRequest, ProxyService
from turngym.agents.proxy.turn_records import TurnRecord
from turngym.core.errors import is_disk_full
from turngym.core.plugins import need

if TYPE_CHECKING:
    from flask import Flask, Response

LOG = logging.getLogger(__name__)

# /metrics: the numbers of /healthz in the text form of Prometheus.

CHOSEN = ("unnamed", "ignored")
"""Tables whose keys clients choose."""
LABELED = (*CHOSEN, "unsupported", "left_out")
"""Tables whose keys become a label, not a part of the metric's name."""


def prometheus(health: Mapping[str, Any]) -> str:
    """One line per number, named `turngym_` and its path in /healthz with underscores; other values are left out."""
    return "".join(f"{name} {value:.12g}\n" for name, value in _numbers("turngym", health))


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, bool | int | float):
        yield name, float(value)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            if name.removeprefix("turngym_") in LABELED:
                label = str(key).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
                yield f'{name}{{name="{label}"}}', float(inner)
            else:
                yield from _numbers(f"{name}_{re.sub('[^a-zA-Z0-9_]', '_', str(key))}", inner)


PAGE = Path(__file__).with_name("watch_page.html")
"""/watch: shows /healthz every two seconds. It loads nothing from elsewhere."""

OTHERS = {"/v1/responses": "the Responses API", "/v1/completions": "plain completions", "/v1/embeddings": "embeddings"}
"""Routes of the OpenAI API that this server does not have: the error names the one to use."""


# Completions in the OpenAI form: whole, or as server-sent events.

POLL_SECONDS = 0.5
"""Seconds between two looks whether a client has gone."""
KEEP_ALIVE, MOST_COMMENTS = 5.0, 100
"""Seconds between keep-alive comments to a client, and most of them in one answer: clients written in Go give up after
300 lines without data."""
DONE = b"data: [DONE]\n\n"


def completion(record: TurnRecord, inflight: InflightRequest, pieces: Sequence[str] | None) -> dict[str, Any]:
    """The whole answer; `pieces` are the texts of the sampled ids if log-probabilities were asked for."""
    message = {**record.reply.as_json(), "refusal": None}
    choice = {
        "index": 0,
        "message": message,
        "logprobs": None if pieces is None else _logprobs(_scored(record), pieces, record.temperature),
        "finish_reason": record.finish_reason,
    }
    answer = {**_head(inflight, "chat.completion"), "choices": [choice], "usage": _usage(record, inflight)}
    if inflight.request.token_ids:
        choice["token_ids"] = record.ids.tolist()
        answer["prompt_token_ids"] = inflight.prompt.ids.tolist()
    return answer


class EventStream:
    """The answer as events while it is being generated: a role, text, calls as they are complete, the end.

    An engine that does not stream gives its text in one event at the end; keep-alive comments come before it. The WSGI
    server calls `close` at the end, also if the client went away: an unfinished answer is then dropped and its
    generation stopped, a finished one stays recorded.
    """

    def __init__(self, inflight: InflightRequest, gone: Callable[[], bool]) -> None:
        self._gone = gone
        """Whether the client has hung up, where the server knows it before it writes."""
        self._inflight, self._service = inflight, inflight.service
        self._head = _head(inflight, "chat.completion.chunk")
        self._text, self._reader = self._service.renderer.incremental_decoder(), inflight.reader()
        self._drawn: list[tuple[int, float]] = []
        """Ids whose log-probabilities were not sent yet."""
        self._sent = self._calls = 0
        self._events = self._run()

    def __iter__(self) -> Iterator[bytes]:
        return self._events

    def close(self) -> None:
        self._events.close()
        # not in a `finally` of _run: closing a generator that never began runs nothing of it
        self._inflight.abandon()

    def _run(self) -> Generator[bytes]:
        inflight, finished = self._inflight, None
        pause, last_sent = max(KEEP_ALIVE, self._service.settings.deadline / MOST_COMMENTS), time.monotonic()
        yield self._event({"role": "assistant", "content": ""})
        try:
            while finished is None:
                if drawn := inflight.new_tokens(POLL_SECONDS):
                    yield from self._token_events(drawn)
                    last_sent = time.monotonic()
                elif (finished := inflight.wait(0)) is None:
                    if self._gone():
                        return
                    if time.monotonic() - last_sent >= pause:
                        yield b": waiting\n\n"
                        last_sent = time.monotonic()
        except Exception as error:
            # the status is sent already: what no error of the server's may do is end the stream without a word
            yield _data(as_api_error(error).as_json())
            return
        text = finished.text
        if not text.startswith(self._text.text):
            # the engine failed on a batch; the retry with a smaller batch sampled other ids than were streamed
            self._service.tally.add("streams_torn")
            failure = ApiError(500, "the engine had to begin again and answered otherwise", code="engine")
            yield _data(failure.as_json())
            return
        new_text = text[len(self._text.text) :]
        self._drawn += _scored(finished)[self._sent + len(self._drawn) :]
        for delta in (*self._reader.feed(new_text), *self._reader.end()):
            yield from self._delta_events(delta)
        yield self._event({}, finish=finished.finish_reason)
        if inflight.request.usage_in_stream:
            yield _data({**self._head, "choices": [], "usage": _usage(finished, inflight)})
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
        call, index = delta.as_json(), self._calls
        self._calls += 1
        arguments = call["function"].pop("arguments")
        # as OpenAI streams calls: the head first, then arguments, which clients append to its empty ones
        opening = {"index": index, **call, "function": {**call["function"], "arguments": ""}}
        yield self._event({"tool_calls": [opening]})
        yield self._event({"tool_calls": [{"index": index, "function": {"arguments": arguments}}]})

    def _event(self, delta: dict[str, Any], finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": self._logprobs(), "finish_reason": finish}
        # as OpenAI does: null everywhere but in the last event
        usage = {"usage": None} if self._inflight.request.usage_in_stream else {}
        return _data({**self._head, "choices": [choice], **usage})

    def _logprobs(self) -> dict[str, Any] | None:
        """Log-probabilities of the ids drawn since the last event, if the client asked for them."""
        if not self._inflight.request.logprobs or not self._drawn:
            return None
        drawn, self._drawn = self._drawn, []
        self._sent += len(drawn)
        pieces = self._service.renderer.pieces([token for token, _ in drawn])
        return _logprobs(drawn, pieces, self._inflight.pending.request.sampling.temperature)


def _data(value: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def _head(inflight: InflightRequest, kind: str) -> dict[str, Any]:
    return {"id": inflight.answer_id, "object": kind, "created": int(time.time()), "model": inflight.service.name}


def _usage(record: TurnRecord, inflight: InflightRequest) -> dict[str, int]:
    prompt, sampled = len(inflight.prompt.ids), len(record.ids)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _scored(record: TurnRecord) -> list[tuple[int, float]]:
    return list(zip(record.ids.tolist(), record.logprobs.tolist(), strict=True))


def _logprobs(drawn: Sequence[tuple[int, float]], pieces: Sequence[str], temperature: float) -> dict[str, Any]:
    # the temperature is no field of the API: without it a client could not tell what the numbers are of
    rows = [
        {"token": piece, "logprob": logprob, "bytes": list(piece.encode()), "top_logprobs": []}
        for piece, (_, logprob) in zip(pieces, drawn, strict=True)
    ]
    return {"content": rows, "refusal": None, "temperature": temperature}


ROUTES = (
    "POST /v1/chat/completions, GET /v1/models, GET /v1/models/NAME, POST /v1/sessions/done, POST /v1/feedback, "
    "GET /healthz, GET /metrics, GET /watch"
)


def as_api_error(error: Exception) -> ApiError:
    """The error that a client is told. Those that nobody expects are logged; the client does not see their text."""
    if is_disk_full(error):
        return ApiError(503, "no room is left for records; ask again later", code="disk_full", retry_after=5)
    if isinstance(error, ApiError):
        return error
    LOG.exception("request failed", exc_info=error)
    return ApiError(500, f"internal error: {type(error).__name__}", code="internal")


def refusal(app: Flask, error: Exception, method: str, path: str) -> Response:
    """The answer to a request that ended in an exception."""
    # exceptions of werkzeug (no such route, a body too large) carry their status
    status = getattr(error, "code", None)
    if isinstance(status, int):
        limit = app.config["MAX_CONTENT_LENGTH"]
        texts = {
            404: f"there is no {method} {path}; valid: {ROUTES}",
            405: f"{path} does not take {method}; valid: {ROUTES}",
            413: f"the body is larger than {limit} bytes",
        }
        error = ApiError(status, texts.get(status, str(error)))
    error = as_api_error(error)
    headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    return json_response(error.as_json(), error.status, headers)


def json_response(value: Mapping[str, Any], status: int, headers: dict[str, str] | None = None) -> Response:
    """`value` as JSON."""
    from flask import Response

    return Response(json.dumps(value).encode(), status=status, headers=headers, mimetype="application/json")


OPEN = ("/healthz", "/watch")
"""Paths that need no key."""


def create_app(
    service: ProxyService, *, keys: ClientKeys | None = None, more_health: Callable[[], Mapping[str, Any]] | None = None
) -> Flask:
    """A WSGI application; `app.extensions["proxy"]` is the service. `more_health` adds to what /healthz says.

    What one of several `keys` has opened, requests with another one neither see nor change.

    Raises MissingExtra if Flask is not installed.
    """
    need("flask", "the proxy", "serve")
    from flask import Flask, Response, g, request

    # both paths are given, because Flask cannot find them for a package inside a namespace
    folder = str(Path(__file__).parent)
    app = Flask("turngym.agents.proxy", root_path=folder, instance_path=folder, static_folder=None)
    app.extensions["proxy"] = service
    # whether clients have a key each, and do not trust each other
    several = keys is not None and any(keys.keys)
    app.config["MAX_CONTENT_LENGTH"] = service.settings.max_body

    @app.before_request
    def check() -> None:
        g.client = "" if keys is None else keys.client_of(request.headers.get("Authorization", ""))
        if g.client is None and request.path not in OPEN:
            text = "the API key is missing or wrong: send Authorization: Bearer KEY"
            raise ApiError(401, text, code="invalid_api_key")
        # any page may send text/plain or a form to any address, but JSON only to who allows it (CORS)
        if request.method == "POST" and request.mimetype != "application/json":
            raise ApiError(415, "send Content-Type: application/json", code="unsupported_media_type")

    @app.errorhandler(Exception)
    def failed(error: Exception) -> Response:
        if isinstance(error, ApiError) and error.code == UNSUPPORTED and error.param is not None:
            service.tally.note_unsupported(error.param)
        return refusal(app, error, request.method, request.path)

    def body() -> dict[str, Any]:
        return read_json(lambda: request.get_data(cache=False))

    @app.post("/v1/chat/completions")
    def chat() -> Response:
        fields = body()
        service.tally.note_ignored(ignored_fields(fields))
        chat_request = read_request(fields, dict(request.headers), service.settings, service.name, g.client)
        inflight = service.begin(chat_request)
        # other WSGI servers do not say whether the client is still there
        gone = request.environ.get("waitress.client_disconnected", lambda: False)
        if chat_request.stream:
            no_cache = {"Cache-Control": "no-cache"}
            return Response(EventStream(inflight, gone), mimetype="text/event-stream", headers=no_cache)
        while (finished := inflight.wait(POLL_SECONDS)) is None:
            if gone():
                inflight.abandon()
                # nginx's status for this; HTTP has none
                raise ApiError(499, "the client closed the connection", code="disconnected")
        pieces = service.renderer.pieces(finished.ids.tolist()) if chat_request.logprobs else None
        return json_response(completion(finished, inflight, pieces), 200)

    @app.post("/v1/sessions/done")
    def done() -> Response:
        fields = body()
        session = read_session(fields, dict(request.headers))
        if session is None:
            raise invalid("which session is done? Set the header X-Session-Id or session_id", "session_id")
        messages = fields.get("messages")
        final = read_messages(messages, service.settings) if messages else ()
        return json_response({"object": "session", "turns": service.end(session, final, client=g.client)}, 200)

    @app.post("/v1/feedback")
    def feedback() -> Response:
        if service.stopping:
            raise ApiError(503, "the server is stopping", code="unavailable", retry_after=5)
        verdict, where = read_feedback(body(), dict(request.headers))
        status = service.feedback(verdict, **where, client=g.client)
        return json_response({"object": "feedback", "score": verdict.score, "status": status}, 200)

    model = {"id": service.name, "object": "model", "created": 0, "owned_by": "turngym"}

    @app.get("/v1/models")
    def models() -> Response:
        return json_response({"object": "list", "data": [model]}, 200)

    # names have slashes, too
    @app.get("/v1/models/<path:name>")
    def one_model(name: str) -> Response:
        if name != service.name:
            raise no_such_model(name, service.name)
        return json_response(model, 200)

    def shown_health() -> dict[str, Any]:
        """What the one who asks may know. Names that clients have chosen are shown to all of them if they trust each
        other; else, and to those who have shown no key, only how many there are."""
        counts = {**service.health(), **({} if more_health is None else more_health())}
        if g.client is not None and not several:
            return counts
        return {name: sum(value.values()) if name in CHOSEN else value for name, value in counts.items()}

    @app.get("/healthz")
    def healthz() -> Response:
        return json_response(shown_health(), 503 if service.stopping else 200)

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(prometheus(shown_health()).encode(), content_type="text/plain; version=0.0.4")

    @app.get("/watch")
    def watch() -> Response:
        return Response(PAGE.read_bytes(), content_type="text/html; charset=utf-8")

    def other() -> Response:
        raise ApiError(
            404,
            f"{request.path}: this server does not have {OTHERS[request.path]}; send messages to "
            "POST /v1/chat/completions (client.chat.completions in the official client)",
            code="unsupported_endpoint",
        )

    for path in OTHERS:
        app.add_url_rule(path, f"not {path}", other, methods=["POST"])
    return app
