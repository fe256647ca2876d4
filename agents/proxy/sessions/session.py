"""Open chat sessions: one request of a session at a time, until the session is done or idle for too long."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from turngym.agents.proxy.conversation.chat import ChatHistory, ChatListRenderer
from turngym.agents.proxy.conversation.messages import ChatMessage, Tools, as_observation, common_prefix
from turngym.agents.proxy.errors import busy
from turngym.agents.proxy.sessions.matching import HistoryMatch
from turngym.agents.proxy.sessions.records import TurnRecord, VersionSpans
from turngym.agents.rendering.answers import Message
from turngym.envs.episode import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionTurn:
    """A main turn as an episode will hold it."""

    observation: str
    role: str
    """Of the last message that the observation is made of."""
    has_new_messages: bool
    """Whether the request brought anything new; if not, the answer before it has no next state."""
    messages: tuple[ChatMessage, ...]
    """The request's messages after the `kept` ones."""
    kept: int
    tools: Tools | None
    """Where they changed."""
    text: str
    segment: int
    prompt_span: Span
    response_span: Span
    logprobs: NDArray[np.float32]
    finish: str
    version: int
    version_spans: VersionSpans
    temperature: float
    at: float
    """When it was answered, in seconds since 1970; 0 where that is not known."""


@dataclass(slots=True, eq=False)
class ProxySession:
    """One open chat session. Its `key` is `name`, a dash, and a serial number."""

    key: str
    name: str
    """128 bits of the SHA-256 of the client's id, in hex; the id itself is kept nowhere."""
    history: ChatHistory = field(default_factory=ChatHistory)
    turns: list[SessionTurn] = field(default_factory=list)
    before: tuple[Message, ...] = ()
    """What had been said before the first turn, as the template got it, where an earlier part was handed on."""
    owner: str | None = None
    """As in `TurnRecord`: a session that is found by its history."""
    first: int = 0
    """Turns of the conversation that were handed on before, under other keys."""
    superseded: int = 0
    """Turns whose answer the client asked for again."""
    queue: deque[object] = field(default_factory=deque)
    """Requests of this session: the first is being answered, the others wait."""
    last_used: float = 0.0
    ended: bool = False

    def apply(self, renderer: ChatListRenderer, record: TurnRecord, text: str | None = None) -> None:
        """Take in a finished main turn, live or from a record."""
        self.owner = record.owner
        known = len(self.history.client_messages)
        follows = not known or record.kept == known
        new = record.messages if follows else (*self.history.client_messages[: record.kept], *record.messages)[-1:]
        prompt_span, response_span = renderer.apply(self.history, record, text)
        # what was asked is what it was, and so is whether it was new
        former = self.turns.pop() if record.retry and self.turns else None
        self.superseded += former is not None
        system = not self.turns and len(new) > 1 and new[0].role == "system"
        self.turns.append(
            SessionTurn(
                observation=as_observation(new[1:] if system else new) if former is None else former.observation,
                role=new[-1].role,
                has_new_messages=bool(record.messages) or (former is not None and former.has_new_messages),
                messages=record.messages,
                kept=record.kept,
                tools=record.tools,
                text=record.text,
                segment=len(self.history.segments) - 1,
                prompt_span=prompt_span,
                response_span=response_span,
                logprobs=record.logprobs,
                finish=record.finish,
                version=record.version,
                version_spans=record.version_spans,
                temperature=record.temperature,
                at=record.at,
            )
        )

    def begin_part(self, key: str) -> None:
        """Go on under a new key without turns: what was said so far is the prompt of what follows."""
        self.first += len(self.turns)
        self.key, self.turns, self.superseded = key, [], 0
        self.before = tuple(self.history.template_messages)
        self.history.segments, self.history.text = [], None

    def new_messages(self, messages: Sequence[ChatMessage]) -> tuple[ChatMessage, ...]:
        """The request's messages after the last answer; where the client rewrote the past, only its last message."""
        known, common = len(self.history.client_messages), common_prefix(self.history.client_messages, messages)
        return tuple(messages[common:] if common == known else messages[common:][-1:])

    @property
    def answers(self) -> int:
        """Answers that were drawn under this key, superseded ones included: each has a random stream of its own."""
        return len(self.turns) + self.superseded

    @property
    def system(self) -> str:
        first = self.history.client_messages[:1]
        return first[0].content if first and first[0].role == "system" else ""


class SessionTable:
    """All open sessions. Requests of one session are answered one at a time, in the order in which they came."""

    def __init__(
        self, *, idle: float, limit: int, clock: Callable[[], float] = time.monotonic, serial: int = 0
    ) -> None:
        self._idle, self._limit, self._clock = idle, limit, clock
        self._open: dict[str, ProxySession] = {}
        self._changed = threading.Condition()
        self._match = HistoryMatch()
        self.serial = serial
        """How many sessions have begun."""

    def __len__(self) -> int:
        return len(self._open)

    def name_of(self, owner: str, messages: Sequence[ChatMessage]) -> str:
        """The name of the session of `owner` that a conversation without a name goes on, or of a new one."""
        with self._changed:
            # the serial number is in the records, so that no later process gives a name again
            return self._match.find(owner, messages) or session_name(f"unnamed/{self.serial + 1}")

    def note(self, session: ProxySession) -> None:
        """A turn was added to a session: it can be found by its history, if it is one that has an owner."""
        if session.owner is not None:
            with self._changed:
                self._match.note(session.name, session.owner, session.history.client_messages)

    def acquire(self, name: str, deadline: float) -> tuple[ProxySession, list[ProxySession]]:
        """(the session, to be given back with `release`; sessions that were evicted to make room for it).

        Raises ApiError (503) when the session's other requests are not done by `deadline`.
        """
        turn = object()
        with self._changed:
            while True:
                session, evicted = self._find(name)
                session.queue.append(turn)
                while session.queue[0] is not turn and not session.ended:
                    if (left := deadline - self._clock()) <= 0:
                        session.queue.remove(turn)
                        raise busy("another request of this session is still being answered", status=503, seconds=5)
                    self._changed.wait(left)
                if not session.ended:
                    session.last_used = self._clock()
                    return session, evicted

    def release(self, session: ProxySession) -> None:
        """The request is answered (or will never be); the next one of the session may go on."""
        with self._changed:
            session.queue.popleft()
            session.last_used = self._clock()
            # nothing was ever said in it: its only requests were refused or dropped
            if not session.queue and not session.history.client_messages:
                self._remove(session)
            self._changed.notify_all()

    def end(self, session: ProxySession) -> None:
        """The session is over; requests that wait for it begin a new one."""
        with self._changed:
            self._remove(session)
            self._changed.notify_all()

    def new_key(self, session: ProxySession) -> str:
        """The key under which the next part of a session goes on."""
        with self._changed:
            return self._key(session.name)

    def expired(self) -> list[ProxySession]:
        """Remove and return the sessions that were idle for too long."""
        with self._changed:
            late = self._clock() - self._idle
            evicted = [session for session in self._open.values() if not session.queue and session.last_used < late]
            for session in evicted:
                self._remove(session)
            return evicted

    def all(self) -> list[ProxySession]:
        """The open sessions."""
        with self._changed:
            return list(self._open.values())

    def restore(self, sessions: Sequence[ProxySession]) -> None:
        """Put back sessions that were open when the last process ended."""
        with self._changed:
            for session in sessions:
                session.last_used = self._clock()
                self._open[session.name] = session
                if session.owner is not None and session.history.client_messages:
                    self._match.note(session.name, session.owner, session.history.client_messages)

    def _find(self, name: str) -> tuple[ProxySession, list[ProxySession]]:
        session = self._open.get(name)
        evicted: list[ProxySession] = []
        if session is None:
            if len(self._open) >= self._limit:
                idle = [other for other in self._open.values() if not other.queue]
                if not idle:
                    raise busy(f"{len(self._open)} sessions are open and all of them busy; ask again later")
                evicted = [min(idle, key=lambda other: other.last_used)]
                self._remove(evicted[0])
            session = self._open[name] = ProxySession(key=self._key(name), name=name, last_used=self._clock())
        return session, evicted

    def _remove(self, session: ProxySession) -> None:
        session.ended = True
        # a new session may have the name by now
        if self._open.get(session.name) is session:
            del self._open[session.name]
            self._match.forget(session.name)

    def _key(self, name: str) -> str:
        self.serial += 1
        return f"{name}-{self.serial}"


def session_name(session_id: str) -> str:
    """A hash of the client's session id: it does not reveal the id, and is safe in file names."""
    return hashlib.sha256(session_id.encode("utf-8", "surrogatepass")).hexdigest()[:32]
