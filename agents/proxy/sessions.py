"""The sessions of a proxy: their turns, which one a request belongs to, and which turn feedback is about.

1. `HistoryMatch`: finds the session of a conversation without an id, by what was said in it.
2. `ProxySession`, `SessionTurn`: one session.
3. `SessionTable`: all open sessions; requests of one session are answered one at a time.
4. `HeardFeedback`: finds the turn that a user's feedback is about.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from turngym.agents.proxy.api_errors import ApiError, busy
from turngym.agents.proxy.session_tokens import ChatHistory, ChatListRenderer
from turngym.agents.proxy.turn_records import ChatMessage, TurnRecord, as_observation, common_prefix
from turngym.agents.rendering.answer_messages import Message
from turngym.core.episode import Episode, Span

NO_IDS = np.empty(0, np.int32)


class HistoryMatch:
    """Finds the session of a conversation by its messages. Not safe for several threads: its owner has a lock.

    A request continues a session if it repeats all of its messages and goes on. White space around an answer does not
    count, nor do thoughts that the client leaves out of it. Where another session has said the same up to there, it is
    told by the ids of the answer's calls, or not at all: nobody's turn is ever added to a conversation that may be
    another client's. Conversations of different owners never match.
    """

    def __init__(self) -> None:
        self._passing: dict[str, set[str]] = {}
        """Maps the digest of a conversation up to one of its answers to the sessions that have said this."""
        self._said: dict[str, tuple[list[str], Sequence[ChatMessage]]] = {}
        """Digests and messages of each session."""

    def find(self, owner: str, messages: Sequence[ChatMessage]) -> tuple[str | None, bool]:
        """(The session of `owner` that `messages` continue, or None; whether that could be told.)"""
        # without the last message: the whole list asks again for an answer, which may have been another client's
        for length, digest in reversed(_digests(owner, messages[:-1])):
            names = [name for name in self._passing.get(digest, ()) if _repeats(messages[:length], self._said[name][1])]
            if len(names) > 1:
                # ids of calls were made by this server
                ids = [call.id for call in messages[length - 1].tool_calls]
                calls_of = {name: self._said[name][1][length - 1].tool_calls for name in names}
                by_id = [name for name in names if ids and ids == [call.id for call in calls_of[name]]]
                names = by_id if len(by_id) == 1 else names
            # one that has gone on from here is not continued: whoever it belongs to began another branch
            ended = [name for name in names if len(self._said[name][1]) == length]
            if ended:
                return (ended[0], True) if len(names) == 1 else (None, False)
            if names:
                return None, True
        return None, True

    def note(self, name: str, owner: str, messages: Sequence[ChatMessage]) -> None:
        """Remember the conversation of the session `name`, the last answer included."""
        self.forget(name)
        digests = [digest for _, digest in _digests(owner, messages)]
        self._said[name] = digests, tuple(messages)
        for digest in digests:
            self._passing.setdefault(digest, set()).add(name)

    def forget(self, name: str) -> None:
        """Remove the session `name`."""
        digests, _ = self._said.pop(name, ([], ()))
        for digest in digests:
            self._passing[digest].discard(name)
            if not self._passing[digest]:
                del self._passing[digest]


def _digests(owner: str, messages: Sequence[ChatMessage]) -> list[tuple[int, str]]:
    """(Number of messages, hash) of every beginning of the conversation that ends with an answer."""
    running = hashlib.sha256(json.dumps(owner).encode())
    digests = []
    for number, message in enumerate(messages, start=1):
        running.update(json.dumps(message.spoken, ensure_ascii=True).encode() + b"\n")
        if message.role == "assistant":
            digests.append((number, running.hexdigest()))
    return digests


def _repeats(messages: Sequence[ChatMessage], said: Sequence[ChatMessage]) -> bool:
    """Whether a request that begins with `messages` repeats the beginning of what was said."""
    return len(messages) <= len(said) and all(map(ChatMessage.repeats, messages, said))


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionTurn:
    """A main turn as an episode will hold it."""

    observation: str
    role: str
    """Role of the last message that the observation is made of."""
    answers_last: bool
    """Whether the request brought something new behind the last answer; if not, that answer has no next state."""
    record: TurnRecord
    """The turn's record without its ids, which are in the session's history."""
    segment: int
    prompt_span: Span
    response_span: Span


@dataclass(slots=True, eq=False)
class ProxySession:
    """One open chat session. Its `key` is `name`, a dash, and a serial number."""

    key: str
    name: str
    """Name that `session_name` makes; the id that the client gave is kept nowhere."""
    history: ChatHistory = field(default_factory=ChatHistory)
    turns: list[SessionTurn] = field(default_factory=list)
    before: tuple[Message, ...] = ()
    """Messages before the first turn, as the template got them, if an earlier part was handed on."""
    owner: str | None = None
    """Owner, as in `TurnRecord`; set for a session that is found by its history."""
    first: int = 0
    """Number of turns of the conversation that were handed on before, under other keys."""
    superseded: int = 0
    """Number of turns whose answer the client requested again."""
    queue: deque[object] = field(default_factory=deque)
    """Requests of this session: the first is being answered, the others wait."""
    last_used: float = 0.0
    ended: bool = False

    def apply(self, renderer: ChatListRenderer, record: TurnRecord, text: str | None = None) -> None:
        """Append a finished main turn, live or from a record."""
        self.owner = record.owner
        count = len(self.history.client_messages)
        follows = bool(record.messages) and (not count or record.kept == count)
        new = record.messages if follows else (*self.history.client_messages[: record.kept], *record.messages)[-1:]
        forks = self.history.forks(record.kept, record.messages)
        prompt_span, response_span = renderer.apply(self.history, record, text)
        # a retry replaces the last turn; its observation and whether it answers are those of the first attempt
        former = self.turns.pop() if record.retry and self.turns else None
        self.superseded += former is not None
        system = not self.turns and len(new) > 1 and new[0].role == "system"
        self.turns.append(
            SessionTurn(
                observation=as_observation(new[1:] if system else new) if former is None else former.observation,
                role=new[-1].role,
                answers_last=(bool(record.messages) and not forks) or (former is not None and former.answers_last),
                record=replace(record, prompt_ids=NO_IDS, ids=NO_IDS),
                segment=len(self.history.segments) - 1,
                prompt_span=prompt_span,
                response_span=response_span,
            )
        )

    def begin_part(self, key: str) -> None:
        """Go on under a new key without turns; all messages so far are the prompt of the next turn."""
        self.first += len(self.turns)
        self.key, self.turns, self.superseded = key, [], 0
        self.before = tuple(self.history.template_messages)
        self.history.segments, self.history.text = [], None

    def continued_by(self, messages: Sequence[ChatMessage]) -> bool:
        """Whether a request without an id goes on where this session, if it has begun, stands."""
        earlier = self.history.client_messages
        return len(earlier) < len(messages) and _repeats(messages[: len(earlier)], earlier)

    def new_messages(self, messages: Sequence[ChatMessage]) -> tuple[ChatMessage, ...]:
        """The request's messages after the last answer; if the client rewrote earlier ones, only its last message; none
        if they answer an earlier one."""
        count, common = len(self.history.client_messages), common_prefix(self.history.client_messages, messages)
        new = tuple(messages[common:])
        return new if common == count else () if self.history.forks(common, new) else new[-1:]

    @property
    def answers(self) -> int:
        """Answers drawn under this key, superseded ones included. Each has a random stream of its own."""
        return len(self.turns) + self.superseded

    @property
    def system(self) -> str:
        first = self.history.client_messages[:1]
        return first[0].content if first and first[0].role == "system" else ""


class SessionTable:
    """All open sessions. Requests of one session are answered one at a time, in the order in which they came."""

    def __init__(
        self,
        *,
        idle: float,
        limit: int,
        share: int,
        clock: Callable[[], float],
        serial: int,
    ) -> None:
        """Begins without sessions.

        Args:
            limit: most open sessions; for a new one the one that is idle longest is evicted.
            share: most sessions of one client among the `limit`.
            serial: highest number of a session in the records; new ones continue from there.
        """
        self._idle, self._limit, self._share, self._clock = idle, limit, share, clock
        self._open: dict[str, ProxySession] = {}
        self._changed = threading.Condition()
        self._match = HistoryMatch()
        self._named = 0
        self.serial = serial
        """How many sessions have begun."""

    def __len__(self) -> int:
        return len(self._open)

    def name_of(self, client: str, owner: str, messages: Sequence[ChatMessage]) -> tuple[str, bool]:
        """(The name of the session of `owner` that a conversation without an id continues, or of a new one; whether
        it could be told from those of others.)"""
        with self._changed:
            name, is_sure = self._match.find(owner, messages)
            return name or self.new_name(client), is_sure

    def new_name(self, client: str) -> str:
        """The name of a new session without an id."""
        # the serial number is in the records, so that no later process gives a name again; of several that begin at the
        # same time each has its own
        with self._changed:
            self._named += 1
            return session_name(client, f"{self.serial + 1}/{self._named}", kind="unnamed")

    def note(self, session: ProxySession) -> None:
        """Make a session with an owner findable by its history, to which a turn was added."""
        if session.owner is not None:
            with self._changed:
                self._match.note(session.name, session.owner, session.history.client_messages)

    def holds(self, name: str) -> bool:
        """Whether the session `name` is open."""
        with self._changed:
            return name in self._open

    def acquire(self, name: str, deadline: float) -> tuple[ProxySession, list[ProxySession]]:
        """(The session, to be given back with `release`; sessions that were evicted to make room for it.)

        A client that has its share makes room with sessions of its own.

        Raises ApiError (503) when the session's other requests are not done by `deadline`.
        """
        turn = object()
        evicted: list[ProxySession] = []
        with self._changed:
            while True:
                session = self._open.get(name)
                if session is None:
                    own = [other for other in self._open.values() if other.name[:CLIENT] == name[:CLIENT]]
                    if len(own) >= self._share or len(self._open) >= self._limit:
                        candidates = own if len(own) >= self._share else list(self._open.values())
                        idle = [other for other in candidates if not other.queue]
                        if not idle:
                            raise busy(f"{len(candidates)} sessions are open and all of them busy; ask again later")
                        evicted.append(min(idle, key=lambda other: other.last_used))
                        self._remove(evicted[-1])
                    session = ProxySession(key=self.new_key(name), name=name, last_used=self._clock())
                    self._open[name] = session
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
        """Let the session's next request go on: this one is answered, or never will be."""
        with self._changed:
            session.queue.popleft()
            session.last_used = self._clock()
            # its only requests were refused or dropped
            if not session.queue and not session.history.client_messages:
                self._remove(session)
            self._changed.notify_all()

    def end(self, session: ProxySession) -> None:
        """End the session; requests that wait for it begin a new one."""
        with self._changed:
            self._remove(session)
            self._changed.notify_all()

    def new_key(self, name: str) -> str:
        """The key of a new session, or of the next part of one."""
        with self._changed:
            self.serial += 1
            return f"{name}-{self.serial}"

    def expired(self) -> list[ProxySession]:
        """Remove and return the sessions that were idle for too long."""
        with self._changed:
            late = self._clock() - self._idle
            expired = [session for session in self._open.values() if not session.queue and session.last_used < late]
            for session in expired:
                self._remove(session)
            return expired

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
                self.note(session)

    def _remove(self, session: ProxySession) -> None:
        session.ended = True
        # a new session may have the name by now
        if self._open.get(session.name) is session:
            del self._open[session.name]
            self._match.forget(session.name)


CLIENT = 16
"""Letters of a session's name that stand for its client: so many that no two clients share them."""


def session_name(client: str, session_id: str, *, kind: Literal["named", "unnamed", "owner"] = "named") -> str:
    """32 hex digits that stand for what a client calls a session, and for the client: they reveal neither.

    Clients may call a session what they like. So the names that this server thinks of are of another `kind`.
    """
    return _hash(f"client/{client}")[:CLIENT] + _hash(f"{kind}/{session_id}")[: 32 - CLIENT]


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


REMEMBERED = 10_000
"""Sessions and answers of all clients that feedback can name; each client has its part, of which the oldest are
forgotten."""
FeedbackStatus = Literal["counted", "late", "recorded"]
"""What becomes of feedback. `counted`: it counts when its turn is trained on; `late`: the turn was trained on, or left
out, already; `recorded`: nothing learns from scores here."""
Place = tuple[str, int]
"""Key of a session, and the index of a turn in it."""
SUPERSEDED = -1
"""Stands for the index of a turn that another answer has replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feedback:
    """What a user thinks of one turn."""

    score: int
    """1 or -1."""
    text: str = ""
    """The user's comment."""


MOST_CHANGES = 20
"""Times that a user may change a mind about one turn: each is a record on disk."""


class _Remembered:
    """What is remembered of one client. Its `limit` holds for each table."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.parts: OrderedDict[str, list[tuple[int, str, int]]] = OrderedDict()
        self.answers: OrderedDict[str, Place] = OrderedDict()
        self.said: OrderedDict[Place, Feedback] = OrderedDict()
        self.changes: OrderedDict[Place, int] = OrderedDict()

    def keep(self, table: OrderedDict[Any, Any], key: Any, value: Any) -> None:
        table[key] = value
        if len(table) > self.limit:
            table.popitem(last=False)

    def note(self, name: str, first: int, key: str, turns: int) -> None:
        parts = [part for part in self.parts.pop(name, []) if part[0] < first and part[1] != key]
        self.keep(self.parts, name, [*parts, (first, key, turns)])


class HeardFeedback:
    """Finds the turn that feedback is about, and remembers the feedback. Safe for several threads.

    Turns are counted from the start of the client's conversation, even if it was handed on in parts.
    """

    def __init__(self, limit: int) -> None:
        """`limit`: sessions and answers of one client that are remembered."""
        self.tell: Callable[[Place, Feedback | None, bool], FeedbackStatus] = lambda *said: "recorded"
        """Gets the turn, its feedback (None takes it back, because the turn was answered anew), and whether the session
        is open. Set by whoever learns from it."""
        self._lock = threading.Lock()
        self._clients: defaultdict[str, _Remembered] = defaultdict(lambda: _Remembered(limit))

    def _of(self, name: str) -> _Remembered:
        """What is remembered of the client of a session, by the session's name or key."""
        return self._clients[name[:CLIENT]]

    def restore(self, said: Mapping[Place, Feedback], begun: Sequence[ProxySession], ended: Sequence[Episode]) -> None:
        """Take over an earlier process's feedback, and its sessions: those that go on, and those that have ended."""
        with self._lock:
            for place, feedback in said.items():
                remembered = self._of(place[0])
                remembered.keep(remembered.said, place, feedback)
            for episode in ended:
                key = episode.task.task_id
                self._of(key).note(key.rpartition("-")[0], episode.meta["first"], key, len(episode.turns))
            for session in begun:
                if session.turns:
                    self._of(session.name).note(session.name, session.first, session.key, len(session.turns))

    def note(self, session: ProxySession, answer: str = "", *, again: bool = False) -> None:
        """Note a session's new turn, which the client knows as `answer`; `again`: it replaces the turn before."""
        place = session.key, len(session.turns) - 1
        with self._lock:
            remembered = self._of(session.name)
            remembered.note(session.name, session.first, session.key, len(session.turns))
            if again:
                for answer_id in [answer_id for answer_id, answered in remembered.answers.items() if answered == place]:
                    remembered.answers[answer_id] = place[0], SUPERSEDED
            if answer:
                remembered.keep(remembered.answers, answer, place)
            taken_back = again and remembered.said.pop(place, None) is not None
        if taken_back:
            self.tell(place, None, True)

    def place(self, client: str, session_id: str | None, turn: int | None, answer: str | None) -> Place | None:
        """The turn of its own that a client names by session and number (None: the last), or by the id of its answer.

        None for an answer that the client asked for again: another one stands in its place.

        Raises ApiError (404) for one that is not known.

        Args:
            answer: `InflightRequest.answer_id`; with it the session and the turn are not looked at.
        """
        with self._lock:
            name = session_name(client, session_id or "")
            remembered = self._of(name)
            parts, answered = remembered.parts.get(name), remembered.answers.get(answer or "")
        if answered is not None:
            return None if answered[1] == SUPERSEDED else answered
        if answer is not None:
            text = f"there was no main turn {answer!r} since this server started; name session_id and turn"
            raise ApiError(404, text, param="answer", code="not_found")
        if not parts:
            raise ApiError(404, "no session of this name has had an answer here", param="session_id", code="not_found")
        last = parts[-1][0] + parts[-1][2] - 1
        wanted = last if turn is None else turn
        for first, key, turns in parts:
            if first <= wanted < first + turns:
                return key, wanted - first
        raise ApiError(404, f"turn is {wanted}; the session has turns 0 to {last}", param="turn", code="not_found")

    def say(self, place: Place, feedback: Feedback, *, is_open: bool, write: Callable[[Any], object]) -> FeedbackStatus:
        """Take in feedback. The same feedback twice changes nothing; another one replaces it.

        Raises ApiError (429) for more than `MOST_CHANGES` changes.
        """
        with self._lock:
            remembered = self._of(place[0])
            if remembered.said.get(place) != feedback:
                if remembered.changes.get(place, 0) >= MOST_CHANGES:
                    raise busy(f"this turn has had {MOST_CHANGES} different feedbacks, which is all that are taken")
                # written before it counts, so that a restarted server knows it, too
                record = {"kind": "feedback", "session": place[0], "turn": place[1]}
                write({**record, "score": feedback.score, "text": feedback.text})
                remembered.keep(remembered.said, place, feedback)
                remembered.keep(remembered.changes, place, remembered.changes.get(place, 0) + 1)
        return self.tell(place, feedback, is_open)
