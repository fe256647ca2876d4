"""Draws malformed HTTP requests of every kind from a seeded random generator, as bytes on the wire."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from urllib.parse import quote_from_bytes, urlencode

import numpy as np

KINDS = (
    *("bad UTF-8", "lone surrogate", "NaN", "deep nesting", "huge number", "wrong type", "wrong content type"),
    *("cut body", "chunked nonsense", "foreign Host", "foreign Origin", "huge header", "noise", "wrong route"),
    *("damaged JSON", "wrong encoding", "wrong query", "wrong framing", "wrong version"),
)
SILENT = ("cut body", "noise", "chunked nonsense", "wrong framing", "wrong version")
"""Kinds that a server may answer by closing the connection, because no request is complete."""
ODD: tuple[Any, ...] = (
    *(None, True, -1, 2**70, 1e300, -0.0, "", "x" * 2000, "\x00\u202e"),
    *([], {}, [[]], {"a": None}, [1, "1"], "1"),
)
_HEADERS = (*("X: " + "x" * 70_000, "\r\n".join(f"X-{n}: {n}" for n in range(9000)), "Cookie: " + "a=b; " * 20_000),)
_BAD = (b"\xff", b"\xc3(", b"\xed\xa0\x80", b"\xf5\x80\x80\x80", b"\xc0\x80")

Option = TypeVar("Option")


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Where a server takes requests, and a request that it understands."""

    method: str
    path: str
    body: dict[str, Any] | None = None
    form: bool = False
    """Whether the body is a form instead of JSON, or the query of a GET."""


def malformed(kind: str, routes: Sequence[Route], host: str, rng: np.random.Generator) -> bytes:
    """One request of that kind, as bytes on the wire."""
    return _MAKE[kind](_one(rng, routes), host, rng)


def _one(rng: np.random.Generator, options: Sequence[Option]) -> Option:
    """Much quicker than `Generator.choice`, which makes an array of its options."""
    return options[int(rng.integers(len(options)))]


def written(
    route: Route, host: str, body: bytes, *, kind: str = "", more: str = "", length: int | None = None
) -> bytes:
    """A request as bytes; a route of a form without a body carries it in its path."""
    path = route.path
    if route.method == "GET":
        path, body = path + (f"?{body.decode('latin-1')}" if body else ""), b""
    kind = kind or ("application/x-www-form-urlencoded" if route.form else "application/json")
    head = f"{route.method} {path} HTTP/1.1\r\nHost: {host}\r\n{more}"
    if route.method != "GET":
        head += f"Content-Type: {kind}\r\nContent-Length: {len(body) if length is None else length}\r\n"
    return head.encode("latin-1") + b"\r\n" + body


def encoded(route: Route, fields: Any) -> bytes:
    """The body of `fields`, or the query of a form."""
    if not route.form:
        return json.dumps(fields).encode()
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in fields.items()}
    return urlencode(texts).encode()


def _with_value(raw: Callable[[np.random.Generator], bytes]) -> Callable[[Route, str, np.random.Generator], bytes]:
    """A body in which one value is what `raw` says."""

    def make(route: Route, host: str, rng: np.random.Generator) -> bytes:
        fields = route.body or {"a": 1}
        name = _one(rng, sorted(fields))
        if route.form:
            quoted = b"".join(b"%%%02X" % byte for byte in raw(rng)[:300])
            return written(route, host, name.encode() + b"=" + quoted)
        body = encoded(route, {**fields, name: "HERE"}).replace(b'"HERE"', raw(rng))
        return written(route, host, body)

    return make


def _deep(rng: np.random.Generator) -> bytes:
    depth = _one(rng, (65, 200, 976, 5000, 50_000))
    return b"[" * depth + b"]" * depth if rng.random() < 0.5 else b'{"a":' * depth + b"1" + b"}" * depth


def _huge(rng: np.random.Generator) -> bytes:
    return _one(rng, (b"9" * 5000, b"1e999", b"-1e400", b"1" * 401, b"9" * 30 + b".5"))


def _wrong_type(route: Route, host: str, rng: np.random.Generator) -> bytes:
    fields = dict(route.body or {})
    for _ in range(int(rng.integers(1, 4))):
        name = _one(rng, [*sorted(fields), "self", "nothing"])
        fields[name] = _one(rng, ODD)
    return written(route, host, encoded(route, fields))


def _wrong_kind(route: Route, host: str, rng: np.random.Generator) -> bytes:
    kinds = ("text/plain", "multipart/form-data; boundary=x", "multipart/form-data", "a/xml", ";;;", "a" * 500)
    return written(route, host, encoded(route, route.body or {}), kind=_one(rng, kinds))


def _cut(route: Route, host: str, rng: np.random.Generator) -> bytes:
    body = encoded(route, route.body or {"a": 1})
    return written(route, host, body[: int(rng.integers(len(body)))], length=len(body) + int(rng.integers(1, 9999)))


def _chunked(route: Route, host: str, rng: np.random.Generator) -> bytes:
    more = "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n"
    head = f"POST {route.path} HTTP/1.1\r\nHost: {host}\r\n{more}\r\n"
    rests = (
        b"zz\r\nx\r\n0\r\n\r\n",
        b"-1\r\n\r\n0\r\n\r\n",
        b"5\r\n{}\r\n0\r\n\r\n\r\n",
        b"1;\x00\r\n{\r\n0\r\n\r\n",
        b"\r\n\r\n",
    )
    return head.encode() + _one(rng, rests) + b"\r\n\r\n"


def _host(route: Route, host: str, rng: np.random.Generator) -> bytes:
    others = ("rebound.example", "127.0.0.1.example", "localhost@rebound.example", "10.0.0.1", "", "a, b", "x" * 300)
    return written(route, _one(rng, others), encoded(route, route.body or {}))


def _origin(route: Route, host: str, rng: np.random.Generator) -> bytes:
    origin = _one(rng, ("null", "https://elsewhere.example", "http://127.0.0.1:1", "file://", ""))
    return written(route, host, encoded(route, route.body or {}), more=f"Origin: {origin}\r\n")


def _header(route: Route, host: str, rng: np.random.Generator) -> bytes:
    return written(route, host, b"", more=f"{_one(rng, _HEADERS)}\r\n")


def _noise(route: Route, host: str, rng: np.random.Generator) -> bytes:
    found = bytearray(written(route, host, encoded(route, route.body or {})))
    for place in rng.integers(len(found), size=int(rng.integers(1, 8))):
        found[place] = int(rng.integers(256))
    return bytes(found) if rng.random() < 0.5 else rng.bytes(200) + b"\r\n\r\n"


def _route(route: Route, host: str, rng: np.random.Generator) -> bytes:
    method = _one(rng, ("PUT", "DELETE", "PATCH", "TRACE", "OPTIONS", "POST"))
    path = _one(rng, (route.path, "/nothing", "/%ff%00", "/../../etc/passwd", "//x", "/" + "a" * 5000))
    return written(Route(method=method, path=path), host, b"{}")


def _damaged(route: Route, host: str, rng: np.random.Generator) -> bytes:
    """One to eight bytes of a good body changed, left out or doubled."""
    body = encoded(route, route.body or {"a": 1})
    for _ in range(int(rng.integers(1, 9))):
        place = int(rng.integers(len(body) + 1))
        body = body[:place] + _one(rng, (b"", rng.bytes(1), body[place : place + 2])) + body[place + 1 :]
    # a query goes into the request line, where most bytes would be noise
    return written(route, host, quote_from_bytes(body, safe="=&%+").encode() if route.form else body)


def _encoding(route: Route, host: str, rng: np.random.Generator) -> bytes:
    body = encoded(route, route.body or {"a": 1})
    more: tuple[str, ...] = (
        "Content-Encoding: gzip\r\n",
        "Content-Encoding: x\r\n",
        "Accept: \x00\r\n",
        "Accept-Encoding: ;q=x\r\n",
    )
    more += ("Range: bytes=9-1\r\n", "If-Modified-Since: x\r\n", "Cookie: =;;a\r\n", "Authorization: Basic \xff\r\n")
    kind = _one(
        rng, ("", "application/json; charset=utf-16", "application/json; charset=nothing", "Application/JSON;;")
    )
    return written(route, host, body, kind=kind, more=_one(rng, more))


def _query(route: Route, host: str, rng: np.random.Generator) -> bytes:
    odd = ("%", "%zz", "%ff=%00", "=&=&", "a" * 5000, "x=1&" * 2000, "x[]=1", "#", "%ed%a0%80=1")
    query = "&".join(_one(rng, odd) for _ in range(int(rng.integers(1, 4))))
    if route.method == "GET":
        return written(route, host, f"{query}&{_one(rng, sorted(route.body or {'a': 1}))}={query}".encode())
    return written(replace(route, path=f"{route.path}?{query}"), host, encoded(route, route.body or {"a": 1}))


def _framing(route: Route, host: str, rng: np.random.Generator) -> bytes:
    """Lengths that contradict each other, and headers that some servers read and others do not."""
    more = (
        *("Content-Length: 3\r\n", "Content-Length: -1\r\n", "Content-Length: 9e9\r\n", "Content-Length: 1, 2\r\n"),
        *("Content-Length: 99999999999999999999\r\n", "Transfer-Encoding: chunked\r\n", "Transfer-Encoding: x\r\n"),
        *(
            *("Transfer-Encoding : chunked\r\n", " folded: 1\r\n", "no colon\r\n", ": no name\r\n", "X: a\x00b\r\n"),
            "X: a\n\r\n",
        ),
        *(f"Host: {host}\r\n", "Host: a\r\n", "Expect: 100-continue\r\n", "Expect: more\r\n", "Upgrade: h2c\r\n"),
        "Connection: Upgrade\r\nUpgrade: websocket\r\n",
    )
    return written(route, host, encoded(route, route.body or {"a": 1}), more=_one(rng, more) + _one(rng, ("", *more)))


def _version(route: Route, host: str, rng: np.random.Generator) -> bytes:
    whole = written(route, host, encoded(route, route.body or {"a": 1}))
    versions = (
        *(b"HTTP/1.0", b"HTTP/0.9", b"HTTP/2.0", b"HTTP/9.9", b"HTTP/1.", b"http/1.1", b"FTP/1.1", b""),
        b"HTTP/1.1 x",
    )
    preface, hello = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\x02\x00" + rng.bytes(60)
    return _one(rng, (preface, hello, *(whole.replace(b"HTTP/1.1", version, 1) for version in versions)))


_MAKE: dict[str, Callable[[Route, str, np.random.Generator], bytes]] = {
    "bad UTF-8": _with_value(lambda rng: b'"' + _one(rng, _BAD) + b'"'),
    "lone surrogate": _with_value(lambda rng: b'"\\ud%x%02x"' % (int(rng.integers(8, 16)), int(rng.integers(256)))),
    "NaN": _with_value(lambda rng: _one(rng, (b"NaN", b"Infinity", b"-Infinity"))),
    "deep nesting": _with_value(_deep),
    "huge number": _with_value(_huge),
    "wrong type": _wrong_type,
    "wrong content type": _wrong_kind,
    "cut body": _cut,
    "chunked nonsense": _chunked,
    "foreign Host": _host,
    "foreign Origin": _origin,
    "huge header": _header,
    "noise": _noise,
    "wrong route": _route,
    "damaged JSON": _damaged,
    "wrong encoding": _encoding,
    "wrong query": _query,
    "wrong framing": _framing,
    "wrong version": _version,
}
