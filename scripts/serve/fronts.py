"""What the draining server must know of each application that it runs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from turngym.scripts.serve.web.front import Front

if TYPE_CHECKING:
    from flask import Flask

    from turngym.agents.proxy.service import ProxyService
    from turngym.retrieval.server.service import RetrievalService

RETRIEVAL_THREADS = 96
"""Each waiting request holds a thread, so this bounds how many queries of single-query clients can share a batch.
Threads that wait cost little; the retriever itself runs in the service's own few."""
SPARE = 8
"""The proxy's threads beyond the requests that may be under way: refusals and /healthz never wait for completions."""


def retrieval_front(app: Flask, *, threads: int = RETRIEVAL_THREADS) -> Front:
    """Of `retrieval.server.app.create_app`; its refusals count among the answers of /stats."""
    service: RetrievalService = app.extensions["retrieval"]

    def refuse(status: int, text: str) -> bytes:
        service.stats.answered(status)
        return json.dumps({"error": text}).encode()

    return Front(
        app=app,
        path="/retrieve",
        threads=threads,
        max_body=service.settings.max_body,
        refuse=refuse,
        leave=service.leave,
    )


def proxy_front(app: Flask) -> Front:
    """Of `agents.proxy.app.create_app`; ends idle sessions while it runs."""
    from turngym.agents.proxy.errors import ApiError

    service: ProxyService = app.extensions["proxy"]
    settings = service.settings
    return Front(
        app=app,
        path="/v1",
        threads=settings.max_waiting + SPARE,
        connections=4 * settings.max_waiting + 100,
        max_body=settings.max_body,
        refuse=lambda status, text: json.dumps(ApiError(status, text).as_json()).encode(),
        leave=service.drain,
        sweep=service.sweep,
        sweep_every=min(settings.idle / 4, 5.0),
    )


def webshop_front(app: Flask, *, threads: int) -> Front:
    """Of `envs.webshop.web.app.create_app`."""
    from turngym.envs.webshop.web.app import MAX_FORM

    # the application explains forms that are too large, up to a point
    return _pages(app, threads, max_body=4 * MAX_FORM)


def trace_front(app: Flask) -> Front:
    """Of `scripts.traces.app.create_app`, which takes no bodies."""
    return _pages(app, threads=4, max_body=0)


def _pages(app: Flask, threads: int, max_body: int) -> Front:
    return Front(
        app=app,
        path="/",
        threads=threads,
        max_body=max_body,
        refuse=lambda status, text: f"{status}: {text}\n".encode(),
        media="text/plain; charset=utf-8",
    )
