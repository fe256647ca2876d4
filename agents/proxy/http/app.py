"""The Flask application: chat completions, models, the end of a session, health. Errors are JSON as OpenAI words it."""

from __future__ import annotations

import hmac
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turngym.agents.proxy.errors import ApiError, ProxyError, invalid
from turngym.agents.proxy.http.identity import read_session
from turngym.agents.proxy.http.more_routes import add_routes
from turngym.agents.proxy.http.read_messages import read_messages
from turngym.agents.proxy.http.reply import POLL_SECONDS, EventStream, completion
from turngym.agents.proxy.http.request import read_json, read_request
from turngym.agents.proxy.inflight import Finished, InflightRequest
from turngym.agents.proxy.service import ProxyService

if TYPE_CHECKING:
    from flask import Flask, Response

ROUTES = "POST /v1/chat/completions, GET /v1/models, POST /v1/sessions/done, GET /healthz, GET /metrics, GET /watch"
OPEN = ("/healthz", "/watch")
"""Paths that need no key."""


def create_app(
    service: ProxyService, *, api_key: str | None = None, more_health: Callable[[], Mapping[str, Any]] | None = None
) -> Flask:
    """A WSGI application; `app.extensions["proxy"]` is the service. `more_health` adds to what /healthz says.

    Raises:
        ProxyError: Flask is not installed.
    """
    try:
        from flask import Flask, request
    except ImportError as error:
        raise ProxyError("the proxy needs Flask: pip install 'turngym[serve]'") from error
    # both paths said, because Flask cannot find them for a package inside a namespace
    here = str(Path(__file__).parent)
    app = Flask("turngym.agents.proxy", root_path=here, instance_path=here, static_folder=None)
    app.extensions["proxy"] = service
    app.config["MAX_CONTENT_LENGTH"] = service.settings.max_body

    def health() -> dict[str, Any]:
        return {**service.health(), **({} if more_health is None else more_health())}

    @app.before_request
    def check_key() -> None:
        if api_key is not None and request.path not in OPEN:
            _check_key(request.headers.get("Authorization", ""), api_key)

    @app.before_request
    def check_type() -> None:
        # any page may send text/plain or a form to any address, but JSON only to who allows it (CORS)
        if request.method == "POST" and request.mimetype != "application/json":
            raise ApiError(415, "send Content-Type: application/json", code="unsupported_media_type")

    @app.post("/v1/chat/completions")
    def chat() -> Response:
        asked = read_request(read_json(request.get_data(cache=False)), request.headers, service.settings, service.name)
        inflight = service.begin(asked)
        if asked.stream:
            return _stream(inflight)
        # other WSGI servers do not say whether the client is still there
        gone = request.environ.get("waitress.client_disconnected", lambda: False)
        finished = _answer(inflight, gone)
        pieces = service.renderer.pieces(finished.record.ids.tolist()) if asked.logprobs else None
        return _json(completion(finished, inflight, pieces), 200)

    @app.post("/v1/sessions/done")
    def done() -> Response:
        fields = read_json(request.get_data(cache=False))
        session = read_session(fields, request.headers)
        if session is None:
            raise invalid("which session is done? Set the header X-Session-Id or session_id", "session_id")
        given = fields.get("messages")
        final = () if not given else read_messages(given, service.settings)
        return _json({"object": "session", "turns": service.end(session, final)}, 200)

    @app.get("/v1/models")
    def models() -> Response:
        model = {"id": service.name, "object": "model", "created": 0, "owned_by": "turngym"}
        return _json({"object": "list", "data": [model]}, 200)

    @app.get("/healthz")
    def healthz() -> Response:
        return _json(health(), 503 if service.stopping else 200)

    add_routes(app, health)

    @app.errorhandler(Exception)
    def refused(error: Exception) -> Response:
        return _refusal(app, error, request.method, request.path)

    return app


def _answer(inflight: InflightRequest, gone: Callable[[], bool]) -> Finished:
    """The whole answer, unless the client goes away first."""
    while (finished := inflight.wait(POLL_SECONDS)) is None:
        if gone():
            inflight.abandon()
            # nginx's status for this; HTTP has none
            raise ApiError(499, "the client closed the connection", code="disconnected")
    return finished


def _stream(inflight: InflightRequest) -> Response:
    from flask import Response

    return Response(EventStream(inflight), mimetype="text/event-stream", headers={"Cache-Control": "no-cache"})


def _check_key(header: str, key: str) -> None:
    scheme, _, given = header.partition(" ")
    # as the bytes that came (WSGI reads headers as Latin-1): compare_digest refuses text that is not ASCII
    same = hmac.compare_digest(given.strip().encode("latin-1", "replace"), key.encode())
    if scheme.lower() != "bearer" or not same:
        raise ApiError(401, "the API key is missing or wrong: send Authorization: Bearer KEY", code="invalid_api_key")


def _refusal(app: Flask, error: Exception, method: str, path: str) -> Response:
    if not isinstance(error, ApiError):
        # exceptions of werkzeug (no such route, a body too large) carry their status
        status = getattr(error, "code", None)
        if not isinstance(status, int):
            app.logger.exception("request failed", exc_info=error)
            error = ApiError(500, f"internal error: {type(error).__name__}", code="internal")
        else:
            limit = app.config["MAX_CONTENT_LENGTH"]
            said = {
                404: f"there is no {method} {path}; valid: {ROUTES}",
                405: f"{path} does not take {method}; valid: {ROUTES}",
                413: f"the body is larger than {limit} bytes",
            }
            error = ApiError(status, said.get(status, str(error)))
    headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    return _json(error.as_json(), error.status, headers)


def _json(value: Mapping[str, Any], status: int, headers: dict[str, str] | None = None) -> Response:
    from flask import Response

    return Response(json.dumps(value).encode(), status=status, headers=headers, mimetype="application/json")
