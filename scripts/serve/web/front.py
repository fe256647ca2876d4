"""An application, and what a server in front of it must know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from turngym.envs.core import TurngymError
from turngym.scripts.serve.web.access import Access

if TYPE_CHECKING:
    from flask import Flask

FRESH = 0.2
"""Seconds in which a new connection may send its request although the server is leaving."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Seconds that a connection gets."""

    receive: float = 60.0
    """From the first byte of a request to its last: who sends a byte now and then holds nothing for longer."""
    idle: float = 75.0
    """Without a request."""
    send: float = 60.0
    """For which a client may take nothing of its answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """An application, and what a server in front of it must know."""

    app: Flask
    path: str
    """What clients put behind the address, such as /v1."""
    threads: int
    """Requests in work at the same time; each that waits holds one."""
    max_body: int
    """Largest body of a request, bytes."""
    refuse: Callable[[int, str], bytes]
    """Body of what is refused before the application sees it, by status and text: malformed HTTP, bodies that are too
    large, other sites."""
    media: str = "application/json"
    """Content type of what `refuse` gives."""
    leave: Callable[[], None] = lambda: None
    """Told when the end begins, so that the health check can say so."""
    sweep: Callable[[], object] | None = None
    """Called every `sweep_every` seconds while the server runs."""
    sweep_every: float = 5.0
    connections: int = 1000
    """Connections open at the same time; the one that is idle for longest makes room."""
    max_headers: int = 64 * 2**10
    """Largest headers of a request, bytes."""
    timeouts: Timeouts = Timeouts()


def access_of(host: str, names: tuple[str, ...]) -> Access:
    """Who may ask a server on `host`. Raises TurngymError for names that are none."""
    try:
        return Access(host=host, names=names)
    except ValueError as error:
        raise TurngymError(str(error)) from None
