"""POST /retrieve past Flask, whose routing and objects cost more than all else that is done here for a request."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from io import BytesIO
from typing import Any

from turngym.retrieval.server.service import RetrievalService
from turngym.retrieval.wire import FINGERPRINT_HEADER

WsgiApp = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]
Answer = Callable[[RetrievalService, bytes], tuple[bytes, int]]
JSON = "application/json"
REASONS = {200: "OK", 400: "Bad Request", 422: "Unprocessable Entity", 503: "Service Unavailable"}
"""Of what `Answer` gives."""


def past(flask: WsgiApp, service: RetrievalService, answer: Answer) -> WsgiApp:
    """`flask`, except for well-formed search requests, which get from `answer` what they would have got from Flask.

    Everything that needs a refusal of HTTP's own (another method, type or address, a body without a length or too
    large) and every mistake of ours goes to `flask`, which words it.
    """

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        began, length = time.perf_counter(), search_length(environ)
        if not 0 <= length <= service.settings.max_body:
            return flask(environ, start_response)
        asked = environ["wsgi.input"].read(length)
        try:
            body, status = answer(service, asked)
            reason = REASONS[status]
        except Exception:
            # once more, where it is logged and answered with a 500
            return flask({**environ, "wsgi.input": BytesIO(asked)}, start_response)
        service.stats.answered(status, time.perf_counter() - began)
        headers = [("Content-Type", JSON), ("Content-Length", str(len(body)))]
        start_response(f"{status} {reason}", [*headers, (FINGERPRINT_HEADER, service.fingerprint)])
        return [body]

    return application


def search_length(environ: dict[str, Any]) -> int:
    """Bytes of a search request's body; -1 for other requests, and where it is not said."""
    if environ["REQUEST_METHOD"] != "POST" or environ["PATH_INFO"] != "/retrieve":
        return -1
    length = environ.get("CONTENT_LENGTH", "")
    plain = "HTTP_TRANSFER_ENCODING" not in environ and length.isdecimal() and length.isascii()
    return int(length) if plain and environ.get("CONTENT_TYPE", "").lower() == JSON else -1
