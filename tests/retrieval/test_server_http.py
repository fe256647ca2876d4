"""The server over HTTP: the exact JSON, an original Search-R1 client, bad input, and an end that loses nothing."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from turngym.retrieval.core import Hit, Passage, RetrieverUnavailable
from turngym.retrieval.http_format import FINGERPRINT_HEADER, read_reply, reply_body

Serve = Callable[..., Any]


def ask(url: str, body: bytes | None = None, kind: str = "application/json") -> tuple[int, Any, dict[str, str]]:
    """(status, JSON, headers); POST if there is a body."""
    request = urllib.request.Request(url, data=body, headers={"Content-Type": kind})
    try:
        with urllib.request.urlopen(request, timeout=20) as reply:
            return reply.status, json.load(reply), dict(reply.headers)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error), dict(error.headers)


def raw(url: str, fields: Any) -> bytes:
    request = urllib.request.Request(url, json.dumps(fields).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=20) as reply:
        return bytes(reply.read())


def test_the_exact_bytes_of_both_forms(echo: Any, serve: Serve) -> None:
    url = serve(echo).url
    assert raw(url, {"queries": ["a"], "topk": 2, "return_scores": True}) == (
        rb'{"result":[[{"document":{"id":"a#0","contents":"\"About a\"\nLine 0.\nMore."},"score":1.0},'
        rb'{"document":{"id":"a#1","contents":"\"About a\"\nLine 1.\nMore."},"score":0.875}]]}'
    )
    # without scores for one, two and three queries: the original answers 500, wrongly, 500
    for queries in (["a"], ["a", "b"], ["a", "b", "c"]):
        expected = [[{"id": f"{q}#0", "contents": f'"About {q}"\nLine 0.\nMore.'}] for q in queries]
        assert json.loads(raw(url, {"queries": queries, "topk": 1})) == {"result": expected}
    assert raw(url, {"queries": [], "topk": 3, "return_scores": True}) == b'{"result":[]}'
    assert raw(url, {"query": "a", "topk": 1}) == raw(url, {"queries": ["a"], "topk": 1})
    assert len(json.loads(raw(url, {"query": "a"}))["result"][0]) == 3


def test_an_original_search_r1_client_works(echo: Any, serve: Serve) -> None:
    """What the trainer of Search-R1 does with a reply: post, take result, cut contents at the first line end."""
    url = serve(echo).url
    payload = {"queries": ["first", "zweite Frage ü"], "topk": 3, "return_scores": True}
    found = ask(url, json.dumps(payload).encode())[1]["result"]
    texts = []
    for result in found:
        text = ""
        for place, item in enumerate(result):
            content = item["document"]["contents"]
            title, rest = content.split("\n")[0], "\n".join(content.split("\n")[1:])
            text += f"Doc {place + 1}(Title: {title}) {rest}\n"
        texts.append(text)
    assert texts[1] == (
        'Doc 1(Title: "About zweite Frage ü") Line 0.\nMore.\n'
        'Doc 2(Title: "About zweite Frage ü") Line 1.\nMore.\n'
        'Doc 3(Title: "About zweite Frage ü") Line 2.\nMore.\n'
    )
    assert len(texts) == 2


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain", "multipart/form-data", ""])
def test_what_any_page_may_send_is_no_request(echo: Any, serve: Serve, kind: str) -> None:
    server = serve(echo)
    assert ask(server.url, b'{"query": "a"}', kind)[:2] == (
        415,
        {"error": "send Content-Type: application/json", "valid": "POST /retrieve, GET /health, GET /stats"},
    )
    status, _, headers = ask(server.url, b'{"query": "a"}', "application/json; charset=utf-8")
    assert (status, headers[FINGERPRINT_HEADER], headers["Content-Type"]) == (200, "echo:1", "application/json")


def test_bad_requests_are_json_too(echo: Any, serve: Serve) -> None:
    server = serve(echo, max_body=1000)
    status, found, _ = ask(server.url, b'{"queries": 3}')
    assert (status, found["field"]) == (422, "queries")
    assert ask(server.url, b"\xff")[0] == 400
    assert ask(server.url, b"x" * 1000)[0] == 400
    assert ask(server.url, b"x" * 1001)[:2] == (413, {"error": "the body is larger than 1000 bytes"})
    base = server.url.removesuffix("/retrieve")
    status, found, _ = ask(f"{base}/search", b"{}")
    assert (status, found) == (
        404,
        {"error": "there is no POST /search", "valid": "POST /retrieve, GET /health, GET /stats"},
    )
    status, found, headers = ask(server.url)
    assert (status, found["error"]) == (405, "/retrieve does not take GET")
    assert "POST" in headers["Allow"]
    assert echo.calls == []
    assert ask(f"{base}/stats")[1]["by_status"] == {"400": 2, "405": 1, "413": 1, "422": 1}


def test_bytes_that_are_no_http_get_a_json_error(echo: Any, serve: Serve) -> None:
    server = serve(echo)
    with socket.create_connection((server.host, server.port), timeout=10) as connection:
        connection.sendall(b"POST /retrieve HTTP/1.1\r\nContent-Length: many\r\n\r\n{}")
        reply = http.client.HTTPResponse(connection)
        reply.begin()
        assert reply.status == 400
        assert "error" in json.load(reply)
    assert ask(server.url, b'{"query": "a"}')[0] == 200


def test_a_failing_retriever_is_503_with_the_reason(echo: Any, serve: Serve) -> None:
    server = serve(echo)
    echo.failures = [RuntimeError("disk on fire"), RetrieverUnavailable("no such shard")]
    status, found, _ = ask(server.url, b'{"query": "a"}')
    assert (status, found) == (503, {"error": "the retriever failed: RuntimeError: disk on fire"})
    assert ask(server.url, b'{"query": "a"}')[:2] == (503, {"error": "no such shard"})


def test_a_stuck_retriever_is_503_after_the_deadline(echo: Any, serve: Serve) -> None:
    server = serve(echo, deadline=1.5)
    echo.gate.clear()
    assert ask(server.url, b'{"query": "a"}')[:2] == (503, {"error": "the retriever did not answer within 1.5 s"})
    # the retriever was called a moment after the request came, so the server may call it stuck a moment later too
    health = server.url.replace("/retrieve", "/health")
    patience = time.monotonic() + 10
    while (answer := ask(health))[0] == 200 and time.monotonic() < patience:
        time.sleep(0.02)
    assert (answer[0], answer[1]["status"]) == (503, "stuck")
    echo.gate.set()


def test_concurrent_clients_share_batches_and_get_their_own_answers(echo: Any, serve: Serve) -> None:
    server = serve(echo, window_ms=20.0)
    echo.gate.clear()
    with ThreadPoolExecutor(12) as pool:
        asked = [pool.submit(ask, server.url, json.dumps({"query": f"q{n}"}).encode()) for n in range(12)]
        while ask(server.url.replace("/retrieve", "/stats"))[1]["queries"] < 12:
            threading.Event().wait(0.001)
        echo.gate.set()
        found = [reply.result(20)[1]["result"][0][0]["id"] for reply in asked]
    assert found == [f"q{n}#0" for n in range(12)]
    assert len(echo.calls) <= 3
    assert sum(len(queries) for queries, _ in echo.calls) == 12


def test_a_second_stop_does_not_wait(echo: Any, serve: Serve) -> None:
    server = serve(echo, drain=600.0)
    echo.gate.clear()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, server.url, b'{"query": "a"}')
        assert echo.entered.acquire(timeout=10)
        server.stop()
        server.stop()
        with pytest.raises((http.client.RemoteDisconnected, ConnectionError, urllib.error.URLError)):
            asked.result(20)
    assert not server.drained
    echo.gate.set()


def test_an_idle_connection_does_not_hold_up_the_end(echo: Any, serve: Serve) -> None:
    server = serve(echo, drain=600.0)
    connection = http.client.HTTPConnection(server.host, server.port, timeout=10)
    connection.request("GET", "/health")
    assert json.load(connection.getresponse())["status"] == "ok"
    server.stop()
    while not echo.closed:
        threading.Event().wait(0.001)
    assert server.drained
    connection.close()


def test_a_reply_reads_back_as_it_was_written() -> None:
    hits = [
        Hit(passage=Passage(id="7", title='The "Big" One', text='"quoted"\n\nline \u2028 ü'), score=0.1),
        Hit(passage=Passage(id="x y", title="", text="no title"), score=-3.5),
    ]
    assert read_reply(reply_body([hits, []], True), 2, 5) == [hits, []]
    assert read_reply(reply_body([hits], True), 1, 1) == [hits[:1]]
