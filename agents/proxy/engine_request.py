"""From a chat request to what the engine is asked: room, sampling, random stream."""

from __future__ import annotations

from dataclasses import dataclass

from turngym.agents.agent import task_number
from turngym.agents.proxy.conversation.chat import ChatListRenderer, Prompt
from turngym.agents.proxy.engine_queue import EngineQueue
from turngym.agents.proxy.errors import invalid
from turngym.agents.proxy.http.request import ChatRequest
from turngym.agents.proxy.sessions.session import ProxySession
from turngym.agents.proxy.settings import ProxySettings
from turngym.agents.sglang.client.stop_strings import StopFinder
from turngym.envs.protocols import GenerateRequest, Policy, Sampling

MAX_TOKENS = 512


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
        """What to draw for the `number`th request. Raises ApiError (400) where no id fits behind the prompt."""
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
        """(the session as the engine knows it, the random stream of the answer)."""
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
