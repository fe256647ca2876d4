"""The queue in front of the engine: one thread generates waiting requests in batches and can be paused for updates.

A request goes through it as a `PendingRequest`: waited for, streamed from, cancelled, or interrupted while new weights
are put in place and then continued by them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from turngym.agents.local_engine.model import EngineError
from turngym.agents.proxy.api_errors import ApiError, busy
from turngym.agents.rendering.stop_text import StopText
from turngym.agents.servers.policy import PartialResponse
from turngym.core import running_clock
from turngym.core.background_threads import SupervisedThread
from turngym.core.protocols import GenerateRequest, Generation, PartialFailure, Policy, StreamingPolicy


@dataclass(slots=True, eq=False)
class PendingRequest:
    """One request to the engine.

    A cancelled request is not generated, or no further. An interrupted one goes back into the queue with the ids so far
    and is continued by the next weights.
    """

    request: GenerateRequest
    answer: Future[Generation] = field(default_factory=Future)
    _drawn: list[tuple[int, float]] = field(default_factory=list, init=False)
    _changed: threading.Condition = field(default_factory=threading.Condition, init=False)
    _cancelled: bool = field(default=False, init=False)
    _interrupted: bool = field(default=False, init=False)
    _partial: PartialResponse = field(default_factory=PartialResponse, init=False)

    def __post_init__(self) -> None:
        self.answer.add_done_callback(lambda _: self._wake())

    def cancel(self) -> None:
        # a future that runs cannot be cancelled; drawn() then tells the engine to stop
        self._cancelled = True
        self.answer.cancel()

    def interrupt(self) -> None:
        """Make the engine stop here; the request is continued with the ids so far when the engine resumes."""
        self._interrupted = True

    def begin(self) -> GenerateRequest:
        """The request to the engine, for the rest of the response. Called again if the batch failed or was interrupted.

        The ids so far become prompt, and the random stream of the rest is a new one.
        """
        self._drawn = self._partial.drawn()
        request, length = self.request, self._partial.length
        if not length:
            return request
        sampling = replace(request.sampling, max_new_tokens=request.sampling.max_new_tokens - length)
        prompt = self._partial.prompt_of(request)
        return replace(request, prompt_ids=prompt, sampling=sampling, stream=(*request.stream, length))

    def may_begin(self) -> bool:
        """Whether to generate it, or go on with it. A cancelled request is answered with the ids so far."""
        if not self.answer.running():
            return self.answer.set_running_or_notify_cancel()
        if self._cancelled:
            self.answer.set_result(self._partial.whole("aborted"))
        return not self._cancelled

    def take(self, generation: Generation, stops: StopText) -> Generation | None:
        """The whole response that `generation` ends; None if it was interrupted and has to go on."""
        if self._interrupted and not self._cancelled and generation.finish == "aborted":
            self._interrupted = False
            self._partial.parts.append(generation)
            return None
        return self._partial.ended_by(generation, self.request, stops)

    def drawn(self, token: int, logprob: float) -> bool:
        """Called by the engine for each id. Returns whether to go on."""
        self._drawn.append((token, logprob))
        self._wake()
        return not (self._cancelled or self._interrupted)

    def new_tokens(self, known: int, seconds: float) -> list[tuple[int, float]]:
        """Ids and log-probabilities after the first `known`, awaited for `seconds`; empty once the answer is there."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._drawn) > known or self.answer.done(), seconds)
            return self._drawn[known:]

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()


STOPPING = "the server is stopping"
STOPS_WITHIN = 20.0
"""Seconds that an engine which was interrupted may take for the token that it draws."""


class EngineQueue:
    """Calls `policy` in a thread of its own, with all requests that wait at that time; at once when idle.

    While paused nothing is generated and the weights may be changed; requests wait.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        max_batch: int = 64,
        max_waiting: int,
        window: float = 0.005,
        stops: StopText,
        clock: Callable[[], float] = running_clock.now,
    ) -> None:
        """Starts the thread.

        Args:
            window: most seconds that a call waits for more requests; only after a call that had several.
            stops: finds stop texts that begin before an interruption and end behind it.
        """
        self._policy, self._max_batch, self._max_waiting = policy, max_batch, max_waiting
        self._stops = stops
        self._window, self._clock = window, clock
        self._changed = threading.Condition()
        self._queue: deque[PendingRequest] = deque()
        self._released: deque[str] = deque()
        self._pauses = 0
        self._running: list[PendingRequest] | None = None
        self._closed = False
        self._last_batch_size = 1
        self._heard = clock()
        """When the engine last drew a token, or began a batch."""
        self.batches = 0
        self.generated = 0
        """Response tokens so far."""
        self.largest = 0
        """Most requests generated together so far."""
        self.aborted = 0
        """Answers that were cancelled before their end, because the client had disconnected."""
        self.broken_off = 0
        """Answers that were interrupted while the weights changed, and continued by the new ones."""
        self._thread = SupervisedThread(self._work, "proxy-engine")
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
        """Whether the engine gives out ids while it draws."""
        return isinstance(self._policy, StreamingPolicy)

    def submit(self, request: GenerateRequest) -> PendingRequest:
        """Queue a request. Raises ApiError: 429 with a full queue, 503 once closed."""
        pending = PendingRequest(request)
        with self._changed:
            if self._closed:
                raise busy(STOPPING, status=503, seconds=5)
            if len(self._queue) >= self._max_waiting:
                raise busy(f"{len(self._queue)} requests are waiting already; ask again later")
            self._queue.append(pending)
            self._changed.notify_all()
        return pending

    def release(self, session: str) -> None:
        """Let the engine forget `session`, before its next batch."""
        with self._changed:
            self._released.append(session)
            self._changed.notify_all()

    def pause(self, patience: float | None = None) -> None:
        """Return when nothing is being generated; nothing will be until `resume`. Pauses add up.

        After `patience` seconds an engine that streams is interrupted and continues its responses after `resume`; other
        engines finish them. None waits until all are finished.

        Raises EngineError where an engine that was interrupted has not stopped `STOPS_WITHIN` seconds later: its
        process stands still, and whoever waited for it could not be ended either. The pause is taken back.
        """
        with self._changed:
            self._pauses += 1
            if self._changed.wait_for(lambda: self._running is None, patience):
                return
            for pending in self._running or ():
                pending.interrupt()
            # an engine that does not stream ends its answers, whose length it limits itself
            limit = STOPS_WITHIN if self.streams else None
            self._changed.wait_for(lambda: self._running is None or self._closed, limit)
            if self._running is not None:
                self._pauses = max(0, self._pauses - 1)
                reason = STOPPING if self._closed else f"it has not stopped within {STOPS_WITHIN:g} s"
                raise EngineError(f"the engine was asked to pause for new weights: {reason}")

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
            remaining, self._queue = list(self._queue), deque()
        for pending in remaining:
            _fail(pending, busy(STOPPING, status=503, seconds=5))

    def _work(self) -> None:
        while (batch := self._next_batch()) is not None:
            try:
                while self._released:
                    self._policy.release(self._released.popleft())
                if batch:
                    self.batches += 1
                    self.largest = max(self.largest, len(batch))
                    self._generate(batch)
            except BaseException as error:
                for pending in batch:
                    _fail(pending, _engine_failed(error))
                raise
            finally:
                with self._changed:
                    self._running = None
                    self._changed.notify_all()

    def _next_batch(self) -> list[PendingRequest] | None:
        """The next batch; None when closed and nothing waits."""
        with self._changed:
            while True:
                # ends: `submit`, `release`, `resume` and `close` say so; a daemon keeps no process
                self._changed.wait_for(lambda: not self._pauses and bool(self._queue or self._released or self._closed))
                if not self._queue and not self._released:
                    return None
                self._wait_for_more()
                # waiting gives up the lock: a pause may have come meanwhile
                if self._pauses:
                    continue
                batch: list[PendingRequest] = []
                while self._queue and len(batch) < self._max_batch:
                    pending = self._queue.popleft()
                    if pending.may_begin():
                        batch.append(pending)
                # a round that only released sessions says nothing about how many clients are busy
                self._last_batch_size = len(batch) or self._last_batch_size
                self._running, self._heard = batch, self._clock()
                return batch

    def _wait_for_more(self) -> None:
        """Wait a moment for more requests if the last batch had several; never when a single client asks."""
        until = time.monotonic() + self._window
        wanted = min(self._last_batch_size, self._max_batch)
        while 0 < len(self._queue) < wanted and not self._closed and (remaining := until - time.monotonic()) > 0:
            self._changed.wait(remaining)

    def _generate(self, batch: list[PendingRequest]) -> None:
        try:
            requests = [pending.begin() for pending in batch]
            if isinstance(self._policy, StreamingPolicy):
                generations = self._policy.stream(requests, [partial(self._drawn, pending) for pending in batch])
            else:
                generations = self._policy.generate(requests)
            if len(generations) != len(batch):
                raise RuntimeError(f"the engine answered {len(generations)} of {len(batch)} requests")
        except PartialFailure as failure:
            self._resolve(batch, failure.results)
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
        self._resolve(batch, generations)

    def _drawn(self, pending: PendingRequest, token: int, logprob: float) -> bool:
        self._heard = self._clock()
        return pending.drawn(token, logprob)

    @property
    def stands_still(self) -> bool:
        """Whether an engine that streams has drawn nothing for `STOPS_WITHIN` seconds, although it was asked to."""
        return self.streams and self._running is not None and self._clock() - self._heard > STOPS_WITHIN

    def _resolve(self, batch: list[PendingRequest], generations: Sequence[Generation | BaseException]) -> None:
        """Resolve each request with its generation or its own error; interrupted ones go to the front of the queue."""
        interrupted: list[PendingRequest] = []
        for pending, result in zip(batch, generations, strict=True):
            if isinstance(result, BaseException):
                _fail(pending, _engine_failed(result))
                continue
            self.generated += len(result.ids)
            response = pending.take(result, self._stops)
            if response is None:
                interrupted.append(pending)
                continue
            self.aborted += response.finish == "aborted"
            pending.answer.set_result(response)
        with self._changed:
            self.broken_off += len(interrupted)
            self._queue.extendleft(reversed(interrupted))

    def as_json(self) -> dict[str, Any]:
        return {
            "waiting": self.waiting,
            "updating": self.paused,
            "batches": self.batches,
            "largest_batch": self.largest,
            "generated_tokens": self.generated,
            "streams": self.streams,
            "aborted": self.aborted,
            "broken_off": self.broken_off,
        }


def _engine_failed(error: BaseException) -> ApiError:
    return ApiError(500, f"the engine failed: {type(error).__name__}: {error}", code="engine")


def _fail(pending: PendingRequest, error: Exception) -> None:
    if pending.answer.done():
        return
    # once it runs, no cancel can come between the check and the exception
    if not pending.answer.running():
        pending.answer.set_running_or_notify_cancel()
    if not pending.answer.cancelled():
        pending.answer.set_exception(error)
