"""Whatever a server does, a request to it ends in time, in little memory, and in an error of ours."""

from __future__ import annotations

import gzip
import time
import traceback
import tracemalloc
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hostile_server import CALLS, HEAD, MISCHIEF, bomb, hostile_server
from servers import Answer, JsonServer
from sglang_fake import VOCABULARY, draw_of, score_of

from turngym.agents.servers.sglang_dialect import SglangDialect
from turngym.agents.servers.vllm_dialect import VllmDialect
from turngym.core import user_files
from turngym.core.http_client import BadReply, HttpClient, LoopThread, NotReached, read_json

SECONDS = 0.4
"""For a request with all that belongs to it."""
MOST = 160
"""MiB of memory; the bomb holds 256, and a retriever's answer may have 64, which are copied once."""


def test_an_answer_has_a_bounded_number_of_values(monkeypatch: pytest.MonkeyPatch) -> None:
    body = b"[" + b"[]," * 30 + b"[]]"
    assert len(read_json(body)) == 31
    monkeypatch.setattr(user_files, "MOST_VALUES", 20)
    with pytest.raises(BadReply):
        read_json(body)


def each_mischief_with_one(calls: Sequence[str]) -> list[Any]:
    """Quick is every mischief with one call, by turns, so that every call meets several; the other pairs are long."""
    return [
        pytest.param(call, mischief, marks=() if number % len(calls) == place else pytest.mark.long)
        for number, mischief in enumerate(MISCHIEF)
        for place, call in enumerate(calls)
    ]


@pytest.mark.parametrize(("call", "mischief"), each_mischief_with_one(tuple(CALLS)))
def test_every_request_ends(call: str, mischief: str) -> None:
    bomb()
    loop = LoopThread("test")
    with hostile_server(mischief) as hostile:
        tracemalloc.start()
        began = time.monotonic()
        said = CALLS[call](hostile.url, loop, SECONDS)
        peak = tracemalloc.get_traced_memory()[1] >> 20
        tracemalloc.stop()
        # a loose bound: without the limits the slow ones take a minute, or for ever
        assert time.monotonic() - began < 30.0
        assert peak < MOST
        assert (hostile.asked > 0, hostile.elsewhere) == (True, 0)
    loop.close()
    assert hostile.url in said
    assert "\n" not in said


def reply(answer: bytes, *, limit: int = 1000) -> Any:
    """What a client makes of the bytes `answer`."""
    loop, http = LoopThread("test"), HttpClient()
    MISCHIEF["test"] = lambda hostile, send: send(answer)
    try:
        with hostile_server("test") as hostile:
            return loop.run(http.send("GET", hostile.url, seconds=5.0, limit=limit))
    finally:
        del MISCHIEF["test"]
        loop.run(http.close())
        loop.close()


def sized(body: bytes, more: bytes = b"") -> bytes:
    return HEAD + more + b"Content-Length: %d\r\n\r\n" % len(body) + body


@pytest.mark.parametrize("coding", [b"", b"Content-Encoding: gzip\r\n"])
def test_the_limit_is_of_the_uncompressed_answer(coding: bytes) -> None:
    wrap = gzip.compress if coding else bytes
    assert reply(sized(wrap(b"x" * 1000), coding)).body == b"x" * 1000
    with pytest.raises(BadReply, match="the answer is longer than 1000 bytes"):
        reply(sized(wrap(b"x" * 1001), coding))


def test_a_redirect_is_named_and_left_alone() -> None:
    with pytest.raises(BadReply, match="301: it redirects to 'http://elsewhere/v1'"):
        reply(b"HTTP/1.1 301 Moved\r\nLocation: http://elsewhere/v1\r\nContent-Length: 0\r\n\r\n")


def test_an_answer_of_scores_may_be_as_long_as_what_was_asked_for() -> None:
    dialect, ids, chosen = SglangDialect(), [1] * 10, np.array([[7, 8]])
    assert dialect.answer_limit(draw_of(ids, 3)) == (16 << 20) + 64 * 10 * 2 + 512 * 3
    assert dialect.answer_limit(score_of(ids, 0, [1], top=4)) == (16 << 20) + 64 * 10 * 6
    assert dialect.answer_limit(score_of(ids, 0, [1], chosen=chosen)) == (16 << 20) + 64 * 10 * 4
    assert VllmDialect().answer_limit(score_of(ids, 0, [1], top=4)) == (16 << 20) + 128 * 10 * 5
    whole = VllmDialect(full=True).answer_limit(score_of(ids, 0, [1], chosen=chosen))
    assert whole == (16 << 20) + 128 * 10 * VOCABULARY


def test_what_an_answer_sets_is_sent_with_no_other_request() -> None:
    asked: list[str | None] = []

    def bake(path: str, body: Any, headers: Any) -> Answer:
        asked.append(headers.get("Cookie"))
        return Answer(headers={"Set-Cookie": "id=1; Path=/; Max-Age=9999"})

    loop, http, server = LoopThread("test"), HttpClient(), JsonServer(bake)
    for _ in range(2):
        loop.run(http.send("GET", server.url, seconds=20.0, limit=100))
    server.stop()
    loop.run(http.close())
    loop.close()
    assert asked == [None, None]


@pytest.mark.parametrize(
    "address", ["socks4://me:hunter2hunter2@127.0.0.1:1", "http://me:hunter2hunter2@[::1", "http://me:hunter2 @h:1"]
)
def test_a_proxy_that_cannot_be_used_is_named_without_its_password(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", address)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    loop, http = LoopThread("test"), HttpClient(use_proxies=True)
    with pytest.raises(NotReached, match="http_proxy") as error:
        loop.run(http.send("GET", "http://example.test/", seconds=20.0, limit=100))
    loop.close()
    assert "hunter2" not in "".join(traceback.format_exception(error.value))
