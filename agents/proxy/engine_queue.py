"""The queue in front of the engine: one thread generates waiting requests in batches and can be paused for updates.

A request goes through it as a `PendingRequest`: waited for, streamed from, cancelled, or interrupted while new weights
are put in place and then continued by them. `ServingCopy` puts them in place. `EngineRequests` makes the engine's
request from a client's.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from turngym.agents.playing.agent import task_number
from turngym.agents.proxy.config import ApiError, ProxyError, ProxySettings, busy, invalid
from turngym.agents.proxy.conversation import ChatListRenderer, Prompt
from turngym.agents.proxy.openai_api import ChatRequest
from turngym.agents.proxy.sessions import ProxySession
from turngym.agents.sglang.policy import StopFinder
from turngym.envs.core.protocols import (
    GenerateRequest,
    Generation,
    PartialFailure,
    Policy,
    Sampling,
    StreamingPolicy,
    WeightSource,
)

# A response that was interrupted: the ids drawn so far, and by which weights.


@dataclass(slots=True)
class PartialResponse:
    """Parts of one response, each drawn by other weights."""

    parts: list[Generation] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Ids drawn so far."""
        return sum(len(part.ids) for part in self.parts)

    def add(self, part: Generation) -> None:
        self.parts.append(part)

    def drawn(self) -> list[tuple[int, float]]:
        """All ids so far, with their log-probabilities."""
        return [pair for part in self.parts for pair in zip(part.ids.tolist(), part.logprobs.tolist(), strict=True)]

    def rest_of(self, request: GenerateRequest) -> GenerateRequest:
        """A request for the rest: the drawn ids become prompt, and the random stream is a new one."""
        if not self.length:
            return request
        ids = np.concatenate([request.prompt_ids, *(part.ids for part in self.parts)]).astype(np.int32)
        sampling = replace(request.sampling, max_new_tokens=request.sampling.max_new_tokens - self.length)
        return replace(request, prompt_ids=ids, sampling=sampling, stream=(*request.stream, self.length))

    def ended_by(self, last: Generation, request: GenerateRequest, stops: StopFinder | None) -> Generation:
        """The whole response, which ends with `last`. A stop text across two parts ends it, too."""
        if not self.length:
            return last
        before = self.length
        whole = _joined([*self.parts, last], last.finish)
        if stops is None or not request.sampling.stop_text:
            return whole
        length = stops.first_hit(whole.ids.tolist(), before, request.sampling.stop_text)
        return whole if length is None else _first(whole, length)

    def aborted(self) -> Generation:
        """The ids so far, for a client that is gone."""
        return _joined(self.parts, "aborted")


def _joined(parts: list[Generation], finish: str) -> Generation:
    spans: list[tuple[int, int, int]] = []
    place = 0
    for part in parts:
        own = part.version_spans or ((part.policy_version, 0, len(part.ids)),)
        for version, start, end in own:
            if spans and spans[-1][0] == version:
                spans[-1] = (version, spans[-1][1], place + end)
            elif end > start:
                spans.append((version, place + start, place + end))
        place += len(part.ids)
    return Generation(
        ids=np.concatenate([part.ids for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
        finish=finish,
        policy_version=min((version for version, _, _ in spans), default=parts[-1].policy_version),
        version_spans=tuple(spans) if len(spans) > 1 else (),
    )


def _first(whole: Generation, length: int) -> Generation:
    """The first `length` ids of a response, ended by a stop text."""
    spans = tuple((version, start, min(end, length)) for version, start, end in whole.version_spans if start < length)
    return replace(
        whole,
        ids=whole.ids[:length],
        logprobs=whole.logprobs[:length],
        finish="stop",
        version_spans=spans if len(spans) > 1 else (),
    )


@dataclass(slots=True, eq=False)
class PendingRequest:
    """One request to the engine.

    A cancelled request is not generated, or no further. An interrupted one goes back into the queue with the ids so far
    and is continued by the next weights.
    """

    request: GenerateRequest
    streaming: bool = False
    """Whether `new_tokens` is called while the answer is generated."""
    answer: Future[Generation] = field(default_factory=Future)
    _drawn: list[tuple[int, float]] = field(default_factory=list, init=False)
    _changed: threading.Condition = field(default_factory=threading.Condition, init=False)
    _cancelled: bool = field(default=False, init=False)
    _broken: bool = field(default=False, init=False)
    _held: PartialResponse = field(default_factory=PartialResponse, init=False)

    def __post_init__(self) -> None:
        if self.streaming:
            self.answer.add_done_callback(self._wake)

    def cancel(self) -> None:
        # a future that runs cannot be cancelled; drawn() then tells the engine to stop
        self._cancelled = True
        self.answer.cancel()

    def break_off(self) -> None:
        """Make the engine stop here; the request goes on with the ids so far when the engine does."""
        self._broken = True

    def begin(self) -> GenerateRequest:
        """The request to the engine. Called again if the batch failed or was interrupted."""
        self._drawn = self._held.drawn()
        return self._held.rest_of(self.request)

    def may_begin(self) -> bool:
        """Whether to generate it, or go on with it. A cancelled request is answered with the ids so far."""
        if not self.answer.running():
            return self.answer.set_running_or_notify_cancel()
        if self._cancelled:
            self.answer.set_result(self._held.aborted())
        return not self._cancelled

    def take(self, generation: Generation, stops: StopFinder | None) -> Generation | None:
        """The whole response that `generation` ends; None if it was interrupted and has to go on."""
        if self._broken and not self._cancelled and generation.finish == "aborted":
            self._broken = False
            self._held.add(generation)
            return None
        return self._held.ended_by(generation, self.request, stops)

    def drawn(self, token: int, logprob: float) -> bool:
        """Called by the engine for each id. Returns whether to go on."""
        if self.streaming:
            with self._changed:
                self._drawn.append((token, logprob))
                self._changed.notify_all()
        return not (self._cancelled or self._broken)

    def new_tokens(self, known: int, seconds: float) -> list[tuple[int, float]]:
        """Ids and log-probabilities after the first `known`, awaited for `seconds`; empty once the answer is there."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._drawn) > known or self.answer.done(), seconds)
            return self._drawn[known:]

    def _wake(self, _: Future[Generation]) -> None:
        with self._changed:
            self._changed.notify_all()


STOPPING = "the server is stopping"


class EngineQueue:
    """Calls `policy` in a thread of its own, with all requests that wait at that time; at once when idle.

    While paused nothing is generated and the weights may be changed; requests wait.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        max_batch: int = 64,
        max_waiting: int = 128,
        window: float = 0.005,
        stops: StopFinder | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`stops` finds stop texts that begin before an interruption and end behind it."""
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
        self.batches = 0
        self.generated = 0
        """Response tokens so far."""
        self.largest = 0
        """Most requests generated together so far."""
        self.aborted = 0
        """Answers that were cancelled before their end, because the client had disconnected."""
        self.broken_off = 0
        """Answers that were interrupted while the weights changed, and continued by the new ones."""
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
        """Whether the engine gives out ids while it draws."""
        return isinstance(self._policy, StreamingPolicy)

    def submit(self, request: GenerateRequest, *, streaming: bool = False) -> PendingRequest:
        """Queue a request. Raises ApiError: 429 with a full queue, 503 once closed."""
        pending = PendingRequest(request, streaming)
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
        """
        with self._changed:
            self._pauses += 1
            if not self._changed.wait_for(lambda: self._running is None, patience):
                for pending in self._running or ():
                    pending.break_off()
                self._changed.wait_for(lambda: self._running is None)

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
                self._answer(batch)
            finally:
                with self._changed:
                    self._running = None
                    self._changed.notify_all()

    def _next_batch(self) -> list[PendingRequest] | None:
        """The next batch; None when closed and nothing waits."""
        with self._changed:
            while True:
                self._changed.wait_for(self._has_work)
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
                self._running = batch
                return batch

    def _has_work(self) -> bool:
        return not self._pauses and bool(self._queue or self._released or self._closed)

    def _wait_for_more(self) -> None:
        """Wait a moment for more requests if the last batch had several; never when a single client asks."""
        until = self._clock() + self._window
        wanted = min(self._last_batch_size, self._max_batch)
        while 0 < len(self._queue) < wanted and not self._closed and (remaining := until - self._clock()) > 0:
            self._changed.wait(remaining)

    def _answer(self, batch: list[PendingRequest]) -> None:
        while self._released:
            self._policy.release(self._released.popleft())
        if not batch:
            return
        self.batches += 1
        self.largest = max(self.largest, len(batch))
        self._generate(batch)

    def _generate(self, batch: list[PendingRequest]) -> None:
        try:
            generations = self._draw(batch)
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

    def _resolve(self, batch: list[PendingRequest], generations: Sequence[Generation | BaseException]) -> None:
        """Resolve each request with its generation or its own error; interrupted ones go to the front of the queue."""
        again: list[PendingRequest] = []
        for pending, result in zip(batch, generations, strict=True):
            if isinstance(result, BaseException):
                _fail(pending, _engine_failed(result))
                continue
            self.generated += len(result.ids)
            whole = pending.take(result, self._stops)
            if whole is None:
                again.append(pending)
                continue
            self.aborted += whole.finish == "aborted"
            pending.answer.set_result(whole)
        with self._changed:
            self.broken_off += len(again)
            self._queue.extendleft(reversed(again))

    def _draw(self, batch: list[PendingRequest]) -> list[Generation]:
        requests = [pending.begin() for pending in batch]
        if not isinstance(self._policy, StreamingPolicy):
            return self._policy.generate(requests)
        return self._policy.stream(requests, [pending.drawn for pending in batch])

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


# The engine's request from a client's: room, sampling, random stream.

MAX_TOKENS = 512
"""Most tokens of an answer where neither request nor settings say."""


def engine_queue(policy: Policy, settings: ProxySettings, renderer: ChatListRenderer) -> EngineQueue:
    """The queue in front of `policy`, as large as the settings say."""
    return EngineQueue(
        policy,
        max_batch=settings.max_batch,
        max_waiting=settings.max_waiting,
        window=settings.window_ms / 1000,
        stops=StopFinder(renderer.tokenizer),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequests:
    """Makes the engine's requests; the arguments are those of `ProxyService`."""

    renderer: ChatListRenderer
    settings: ProxySettings
    max_context: int
    temperature: float | None
    seed: int

    def make(self, request: ChatRequest, prompt: Prompt, session: ProxySession | None, number: int) -> GenerateRequest:
        """The engine's form of the `number`th request. Raises ApiError (400) if no id fits behind the prompt."""
        name, stream = self._stream(request, prompt, session, number)
        return GenerateRequest(
            session=name, prompt_ids=prompt.ids, sampling=self._sampling(request, prompt), stream=stream
        )

    def _sampling(self, request: ChatRequest, prompt: Prompt) -> Sampling:
        room = self.max_context - len(prompt.ids)
        if room < 1:
            raise invalid(
                f"the messages are {len(prompt.ids)} tokens; with an answer this model holds {self.max_context}",
                "messages",
                "context_length_exceeded",
            )
        # who names no session may not know that it trains: it gets what it asks for, and that may exclude the turn
        fixed = self.temperature if request.main and request.session_id is not None else None
        return Sampling(
            temperature=request.temperature if fixed is None else fixed,
            max_new_tokens=min(request.max_tokens or self.settings.max_tokens or MAX_TOKENS, room),
            stop_ids=self.renderer.stop_ids,
            stop_text=request.stop,
        )

    def _stream(
        self, request: ChatRequest, prompt: Prompt, session: ProxySession | None, number: int
    ) -> tuple[str, tuple[int, ...]]:
        """(The engine's name of the session, the random stream of the answer.)"""
        stream: tuple[int, ...]
        if session is None or not request.main:
            # a seed alone decides the draws of a turn without a session, whatever was asked before
            name, stream = f"side/{number}", (self.seed, 0, number if request.seed is None else 0)
        else:
            segment = len(session.history.segments) - (0 if prompt.opens else 1)
            name, stream = f"{session.key}/{segment}", (self.seed, task_number(session.key), session.answers)
        if request.seed is not None:
            # clients may send negative seeds, of which no stream can be made
            seed = request.seed & (2**63 - 1)
            stream = (seed, 0, 0) if request.session_id is None else (seed, *stream[1:])
        return name, stream


# A copy of a model in training that answers meanwhile; new weights are swapped in between two tokens.


@dataclass(slots=True, kw_only=True)
class ServingCopy:
    """Publishes the weights of a model in training to the copy that answers.

    Adapters are merged before the engine is paused, so that only the copying happens during the pause. Called in the
    trainer's thread between two updates.
    """

    engine: Any
    """The engine that answers; `weights_changed(version)` tells it that the parameters of `copy` have other values."""
    copy: Any
    """The model that `engine` runs."""
    weights: WeightSource
    """The weights of the model in training."""
    patience: float = 0.5
    """Seconds that responses being drawn get to end; then they are interrupted and continued by the new weights."""
    clock: Callable[[], float] = time.monotonic
    queue: EngineQueue | None = None
    """The queue in front of `engine`; `publish` needs it."""
    swaps: int = field(default=0, init=False)
    last_pause: float = field(default=0.0, init=False)
    """Seconds for which requests waited at the last swap, `patience` included."""
    longest_pause: float = field(default=0.0, init=False)

    def publish(self, version: int) -> None:
        """Put the model's weights as they are now in place, as `version`.

        Raises ProxyError where the model has parameters that the copy lacks, or the other way round.
        """
        assert self.queue is not None
        new, own = dict(self.weights.named_weights()), dict(self.copy.named_parameters())
        if new.keys() != own.keys():
            odd = sorted(new.keys() ^ own.keys())
            raise ProxyError(f"the model in training and its serving copy differ in parameters: {', '.join(odd[:3])}")
        began = self.clock()
        self.queue.pause(self.patience)
        try:
            with torch.no_grad():
                for name, value in new.items():
                    own[name].copy_(value)
            self.engine.weights_changed(version)
        finally:
            self.queue.resume()
        self.swaps += 1
        self.last_pause = self.clock() - began
        self.longest_pause = max(self.longest_pause, self.last_pause)

    def as_json(self) -> dict[str, Any]:
        return {"swaps": self.swaps, "last_pause_s": self.last_pause, "longest_pause_s": self.longest_pause}
