"""A fleet of servers, or of servers behind a router: routes requests by session and calls all servers at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

from turngym.agents.sglang.client.event_loop import LoopThread
from turngym.agents.sglang.client.http import Connection
from turngym.agents.sglang.client.server_info import ServerInfo, check_version, read_info
from turngym.agents.sglang.errors import ServerDown, ServerError, ServerTimeout
from turngym.agents.sglang.settings import SglangSettings
from turngym.agents.sglang.weights.weight_versions import WeightVersions

T = TypeVar("T")


@dataclass(slots=True)
class Endpoint:
    """One address that takes /generate, with its limit of requests."""

    connection: Connection
    slots: asyncio.Semaphore
    load: int = 0
    """Requests in flight."""
    failures: int = 0
    """Since the last answer."""


@dataclass(slots=True, kw_only=True)
class Fleet:
    """Servers with the same model. `open` looks at them; nothing else may be called before.

    Administrative calls (weights, pauses, aborts) go to every server, behind a router too: a router passes on
    /generate alone, and names its servers under /workers.
    """

    urls: Sequence[str]
    settings: SglangSettings = field(default_factory=SglangSettings)
    versions: WeightVersions = field(default_factory=WeightVersions)
    servers: list[ServerInfo] = field(default_factory=list, init=False)
    repair: Callable[[str], None] | None = field(default=None, init=False)
    """Gives one server (by its url) the weights that it should have; called when it answers with others."""
    loop: LoopThread = field(init=False)
    _endpoints: list[Endpoint] = field(default_factory=list, init=False)
    _admin: list[Connection] = field(default_factory=list, init=False)
    _assigned: dict[str, Endpoint] = field(default_factory=dict, init=False)

    def open(self, *, wait: float = 0.0) -> Self:
        """Connect, waiting up to `wait` seconds for servers that start.

        Raises:
            ServerError: no url, a server that is down, of another release than those supported, or not of the others'
                model.
        """
        if not self.urls:
            raise ServerError("no server was named; give at least one url")
        self.loop = LoopThread("sglang-client")
        try:
            self.servers = self.loop.run(self._discover(wait))
            check_version(self.servers)
        except BaseException:
            self.close()
            raise
        names = {server.weights for server in self.servers}
        # where they differ none is known: answers are refused until weights are published
        if len(names) == 1:
            self.versions.add(names.pop(), 0)
        return self

    def close(self) -> None:
        """Close the connections. The servers go on."""
        try:
            self.loop.run(self._close())
        finally:
            self.loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine that uses this fleet."""
        return self.loop.run(work)

    def call_all(self, method: str, path: str, body: Any = None, *, timeout: float | None = None) -> list[Any]:
        """One attempt at each server, at the same time: the answers. Raises the first error, with the server in it."""
        limit = self.settings.admin_timeout if timeout is None else timeout

        async def call() -> list[Any]:
            return await asyncio.gather(*(one.request(method, path, body, timeout=limit) for one in self._admin))

        return self.loop.run(call())

    def call_one(self, url: str, method: str, path: str, body: Any = None) -> Any:
        """One attempt at the server `url`."""
        one = next(connection for connection in self._admin if connection.url == url)
        return self.loop.run(one.request(method, path, body, timeout=self.settings.admin_timeout))

    async def abort(self, rid: str) -> None:
        """Abort a request on whichever server has it; one that is down has lost it anyway."""
        for one in self._admin:
            try:
                await one.request("POST", "/abort_request", {"rid": rid}, timeout=self.settings.connect_timeout)
            except ServerError:
                continue

    async def ready(self, connection: Connection) -> str:
        """The answer of /ready as text for an error message."""
        try:
            await connection.request("GET", "/ready", timeout=self.settings.connect_timeout)
        except ServerDown as error:
            return f"/ready says: {error}"
        except ServerError as error:
            return f"/ready does not answer: {error}"
        return "/ready says that it is up"

    def endpoint_for(self, session: str) -> Endpoint:
        """The endpoint of `session`: always the same while it answers, so that its prefix cache is reused."""
        endpoint = self._assigned.get(session)
        if endpoint is None or endpoint.failures:
            endpoint = min(self._endpoints, key=lambda one: (one.failures, one.load))
            self._assigned[session] = endpoint
        return endpoint

    def forget(self, session: str) -> None:
        self._assigned.pop(session, None)

    async def _discover(self, wait: float) -> list[ServerInfo]:
        fronts = [Connection(url=url, settings=self.settings) for url in dict.fromkeys(self.urls)]
        behind: list[Connection] = []
        for front in fronts:
            self._endpoints.append(Endpoint(front, asyncio.Semaphore(self.settings.parallel)))
            found = await self._servers_behind(front, wait)
            behind += [Connection(url=url, settings=self.settings) for url in found] or [front]
        self._admin = behind
        return [await read_info(one, wait) for one in behind]

    async def _servers_behind(self, front: Connection, wait: float) -> list[str]:
        """Urls of the servers behind a router; none if `front` is a server."""
        try:
            await front.request_until("GET", "/ready", deadline=max(wait, self.settings.connect_timeout))
        except (ServerDown, ServerTimeout):
            raise
        except ServerError:
            pass  # a router has no /ready
        end = front.clock() + max(wait, self.settings.connect_timeout)
        while True:
            try:
                found = await front.request("GET", "/workers", timeout=self.settings.connect_timeout)
            except ServerError:
                return []
            rows = found.get("workers", []) if isinstance(found, dict) else []
            urls = [str(row["url"] if isinstance(row, dict) else row) for row in rows]
            if urls:
                return urls
            if front.clock() >= end:
                raise ServerError(f"{front.url} is a router without servers")
            await asyncio.sleep(0.2)  # it begins before it has looked at its servers

    async def _close(self) -> None:
        # without a router a connection is in both lists
        for connection in {id(one): one for one in (*self._admin, *(w.connection for w in self._endpoints))}.values():
            await connection.close()
