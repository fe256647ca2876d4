"""A chat request in flight: waited for, or abandoned when its client disconnects."""

from __future__ import annotations

from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import Protocol

from turngym.agents.proxy.conversation.answer import AnswerReader
from turngym.agents.proxy.conversation.chat import ChatListRenderer, Prompt
from turngym.agents.proxy.conversation.messages import ChatMessage
from turngym.agents.proxy.errors import busy
from turngym.agents.proxy.http.request import ChatRequest
from turngym.agents.proxy.pending_request import PendingRequest
from turngym.agents.proxy.sessions.records import TurnRecord
from turngym.agents.proxy.sessions.session import ProxySession
from turngym.envs.protocols import Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """An answered request."""

    reply: ChatMessage
    finish: str
    """`stop`, `length` or `tool_calls`."""
    record: TurnRecord
    prompt_tokens: int
    number: int
    """Of the request, since the server started."""


def answer_id(run_id: str, number: int) -> str:
    """What clients know the answer to the `number`th request as."""
    return f"chatcmpl-{run_id}-{number}"


class RequestOwner(Protocol):
    """What a request in flight needs of the service that accepted it (`ProxyService`)."""

    @property
    def renderer(self) -> ChatListRenderer: ...

    @property
    def name(self) -> str:
        """Of the model, as clients ask for it."""

    @property
    def run_id(self) -> str:
        """Makes the ids of answers unique among servers."""

    def now(self) -> float:
        """Seconds on the clock that deadlines are set by."""

    def deadline(self) -> float:
        """When a request that begins to wait now has waited too long."""

    def record_turn(self, inflight: InflightRequest, generation: Generation) -> Finished:
        """Write down the turn that `generation` finishes; called once per request."""

    def release_engine(self, session: str) -> None:
        """Let the engine forget what it holds for a session of its own naming."""

    def closed(self, session: ProxySession | None, dropped: str) -> None:
        """The request is over; `dropped` says why it was not answered, if it was not."""

    def count(self, what: str) -> None:
        """One more of what /healthz tells."""


class InflightRequest:
    """A request in flight. Exactly one of `wait` (until it returns an answer) and `abandon` ends it."""

    def __init__(
        self,
        service: RequestOwner,
        request: ChatRequest,
        session: ProxySession | None,
        prompt: Prompt,
        pending: PendingRequest,
        number: int,
        deadline: float,
        salt: str = "",
    ) -> None:
        self.service, self.request, self.session, self.prompt = service, request, session, prompt
        self.pending, self.number, self.deadline = pending, number, deadline
        self._salt, self._over, self._known = salt, False, 0

    def reader(self) -> AnswerReader:
        """Reads the text of the answer: for the client, without stop texts, control tokens and calls."""
        request = self.request
        return self.service.renderer.reader(self.prompt, stops=request.stop, tools=bool(request.tools), salt=self._salt)

    def new_tokens(self, seconds: float) -> list[tuple[int, float]]:
        """Ids drawn since the last call, with their log-probabilities; empty after `seconds`, or once all are known.

        An answer that comes has not waited too long: every id moves the deadline.
        """
        drawn = self.pending.new_tokens(self._known, seconds)
        self._known += len(drawn)
        if drawn:
            self.deadline = self.service.deadline()
        return drawn

    def wait(self, seconds: float) -> Finished | None:
        """The answer; None if it is not there after `seconds`.

        Raises:
            ApiError: 500 for an engine that failed, 503 when the deadline has passed. The request is over then.
        """
        try:
            generation = self.pending.answer.result(seconds)
        except FutureTimeout:
            if self.service.now() < self.deadline:
                return None
            self.abandon("timed_out")
            raise busy("the request waited too long for the engine", status=503, seconds=5) from None
        except BaseException:
            self._end("failed")
            raise
        try:
            finished = self.service.record_turn(self, generation)
        except BaseException:
            self._end("failed")
            raise
        self._end("")
        return finished

    def abandon(self, why: str = "disconnected") -> None:
        """Stop generating and drop the answer: its client is gone. Does nothing once the request is over."""
        if not self._over:
            self.pending.cancel()
            # While it is being generated the session's next request must not reach the engine.
            self.pending.answer.add_done_callback(lambda _: self._end(why))

    def _end(self, why: str) -> None:
        if not self._over:
            self._over = True
            if why:
                self.service.release_engine(self.pending.request.session)
            self.service.closed(self.session, why)
