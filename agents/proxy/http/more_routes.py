"""Routes beside the chat: what this server does not do, said clearly."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from turngym.agents.proxy.errors import ApiError

if TYPE_CHECKING:
    from flask import Flask, Response

OTHERS = {
    "/v1/responses": "the Responses API",
    "/v1/completions": "plain completions",
    "/v1/embeddings": "embeddings",
}


def add_routes(app: Flask) -> None:
    """Add them to the application."""
    for path, what in OTHERS.items():
        app.add_url_rule(path, f"not {path}", _refuse(path, what), methods=["POST"])


def _refuse(path: str, what: str) -> Callable[[], Response]:
    def refuse() -> Response:
        raise ApiError(
            404,
            f"{path}: this server does not have {what}; send messages to POST /v1/chat/completions "
            "(client.chat.completions in the official client)",
            code="unsupported_endpoint",
        )

    return refuse
