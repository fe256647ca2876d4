"""A server that answers every request in the way that a test asks for, none of them good."""

from __future__ import annotations

import contextlib
import functools
import gzip
import socket
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from judged import judge_of

from turngym.agents.endpoint.client import Address, EndpointClient, EndpointError
from turngym.agents.judges.model_judges import HttpJudge
from turngym.agents.servers.server_connection import ClientLimits, Connection, ServerError
from turngym.core.http_client import LoopThread
from turngym.core.protocols import JudgeRequest
from turngym.retrieval.core import RetrieverUnavailable
from turngym.retrieval.http_retriever import HttpRetriever

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


@dataclass
class Hostile:
    """The server. `asked` counts requests; `elsewhere` those that arrived where a redirect pointed."""

    url: str = ""
    other: str = ""
    asked: int = 0
    elsewhere: int = 0
    stop: threading.Event = field(default_factory=threading.Event)


Send = Callable[[bytes], None]
Mischief = Callable[[Hostile, Send], None]


def _sized(body: bytes, more: bytes = b"") -> bytes:
    return HEAD + more + b"Content-Length: %d\r\n\r\n" % len(body) + body


def _drip(hostile: Hostile, send: Send) -> None:
    while not hostile.stop.wait(0.02):
        send(b" ")


def _silent(hostile: Hostile, send: Send) -> None:
    hostile.stop.wait(60.0)


def _drips_its_head(hostile: Hostile, send: Send) -> None:
    send(b"HTTP/1.1 200 OK\r\nX-Wait:")
    _drip(hostile, send)


def _drips_its_body(hostile: Hostile, send: Send) -> None:
    send(HEAD + b"Content-Length: 1000000\r\n\r\n")
    _drip(hostile, send)


def _endless(hostile: Hostile, send: Send) -> None:
    send(HEAD + b"\r\n")
    while not hostile.stop.is_set():
        send(b" " * 65536)


@functools.cache
def bomb() -> bytes:
    """256 MiB of spaces, compressed to a thousandth."""
    squeeze = zlib.compressobj(wbits=16 + zlib.MAX_WBITS)
    return b"".join(squeeze.compress(b" " * (1 << 20)) for _ in range(256)) + squeeze.flush()


def _redirect(hostile: Hostile, send: Send) -> None:
    send(b"HTTP/1.1 307 Temporary Redirect\r\nLocation: %s/\r\nContent-Length: 0\r\n\r\n" % hostile.other.encode())


MISCHIEF: dict[str, Mischief] = {
    "is silent": _silent,
    "drips its head": _drips_its_head,
    "drips its body": _drips_its_body,
    "never ends": _endless,
    "never ends its head": lambda hostile, send: send(b"HTTP/1.1 200 OK\r\nX: " + b"x" * (1 << 20)),
    "sends a bomb": lambda hostile, send: send(_sized(bomb(), b"Content-Encoding: gzip\r\n")),
    "sends a bomb in a bomb": lambda hostile, send: send(
        _sized(gzip.compress(bomb()), b"Content-Encoding: gzip, gzip\r\n")
    ),
    "says gzip and sends none": lambda hostile, send: send(_sized(b"plain", b"Content-Encoding: gzip\r\n")),
    "nests its JSON": lambda hostile, send: send(_sized(b"[" * 200_000)),
    "sends a number of 9,000 digits": lambda hostile, send: send(_sized(b"9" * 9000)),
    "redirects to another host": _redirect,
    "speaks no HTTP": lambda hostile, send: send(b"\x00\xff\r\n\r\n"),
    "hangs up": lambda hostile, send: None,
    "breaks off": lambda hostile, send: send(HEAD + b'Content-Length: 999\r\n\r\n{"choices": ['),
    "sends bytes that are no text": lambda hostile, send: send(_sized(b"\xff\xfe\xfa")),
}
"""What a server does with a request, by name."""


@contextmanager
def hostile_server(name: str) -> Iterator[Hostile]:
    """A server on this machine that does `MISCHIEF[name]` to everybody."""
    hostile = Hostile()
    threads = []
    with socket.create_server(("127.0.0.1", 0)) as front, socket.create_server(("127.0.0.1", 0)) as other:
        hostile.url = f"http://127.0.0.1:{front.getsockname()[1]}"
        hostile.other = f"http://127.0.0.1:{other.getsockname()[1]}"
        for listener, answer in ((front, MISCHIEF[name]), (other, None)):
            listener.settimeout(0.05)
            threads.append(threading.Thread(target=_accept, args=(hostile, listener, answer), daemon=True))
            threads[-1].start()
        try:
            yield hostile
        finally:
            hostile.stop.set()
            for thread in threads:
                thread.join(5.0)


def _accept(hostile: Hostile, listener: socket.socket, answer: Mischief | None) -> None:
    while not hostile.stop.is_set():
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        threading.Thread(target=_serve, args=(hostile, connection, answer), daemon=True).start()


def _serve(hostile: Hostile, connection: socket.socket, answer: Mischief | None) -> None:
    # the client hangs up on purpose
    with connection, contextlib.suppress(OSError):
        connection.settimeout(10.0)
        if not connection.recv(1 << 20):
            return
        if answer is None:
            hostile.elsewhere += 1
            return
        hostile.asked += 1
        answer(hostile, connection.sendall)


# Those who ask: each returns the error that came of one request with a limit of `seconds`, or "" if an answer did.


def ask_endpoint(url: str, loop: LoopThread, seconds: float) -> str:
    client = EndpointClient(address=Address(base_url=url), model="m", deadline=seconds, retries=0)
    try:
        loop.run(client.ask({"model": "m", "messages": [], "max_tokens": 9}, np.random.default_rng(0), "task 1"))
    except EndpointError as error:
        return str(error)
    finally:
        loop.run(client.close())
    return ""


def ask_judge(url: str, loop: LoopThread, seconds: float) -> str:
    judge = HttpJudge(options=judge_of(url, judge_votes=2, judge_timeout=seconds, judge_tries=1))
    [judgment] = judge.judge([JudgeRequest(name="task 1", kind="score", response="r", next_state="s")])
    judge.close()
    return judgment.error if judgment.votes == (None, None) else ""


def ask_server(url: str, loop: LoopThread, seconds: float) -> str:
    """A teacher that scores or a server that plays: both are asked through one `Connection`."""
    connection = Connection(url=url, settings=ClientLimits(deadline=seconds))
    try:
        loop.run(connection.request("POST", "/generate", {"task 1": 1}, timeout=seconds))
    except ServerError as error:
        return str(error)
    finally:
        loop.run(connection.close())
    return ""


def ask_retriever(url: str, loop: LoopThread, seconds: float) -> str:
    retriever = HttpRetriever(url, deadline=seconds, retries=0)
    try:
        retriever.search(["q"], 1)
    except RetrieverUnavailable as error:
        return str(error)
    finally:
        retriever.close()
    return ""


CALLS: dict[str, Callable[[str, LoopThread, float], str]] = {
    "endpoint": ask_endpoint,
    "judge": ask_judge,
    "SGLang server": ask_server,
    "retriever": ask_retriever,
}
