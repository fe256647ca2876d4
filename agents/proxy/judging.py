"""From finished chat sessions to a training step: turns are judged, sessions are buffered, hints go into prompts.

1. `TurnJudging`: a queue of turns in front of a `TurnJudge`. A turn is judged as soon as what came next is known; a
   judge that fails is asked again, after longer and longer waits.
2. `SessionBuffer`: holds judged sessions until a training step has enough turns.
3. `SessionHints`: tokenizes each turn's prompt again, with the judge's hint in it.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from turngym.agents.judges.hints import HINT_HEAD, is_plain
from turngym.agents.proxy.conversation import ChatListRenderer
from turngym.agents.proxy.sessions import Feedback, without_stale
from turngym.agents.proxy.turn_records import Tools, messages_from_json
from turngym.agents.rendering.conversation import Message
from turngym.envs.core.episode import Episode, Turn
from turngym.envs.core.protocols import JudgeRequest, Judgment, RolloutRequest

BACKLOG = 1024
"""Most sessions that wait for the judge, and most that wait for the trainer; one of 3,400 ids takes 31 kB. Where
clients are faster than the trainer, the oldest go: their turns would be many versions old."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionHints:
    """Fills in `Turn.hint_prompt_ids` of a proxy's episodes: the turn's messages with the hint in them, tokenized anew.

    The hint follows the last message of role user; where there is none, or with `last_message`, the last message; an
    empty list gets a user message. A hint with control tokens or control characters is refused, and one that leaves
    the answer no room in `max_context`: `hint` stays, `hint_prompt_ids` stays None.
    Source: [openclaw-rl] section 4.2; docs/algorithms.md#hinted-prompt.
    """

    renderer: ChatListRenderer
    max_context: int
    position: Literal["last_user", "last_message"] = "last_user"

    def enhance(self, episode: Episode) -> Episode:
        """`episode` with the prompts of its hints."""
        given: list[Message] = [dict(message) for message in episode.meta["before"]]
        tools: Tools = ()
        turns = []
        for turn, said in zip(episode.turns, episode.meta["chat"], strict=True):
            tools = tuple(said.get("tools", tools))
            added = [self.renderer.template_message(message) for message in messages_from_json(said["messages"])]
            given = [*given[: said["kept"]], *added]
            if turn.hint is not None and turn.hint_prompt_ids is None and is_plain(turn.hint, self.renderer.control):
                messages = [dict(message) for message in given] or [{"role": "user", "content": ""}]
                users = [place for place, message in enumerate(messages) if message["role"] == "user"]
                place = users[-1] if users and self.position == "last_user" else len(messages) - 1
                messages[place]["content"] += HINT_HEAD + turn.hint
                ids = self.renderer.ids(messages, tools)
                if len(ids) + turn.response_length <= self.max_context:
                    turn = replace(turn, hint_prompt_ids=ids)
            turns.append(turn)
            given.append(self.renderer.template.answer(turn.response))
        return replace(episode, turns=tuple(turns))


class SessionBuffer:
    """Implements `RolloutSource` over live sessions; safe for several threads.

    A step takes whole sessions, oldest first, until they hold `batch_turns` turns that can be trained on. From then
    until `updated` the engine is paused, so that no answer is sampled while the weights change, unless it answers with
    a copy of them (`live`). It is paused from the start, too, until the trainer asks for the first time (a resumed run
    loads its weights before that).

    Args:
        count_trainable: number of turns of a judged episode that can be trained on; episodes with none are counted and
            left out.
        pause_engine, resume_engine: pausing returns when the engine is idle.
        set_version: called with the version of the weights, while the engine is paused; with `live` whenever there are
            new ones, which it has to give to the engine.
        on_sessions: called with ("trained" | "unused", step or 0, episodes) for the records.
        staleness: most versions that a turn may be behind the student when it is trained on; older ones are excluded.
        newest_first: a step takes the sessions that came last, not those that wait longest.
        backlog: most sessions that wait for the trainer; the oldest are dropped and counted.
    """

    def __init__(
        self,
        *,
        count_trainable: Callable[[Episode], int],
        pause_engine: Callable[[], None],
        resume_engine: Callable[[], None],
        set_version: Callable[[int], None],
        on_sessions: Callable[[str, int, Sequence[Episode]], None],
        batch_turns: int = 16,
        backlog: int = BACKLOG,
        live: bool = False,
        staleness: int | None = None,
        newest_first: bool = False,
    ) -> None:
        self._usable, self._written = count_trainable, on_sessions
        self._pause_engine, self._resume_engine, self._set_version = pause_engine, resume_engine, set_version
        self._batch_turns, self._backlog = batch_turns, backlog
        self._live, self._staleness, self._newest_first = live, staleness, newest_first
        self._version = 0
        self._changed = threading.Condition()
        self._ready: deque[tuple[Episode, int]] = deque()
        self._ready_turns = 0
        self._paused = True
        self._closed = False
        self.counts: Counter[str] = Counter()
        self._pause_engine()

    def put_judged(self, episodes: Iterable[Episode]) -> None:
        """Add sessions whose turns carry a judge's votes already."""
        for given in episodes:
            episode = without_stale(given, self._version, self._staleness)
            turns = self._usable(episode)
            if not turns:
                self._written("unused", 0, [episode])
            with self._changed:
                if turns:
                    self._ready.append((episode, turns))
                    self._ready_turns += turns
                    while len(self._ready) > self._backlog:
                        self._ready_turns -= self._ready.popleft()[1]
                        self.counts["dropped_for_age"] += 1
                else:
                    self.counts["nothing_to_train_on"] += 1
                self._changed.notify_all()

    def amend(self, key: str, change: Callable[[Episode], Episode]) -> bool:
        """Change a session that waits for the trainer. Returns False if none with this key does."""
        with self._changed:
            for place, (episode, turns) in enumerate(self._ready):
                if episode.task.task_id == key:
                    changed = change(episode)
                    self._ready[place] = changed, self._usable(changed)
                    self._ready_turns += self._ready[place][1] - turns
                    self._changed.notify_all()
                    return True
        return False

    def __call__(self, request: RolloutRequest) -> list[Episode]:
        """Wait for a step's sessions, at most `request.episodes`; the engine is then paused, unless `live`.

        Raises KeyboardInterrupt once closed: the training loop then saves and stops.
        """
        if self._paused:
            self._set_version(request.step - 1)
            self.resume()
        # a new version of the student may make waiting turns too old
        with self._changed:
            self._version = request.step - 1
            waiting: list[tuple[Episode, int]] = []
            if self._staleness is not None:
                waiting, self._ready, self._ready_turns = list(self._ready), deque(), 0
        self.put_judged(episode for episode, _ in waiting)
        most, turns = request.episodes, 0
        taken: list[Episode] = []
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or self._ready_turns >= self._batch_turns or len(self._ready) >= most
            )
            if self._closed:
                raise KeyboardInterrupt
            while self._ready and turns < self._batch_turns and len(taken) < most:
                episode, more = self._ready.pop() if self._newest_first else self._ready.popleft()
                taken.append(episode)
                turns += more
            self._ready_turns -= turns
            self.counts["sessions_trained"] += len(taken)
            self.counts["turns_trained"] += turns
        # before the update: a run resumed from an older checkpoint takes back what later steps used
        self._written("trained", request.step, taken)
        if not self._live:
            self._pause_engine()
            self._paused = True
        return taken

    def updated(self, step: int) -> None:
        """The weights of `step` are in place: resume the engine."""
        self._set_version(step)
        self.resume()

    def close(self) -> None:
        """Stop the trainer when it next asks. Nothing is lost: sessions that were not trained on are in the records."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.resume()

    def as_json(self) -> dict[str, Any]:
        with self._changed:
            return {
                "ready_sessions": len(self._ready),
                "ready_turns": self._ready_turns,
                **dict(sorted(self.counts.items())),
            }

    def resume(self) -> None:
        """Resume the engine if it was paused for the trainer."""
        if self._paused:
            self._paused = False
            self._resume_engine()


class TurnJudge(Protocol):
    """Asks about turns and reads the answers; `trainers.live.turns` has the one for training."""

    @property
    def workers(self) -> int:
        """How many threads may ask at a time."""

    @property
    def batch(self) -> int:
        """Most turns that one of them asks about together."""

    def requests(self, episode: Episode) -> list[JudgeRequest]:
        """One for each turn that has a next state and no votes."""

    def ask(self, requests: Sequence[JudgeRequest]) -> list[Judgment]:
        """One judgment per request, in order; called by several threads."""

    def judged(self, turn: Turn, judgment: Judgment) -> Turn:
        """`turn` with its votes."""

    def settles(self, feedback: Feedback) -> bool:
        """Whether a turn of which a user said this needs no votes."""

    def heard(self, turn: Turn, feedback: Feedback) -> Turn:
        """`turn`, judged or not, with what a user said of it; the same a second time changes nothing."""

    def finished(self, episode: Episode) -> Episode:
        """A session that has ended, all of whose turns were judged."""


FIRST_WAIT, LONGEST_WAIT = 1.0, 120.0
"""Seconds before a turn whose votes all failed is judged again: doubled each time, up to the longest."""
GIVE_UP = 8
"""Failures after which a turn is given up. Only those count during which other turns were judged: if all fail, the
judge is down, and nothing is given up."""


@dataclass(slots=True)
class _Session:
    episode: Episode | None = None
    """The session once it has ended. Until then it is kept by the proxy alone: hundreds may be open for a long time."""
    votes: dict[int, Judgment] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Job:
    key: str
    request: JudgeRequest
    due: float
    failures: int = 0
    alone: int = 0
    """Failures while other turns were judged."""
    seen: int = 0
    """Turns that had been judged when it last failed."""

    @property
    def turn(self) -> int:
        return self.request.turn


class TurnJudging:
    """A queue of turns in front of a judge. Safe for several threads.

    Args:
        on_votes: called with session, turn and judgment before anything else knows of them, for the records.
        on_judged: gets every session that has ended, once all of its turns were judged or given up.
        votes: what an earlier process recorded: (session, turn) -> judgment.
        feedback: what users said to it: (session, turn) -> feedback.
        backlog: most ended sessions that wait for the judge; the oldest are dropped and counted.
    """

    def __init__(
        self,
        judge: TurnJudge,
        *,
        on_votes: Callable[[str, int, Judgment], object],
        on_judged: Callable[[Episode], None],
        votes: Mapping[tuple[str, int], Judgment] | None = None,
        feedback: Mapping[tuple[str, int], Feedback] | None = None,
        backlog: int = BACKLOG,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._judge, self._on_votes, self._on_judged = judge, on_votes, on_judged
        self._backlog, self._clock = backlog, clock
        self._known = dict(votes or {})
        self._heard = dict(feedback or {})
        self._changed = threading.Condition()
        self._sessions: dict[str, _Session] = {}
        self._jobs: list[_Job] = []
        self._asking: set[tuple[str, int]] = set()
        self._closed = False
        self.counts: Counter[str] = Counter()
        self.error = ""
        """The judge's last error."""
        self._threads = [
            threading.Thread(target=self._work, name=f"proxy-judge-{number}", daemon=True)
            for number in range(judge.workers)
        ]
        for thread in self._threads:
            thread.start()

    def update(self, episode: Episode) -> None:
        """Take in a session that has another turn: the turn before it can be judged now."""
        with self._changed:
            self._take(episode)
            self._changed.notify_all()

    def put(self, episode: Episode) -> None:
        """Take in a session that has ended."""
        with self._changed:
            self._take(episode).episode = episode
            waiting = [key for key, session in self._sessions.items() if session.episode is not None]
            for key in waiting[: -self._backlog]:
                self._forget(key)
                self.counts["dropped_for_age"] += 1
            self._changed.notify_all()
        self._complete(episode.task.task_id)

    def hear(self, key: str, turn: int, feedback: Feedback | None, is_open: bool) -> bool:
        """Take in a user's feedback; None takes it back. Returns False if the session was handed on already."""
        with self._changed:
            if not is_open and key not in self._sessions:
                return False
            if feedback is None:
                self._heard.pop((key, turn), None)
            else:
                self._heard[key, turn] = feedback
                if self._judge.settles(feedback):
                    self._jobs = [job for job in self._jobs if (job.key, job.turn) != (key, turn)]
        self._complete(key)
        return True

    def close(self, timeout: float = 10.0) -> None:
        """Ask about nothing more. What was not judged is in the records, and judged by the next process."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(timeout)

    def as_json(self) -> dict[str, Any]:
        with self._changed:
            return {
                "to_judge": len(self._jobs) + len(self._asking),
                "sessions_to_judge": sum(session.episode is not None for session in self._sessions.values()),
                **dict(sorted(self.counts.items())),
                **({"judge_error": self.error} if self.error else {}),
            }

    def _take(self, episode: Episode) -> _Session:
        """Queue the session's turns that nobody has judged."""
        key = episode.task.task_id
        session = self._sessions.setdefault(key, _Session())
        queued = {(job.key, job.turn) for job in self._jobs} | self._asking
        for request in self._judge.requests(episode):
            place = (key, request.turn)
            if place in self._known:
                session.votes[request.turn] = self._known.pop(place)
            elif request.turn not in session.votes and place not in queued and not self._settled(place):
                self._jobs.append(_Job(key, request, self._clock(), seen=self.counts["turns_judged"]))
        return session

    def _settled(self, place: tuple[str, int]) -> bool:
        """Whether a user has said of the turn what makes votes needless."""
        return place in self._heard and self._judge.settles(self._heard[place])

    def _work(self) -> None:
        while (jobs := self._next()) is not None:
            for job, judgment in zip(jobs, self._ask(jobs), strict=True):
                self._settle(job, judgment)

    def _next(self) -> list[_Job] | None:
        """The next turns to ask about, oldest first; None once closed."""
        with self._changed:
            while not self._closed:
                now = self._clock()
                due = [job for job in self._jobs if job.due <= now][: self._judge.batch]
                if due:
                    for job in due:
                        self._jobs.remove(job)
                        self._asking.add((job.key, job.turn))
                    return due
                wait = min((job.due for job in self._jobs), default=None)
                # a clock that a test moves says nothing when it is moved: look again after a moment
                self._changed.wait(None if wait is None else min(max(wait - now, 0.0), 0.5))
        return None

    def _ask(self, jobs: Sequence[_Job]) -> list[Judgment]:
        with self._changed:
            known = [job.key in self._sessions for job in jobs]
        asked = [job.request for job, wanted in zip(jobs, known, strict=True) if wanted]
        try:
            found = iter(self._judge.ask(asked) if asked else [])
            return [next(found) if wanted else Judgment(votes=()) for wanted in known]
        except Exception as error:  # a judge may be any code and any server: its failure must not end this thread
            return [Judgment(votes=(None,), error=f"{type(error).__name__}: {error}") for _ in jobs]

    def _settle(self, job: _Job, judgment: Judgment) -> None:
        failed = bool(judgment.votes) and all(vote is None for vote in judgment.votes)
        with self._changed:
            if failed and not self._settled((job.key, job.turn)) and not self._given_up(job, judgment):
                self._asking.discard((job.key, job.turn))
                self._jobs.append(job)
                self._changed.notify_all()
                return
        if judgment.votes:
            self._on_votes(job.key, job.turn, judgment)
        with self._changed:
            self._asking.discard((job.key, job.turn))
            self.counts["turns_judged"] += not failed
            if job.key in self._sessions:
                self._sessions[job.key].votes.setdefault(job.turn, judgment)
            self._changed.notify_all()
        self._complete(job.key)

    def _given_up(self, job: _Job, judgment: Judgment) -> bool:
        """Count a failure. Returns False if the turn is to be judged again."""
        self.counts["judge_failed"] += 1
        self.error = judgment.error or self.error
        job.failures += 1
        job.alone += self.counts["turns_judged"] > job.seen
        job.seen = self.counts["turns_judged"]
        if job.alone >= GIVE_UP:
            self.counts["judge_gave_up"] += 1
            return True
        job.due = self._clock() + min(FIRST_WAIT * 2.0 ** (job.failures - 1), LONGEST_WAIT)
        return False

    def _complete(self, key: str) -> None:
        """Hand a session on if it has ended and all of its turns were judged."""
        with self._changed:
            session = self._sessions.get(key)
            waits = any(job.key == key for job in self._jobs) or any(name == key for name, _ in self._asking)
            if session is None or session.episode is None or waits:
                return
            episode = session.episode
            heard = {turn: self._heard.pop((key, turn)) for name, turn in list(self._heard) if name == key}
            self._forget(key)
        turns = []
        for turn in episode.turns:
            judgment = session.votes.get(turn.index)
            if judgment is not None and judgment.votes:
                turn = self._judge.judged(turn, judgment)
            if turn.index in heard:
                turn = self._judge.heard(turn, heard[turn.index])
            turns.append(turn)
        self._on_judged(self._judge.finished(replace(episode, turns=tuple(turns))))

    def _forget(self, key: str) -> None:
        del self._sessions[key]
        self._jobs = [job for job in self._jobs if job.key != key]
