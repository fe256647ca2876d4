"""The proxy's service: for each chat request it finds the session, generates, records and answers."""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from turngym.agents.agent import task_number
from turngym.agents.proxy.conversation.answer import reply_of
from turngym.agents.proxy.conversation.chat import ChatHistory, ChatListRenderer, Prompt
from turngym.agents.proxy.conversation.messages import ChatMessage
from turngym.agents.proxy.engine_queue import STOPPING, EngineQueue
from turngym.agents.proxy.errors import busy, invalid
from turngym.agents.proxy.http.request import ChatRequest
from turngym.agents.proxy.inflight import Finished, InflightRequest
from turngym.agents.proxy.sessions.episodes import episode_of
from turngym.agents.proxy.sessions.records import Recorder, TurnRecord
from turngym.agents.proxy.sessions.restore import restore, usage_record
from turngym.agents.proxy.sessions.session import ProxySession, SessionTable, session_name
from turngym.agents.proxy.settings import ProxySettings
from turngym.agents.sglang.client.stop_strings import StopFinder
from turngym.envs.episode import Episode
from turngym.envs.protocols import GenerateRequest, Generation, Policy, Sampling

MAX_TOKENS = 512
CLIENTS = 100
"""Most clients that are counted by name."""


class ProxyService:
    """Chat sessions over one policy: what the HTTP application calls.

    Args:
        folder: where the records are; sessions that are open in them go on.
        max_context: most ids of prompt and answer together.
        temperature: of main turns, whatever clients ask for: the trainer's own, so that log-probabilities as sampled
            mean the same to it. None: what the client asks for, as side turns always get.
        resumed_from: step of the checkpoint that training goes on from: what later steps used is unused again.
        on_episode: gets every session that ended with at least one main turn.
        on_turn: gets every session, as it is by then, when a turn has been added behind another one.
        on_close: called when nothing is generated any more; it ends the policy.

    Raises:
        ProxyError: records of a newer version.
    """

    def __init__(
        self,
        policy: Policy,
        renderer: ChatListRenderer,
        folder: Path,
        settings: ProxySettings | None = None,
        *,
        max_context: int,
        temperature: float | None = None,
        seed: int = 0,
        resumed_from: int | None = None,
        on_episode: Callable[[Episode], None] | None = None,
        on_turn: Callable[[Episode], None] | None = None,
        on_close: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings or ProxySettings()
        self.renderer, self.max_context, self.temperature = renderer, max_context, temperature
        self.name = self.settings.name or "turngym"
        self.stopping = False
        self.run_id = secrets.token_hex(4)
        """Makes the ids of answers unique among servers; nothing depends on it."""
        self.counts: Counter[str] = Counter()
        self.ignored: Counter[str] = Counter()
        """Fields of requests that were not honored."""
        self.unnamed: Counter[str] = Counter()
        """Requests that named no session, by what their client calls itself."""
        self.notice: Callable[[str], None] = lambda text: None
        """Gets lines for the log of the server."""
        self._seed, self._clock = seed, clock
        self._on_episode, self._on_turn, self._on_close = on_episode, on_turn, on_close
        self._numbers = count(1)
        self._lock = threading.Lock()
        self.engine = EngineQueue(
            policy,
            max_batch=self.settings.max_batch,
            max_waiting=self.settings.max_waiting,
            window=self.settings.window_ms / 1000,
            stops=StopFinder(renderer.tokenizer),
        )
        self.recorder = Recorder(folder)
        # before restore(), which reads it
        if resumed_from is not None:
            self.recorder.write(usage_record("resumed", resumed_from))
        past = restore(folder, renderer, want_ended=on_episode is not None, temperature=temperature)
        self.sessions = SessionTable(
            idle=self.settings.idle, limit=self.settings.max_sessions, clock=clock, serial=past.serial
        )
        self.sessions.restore(past.open)
        self.unused = past.ended
        """Sessions that ended before, as far as no trainer has used them."""
        self.votes = past.votes
        """What was judged before of these, and of those that go on."""

    def begin(self, request: ChatRequest) -> InflightRequest:
        """Accept a request: lock its session and queue its prompt.

        Raises:
            ApiError: 400 for what can never be answered, 429 and 503 for what cannot be answered now.
        """
        self._admit()
        deadline, session = self.deadline(), None
        try:
            if (name := self._session_name(request)) is not None:
                session = self._enter(name, deadline)
            if session is not None and request.main and len(session.turns) >= self.settings.session_turns:
                self._split(session, request)
            history = session.history if session is not None and request.main else ChatHistory()
            prompt = self.renderer.prompt(history, request.messages, request.tools)
            number = next(self._numbers)
            asked = self._generate_request(request, prompt, session, number)
            pending = self.engine.submit(asked, streaming=request.stream)
        except BaseException:
            self.closed(session, "refused")
            raise
        with self._lock:
            self.ignored.update(request.ignored)
        salt = f"{self._seed}/{asked.session}/{len(prompt.ids)}"
        return InflightRequest(self, request, session, prompt, pending, number, deadline, salt)

    def end(self, session_id: str, final: tuple[ChatMessage, ...] = ()) -> int:
        """The client says that a session is over; `final` came after its last answer. Its number of turns."""
        self._admit()
        session = None
        try:
            session = self._enter(session_name(session_id), self.deadline())
            turns = len(session.turns)
            self._finish(session, "done", session.new_messages(final) or final)
            self.sessions.end(session)
        finally:
            self.closed(session, "")
        return turns

    def open_episodes(self) -> list[Episode]:
        """Sessions that go on, as they are now. To be called before any request is accepted."""
        found = [session for session in self.sessions.all() if session.turns]
        return [episode_of(session, "open", temperature=self.temperature) for session in found]

    def now(self) -> float:
        """Seconds on the clock that deadlines are set by."""
        return self._clock()

    def deadline(self) -> float:
        """When a request that begins to wait now has waited too long."""
        return self._clock() + self.settings.deadline

    def sweep(self) -> int:
        """End sessions that were idle for too long; how many."""
        gone = self.sessions.expired()
        for session in gone:
            self._finish(session, "idle")
        return len(gone)

    def health(self) -> dict[str, Any]:
        with self._lock:
            counts, ignored, unnamed = dict(self.counts), dict(self.ignored), dict(self.unnamed)
        shown = ("main", "side", "sessions_ended", "underway")
        return {
            "status": "stopping" if self.stopping else "updating" if self.engine.paused else "ok",
            "model": self.name,
            "turns": {"main": counts.get("main", 0), "side": counts.get("side", 0)},
            "sessions": {"open": len(self.sessions), "ended": counts.get("sessions_ended", 0)},
            "underway": counts.get("underway", 0),
            "engine": self.engine.as_json(),
            "ignored": ignored,
            "unnamed": unnamed,
            **{name: value for name, value in sorted(counts.items()) if name not in shown},
        }

    def drain(self) -> None:
        """Accept no further requests; those in flight go on."""
        self.stopping = True

    def close(self) -> None:
        """Answer what waits and close the records; open sessions stay in them for the next start. Twice is fine."""
        self.drain()
        self.engine.close()
        if self._on_close is not None:
            self._on_close()
        self.recorder.close()

    def _session_name(self, request: ChatRequest) -> str | None:
        """The session that a request belongs to; None for a side turn of nobody's."""
        if request.session_id is not None:
            return session_name(request.session_id)
        self._note_unnamed(request)
        return self.sessions.name_of(_owner(request.user), request.messages) if request.main else None

    def _note_unnamed(self, request: ChatRequest) -> None:
        """Count a request that names no session, and say once of each client that it does not."""
        with self._lock:
            # what clients call themselves is theirs to choose: the table must not grow without end
            client = request.client if len(self.unnamed) < CLIENTS else "others"
            self.unnamed[client] += 1
            new = self.unnamed[client] == 1
        if new:
            way = "told apart by their history" if request.main else "answered and not trained on"
            self.notice(f"{client!r} names no session; its conversations are {way}. X-Session-Id names them exactly")

    def _enter(self, name: str, deadline: float) -> ProxySession:
        session, gone = self.sessions.acquire(name, deadline)
        for other in gone:
            self._finish(other, "room")
        return session

    def _admit(self) -> None:
        if self.stopping:
            raise busy(STOPPING, status=503, seconds=5)
        with self._lock:
            if self.counts["underway"] >= self.settings.max_waiting:
                self.counts["turned_away"] += 1
                raise busy(f"{self.settings.max_waiting} requests are under way already; ask again later")
            self.counts["underway"] += 1

    def _generate_request(
        self, request: ChatRequest, prompt: Prompt, session: ProxySession | None, number: int
    ) -> GenerateRequest:
        room = self.max_context - len(prompt.ids)
        if room < 1:
            raise invalid(
                f"the messages are {len(prompt.ids)} tokens; with an answer this model holds {self.max_context}",
                "messages",
                "context_length_exceeded",
            )
        # who names no session may not know that it trains: it gets what it asks for, and that may exclude the turn
        fixed = self.temperature if request.main and request.session_id is not None else None
        sampling = Sampling(
            temperature=request.temperature if fixed is None else fixed,
            max_new_tokens=min(request.max_tokens or self.settings.max_tokens or MAX_TOKENS, room),
            stop_ids=self.renderer.stop_ids,
            stop_text=request.stop,
        )
        if session is None or not request.main:
            # a seed alone decides the draws of a turn without a session, whatever was asked before
            name, stream = f"side/{number}", (self._seed, 0, number if request.seed is None else 0)
        else:
            segment = len(session.history.segments) - (0 if prompt.opens else 1)
            name, stream = f"{session.key}/{segment}", (self._seed, task_number(session.key), session.answers)
        if request.seed is not None:
            # clients may send negative seeds, of which no stream can be made
            seed = request.seed & (2**63 - 1)
            stream = (seed, 0, 0) if request.session_id is None else (seed, *stream[1:])
        return GenerateRequest(session=name, prompt_ids=prompt.ids, sampling=sampling, stream=stream)

    def _split(self, session: ProxySession, request: ChatRequest) -> None:
        """A long session is handed on, and goes on under a new key."""
        key = self.sessions.new_key(session)
        self._finish(session, "part", session.new_messages(request.messages), key)
        session.begin_part(key)

    def _finish(
        self, session: ProxySession, why: str, final: tuple[ChatMessage, ...] = (), following: str = ""
    ) -> None:
        """The end of a session in the records, for the engine and for the trainer."""
        if not session.turns:
            return
        messages = [message.as_json() for message in final]
        self.recorder.write({"kind": "end", "session": session.key, "why": why, "final": messages, "next": following})
        self.engine.release(f"{session.key}/{len(session.history.segments) - 1}")
        with self._lock:
            self.counts["sessions_ended"] += 1
        if self._on_episode is not None:
            self._on_episode(episode_of(session, why, final, temperature=self.temperature))

    def record_turn(self, inflight: InflightRequest, generation: Generation) -> Finished:
        """Write down a finished turn, then let its session go on. Called once per inflight request."""
        request, prompt, session = inflight.request, inflight.prompt, inflight.session
        text, _ = self.renderer.decode(generation.ids)
        reader = inflight.reader()
        reply = reply_of([*reader.feed(text), *reader.end()])
        finish = "tool_calls" if reply.tool_calls else generation.finish
        main = request.main and session is not None
        record = TurnRecord(
            session="" if session is None else session.key,
            main=main,
            kept=prompt.kept,
            messages=prompt.new_messages,
            tools=prompt.tools if session is None or prompt.tools != session.history.tools else None,
            opens=prompt.opens,
            prompt_ids=prompt.added,
            ids=generation.ids,
            logprobs=generation.logprobs,
            reply=reply,
            text=text,
            finish=generation.finish,
            version=generation.policy_version,
            version_spans=generation.version_spans,
            temperature=inflight.pending.request.sampling.temperature,
            retry=prompt.retry,
            owner=_owner(request.user) if main and request.session_id is None else None,
        )
        # before anything else: no client has an answer that a restarted server would not know
        self.recorder.write(record.as_json())
        if session is not None and main:
            if prompt.opens and session.history.segments:
                self.engine.release(f"{session.key}/{len(session.history.segments) - 1}")
            session.apply(self.renderer, record, prompt.text)
            self.sessions.note(session)
            if self._on_turn is not None and len(session.turns) > 1:
                self._on_turn(episode_of(session, "open", temperature=self.temperature))
        else:
            self.engine.release(inflight.pending.request.session)
        with self._lock:
            self.counts["main" if main else "side"] += 1
        if request.done and session is not None:
            self._finish(session, "done")
            self.sessions.end(session)
        return Finished(
            reply=reply, finish=finish, record=record, prompt_tokens=len(prompt.ids), number=inflight.number
        )

    def release_engine(self, session: str) -> None:
        """Let the engine forget what it holds for a session of its own naming."""
        self.engine.release(session)

    def count(self, what: str) -> None:
        """One more of what /healthz tells."""
        with self._lock:
            self.counts[what] += 1

    def closed(self, session: ProxySession | None, dropped: str) -> None:
        """A request is over; `dropped` says why it was not answered, if it was not."""
        with self._lock:
            self.counts["underway"] -= 1
            if dropped:
                self.counts[dropped] += 1
        if session is not None:
            self.sessions.release(session)


def _owner(user: str) -> str:
    """A hash of whom the conversations belong to; "" for nobody."""
    return session_name(f"user/{user}") if user else ""
