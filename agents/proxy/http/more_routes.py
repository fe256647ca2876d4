"""Routes beside the chat: numbers for Prometheus, a page to watch, and what this server does not do, said clearly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from turngym.agents.proxy.errors import ApiError
from turngym.agents.proxy.http.metrics import prometheus
from turngym.agents.proxy.http.watch_page import PAGE

if TYPE_CHECKING:
    from flask import Flask, Response

OTHERS = {
    "/v1/responses": "the Responses API",
    "/v1/completions": "plain completions",
    "/v1/embeddings": "embeddings",
}


def add_routes(app: Flask, health: Callable[[], Mapping[str, Any]]) -> None:
    """Add them to the application; `health` is what /healthz says."""
    app.add_url_rule("/metrics", "metrics", lambda: _text(prometheus(health()), "text/plain; version=0.0.4"))
    app.add_url_rule("/watch", "watch", lambda: _text(PAGE, "text/html; charset=utf-8"))
    for path, what in OTHERS.items():
        app.add_url_rule(path, f"not {path}", _refuse(path, what), methods=["POST"])


def _text(text: str, kind: str) -> Response:
    from flask import Response

    return Response(text.encode(), content_type=kind)


def _refuse(path: str, what: str) -> Callable[[], Response]:
    def refuse() -> Response:
        raise ApiError(
            404,
            f"{path}: this server does not have {what}; send messages to POST /v1/chat/completions "
            "(client.chat.completions in the official client)",
            code="unsupported_endpoint",
        )

    return refuse
