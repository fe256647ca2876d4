"""A request to the engine: waited for, streamed from, cancelled, or broken off and continued by newer weights."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass, field

from turngym.agents.proxy.held_response import HeldResponse
from turngym.agents.sglang.client.stop_strings import StopFinder
from turngym.envs.protocols import GenerateRequest, Generation


@dataclass(slots=True, eq=False)
class PendingRequest:
    """One request to the engine. Cancel it and it is not generated, or, if it is being generated, no further.

    Broken off, it goes back into the queue with what was drawn, and is continued by the weights that come then.
    """

    request: GenerateRequest
    streaming: bool = False
    """Whether `new_tokens` is called while the answer is generated."""
    answer: Future[Generation] = field(default_factory=Future)
    _drawn: list[tuple[int, float]] = field(default_factory=list, init=False)
    _changed: threading.Condition = field(default_factory=threading.Condition, init=False)
    _cancelled: bool = field(default=False, init=False)
    _broken: bool = field(default=False, init=False)
    _held: HeldResponse = field(default_factory=HeldResponse, init=False)

    def __post_init__(self) -> None:
        if self.streaming:
            self.answer.add_done_callback(self._wake)

    def cancel(self) -> None:
        # a future that runs cannot be cancelled; drawn() then tells the engine to stop
        self._cancelled = True
        self.answer.cancel()

    def break_off(self) -> None:
        """The engine is to stop here; what was drawn is held, and continued when it goes on."""
        self._broken = True

    def begin(self) -> GenerateRequest:
        """What to ask the engine now; a second time if the batch that this request was in failed, or was broken off."""
        self._drawn = self._held.drawn()
        return self._held.rest_of(self.request)

    def may_begin(self) -> bool:
        """Whether to generate it (on); one that was cancelled is answered with what is held."""
        if not self.answer.running():
            return self.answer.set_running_or_notify_cancel()
        if self._cancelled:
            self.answer.set_result(self._held.aborted())
        return not self._cancelled

    def take(self, generation: Generation, stops: StopFinder | None) -> Generation | None:
        """The whole response that `generation` ends; None where it was broken off and has to go on."""
        if self._broken and not self._cancelled and generation.finish == "aborted":
            self._broken = False
            self._held.add(generation)
            return None
        return self._held.ended_by(generation, self.request, stops)

    def drawn(self, token: int, logprob: float) -> bool:
        """The engine has drawn an id. A `Watch`."""
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
