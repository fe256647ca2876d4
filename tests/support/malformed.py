"""Bodies that are no JSON, or JSON that nobody could answer: every server says so with a 4xx."""

from __future__ import annotations

MALFORMED = {
    "empty": b"",
    "cut off": b'{"messages": [{"role": "us',
    "not UTF-8": b'{"messages": "\xff\xfe"}',
    "surrogates in UTF-8": b'{"messages": "\xed\xa0\x80"}',
    "half a pair": b'{"messages": "\\ud800"}',
    "half a pair in a name": b'{"\\udc00": 1}',
    "NaN": b'{"temperature": NaN}',
    "Infinity": b'{"max_tokens": -Infinity}',
    "beyond floats": b'{"temperature": 1e999}',
    "many digits": b'{"seed": ' + b"9" * 5000 + b"}",
    "deep": b'{"metadata": ' + b"[" * 976 + b"]" * 976 + b"}",
    "deeper than Python goes": b"[" * 100_000,
    "deep objects": b'{"a": ' * 500 + b"1" + b"}" * 500,
    "no object": b"[1, 2]",
    "two values": b"{} {}",
}
"""By name. `no object` is JSON, but no request."""
