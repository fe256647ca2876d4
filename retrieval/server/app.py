"""The Flask application: POST /retrieve, GET /health, GET /stats. Every answer is JSON, errors included."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from flask import Flask, Response

from turngym.retrieval.core import RetrievalError, Retriever, RetrieverUnavailable
from turngym.retrieval.server.direct import past
from turngym.retrieval.server.request import BadRequest, read_request
from turngym.retrieval.server.service import RetrievalService
from turngym.retrieval.server.settings import ServerSettings
from turngym.retrieval.wire import FINGERPRINT_HEADER, reply_body

ROUTES = "POST /retrieve, GET /health, GET /stats"


def create_app(retriever: Retriever | RetrievalService, settings: ServerSettings | None = None) -> Flask:
    """A WSGI application that serves `retriever`; `app.extensions["retrieval"]` is its service.

    Raises:
        RetrievalError: Flask is not installed.
    """
    try:
        from flask import Flask, abort, request
    except ImportError as error:
        raise RetrievalError("the retrieval server needs Flask: pip install 'turngym[serve]'") from error
    service = retriever if isinstance(retriever, RetrievalService) else RetrievalService(retriever, settings)
    # both paths said, because Flask cannot find them for a package inside a namespace
    here = str(Path(__file__).parent)
    app = Flask("turngym.retrieval.server", root_path=here, instance_path=here, static_folder=None)
    app.extensions["retrieval"] = service
    app.config["MAX_CONTENT_LENGTH"] = service.settings.max_body

    @app.post("/retrieve")
    def retrieve() -> Response:
        began = time.perf_counter()
        # any page may send text/plain or a form to any address, but JSON only to who allows it (CORS)
        if request.mimetype != "application/json":
            abort(415)
        body, status = _retrieve(service, request.get_data(cache=False))
        service.stats.answered(status, time.perf_counter() - began)
        return _json(body, status, {FINGERPRINT_HEADER: service.fingerprint})

    @app.get("/health")
    def health() -> Response:
        found = service.health()
        return _json(_dump(found), 200 if found["status"] == "ok" else 503)

    @app.get("/stats")
    def stats() -> Response:
        return _json(_dump(service.statistics()), 200)

    @app.errorhandler(Exception)
    def refused(error: Exception) -> Response:
        status = getattr(error, "code", None)
        if not isinstance(status, int):
            app.logger.exception("request failed", exc_info=error)
            return _json(_dump({"error": f"internal error: {type(error).__name__}"}), 500)
        said = {
            404: f"there is no {request.method} {request.path}",
            405: f"{request.path} does not take {request.method}",
            415: "send Content-Type: application/json",
            413: f"the body is larger than {service.settings.max_body} bytes",
        }
        if request.path == "/retrieve":
            service.stats.answered(status)
        allowed = getattr(error, "valid_methods", None)
        headers = {"Allow": ", ".join(sorted(allowed))} if allowed else None
        return _json(_dump({"error": said.get(status, str(error)), "valid": ROUTES}), status, headers)

    app.wsgi_app = past(app.wsgi_app, service, _retrieve)  # type: ignore[assignment, method-assign]
    return app


def _retrieve(service: RetrievalService, body: bytes) -> tuple[bytes, int]:
    """(JSON, HTTP status) of one search request."""
    try:
        asked = read_request(body, service.settings)
        return reply_body(service.search(asked.queries, asked.k), asked.scores), 200
    except BadRequest as error:
        return _dump(error.as_json()), error.status
    except RetrieverUnavailable as error:
        return _dump({"error": str(error)}), 503


def _dump(value: Any) -> bytes:
    return json.dumps(value).encode()


def _json(body: bytes, status: int, headers: dict[str, str] | None = None) -> Response:
    from flask import Response

    return Response(body, status=status, headers=headers, mimetype="application/json")
