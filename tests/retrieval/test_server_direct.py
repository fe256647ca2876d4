"""Search requests past Flask: the same answers to the byte, and Flask for everything else."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import flask
import pytest

from turngym.retrieval.core import Hit, Passage, RetrieverUnavailable
from turngym.retrieval.server import fast_retrieve, search_length

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
def app() -> Any:
    from turngym.retrieval.http_format import RetrievalServerSettings
    from turngym.retrieval.server import create_app

    return create_app(Toy(), RetrievalServerSettings(max_body=4096, max_waiting=8192))


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


def call(app: Callable[..., Any], asked: dict[str, Any]) -> tuple[str, list[tuple[str, str]], bytes]:
    said: list[Any] = []
    body = b"".join(app(asked, lambda status, headers, *_: said.extend((status, headers))))
    return said[0].upper(), sorted(said[1]), body


@pytest.mark.parametrize(
    "body",
    [json.dumps(GOOD).encode(), b'{"query": "a"}', b"", b"{", b'{"queries": 3}', b'{"query": "gone"}', b"\xff", b"[]"],
)
def test_answers_are_flasks(app: Any, body: bytes) -> None:
    whole = flask.Flask.wsgi_app.__get__(app)
    assert call(app.wsgi_app, environ(body)) == call(whole, environ(body))


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"CONTENT_TYPE": "text/plain"}, "415"),
        ({"REQUEST_METHOD": "GET"}, "405"),
        ({"PATH_INFO": "/retrieves"}, "404"),
        ({"CONTENT_LENGTH": "4097"}, "413"),
        ({"CONTENT_LENGTH": "-1"}, "400"),
        ({"HTTP_TRANSFER_ENCODING": "chunked", "CONTENT_LENGTH": "absent"}, "400"),
    ],
)
def test_other_requests_are_flasks(app: Any, change: dict[str, str], status: str) -> None:
    body = json.dumps(GOOD).encode()
    length = search_length(environ(body, **change))
    assert length == -1 or length > 4096
    assert call(app.wsgi_app, environ(body, **change))[0].startswith(status)


def test_flask_is_not_asked_and_requests_are_counted(app: Any) -> None:
    service = app.extensions["retrieval"]

    def never(*_: Any) -> Any:
        raise AssertionError("Flask was asked")

    direct = fast_retrieve(never, service, lambda service, body: (b"{}", 200))
    before = service.stats.as_json()["requests"]
    assert call(direct, environ(b"{}"))[0] == "200 OK"
    assert service.stats.as_json()["requests"] == before + 1
    call(app.wsgi_app, environ(json.dumps(GOOD).encode()))
    assert service.stats.as_json()["by_status"]["200"] == before + 2


def test_a_mistake_of_ours_is_a_500(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError

    service = app.extensions["retrieval"]
    monkeypatch.setattr(service, "search", broken)
    status, _, body = call(app.wsgi_app, environ(json.dumps(GOOD).encode()))
    assert (status[:3], json.loads(body)) == ("500", {"error": "internal error: ZeroDivisionError"})
    assert service.stats.as_json()["by_status"] == {}, "only answers are counted"
