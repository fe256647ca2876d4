"""Judges turns as soon as what came next is known: many sessions at once, and what failed again, with back-off."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from turngym.agents.proxy.sessions.feedback import Feedback
from turngym.agents.proxy.sessions.turn_judge import TurnJudge
from turngym.envs.episode import Episode, Turn
from turngym.envs.protocols import Judgment

FIRST_WAIT, LONGEST_WAIT = 1.0, 120.0
"""Seconds before a turn whose votes all failed is asked about again: doubled each time, up to the longest."""
GIVE_UP = 8
"""So often a turn may fail while others are judged; when all fail the judge is down, and nothing is given up."""


@dataclass(slots=True)
class _Session:
    episode: Episode
    """As it was last heard of."""
    votes: dict[int, Judgment] = field(default_factory=dict)
    ended: bool = False


@dataclass(slots=True, eq=False)
class _Job:
    key: str
    turn: int
    due: float
    failures: int = 0
    alone: int = 0
    """Failures while other turns were judged."""
    seen: int = 0
    """Turns that had been judged when it last failed."""


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
        on_votes: Callable[[str, int, Judgment], None],
        on_judged: Callable[[Episode], None],
        votes: Mapping[tuple[str, int], Judgment] | None = None,
        feedback: Mapping[tuple[str, int], Feedback] | None = None,
        backlog: int = 4096,
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
        """Of the judge, the last one."""
        self._threads = [
            threading.Thread(target=self._work, name=f"proxy-judge-{number}", daemon=True)
            for number in range(judge.workers)
        ]
        for thread in self._threads:
            thread.start()

    def update(self, episode: Episode) -> None:
        """A session has another turn: the one before it can be judged."""
        with self._changed:
            self._take(episode)
            self._changed.notify_all()

    def put(self, episode: Episode) -> None:
        """A session has ended."""
        with self._changed:
            self._take(episode).ended = True
            waiting = [key for key, session in self._sessions.items() if session.ended]
            for key in waiting[: -self._backlog]:
                self._forget(key)
                self.counts["dropped_for_age"] += 1
            self._changed.notify_all()
        self._complete(episode.task.task_id)

    def hear(self, key: str, turn: int, feedback: Feedback | None, is_open: bool) -> bool:
        """A user has said something of a turn; None takes it back. False where its session was judged already."""
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
                "sessions_to_judge": sum(session.ended for session in self._sessions.values()),
                **dict(sorted(self.counts.items())),
                **({"judge_error": self.error} if self.error else {}),
            }

    def _take(self, episode: Episode) -> _Session:
        """Note the session as it is now, and queue its turns that nobody has judged."""
        key = episode.task.task_id
        session = self._sessions.setdefault(key, _Session(episode))
        session.episode = episode
        queued = {(job.key, job.turn) for job in self._jobs} | self._asking
        for request in self._judge.requests(episode):
            place = (key, request.turn)
            if place in self._known:
                session.votes[request.turn] = self._known.pop(place)
            elif request.turn not in session.votes and place not in queued and not self._settled(place):
                self._jobs.append(_Job(key, request.turn, self._clock(), seen=self.counts["turns_judged"]))
        return session

    def _settled(self, place: tuple[str, int]) -> bool:
        """Whether a user has said of the turn what makes votes needless."""
        return place in self._heard and self._judge.settles(self._heard[place])

    def _work(self) -> None:
        while (jobs := self._next()) is not None:
            judgments = self._ask(jobs)
            for job, judgment in zip(jobs, judgments, strict=True):
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
            episodes = [self._sessions[job.key].episode if job.key in self._sessions else None for job in jobs]
        asked = [
            None if episode is None else next((r for r in self._judge.requests(episode) if r.turn == job.turn), None)
            for job, episode in zip(jobs, episodes, strict=True)
        ]
        known = [request for request in asked if request is not None]
        try:
            found = iter(self._judge.ask(known) if known else [])
            return [Judgment(votes=()) if request is None else next(found) for request in asked]
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
        """Count a failure; False where the turn is to be asked about again."""
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
            if session is None or not session.ended or waits:
                return
            heard = {turn: self._heard.pop((key, turn)) for name, turn in list(self._heard) if name == key}
            self._forget(key)
        turns = tuple(self._with_votes(turn, session, heard.get(turn.index)) for turn in session.episode.turns)
        self._on_judged(self._judge.finished(replace(session.episode, turns=turns)))

    def _with_votes(self, turn: Turn, session: _Session, feedback: Feedback | None) -> Turn:
        judgment = session.votes.get(turn.index, Judgment(votes=()))
        judged = self._judge.judged(turn, judgment) if judgment.votes else turn
        return judged if feedback is None else self._judge.heard(judged, feedback)

    def _forget(self, key: str) -> None:
        del self._sessions[key]
        self._jobs = [job for job in self._jobs if job.key != key]
