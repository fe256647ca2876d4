"""Answers in JSON, and what a request that fails is told."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from turngym.agents.proxy.errors import ApiError

if TYPE_CHECKING:
    from flask import Flask, Response

ROUTES = (
    "POST /v1/chat/completions, GET /v1/models, POST /v1/sessions/done, POST /v1/feedback, GET /healthz, GET /metrics, "
    "GET /watch"
)


def refusal(app: Flask, error: Exception, method: str, path: str) -> Response:
    """The answer to a request of `method` and `path` that ended in `error`."""
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
    return json_response(error.as_json(), error.status, headers)


def json_response(value: Mapping[str, Any], status: int, headers: dict[str, str] | None = None) -> Response:
    """`value` as JSON."""
    from flask import Response

    return Response(json.dumps(value).encode(), status=status, headers=headers, mimetype="application/json")
