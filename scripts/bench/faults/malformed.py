"""Malformed HTTP requests of every kind, drawn from a seed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

import numpy as np

KINDS = (
    *("bad UTF-8", "lone surrogate", "NaN", "deep nesting", "huge number", "wrong type", "wrong content type"),
    *("cut body", "chunked nonsense", "foreign Host", "foreign Origin", "huge header", "noise", "wrong route"),
)
SILENT = ("cut body", "noise", "chunked nonsense")
"""Kinds that a server may answer by closing the connection, because no request is complete."""
ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    2**70,
    1e300,
    -0.0,
    "",
    "x" * 2000,
    "\x00\u202e",
    [],
    {},
    [[]],
    {"a": None},
    [1, "1"],
    "1",
)
_BAD = (b"\xff", b"\xc3(", b"\xed\xa0\x80", b"\xf5\x80\x80\x80", b"\xc0\x80")


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
    route = routes[int(rng.integers(len(routes)))]
    return _MAKE[kind](route, host, rng)


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
        name = str(rng.choice(sorted(fields)))
        if route.form:
            quoted = b"".join(b"%%%02X" % byte for byte in raw(rng)[:300])
            return written(route, host, name.encode() + b"=" + quoted)
        body = encoded(route, {**fields, name: "HERE"}).replace(b'"HERE"', raw(rng))
        return written(route, host, body)

    return make


def _deep(rng: np.random.Generator) -> bytes:
    depth = int(rng.choice([65, 200, 976, 5000, 50_000]))
    return b"[" * depth + b"]" * depth if rng.random() < 0.5 else b'{"a":' * depth + b"1" + b"}" * depth


def _huge(rng: np.random.Generator) -> bytes:
    return [b"9" * 5000, b"1e999", b"-1e400", b"1" * 401, b"9" * 30 + b".5"][int(rng.integers(5))]


def _wrong_type(route: Route, host: str, rng: np.random.Generator) -> bytes:
    fields = dict(route.body or {})
    for _ in range(int(rng.integers(1, 4))):
        name = str(rng.choice([*sorted(fields), "self", "nothing"]))
        fields[name] = ODD[int(rng.integers(len(ODD)))]
    return written(route, host, encoded(route, fields))


def _wrong_kind(route: Route, host: str, rng: np.random.Generator) -> bytes:
    kinds = ("text/plain", "multipart/form-data; boundary=x", "multipart/form-data", "a/xml", ";;;", "a" * 500)
    return written(route, host, encoded(route, route.body or {}), kind=str(rng.choice(kinds)))


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
    return head.encode() + rests[int(rng.integers(len(rests)))] + b"\r\n\r\n"


def _host(route: Route, host: str, rng: np.random.Generator) -> bytes:
    others = ("rebound.example", "127.0.0.1.example", "localhost@rebound.example", "10.0.0.1", "", "a, b", "x" * 300)
    return written(route, str(rng.choice(others)), encoded(route, route.body or {}))


def _origin(route: Route, host: str, rng: np.random.Generator) -> bytes:
    origin = str(rng.choice(["null", "https://elsewhere.example", "http://127.0.0.1:1", "file://", ""]))
    return written(route, host, encoded(route, route.body or {}), more=f"Origin: {origin}\r\n")


def _header(route: Route, host: str, rng: np.random.Generator) -> bytes:
    more = ["X: " + "x" * 70_000, "\r\n".join(f"X-{n}: {n}" for n in range(9000)), "Cookie: " + "a=b; " * 20_000]
    return written(route, host, b"", more=more[int(rng.integers(len(more)))] + "\r\n")


def _noise(route: Route, host: str, rng: np.random.Generator) -> bytes:
    found = bytearray(written(route, host, encoded(route, route.body or {})))
    for place in rng.integers(len(found), size=int(rng.integers(1, 8))):
        found[place] = int(rng.integers(256))
    return bytes(found) if rng.random() < 0.5 else rng.bytes(200) + b"\r\n\r\n"


def _route(route: Route, host: str, rng: np.random.Generator) -> bytes:
    method = str(rng.choice(["PUT", "DELETE", "PATCH", "TRACE", "POST"]))
    path = str(rng.choice([route.path, "/nothing", "/%ff%00", "/../../etc/passwd", "//x", "/" + "a" * 5000]))
    return written(Route(method=method, path=path), host, b"{}")


_MAKE: dict[str, Callable[[Route, str, np.random.Generator], bytes]] = {
    "bad UTF-8": _with_value(lambda rng: b'"' + _BAD[int(rng.integers(len(_BAD)))] + b'"'),
    "lone surrogate": _with_value(lambda rng: b'"\\ud%x%02x"' % (int(rng.integers(8, 16)), int(rng.integers(256)))),
    "NaN": _with_value(lambda rng: [b"NaN", b"Infinity", b"-Infinity"][int(rng.integers(3))]),
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
}
