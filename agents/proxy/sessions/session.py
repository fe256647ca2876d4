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

from turngym.agents.proxy.conversation.chat import ChatHistory, ChatRenderer
from turngym.agents.proxy.conversation.messages import ChatMessage, Tools, as_observation, shared
from turngym.agents.proxy.errors import busy
from turngym.agents.proxy.sessions.records import TurnRecord
from turngym.agents.rendering.chat_template import Message
from turngym.envs.episode import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionTurn:
    """A main turn as an episode will hold it."""

    observation: str
    role: str
    """Of the last message that the observation is made of."""
    heard: bool
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
    temperature: float


@dataclass(slots=True, eq=False)
class ProxySession:
    """One conversation under way, known by its `key`: `name`, a dash, and a number."""

    key: str
    name: str
    """128 bits of the SHA-256 of the client's id, in hex; the id itself is kept nowhere."""
    thread: ChatHistory = field(default_factory=ChatHistory)
    turns: list[SessionTurn] = field(default_factory=list)
    before: tuple[Message, ...] = ()
    """What had been said before the first turn, as the template got it, where an earlier part was handed on."""
    superseded: int = 0
    """Turns whose answer the client asked for again."""
    line: deque[object] = field(default_factory=deque)
    """Requests of this session: the first is being answered, the others wait."""
    touched: float = 0.0
    ended: bool = False

    def apply(self, renderer: ChatRenderer, record: TurnRecord, text: str | None = None) -> None:
        """Take in a finished main turn, live or from a record."""
        known = len(self.thread.shown)
        follows = not known or record.kept == known
        heard = record.messages if follows else (*self.thread.shown[: record.kept], *record.messages)[-1:]
        prompt_span, response_span = renderer.apply(self.thread, record, text)
        if record.retry and self.turns:
            self.turns.pop()
            self.superseded += 1
        system = not self.turns and len(heard) > 1 and heard[0].role == "system"
        self.turns.append(
            SessionTurn(
                observation=as_observation(heard[1:] if system else heard),
                role=heard[-1].role,
                heard=bool(record.messages),
                messages=record.messages,
                kept=record.kept,
                tools=record.tools,
                text=record.text,
                segment=len(self.thread.segments) - 1,
                prompt_span=prompt_span,
                response_span=response_span,
                logprobs=record.logprobs,
                finish=record.finish,
                version=record.version,
                temperature=record.temperature,
            )
        )

    def begin_part(self, key: str) -> None:
        """Go on under a new key without turns: what was said so far is the prompt of what follows."""
        self.key, self.turns, self.superseded = key, [], 0
        self.before = tuple(self.thread.given)
        self.thread.segments, self.thread.text = [], None

    def heard_in(self, messages: Sequence[ChatMessage]) -> tuple[ChatMessage, ...]:
        """What a request brings that came after the last answer; where the past was rewritten, its last message."""
        known, common = len(self.thread.shown), shared(self.thread.shown, messages)
        return tuple(messages[common:] if common == known else messages[common:][-1:])

    @property
    def system(self) -> str:
        first = self.thread.shown[:1]
        return first[0].content if first and first[0].role == "system" else ""


class SessionTable:
    """All open sessions. Of one session, one request is answered at a time, in the order they came."""

    def __init__(
        self, *, idle: float, limit: int, clock: Callable[[], float] = time.monotonic, serial: int = 0
    ) -> None:
        self._idle, self._limit, self._clock = idle, limit, clock
        self._open: dict[str, ProxySession] = {}
        self._changed = threading.Condition()
        self.serial = serial
        """How many sessions have begun."""

    def __len__(self) -> int:
        return len(self._open)

    def enter(self, session_id: str, deadline: float) -> tuple[ProxySession, list[ProxySession]]:
        """(the session, to be given back with `leave`; sessions that had to go to make room for it).

        Raises ApiError (503) when the session's other requests are not done by `deadline`.
        """
        name, me = session_name(session_id), object()
        with self._changed:
            while True:
                session, gone = self._find(name)
                session.line.append(me)
                while session.line[0] is not me and not session.ended:
                    if (left := deadline - self._clock()) <= 0:
                        session.line.remove(me)
                        raise busy("another request of this session is still being answered", status=503, seconds=5)
                    self._changed.wait(left)
                if not session.ended:
                    session.touched = self._clock()
                    return session, gone

    def leave(self, session: ProxySession) -> None:
        """The request is answered (or will never be); the next one of the session may go on."""
        with self._changed:
            session.line.popleft()
            session.touched = self._clock()
            if not session.line and not session.thread.shown:
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
            gone = [session for session in self._open.values() if not session.line and session.touched < late]
            for session in gone:
                self._remove(session)
            return gone

    def restore(self, sessions: Sequence[ProxySession]) -> None:
        """Put back sessions that were open when the last process ended."""
        with self._changed:
            for session in sessions:
                session.touched = self._clock()
                self._open[session.name] = session

    def _find(self, name: str) -> tuple[ProxySession, list[ProxySession]]:
        session = self._open.get(name)
        gone: list[ProxySession] = []
        if session is None:
            if len(self._open) >= self._limit:
                idle = [other for other in self._open.values() if not other.line]
                if not idle:
                    raise busy(f"{len(self._open)} sessions are open and all of them busy; ask again later")
                gone = [min(idle, key=lambda other: other.touched)]
                self._remove(gone[0])
            session = self._open[name] = ProxySession(key=self._key(name), name=name, touched=self._clock())
        return session, gone

    def _remove(self, session: ProxySession) -> None:
        session.ended = True
        if self._open.get(session.name) is session:
            del self._open[session.name]

    def _key(self, name: str) -> str:
        self.serial += 1
        return f"{name}-{self.serial}"


def session_name(session_id: str) -> str:
    """What a session is called here: nothing of the client's id can be read from it, and it is safe in file names."""
    return hashlib.sha256(session_id.encode("utf-8", "surrogatepass")).hexdigest()[:32]
