"""The WSGI application by itself: statuses, and what is counted."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from turngym.retrieval.core import Hit, Passage, RetrieverUnavailable
from turngym.retrieval.http_format import RetrievalServerSettings
from turngym.retrieval.server import RetrievalApp

GOOD = {"queries": ["a", "b"], "topk": 2, "return_scores": True}


class Toy:
    fingerprint = "toy"

    def search(self, queries: Any, k: int) -> Any:
        if "gone" in queries:
            raise RetrieverUnavailable("shard 7 is gone")
        return [[Hit(passage=Passage(id=f"{q}{n}", title="T", text="x"), score=1.5) for n in range(k)] for q in queries]

    def close(self) -> None:
        pass


@pytest.fixture
def app() -> RetrievalApp:
    return RetrievalApp(Toy(), RetrievalServerSettings(max_body=4096, max_waiting=8192))


def environ(body: bytes, **more: str) -> dict[str, Any]:
    values = {
        "REQUEST_METHOD": "POST",
        "SCRIPT_NAME": "",
        "PATH_INFO": "/retrieve",
        "QUERY_STRING": "",
        "SERVER_NAME": "127.0.0.1",
        "SERVER_PORT": "80",
        "SERVER_PROTOCOL": "HTTP/1.1",
        "CONTENT_TYPE": "application/json",
        "CONTENT_LENGTH": str(len(body)),
        "wsgi.url_scheme": "http",
        "wsgi.input": io.BytesIO(body),
        "wsgi.errors": io.StringIO(),
    }
    return {name: value for name, value in (values | more).items() if value != "absent"}


def call(app: RetrievalApp, asked: dict[str, Any]) -> tuple[str, dict[str, str], bytes]:
    said: list[Any] = []
    body = b"".join(app(asked, lambda status, headers: said.extend((status, dict(headers)))))
    return said[0], said[1], body


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"CONTENT_TYPE": "text/plain"}, "415"),
        ({"REQUEST_METHOD": "GET"}, "405"),
        ({"REQUEST_METHOD": "HEAD", "PATH_INFO": "/health"}, "200"),
        ({"PATH_INFO": "/retrieves"}, "404"),
        ({"CONTENT_LENGTH": "4097"}, "413"),
        ({"CONTENT_LENGTH": "absent"}, "400"),
        ({"HTTP_TRANSFER_ENCODING": "chunked", "CONTENT_LENGTH": "absent"}, "400"),
    ],
)
def test_statuses(app: RetrievalApp, change: dict[str, str], status: str) -> None:
    body = json.dumps(GOOD).encode()
    said, headers, answer = call(app, environ(body, **change))
    assert said.startswith(status)
    assert change.get("REQUEST_METHOD") == "HEAD" or headers["Content-Length"] == str(len(answer))
    counted = {} if "PATH_INFO" in change else {status: 1}
    assert app.service.stats.as_json()["by_status"] == counted


def test_a_mistake_of_ours_is_a_500(app: RetrievalApp, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(app.service, "search", broken)
    status, _, body = call(app, environ(json.dumps(GOOD).encode()))
    assert (status[:3], json.loads(body)) == ("500", {"error": "internal error: ZeroDivisionError"})
    assert app.service.stats.as_json()["by_status"] == {}, "only answers are counted"
