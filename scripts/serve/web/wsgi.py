"""The rule of `access` in front of a WSGI application."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from turngym.scripts.serve.web.access import Access
from turngym.scripts.serve.web.front import Front

WsgiApp = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


def guarded(front: Front, access: Access) -> WsgiApp:
    """The application of `front`; requests that `access` refuses get a 403 and never reach it."""

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        said = access.refusal(environ.get("HTTP_HOST"), environ.get("HTTP_ORIGIN"))
        if said is None:
            return front.app(environ, start_response)
        body = front.refuse(403, said)
        start_response("403 Forbidden", [("Content-Type", front.media), ("Content-Length", str(len(body)))])
        return [body]

    return application
