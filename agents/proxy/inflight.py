"""A request under way: waited for, or abandoned by a client that went away."""

from __future__ import annotations

from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import TYPE_CHECKING

from turngym.agents.proxy.conversation.answer import AnswerReader
from turngym.agents.proxy.conversation.chat import Prompt
from turngym.agents.proxy.conversation.messages import ChatMessage
from turngym.agents.proxy.engine_queue import PendingRequest
from turngym.agents.proxy.errors import busy
from turngym.agents.proxy.http.request import ChatRequest
from turngym.agents.proxy.sessions.records import TurnRecord
from turngym.agents.proxy.sessions.session import ProxySession

if TYPE_CHECKING:
    from turngym.agents.proxy.service import ProxyService


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


class InflightRequest:
    """A request under way. Exactly one of `wait` (until it returns an answer) and `abandon` ends it."""

    def __init__(
        self,
        service: ProxyService,
        request: ChatRequest,
        session: ProxySession | None,
        prompt: Prompt,
        ticket: PendingRequest,
        number: int,
        deadline: float,
        salt: str = "",
    ) -> None:
        self.service, self.request, self.session, self.prompt = service, request, session, prompt
        self.ticket, self.number, self.deadline = ticket, number, deadline
        self._salt, self._over, self._heard = salt, False, 0

    def reader(self) -> AnswerReader:
        """Reads the text of the answer: for the client, without stop texts, control tokens and calls."""
        request = self.request
        return self.service.renderer.reader(self.prompt, stops=request.stop, tools=bool(request.tools), salt=self._salt)

    def hear(self, seconds: float) -> list[tuple[int, float]]:
        """Ids drawn since the last call, with their log-probabilities; empty after `seconds`, or once all are known.

        An answer that comes has not waited too long: every id moves the deadline.
        """
        drawn = self.ticket.news(self._heard, seconds)
        self._heard += len(drawn)
        if drawn:
            self.deadline = self.service.deadline()
        return drawn

    def wait(self, seconds: float) -> Finished | None:
        """The answer; None if it is not there after `seconds`.

        Raises:
            ApiError: 500 for an engine that failed, 503 when the deadline has passed. The request is over then.
        """
        try:
            generation = self.ticket.answer.result(seconds)
        except FutureTimeout:
            if self.service.now() < self.deadline:
                return None
            self.abandon("timed_out")
            raise busy("the request waited too long for the engine", status=503, seconds=5) from None
        except BaseException:
            self._end("failed")
            raise
        try:
            finished = self.service.take_in(self, generation)
        except BaseException:
            self._end("failed")
            raise
        self._end("")
        return finished

    def abandon(self, why: str = "disconnected") -> None:
        """Nobody waits for the answer any more: it is not generated (any further), and dropped. No use once over."""
        if not self._over:
            self.ticket.cancel()
            # While it is being generated the session's next request must not reach the engine.
            self.ticket.answer.add_done_callback(lambda _: self._end(why))

    def _end(self, why: str) -> None:
        if not self._over:
            self._over = True
            if why:
                self.service.bridge.release(self.ticket.request.session)
            self.service.closed(self.session, why)
