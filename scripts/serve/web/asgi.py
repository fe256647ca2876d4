"""The rule of `access` in front of an ASGI application, WebSockets included."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from turngym.scripts.serve.web.access import Access
from turngym.trainers.adapters.json_bodies import AsgiApp, Receive, Send, refuse


class Guarded:
    """`app`; requests that `access` refuses get a 403 and never reach it."""

    def __init__(self, app: AsgiApp, access: Access) -> None:
        self.app, self.access = app, access

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        said = None if scope["type"] == "lifespan" else self._refusal(scope["headers"])
        if said is None:
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await refuse(send, 403, said)
        else:
            # before it is accepted, a WebSocket is an HTTP request: closing it answers 403
            await receive()
            await send({"type": "websocket.close", "code": 1008, "reason": said[:100]})

    def _refusal(self, headers: list[tuple[bytes, bytes]]) -> str | None:
        found: dict[bytes, list[str]] = {b"host": [], b"origin": []}
        for name, value in headers:
            if name in found:
                found[name].append(value.decode("latin-1"))
        host, origin = (", ".join(values) if values else None for values in found.values())
        return self.access.refusal(host, origin)
