"""The Flask application: chat completions, models, the end of a session, health. Errors are JSON as OpenAI words it."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turngym.agents.proxy.errors import ApiError, ProxyError
from turngym.agents.proxy.http.more_routes import add_routes
from turngym.agents.proxy.http.reply import POLL_SECONDS, EventStream, completion
from turngym.agents.proxy.http.request import read_json, read_request
from turngym.agents.proxy.http.respond import json_response, refusal
from turngym.agents.proxy.http.session_routes import add_session_routes
from turngym.agents.proxy.inflight import Finished, InflightRequest
from turngym.agents.proxy.service import ProxyService

if TYPE_CHECKING:
    from flask import Flask, Response

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

    _add_checks(app, api_key)
    _add_chat(app, service)
    add_session_routes(app, service)
    _add_health(app, service, health)
    add_routes(app, health)

    @app.errorhandler(Exception)
    def refused(error: Exception) -> Response:
        return refusal(app, error, request.method, request.path)

    return app


def _add_checks(app: Flask, api_key: str | None) -> None:
    """Who may ask, and in what form."""
    from flask import request

    @app.before_request
    def check_key() -> None:
        if api_key is not None and request.path not in OPEN:
            _check_key(request.headers.get("Authorization", ""), api_key)

    @app.before_request
    def check_type() -> None:
        # any page may send text/plain or a form to any address, but JSON only to who allows it (CORS)
        if request.method == "POST" and request.mimetype != "application/json":
            raise ApiError(415, "send Content-Type: application/json", code="unsupported_media_type")


def _add_chat(app: Flask, service: ProxyService) -> None:
    from flask import request

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
        return json_response(completion(finished, inflight, pieces), 200)


def _add_health(app: Flask, service: ProxyService, health: Callable[[], Mapping[str, Any]]) -> None:
    @app.get("/v1/models")
    def models() -> Response:
        model = {"id": service.name, "object": "model", "created": 0, "owned_by": "turngym"}
        return json_response({"object": "list", "data": [model]}, 200)

    @app.get("/healthz")
    def healthz() -> Response:
        return json_response(health(), 503 if service.stopping else 200)


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
