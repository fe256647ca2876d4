"""Bodies of an ASGI application, read before it: whole, in time, of a bounded size, and strict JSON.

Frameworks read JSON as Python does, NaN and half surrogate pairs included, and fail to write their answer about it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from turngym.envs.common.strict_json import JsonError, strict_json

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

MAX_BODY = 8 << 20
SECONDS = 60.0


class _Refused(Exception):
    """A body that the application does not see: status and one line."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class JsonBodies:
    """ASGI middleware: a body that is no JSON gets 400, of another content type 415, too large 413, too slow 408.

    Messages of a WebSocket that are no JSON are answered with `complaint(text)` and never reach the application.
    """

    def __init__(
        self,
        app: AsgiApp,
        *,
        max_body: int = MAX_BODY,
        seconds: float = SECONDS,
        complaint: Callable[[str], str] = lambda text: json.dumps({"error": text}),
    ) -> None:
        self.app, self.max_body, self.seconds, self.complaint = app, max_body, seconds, complaint

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self.app(scope, self._messages(receive, send), send)
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self.seconds):
                body = await self._read(receive)
            self._check(scope, body)
        except TimeoutError:
            await refuse(send, 408, f"the body did not arrive in {self.seconds:g} s")
        except _Refused as error:
            await refuse(send, error.status, str(error))
        except ConnectionError:
            return
        else:
            await self.app(scope, _again(body, receive), send)

    async def _read(self, receive: Receive) -> bytes:
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ConnectionError("the client went away")
            body += message.get("body", b"")
            if len(body) > self.max_body:
                raise _Refused(413, f"the body is larger than {self.max_body} bytes")
            if not message.get("more_body", False):
                return bytes(body)

    def _check(self, scope: MutableMapping[str, Any], body: bytes) -> None:
        if not body:
            return
        kind = dict(scope["headers"]).get(b"content-type", b"")
        # any page may send text/plain or a form to any address, but JSON only to who allows it (CORS)
        if kind.partition(b";")[0].strip().lower() != b"application/json":
            raise _Refused(415, "send Content-Type: application/json")
        try:
            strict_json(body)
        except JsonError as error:
            raise _Refused(400, str(error)) from None

    def _messages(self, receive: Receive, send: Send) -> Receive:
        async def read() -> Message:
            while True:
                message = await receive()
                if message["type"] != "websocket.receive":
                    return message
                text = message.get("text")
                try:
                    found = strict_json(message.get("bytes") or b"" if text is None else _encoded(text))
                    if isinstance(found, dict):
                        return message
                    said = "a message must be a JSON object"
                except JsonError as error:
                    said = str(error).replace("the body", "the message", 1)
                await send({"type": "websocket.send", "text": self.complaint(said)})

        return read


async def refuse(send: Send, status: int, text: str) -> None:
    """Answer with one line of JSON; the connection ends, because not all of the body may have been read."""
    body = json.dumps({"error": text}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*headers, (b"connection", b"close")]})
    await send({"type": "http.response.body", "body": body})


def _again(body: bytes, receive: Receive) -> Receive:
    """`receive` that gives the body once more, and then waits for the client to go away."""
    left = [body]

    async def read() -> Message:
        if left:
            return {"type": "http.request", "body": left.pop(), "more_body": False}
        return await receive()

    return read


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
