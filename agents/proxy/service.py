"""The proxy's service: for each chat request it finds the session, generates, records and answers."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from turngym.agents.proxy.conversation.chat import ChatHistory, ChatListRenderer
from turngym.agents.proxy.conversation.messages import ChatMessage
from turngym.agents.proxy.engine_queue import STOPPING
from turngym.agents.proxy.engine_request import EngineRequests, engine_queue
from turngym.agents.proxy.errors import busy
from turngym.agents.proxy.http.request import ChatRequest
from turngym.agents.proxy.inflight import Finished, InflightRequest, answer_id
from turngym.agents.proxy.request_counts import RequestCounts
from turngym.agents.proxy.session_ending import SessionEnding
from turngym.agents.proxy.sessions.episodes import episode_of
from turngym.agents.proxy.sessions.feedback import Feedback, HeardFeedback, Outcome
from turngym.agents.proxy.sessions.records import Recorder
from turngym.agents.proxy.sessions.restore import restore, usage_record
from turngym.agents.proxy.sessions.session import ProxySession, SessionTable, session_name
from turngym.agents.proxy.settings import ProxySettings
from turngym.agents.proxy.turn_record import owner_of, turn_record
from turngym.envs.episode import Episode
from turngym.envs.protocols import Generation, Policy


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
        on_feedback: gets what users say of turns, as `HeardFeedback` tells it.
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
        on_feedback: Callable[[str, int, Feedback | None, bool], Outcome] | None = None,
        on_close: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings or ProxySettings()
        self.renderer, self.max_context, self.temperature = renderer, max_context, temperature
        self.name = self.settings.name or "turngym"
        self.stopping = False
        self.run_id = secrets.token_hex(4)
        """Makes the ids of answers unique among servers; nothing depends on it."""
        self.tally = RequestCounts()
        self.counts = self.tally.counts
        self._seed, self._clock = seed, clock
        self._on_turn, self._on_close = on_turn, on_close
        self._numbers = count(1)
        self._heard = HeardFeedback(on_feedback)
        self._asks = EngineRequests(
            renderer=renderer, settings=self.settings, max_context=max_context, temperature=temperature, seed=seed
        )
        self.engine = engine_queue(policy, self.settings, renderer)
        self.recorder = Recorder(folder)
        self._ending = SessionEnding(
            recorder=self.recorder, engine=self.engine, tally=self.tally, temperature=temperature, tell=on_episode
        )
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
        self.feedback_before = past.feedback
        """What users said of them."""
        self._heard.restore(past.feedback, past.open, past.ended)

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
                self._ending.split(session, self.sessions.new_key(session), request.messages)
            history = session.history if session is not None and request.main else ChatHistory()
            prompt = self.renderer.prompt(history, request.messages, request.tools)
            number = next(self._numbers)
            asked = self._asks.make(request, prompt, session, number)
            pending = self.engine.submit(asked, streaming=request.stream)
        except BaseException:
            self.closed(session, "refused")
            raise
        self.tally.note_ignored(request.ignored)
        salt = f"{self._seed}/{asked.session}/{len(prompt.ids)}"
        return InflightRequest(self, request, session, prompt, pending, number, deadline, salt)

    def end(self, session_id: str, final: tuple[ChatMessage, ...] = ()) -> int:
        """The client says that a session is over; `final` came after its last answer. Its number of turns."""
        self._admit()
        session = None
        try:
            session = self._enter(session_name(session_id), self.deadline())
            turns = len(session.turns)
            self._ending.finish(session, "done", session.new_messages(final) or final)
            self.sessions.end(session)
        finally:
            self.closed(session, "")
        return turns

    def feedback(
        self, feedback: Feedback, *, session_id: str | None = None, turn: int | None = None, answer: str | None = None
    ) -> Outcome:
        """What a user thinks of one turn, named by session and number (None: the last) or by the id of its answer.

        Returns what becomes of it. Raises ApiError: 404 for a turn that is not known.
        """
        place = self._heard.place(session_id, turn, answer)
        is_open = any(session.key == place[0] for session in self.sessions.all())
        outcome = self._heard.say(place, feedback, is_open=is_open, write=self.recorder.write)
        self.tally.add(f"feedback_{outcome}")
        return outcome

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
            self._ending.finish(session, "idle")
        return len(gone)

    def health(self) -> dict[str, Any]:
        counts, shown = self.tally.as_json()
        return {
            "status": "stopping" if self.stopping else "updating" if self.engine.paused else "ok",
            "model": self.name,
            "turns": {"main": counts["main"], "side": counts["side"]},
            "sessions": {"open": len(self.sessions), "ended": counts["sessions_ended"]},
            "underway": counts["underway"],
            "engine": self.engine.as_json(),
            **shown,
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
        self.tally.note_unnamed(request.client, request.main)
        return self.sessions.name_of(owner_of(request.user), request.messages) if request.main else None

    def _enter(self, name: str, deadline: float) -> ProxySession:
        session, gone = self.sessions.acquire(name, deadline)
        for other in gone:
            self._ending.finish(other, "room")
        return session

    def _admit(self) -> None:
        if self.stopping:
            raise busy(STOPPING, status=503, seconds=5)
        self.tally.begin(self.settings.max_waiting)

    def record_turn(self, inflight: InflightRequest, generation: Generation) -> Finished:
        """Write down a finished turn, then let its session go on. Called once per inflight request."""
        request, prompt, session = inflight.request, inflight.prompt, inflight.session
        record = turn_record(inflight, generation)
        # before anything else: no client has an answer that a restarted server would not know
        record = replace(record, at=self.recorder.write(record.as_json()))
        if session is not None and record.main:
            if prompt.opens and session.history.segments:
                self.engine.release(f"{session.key}/{len(session.history.segments) - 1}")
            session.apply(self.renderer, record, prompt.text)
            self.sessions.note(session)
            self._heard.note(session, answer_id(self.run_id, inflight.number), again=record.retry)
            if self._on_turn is not None and len(session.turns) > 1:
                self._on_turn(episode_of(session, "open", temperature=self.temperature))
        else:
            self.engine.release(inflight.pending.request.session)
        self.tally.add("main" if record.main else "side")
        if request.done and session is not None:
            self._ending.finish(session, "done")
            self.sessions.end(session)
        return Finished(
            reply=record.reply,
            finish="tool_calls" if record.reply.tool_calls else generation.finish,
            record=record,
            prompt_tokens=len(prompt.ids),
            number=inflight.number,
        )

    def release_engine(self, session: str) -> None:
        """Let the engine forget what it holds for a session of its own naming."""
        self.engine.release(session)

    def count(self, what: str) -> None:
        """One more of what /healthz tells."""
        self.tally.add(what)

    def closed(self, session: ProxySession | None, dropped: str) -> None:
        """A request is over; `dropped` says why it was not answered, if it was not."""
        self.tally.end(dropped)
        if session is not None:
            self.sessions.release(session)
