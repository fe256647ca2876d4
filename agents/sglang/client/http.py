"""HTTP connection to one server: maps status codes to errors, and says which are worth a retry."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from turngym.agents.sglang.errors import BadAnswer, ServerDown, ServerError, ServerTimeout
from turngym.agents.sglang.settings import SglangSettings

KEY = "TURNGYM_SERVER_KEY"
"""Environment variable with the servers' bearer key; none is sent without it."""
PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses that may pass by themselves: a server that starts, restarts or is full."""


def error_text(body: Any) -> str:
    """What a server's error says: `error` is a text, or an object with a `message`; admin calls have `message`."""
    if isinstance(body, Mapping):
        found = body.get("error", body.get("message", body.get("detail")))
        if isinstance(found, Mapping):
            found = found.get("message", found)
        if found is not None:
            return str(found)
    return str(body)[:500]


@dataclass(slots=True, kw_only=True)
class Connection:
    """Requests to one address, from one event loop. Every method is a coroutine of that loop.

    Raises:
        ServerError: an address that is none, or httpx is not installed.
    """

    url: str
    settings: SglangSettings
    clock: Callable[[], float] = time.monotonic
    _http: Any = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.url = self.url.rstrip("/")
        if not self.url.startswith(("http://", "https://")):
            raise ServerError(f"server {self.url!r} must begin with http:// or https://")
        try:
            import httpx
        except ImportError as error:
            raise ServerError("a server needs httpx: pip install 'turngym[serve]'") from error
        key = os.environ.get(KEY)
        self._http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            # the fleet's semaphores limit requests; under httpx's limit of 100, aborts could queue behind generations
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=self.settings.parallel),
            # a proxy of the environment is for the outside world, and may not reach the servers
            trust_env=False,
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def request(self, method: str, path: str, body: Any = None, *, timeout: float) -> Any:
        """One attempt: the JSON of a 200, None where there is no body.

        Raises:
            ServerDown: no connection, or a status that may pass.
            ServerTimeout: nothing after `timeout` seconds.
            ServerError: any other status; the server's own words are in it.
            BadAnswer: a 200 that is not JSON.
        """
        import httpx

        limits = httpx.Timeout(timeout, connect=min(timeout, self.settings.connect_timeout))
        try:
            answer = await self._http.request(method, self.url + path, json=body, timeout=limits)
        # without ConnectTimeout: a server that cannot be reached is down, not slow
        except (httpx.ReadTimeout, httpx.WriteTimeout, httpx.PoolTimeout) as error:
            raise ServerTimeout(f"{self.url}{path}: no answer within {timeout:.0f} s") from error
        except httpx.TransportError as error:
            raise ServerDown(f"{self.url}{path}: {type(error).__name__}: {error or 'no connection'}") from error
        try:
            found = answer.json() if answer.content else None
        except ValueError:
            found = answer.text[:500]
        if answer.status_code == 200:
            # a JSON text begins with a quote; without it `found` is the raw text from above
            if isinstance(found, str) and answer.content[:1] != b'"':
                raise BadAnswer(f"{self.url}{path}: the answer is not JSON: {found[:200]!r}")
            return found
        said = f"{self.url}{path}: status {answer.status_code}: {error_text(found)}"
        if answer.status_code in PASSING:
            raise ServerDown(said)
        if answer.status_code in (401, 403):
            raise ServerError(f"{said}; set the server's key in {KEY}")
        if answer.status_code == 404:
            raise ServerError(f"{said}; is this an SGLang server?")
        raise ServerError(said)

    async def request_until(self, method: str, path: str, body: Any = None, *, deadline: float) -> Any:
        """As `request`, tried again while the server is down, until `deadline` seconds have passed.

        Raises ServerTimeout where an attempt would still be waiting then, ServerDown where all failed before.
        """
        end = self.clock() + deadline
        pause = self.settings.backoff
        tries = 0
        while True:
            tries += 1
            try:
                return await self.request(method, path, body, timeout=max(end - self.clock(), 0.01))
            except ServerDown as error:
                if self.clock() + pause >= end:
                    raise ServerDown(f"{error} (tried {tries} times in {deadline:.0f} s)") from error
            await asyncio.sleep(pause)
            # max: a backoff of 0 would stay 0
            pause = min(max(2 * pause, 0.05), 5.0)
