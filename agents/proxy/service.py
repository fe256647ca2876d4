"""What happens to a chat request: its session is found, an answer generated, recorded and given out.

`ProxyService.begin` accepts a request and returns an `InflightRequest`, whose `wait` gives the answer. Order matters: a
turn is written to the records before its client gets it, so that no client has an answer that a restarted server would
not know; and a session's next request begins only when the one before it is over.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from turngym.agents.proxy.answer import AnswerReader, reply_of
from turngym.agents.proxy.api_errors import busy, invalid
from turngym.agents.proxy.config import ProxySettings
from turngym.agents.proxy.engine_queue import STOPPING, EngineQueue, PendingRequest
from turngym.agents.proxy.openai_api import ChatRequest
from turngym.agents.proxy.restored_sessions import restore
from turngym.agents.proxy.session_episode import episode_of
from turngym.agents.proxy.session_tokens import ChatHistory, ChatListRenderer, Prompt
from turngym.agents.proxy.sessions import (
    REMEMBERED,
    Feedback,
    FeedbackStatus,
    HeardFeedback,
    ProxySession,
    SessionTable,
    session_name,
)
from turngym.agents.proxy.turn_records import ChatMessage, TurnRecord, TurnRecorder, common_prefix, usage_record
from turngym.agents.rendering.stop_text import StopText
from turngym.core import running_clock
from turngym.core.background_threads import failures_of_threads
from turngym.core.episode import Episode
from turngym.core.protocols import GenerateRequest, Generation, Policy, Sampling
from turngym.core.redaction import first_letters
from turngym.core.resolve import checked
from turngym.core.task import task_number


class InflightRequest:
    """A request in flight. Exactly one of `wait` (until it returns an answer) and `abandon` ends it.

    Args:
        session: is locked until the request is over; None for a side turn without a session id.
        deadline: when it has waited too long, on the service's clock; in a stream every drawn id moves it.
    """

    def __init__(
        self,
        service: ProxyService,
        request: ChatRequest,
        session: ProxySession | None,
        prompt: Prompt,
        pending: PendingRequest,
        deadline: float,
        salt: str,
    ) -> None:
        self.service, self.request, self.session, self.prompt = service, request, session, prompt
        self.pending, self.deadline = pending, deadline
        self.answer_id = f"chatcmpl-{secrets.token_hex(12)}"
        """What the client knows the answer as. It cannot be guessed: nobody else can say anything of the answer."""
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

    def wait(self, seconds: float) -> TurnRecord | None:
        """The turn with its answer; None if it is not there after `seconds`.

        Raises ApiError: 500 for an engine that failed, 503 when the deadline has passed. The request is over then.
        """
        try:
            generation = self.pending.answer.result(seconds)
        except FutureTimeout:
            if self.service.clock() < self.deadline:
                return None
            self.abandon("timed_out")
            raise busy("the request waited too long for the engine", status=503, seconds=5) from None
        except BaseException:
            self._end("failed")
            raise
        try:
            record = self.service.record_turn(self, generation)
        except BaseException:
            self._end("failed")
            raise
        self._end("")
        return record

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
                self.service.engine.release(self.pending.request.session)
            self.service.closed(self.request.client, self.session, why)


MAX_TOKENS = 512
"""Most tokens of an answer where neither request nor settings say."""
NAMES = 100
"""Most names that clients choose which are counted one by one."""
RENAMED_COUNTS = ("main", "side", "sessions_ended", "underway")
"""Counts that /healthz has under other names."""


class RequestCounts:
    """Counters of one service, and a notice about each client that names no session. Safe for several threads."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.ignored: Counter[str] = Counter()
        """Fields of requests that were not honored."""
        self.unsupported: Counter[str] = Counter()
        """Fields for whose value requests were refused, as this server does not do what they ask for."""
        self.unnamed: Counter[str] = Counter()
        """Requests that named no session, by what their client calls itself."""
        self.notice: Callable[[str], None] = lambda text: None
        """Gets lines for the log of the server."""
        self._underway: Counter[str] = Counter()
        """Requests under way, by client."""
        self._lock = threading.Lock()

    def add(self, what: str) -> None:
        """One more of `what`."""
        with self._lock:
            self.counts[what] += 1

    def begin(self, client: str, most: int, share: int) -> None:
        """One more request is under way. Raises ApiError (429) where `most` are already, or `share` of this client."""
        with self._lock:
            own = self._underway[client]
            if self.counts["underway"] >= most or own >= share:
                self.counts["turned_away"] += 1
                requests = f"{own} requests of this client" if own >= share else f"{most} requests"
                raise busy(f"{requests} are under way already; ask again later")
            self.counts["underway"] += 1
            self._underway[client] += 1

    def end(self, client: str, dropped: str) -> None:
        """Note that a request is over; `dropped` says why it got no answer, and is empty if it got one."""
        with self._lock:
            self.counts["underway"] -= 1
            self._underway[client] -= 1
            if dropped:
                self.counts[dropped] += 1

    def note_ignored(self, fields: Sequence[str]) -> None:
        with self._lock:
            for name in fields:
                _count(self.ignored, name)

    def note_unsupported(self, field: str) -> None:
        with self._lock:
            self.unsupported[field.partition("[")[0]] += 1

    def note_unnamed(self, user_agent: str, main: bool) -> None:
        """Count a request that names no session, and say once of each client that it does not."""
        with self._lock:
            new = _count(self.unnamed, user_agent) == 1
        if new:
            way = "told apart by their history" if main else "answered and not trained on"
            self.notice(
                f"{user_agent!r} names no session; its conversations are {way}. X-Session-Id names them exactly"
            )

    def note_untold(self) -> None:
        """Count a conversation that may be one of several, and say once that there are such."""
        with self._lock:
            self.counts["not_told_apart"] += 1
            new = self.counts["not_told_apart"] == 1
        if new:
            self.notice(
                "conversations without a session say the same word for word: which one a request continues cannot be "
                "told, so it begins a new one, and the turns before it have no next state. X-Session-Id names them"
            )

    def as_json(self) -> tuple[Counter[str], dict[str, Any]]:
        """(All counts; what /healthz shows: the tables, then the counts that it has under no other name.)"""
        with self._lock:
            counts = Counter(self.counts)
            tables = {name: dict(getattr(self, name)) for name in ("ignored", "unsupported", "unnamed")}
        return counts, tables | {name: count for name, count in sorted(counts.items()) if name not in RENAMED_COUNTS}


def _count(table: Counter[str], name: str) -> int:
    """Count a name that a client chose, in a table of bounded size."""
    name = first_letters(name, 60)
    name = name if name in table or len(table) < NAMES else "others"
    table[name] += 1
    return table[name]


def owner_of(request: ChatRequest) -> str:
    """A hash of whose conversations they are: the client and its user. "" if neither has a name."""
    whose = f"{request.client}/{request.user}"
    return "" if whose == "/" else session_name(request.client, whose, kind="owner")


class ProxyService:
    """Chat sessions over one policy: what the HTTP application calls.

    Args:
        folder: where the records are; sessions that are open in them go on.
        max_context: most ids of prompt and answer together.
        temperature: of main turns, whatever clients ask for: the trainer's own, so that log-probabilities as sampled
            mean the same to it. None: what the client asks for, as side turns always get.
        resumed_from: step of the checkpoint that training goes on from; what later steps used is unused again.
        learns: whether a trainer sets `on_session` and takes the sessions that end.
        on_close: called when nothing is generated any more; it ends the policy.
        share: the part of a limit that one client may take, from the limit; by default all of it.
        clock: the time in seconds; only differences count. By default it stops with the machine: a request that was
            asked before has not waited too long, and no engine stands still.

    Raises ProxyError for records of a newer version.
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
        learns: bool = False,
        on_close: Callable[[], None] | None = None,
        share: Callable[[int], int] = lambda limit: limit,
        clock: Callable[[], float] = running_clock.now,
    ) -> None:
        self.settings = checked(settings or ProxySettings())
        self.renderer, self.max_context, self.temperature = renderer, max_context, temperature
        self.name = self.settings.name or "turngym"
        self.stopping = False
        self.tally = RequestCounts()
        self.counts = self.tally.counts
        self._seed, self.clock = seed, clock
        self._learns, self._on_close = learns, on_close
        self.on_session: Callable[[Episode], None] = lambda episode: None
        """Gets each session that has ended, and (`meta["ended"]` "open") each with a turn behind another one."""
        self._numbers = count(1)
        self._share = share(self.settings.max_waiting)
        self.heard = HeardFeedback(share(REMEMBERED))
        self._gone: deque[tuple[ProxySession, str]] = deque()
        """Sessions that are over, with the reason, until it is written down."""
        self.engine = EngineQueue(
            policy,
            max_batch=self.settings.max_batch,
            max_waiting=self.settings.max_waiting,
            window=self.settings.window_ms / 1000,
            stops=StopText(renderer.tokenizer),
            clock=clock,
        )
        self.recorder = TurnRecorder(folder)
        # before restore(), which reads it
        if resumed_from is not None:
            self.recorder.write(usage_record("resumed", resumed_from))
        past = restore(folder, renderer, want_ended=learns, temperature=temperature)
        self.sessions = SessionTable(
            idle=self.settings.idle,
            limit=self.settings.max_sessions,
            share=share(self.settings.max_sessions),
            clock=clock,
            serial=past.serial,
        )
        self.sessions.restore(past.open)
        self.unused = past.ended
        """Sessions that ended before, as far as no trainer has used them."""
        self.votes = past.votes
        """Earlier judgments of these sessions and of those that go on."""
        self.feedback_before = past.feedback
        """Earlier feedback on turns of these sessions and of those that go on."""
        self.heard.restore(past.feedback, past.open, past.ended)

    def begin(self, request: ChatRequest) -> InflightRequest:
        """Accept a request: lock its session and queue its prompt.

        Raises ApiError: 400 for what can never be answered, 429 and 503 for what cannot be answered now.
        """
        self._admit(request.client)
        deadline, session = self.deadline(), None
        try:
            self._check_size(request)
            # a side turn without a session id has no session
            if request.session_id is not None:
                session = self._enter(session_name(request.client, request.session_id), deadline)
            else:
                self.tally.note_unnamed(request.user_agent, request.main)
                session = self._enter_unnamed(request, deadline) if request.main else None
            full = session is not None and request.main and len(session.turns) >= self.settings.session_turns
            if session is not None and full and not session.history.asks_again(request.messages):
                # a long session is handed on for training and goes on under a new key
                key = self.sessions.new_key(session.name)
                self._finish(session, "part", session.new_messages(request.messages), key)
                session.begin_part(key)
            history = session.history if session is not None and request.main else ChatHistory()
            prompt = self.renderer.prompt(history, request.messages, request.tools, most=self.max_context)
            engine_request = self._engine_request(request, prompt, session, next(self._numbers))
            pending = self.engine.submit(engine_request)
        except BaseException:
            self.closed(request.client, session, "refused")
            raise
        salt = f"{self._seed}/{engine_request.session}/{len(prompt.ids)}"
        return InflightRequest(self, request, session, prompt, pending, deadline, salt)

    def end(self, session_id: str, final: tuple[ChatMessage, ...] = (), *, client: str = "") -> int:
        """End a session because its client says so; returns its number of turns.

        `final` are messages after its last answer, or the whole conversation with them. Raises ApiError (400) for
        special tokens that `final` spells.
        """
        self._admit(client)
        session = None
        try:
            self.renderer.refuse_control(final)
            name = session_name(client, session_id)
            # one that is not known would take the place of another
            if not self.sessions.holds(name):
                return 0
            session = self._enter(name, self.deadline())
            turns = len(session.turns)
            is_whole = common_prefix(session.history.client_messages, final) > 0
            self._finish(session, "done", session.new_messages(final) if is_whole else final)
            self.sessions.end(session)
        finally:
            self.closed(client, session, "")
        return turns

    def feedback(
        self,
        feedback: Feedback,
        *,
        session_id: str | None = None,
        turn: int | None = None,
        answer: str | None = None,
        client: str = "",
    ) -> FeedbackStatus:
        """Take in a client's feedback on a turn, named by session and number (None: the last) or by its answer's id.

        Returns what becomes of the feedback. Raises ApiError: 404 for a turn that is not known, 429 and 503 as `begin`.

        Args:
            answer: id of the answer (`chatcmpl-...`); with it the session and the turn are not looked at.
            client: name of the client's key; "" where all clients share one. Turns of other clients are not known.
        """
        self._admit(client)
        try:
            place = self.heard.place(client, session_id, turn, answer)
            status: FeedbackStatus = "late"
            if place is not None:
                is_open = any(session.key == place[0] for session in self.sessions.all())
                status = self.heard.say(place, feedback, is_open=is_open, write=self.recorder.write)
        finally:
            self.closed(client, None, "")
        self.tally.add(f"feedback_{status}")
        return status

    def open_episodes(self) -> list[Episode]:
        """Sessions that go on, as they are now. To be called before any request is accepted."""
        sessions = [session for session in self.sessions.all() if session.turns]
        return [episode_of(session, "open", temperature=self.temperature) for session in sessions]

    def deadline(self) -> float:
        """Until when a request that comes now may wait, on `clock`."""
        return self.clock() + self.settings.deadline

    def sweep(self) -> int:
        """End sessions that were idle for too long; returns how many. What fails is done by the next sweep."""
        expired = self.sessions.expired()
        self._gone += [(session, "idle") for session in expired]
        self._finish_gone()
        return len(expired)

    def _finish_gone(self) -> None:
        while True:
            try:
                session, why = self._gone.popleft()
            except IndexError:  # none is left: requests and the sweep share the queue
                return
            try:
                self._finish(session, why)
            except BaseException:
                self._gone.appendleft((session, why))
                raise

    def health(self) -> dict[str, Any]:
        counts, tables = self.tally.as_json()
        status = "stalled" if self.engine.stands_still else "updating" if self.engine.paused else "ok"
        return {
            "status": "stopping" if self.stopping else status,
            "model": self.name,
            "turns": {"main": counts["main"], "side": counts["side"]},
            "sessions": {"open": len(self.sessions), "ended": counts["sessions_ended"]},
            "underway": counts["underway"],
            "engine": self.engine.as_json(),
            **({"threads": failures} if (failures := failures_of_threads()) else {}),
            **tables,
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

    def _check_size(self, request: ChatRequest) -> None:
        """Raises ApiError (400) for what is too long by its characters: tokenizing it could take half a minute."""
        most = self.max_context * self.renderer.longest_token
        characters = sum(message.characters for message in request.messages)
        characters += len(json.dumps(request.tools)) if request.tools else 0
        if characters > most:
            text = f"the messages are {characters} characters; this model holds {self.max_context} tokens"
            raise invalid(f"{text}, which are {most} at most", "messages", "context_length_exceeded")

    def _engine_request(
        self, request: ChatRequest, prompt: Prompt, session: ProxySession | None, number: int
    ) -> GenerateRequest:
        """The engine's form of the `number`th request. Raises ApiError (400) if no id fits behind the prompt."""
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
        # the engine's name of the session, and the random stream of the answer
        stream: tuple[int, ...]
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

    def _finish(
        self, session: ProxySession, why: str, final: tuple[ChatMessage, ...] = (), following: str = ""
    ) -> None:
        """End `session`, or a part of it, in the records, for the engine and for the trainer.

        `why` is as in `episode_of`; `final` are messages after the last answer; `following` is the next part's key.
        """
        if not session.turns:
            return
        messages = [message.as_json() for message in final]
        self.recorder.write({"kind": "end", "session": session.key, "why": why, "final": messages, "next": following})
        self.engine.release(f"{session.key}/{len(session.history.segments) - 1}")
        self.tally.add("sessions_ended")
        if self._learns:
            self.on_session(episode_of(session, why, final, temperature=self.temperature))

    def _enter(self, name: str, deadline: float) -> ProxySession:
        session, evicted = self.sessions.acquire(name, deadline)
        self._gone += [(former, "room") for former in evicted]
        # a full disk is told by this request's own record; the sweep ends the others
        with contextlib.suppress(OSError):
            self._finish_gone()
        return session

    def _enter_unnamed(self, request: ChatRequest, deadline: float) -> ProxySession:
        """The session that a conversation without an id continues, as far as that is sure, or a new one."""
        name, is_sure = self.sessions.name_of(request.client, owner_of(request), request.messages)
        if not is_sure:
            self.tally.note_untold()
        session = self._enter(name, deadline)
        while not session.continued_by(request.messages):
            # another request went on with it while this one waited
            self.sessions.release(session)
            session = self._enter(self.sessions.new_name(request.client), deadline)
        return session

    def _admit(self, client: str) -> None:
        if self.stopping:
            raise busy(STOPPING, status=503, seconds=5)
        self.tally.begin(client, self.settings.max_waiting, self._share)

    def record_turn(self, inflight: InflightRequest, generation: Generation) -> TurnRecord:
        """Write down a finished turn and add it to its session. Called once per request."""
        request, prompt, session = inflight.request, inflight.prompt, inflight.session
        text, _ = self.renderer.decode(generation.ids)
        reader = inflight.reader()
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
            reply=reply_of([*reader.feed(text), *reader.end()]),
            text=text,
            finish=generation.finish,
            version=generation.policy_version,
            version_spans=generation.version_spans,
            temperature=inflight.pending.request.sampling.temperature,
            retry=prompt.retry,
            owner=owner_of(request) if main and request.session_id is None else None,
        )
        # written before anything else: no client may have an answer that a restarted server would not know
        record = replace(record, at=self.recorder.write(record.as_json()))
        if session is not None and record.main:
            if prompt.opens and session.history.segments:
                self.engine.release(f"{session.key}/{len(session.history.segments) - 1}")
            session.apply(self.renderer, record, prompt.text)
            self.sessions.note(session)
            self.heard.note(session, inflight.answer_id, again=record.retry)
            if self._learns and len(session.turns) > 1:
                self.on_session(episode_of(session, "open", temperature=self.temperature))
        else:
            self.engine.release(inflight.pending.request.session)
        self.tally.add("main" if record.main else "side")
        if request.done and session is not None:
            self.sessions.end(session)
            self._gone.append((session, "done"))
            # the turn is written down, so it is answered; an end that finds no room is left to the sweep
            with contextlib.suppress(OSError):
                self._finish_gone()
        return record

    def closed(self, client: str, session: ProxySession | None, dropped: str) -> None:
        """Note that a client's request is over; `dropped` says why it got no answer, and is empty if it got one."""
        self.tally.end(client, dropped)
        if session is not None:
            self.sessions.release(session)
