"""The WSGI application by itself: what no HTTP server in front of it lets through, and mistakes of ours."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from turngym.retrieval.server import RetrievalApp, create_app
from turngym.retrieval.wire import ServerSettings

GOOD = b'{"queries": ["a", "b"], "topk": 2, "return_scores": true}'


@pytest.fixture
def app(echo: Any) -> RetrievalApp:
    return create_app(echo, ServerSettings(max_body=4096, max_waiting=8192))


def call(app: RetrievalApp, body: bytes = GOOD, **more: str) -> tuple[str, dict[str, str], bytes]:
    environ = {"REQUEST_METHOD": "POST", "PATH_INFO": "/retrieve", "CONTENT_TYPE": "application/json"}
    environ |= {"CONTENT_LENGTH": str(len(body)), **more}
    said: list[Any] = []
    answer = b"".join(app(environ | {"wsgi.input": io.BytesIO(body)}, lambda *given: said.extend(given)))
    return said[0], dict(said[1]), answer


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({}, "200 OK"),
        ({"CONTENT_TYPE": "Application/JSON ; charset=utf-8"}, "200 OK"),
        ({"CONTENT_TYPE": "text/plain"}, "415 Unsupported Media Type"),
        ({"REQUEST_METHOD": "GET"}, "405 Method Not Allowed"),
        ({"REQUEST_METHOD": "POST", "PATH_INFO": "/health"}, "405 Method Not Allowed"),
        ({"PATH_INFO": "/retrieves"}, "404 Not Found"),
        ({"CONTENT_LENGTH": "4097"}, "413 Request Entity Too Large"),
        ({"CONTENT_LENGTH": "-1"}, "400 Bad Request"),
        ({"CONTENT_LENGTH": "\u0663"}, "400 Bad Request"),
        ({"CONTENT_LENGTH": ""}, "400 Bad Request"),
    ],
)
def test_what_is_no_search_is_said(app: RetrievalApp, change: dict[str, str], status: str) -> None:
    found, headers, body = call(app, **change)
    assert (found, headers["Content-Length"]) == (status, str(len(body)))
    assert ("error" in json.loads(body)) == (status != "200 OK")
    counted = {status[:3]: 1} if change.get("PATH_INFO") is None else {}
    assert app.service.stats.as_json()["by_status"] == counted


def test_a_head_has_no_body(app: RetrievalApp) -> None:
    status, headers, body = call(app, b"", REQUEST_METHOD="HEAD", PATH_INFO="/health")
    assert (status, body, int(headers["Content-Length"]) > 0) == ("200 OK", b"", True)


def test_a_mistake_of_ours_is_a_500(app: RetrievalApp, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(app.service, "search", broken)
    status, _, body = call(app)
    assert (status[:3], json.loads(body)) == ("500", {"error": "internal error: ZeroDivisionError"})
    assert app.service.stats.as_json()["by_status"] == {}, "only answers are counted"
