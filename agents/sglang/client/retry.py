"""A client of /generate with retries, a deadline, aborts, and repair of servers that have the wrong weights."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from turngym.agents.sglang.client.fleet import Endpoint, Fleet
from turngym.agents.sglang.errors import ServerDown, ServerTimeout, WrongWeights

GRACE = 5.0
"""Seconds that a server gets to hand over what it had drawn after a request is aborted."""
T = TypeVar("T")


@dataclass(slots=True)
class RetryingClient:
    """Sends requests to a fleet. All methods are coroutines of its loop."""

    fleet: Fleet
    _numbers: Any = field(default_factory=itertools.count, init=False)
    _name: str = field(default_factory=lambda: secrets.token_hex(4), init=False)
    _running: set[str] = field(default_factory=set, init=False)
    _repairing: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _repairs: Counter[str] = field(default_factory=Counter, init=False)
    """By url, how often its server has been given its weights again."""

    def rid(self) -> str:
        """A name for a request that no other has."""
        return f"turngym-{self._name}-{next(self._numbers)}"

    async def send(
        self,
        session: str,
        make: Callable[[str], dict[str, Any]],
        read: Callable[[Any, int], T],
        end: float,
        where: str,
    ) -> T:
        """The answer to `make(rid)`, read by `read(answer, floor)`, by `end` on the clock of the connections.

        A server that is down is waited for, or another one asked; one with other weights than it should have gets them
        again. Raises ServerDown, ServerTimeout or WrongWeights where that has not helped by the deadline.
        """
        pause, tries = self.fleet.settings.backoff, 0
        while True:
            endpoint = self.fleet.endpoint_for(session)
            tries += 1
            floor, repairs = self.fleet.versions.place, self._repairs[endpoint.connection.url]
            try:
                answer = await self._once(endpoint, make, end, where)
                endpoint.failures = 0
                return read(answer, floor)
            except ServerDown as error:
                endpoint.failures += 1
                if endpoint.connection.clock() + pause >= end:
                    raise ServerDown(f"{where}: {error} (tried {tries} times)") from error
            except WrongWeights as error:
                if endpoint.connection.clock() + pause >= end or not await self._repaired(endpoint, floor, repairs):
                    raise WrongWeights(f"{error}{self._restart_hint()}") from error
            await asyncio.sleep(pause)
            pause = min(max(2 * pause, 0.05), 5.0)

    async def abort_all(self) -> int:
        """Abort all requests in flight; how many there were."""
        running = list(self._running)
        for rid in running:
            await self.fleet.abort(rid)
        return len(running)

    async def _once(self, endpoint: Endpoint, make: Callable[[str], dict[str, Any]], end: float, where: str) -> Any:
        rid = self.rid()
        endpoint.load += 1
        try:
            async with endpoint.slots:
                self._running.add(rid)
                return await self._wait(endpoint, rid, make(rid), end, where)
        finally:
            endpoint.load -= 1
            self._running.discard(rid)

    async def _wait(self, endpoint: Endpoint, rid: str, body: dict[str, Any], end: float, where: str) -> Any:
        left = max(end - endpoint.connection.clock(), 0.01)
        # longer than both waits below: an aborted request must still be able to hand over what was drawn
        task = asyncio.create_task(endpoint.connection.request("POST", "/generate", body, timeout=left + 2 * GRACE + 1))
        try:
            done, _ = await asyncio.wait({task}, timeout=left)
            if not done:
                await self.fleet.abort(rid)
                done, _ = await asyncio.wait({task}, timeout=GRACE)
            if done:
                return task.result()
        except asyncio.CancelledError:
            # the caller is gone: the server must not go on generating
            await asyncio.shield(self.fleet.abort(rid))
            raise
        finally:
            task.cancel()
        state = await self.fleet.ready(endpoint.connection)
        raise ServerTimeout(
            f"{where}: {endpoint.connection.url} gave no answer within {self.fleet.settings.deadline:.0f} s; {state}"
        )

    async def _repaired(self, endpoint: Endpoint, floor: int, repairs: int) -> bool:
        """Whether the servers have been given their weights again, by this request or another.

        `floor` and `repairs`: the newest weights, and how often the server had been repaired, as the request was sent.
        """
        repair, url = self.fleet.repair, endpoint.connection.url
        if repair is None:
            return False
        async with self._repairing:
            # while the lock was awaited, a publish has moved the place, or another request has repaired the server
            if (self.fleet.versions.place, self._repairs[url]) == (floor, repairs):
                # repair() waits for calls that run on this very loop
                await asyncio.to_thread(repair, url)
                self._repairs[url] += 1
        return True

    def _restart_hint(self) -> str:
        return (
            ". Start it with the model that is meant, and run again"
            if self.fleet.repair is None
            else ". Its weights were sent again without success"
        )
