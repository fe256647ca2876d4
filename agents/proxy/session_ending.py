"""The end of a session: in the records, for the engine and for the trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from turngym.agents.proxy.conversation.messages import ChatMessage
from turngym.agents.proxy.engine_queue import EngineQueue
from turngym.agents.proxy.request_counts import RequestCounts
from turngym.agents.proxy.sessions.episodes import episode_of
from turngym.agents.proxy.sessions.records import Recorder
from turngym.agents.proxy.sessions.session import ProxySession
from turngym.envs.episode import Episode


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionEnding:
    """Ends sessions, or parts of long ones."""

    recorder: Recorder
    engine: EngineQueue
    tally: RequestCounts
    temperature: float | None
    """As of `ProxyService`."""
    tell: Callable[[Episode], None] | None
    """Gets every session that ended with at least one main turn."""

    def finish(self, session: ProxySession, why: str, final: tuple[ChatMessage, ...] = (), following: str = "") -> None:
        """`session` is over: `why` as in `episode_of`, `final` what came last, `following` the key it goes on under."""
        if not session.turns:
            return
        messages = [message.as_json() for message in final]
        self.recorder.write({"kind": "end", "session": session.key, "why": why, "final": messages, "next": following})
        self.engine.release(f"{session.key}/{len(session.history.segments) - 1}")
        self.tally.add("sessions_ended")
        if self.tell is not None:
            self.tell(episode_of(session, why, final, temperature=self.temperature))

    def split(self, session: ProxySession, key: str, messages: Sequence[ChatMessage]) -> None:
        """A long session is handed on, and goes on under the new `key` with a request of these messages."""
        self.finish(session, "part", session.new_messages(messages), key)
        session.begin_part(key)
