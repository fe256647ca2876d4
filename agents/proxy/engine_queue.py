"""Between many requests and one engine: a thread that generates whatever waits together, and a gate for updates."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from turngym.agents.proxy.errors import ApiError, busy
from turngym.envs.protocols import GenerateRequest, Generation, PartialFailure, Policy, StreamingPolicy

STOPPING = "the server is stopping"


@dataclass(slots=True, eq=False)
class PendingRequest:
    """One request to the engine. Cancel it and it is not generated, or, if it is being generated, no further."""

    request: GenerateRequest
    listens: bool = False
    """Whether somebody calls `news`."""
    answer: Future[Generation] = field(default_factory=Future)
    _drawn: list[tuple[int, float]] = field(default_factory=list, init=False)
    _changed: threading.Condition = field(default_factory=threading.Condition, init=False)
    _unwanted: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if self.listens:
            self.answer.add_done_callback(self._wake)

    def cancel(self) -> None:
        self._unwanted = True
        self.answer.cancel()

    def begin(self) -> None:
        """The engine begins; again, if the batch that this request was in has failed."""
        self._drawn = []

    def drawn(self, token: int, logprob: float) -> bool:
        """The engine has drawn an id. A `Watch`."""
        if self.listens:
            with self._changed:
                self._drawn.append((token, logprob))
                self._changed.notify_all()
        return not self._unwanted

    def news(self, known: int, seconds: float) -> list[tuple[int, float]]:
        """Ids and log-probabilities after the first `known`, awaited for `seconds`; empty once the answer is there."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._drawn) > known or self.answer.done(), seconds)
            return self._drawn[known:]

    def _wake(self, _: Future[Generation]) -> None:
        with self._changed:
            self._changed.notify_all()


class EngineQueue:
    """Calls `policy` in a thread of its own, for all that wait at the time: at once when idle.

    While paused nothing is generated and the weights may be changed; requests wait.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        max_batch: int = 64,
        max_waiting: int = 128,
        window: float = 0.005,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._policy, self._max_batch, self._max_waiting = policy, max_batch, max_waiting
        self._window, self._clock = window, clock
        self._changed = threading.Condition()
        self._queue: deque[PendingRequest] = deque()
        self._forgotten: deque[str] = deque()
        self._pauses = 0
        self._running = False
        self._closed = False
        self._company = 1
        self.batches = 0
        self.generated = 0
        """Response tokens so far."""
        self.largest = 0
        """Most requests generated together so far."""
        self.aborted = 0
        """Answers that were given up before their end, because nobody wanted them any more."""
        self._thread = threading.Thread(target=self._work, name="proxy-engine", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Requests that are not being generated yet."""
        return len(self._queue)

    @property
    def paused(self) -> bool:
        return self._pauses > 0

    @property
    def streams(self) -> bool:
        """Whether the engine says what it draws while it draws."""
        return isinstance(self._policy, StreamingPolicy)

    def submit(self, request: GenerateRequest, *, listens: bool = False) -> PendingRequest:
        """Queue a request. Raises ApiError: 429 with a full queue, 503 once closed."""
        ticket = PendingRequest(request, listens)
        with self._changed:
            if self._closed:
                raise busy(STOPPING, status=503, seconds=5)
            if len(self._queue) >= self._max_waiting:
                raise busy(f"{len(self._queue)} requests are waiting already; ask again later")
            self._queue.append(ticket)
            self._changed.notify_all()
        return ticket

    def release(self, session: str) -> None:
        """Let the engine forget `session`, before its next batch."""
        with self._changed:
            self._forgotten.append(session)
            self._changed.notify_all()

    def pause(self) -> None:
        """Return when nothing is being generated; nothing will be until `resume`. Pauses add up."""
        with self._changed:
            self._pauses += 1
            self._changed.wait_for(lambda: not self._running)

    def resume(self) -> None:
        """Take back one pause; without one it does nothing."""
        with self._changed:
            self._pauses = max(0, self._pauses - 1)
            self._changed.notify_all()

    def close(self, timeout: float = 10.0) -> None:
        """Refuse new requests, answer those that wait, and end the thread."""
        with self._changed:
            self._closed = True
            self._pauses = 0
            self._changed.notify_all()
        self._thread.join(timeout)
        with self._changed:
            left, self._queue = list(self._queue), deque()
        for ticket in left:
            _fail(ticket, busy(STOPPING, status=503, seconds=5))

    def _work(self) -> None:
        while (batch := self._take()) is not None:
            try:
                self._answer(batch)
            finally:
                with self._changed:
                    self._running = False
                    self._changed.notify_all()

    def _take(self) -> list[PendingRequest] | None:
        """The next batch; None when closed and nothing waits."""
        with self._changed:
            while True:
                self._changed.wait_for(self._something)
                if not self._queue and not self._forgotten:
                    return None
                self._coalesce()
                if self._pauses:
                    continue
                batch: list[PendingRequest] = []
                while self._queue and len(batch) < self._max_batch:
                    ticket = self._queue.popleft()
                    if ticket.answer.set_running_or_notify_cancel():
                        batch.append(ticket)
                self._company = len(batch) or self._company
                self._running = True
                return batch

    def _something(self) -> bool:
        return not self._pauses and bool(self._queue or self._forgotten or self._closed)

    def _coalesce(self) -> None:
        """Wait for company if the last batch had some; never when one client alone asks."""
        until = self._clock() + self._window
        wanted = min(self._company, self._max_batch)
        while 0 < len(self._queue) < wanted and not self._closed and (left := until - self._clock()) > 0:
            self._changed.wait(left)

    def _answer(self, batch: list[PendingRequest]) -> None:
        while self._forgotten:
            self._policy.release(self._forgotten.popleft())
        if not batch:
            return
        self.batches += 1
        self.largest = max(self.largest, len(batch))
        self._generate(batch)

    def _generate(self, batch: list[PendingRequest]) -> None:
        try:
            found = self._draw(batch)
            if len(found) != len(batch):
                raise RuntimeError(f"the engine answered {len(found)} of {len(batch)} requests")
        except PartialFailure as failure:
            self._settle(batch, failure.results)
            return
        except Exception as error:
            if len(batch) == 1:
                _fail(batch[0], _engine_failed(error))
                return
            # one bad request must not fail those that happened to come with it, and half a batch may fit in memory
            half = len(batch) // 2
            self._generate(batch[:half])
            self._generate(batch[half:])
            return
        self._settle(batch, found)

    def _settle(self, batch: list[PendingRequest], found: Sequence[Generation | BaseException]) -> None:
        """Hand every request its generation, or the error that it alone had."""
        for ticket, result in zip(batch, found, strict=True):
            if isinstance(result, BaseException):
                _fail(ticket, _engine_failed(result))
                continue
            self.generated += len(result.ids)
            self.aborted += result.finish == "aborted"
            ticket.answer.set_result(result)

    def _draw(self, batch: list[PendingRequest]) -> list[Generation]:
        requests = [ticket.request for ticket in batch]
        if not isinstance(self._policy, StreamingPolicy):
            return self._policy.generate(requests)
        for ticket in batch:
            ticket.begin()
        return self._policy.stream(requests, [ticket.drawn for ticket in batch])

    def as_json(self) -> dict[str, Any]:
        return {
            "waiting": self.waiting,
            "updating": self.paused,
            "batches": self.batches,
            "largest_batch": self.largest,
            "generated_tokens": self.generated,
            "streams": self.streams,
            "aborted": self.aborted,
        }


def _engine_failed(error: BaseException) -> ApiError:
    return ApiError(500, f"the engine failed: {type(error).__name__}: {error}", code="engine")


def _fail(ticket: PendingRequest, error: Exception) -> None:
    if ticket.answer.done():
        return
    if not ticket.answer.running():
        ticket.answer.set_running_or_notify_cancel()
    if not ticket.answer.cancelled():
        ticket.answer.set_exception(error)
