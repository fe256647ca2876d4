"""One request to /generate from its first attempt to its end: retries, repairs, a deadline, an abort that is kept."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from turngym.agents.sglang.client.fleet import Fleet, Worker
from turngym.agents.sglang.errors import ServerDown, ServerTimeout, WrongWeights

GRACE = 5.0
"""Seconds that a server gets to hand over what it had drawn when a request was broken off."""
T = TypeVar("T")


@dataclass(slots=True)
class Caller:
    """Sends requests to a fleet. All methods but `cut` are coroutines of its loop."""

    fleet: Fleet
    _numbers: Any = field(default_factory=itertools.count, init=False)
    _name: str = field(default_factory=lambda: secrets.token_hex(4), init=False)
    _running: set[str] = field(default_factory=set, init=False)
    _repairs: dict[str, asyncio.Lock] = field(default_factory=dict, init=False)

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
            worker = self.fleet.home(session)
            tries += 1
            floor = self.fleet.versions.place
            try:
                answer = await self._once(worker, make, end, where)
                worker.failures = 0
                return read(answer, floor)
            except ServerDown as error:
                worker.failures += 1
                if worker.connection.clock() + pause >= end:
                    raise ServerDown(f"{where}: {error} (tried {tries} times)") from error
            except WrongWeights as error:
                if worker.connection.clock() + pause >= end or not await self._repaired(worker, floor):
                    raise WrongWeights(f"{error}{self._restart_hint()}") from error
            await asyncio.sleep(pause)
            pause = min(max(2 * pause, 0.05), 5.0)

    async def cut(self) -> int:
        """Break off everything under way; how many requests that were."""
        running = list(self._running)
        for rid in running:
            await self.fleet.abort(rid)
        return len(running)

    async def _once(self, worker: Worker, make: Callable[[str], dict[str, Any]], end: float, where: str) -> Any:
        rid = self.rid()
        worker.load += 1
        try:
            async with worker.slots:
                self._running.add(rid)
                return await self._wait(worker, rid, make(rid), end, where)
        finally:
            worker.load -= 1
            self._running.discard(rid)

    async def _wait(self, worker: Worker, rid: str, body: dict[str, Any], end: float, where: str) -> Any:
        left = max(end - worker.connection.clock(), 0.01)
        task = asyncio.create_task(worker.connection.once("POST", "/generate", body, timeout=left + 2 * GRACE + 1))
        try:
            done, _ = await asyncio.wait({task}, timeout=left)
            if not done:
                await self.fleet.abort(rid)
                done, _ = await asyncio.wait({task}, timeout=GRACE)
            if done:
                return task.result()
        except asyncio.CancelledError:
            # nobody waits any more: the server must not go on drawing for nobody
            await asyncio.shield(self.fleet.abort(rid))
            raise
        finally:
            task.cancel()
        state = await self.fleet.ready(worker.connection)
        raise ServerTimeout(
            f"{where}: {worker.connection.url} gave no answer within {self.fleet.settings.deadline:.0f} s; {state}"
        )

    async def _repaired(self, worker: Worker, floor: int) -> bool:
        """Whether the servers have been given their weights again, by this request or another."""
        repair = self.fleet.repair
        if repair is None:
            return False
        lock = self._repairs.setdefault("all", asyncio.Lock())
        async with lock:
            if self.fleet.versions.place == floor:
                await asyncio.to_thread(repair, worker.connection.url)
        return True

    def _restart_hint(self) -> str:
        return (
            ". Start it with the model that is meant, and run again"
            if self.fleet.repair is None
            else ". Its weights were sent again without success"
        )
