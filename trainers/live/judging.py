"""How turns of live sessions are judged: each as soon as the next message is known, and again after a failure.

1. `SessionJudge`: asks a judge about turns and reads its votes. A user's feedback is a vote in their place.
2. `TurnJudging`: the queue in front of it. A judge that fails is asked again, after longer and longer waits.
3. `SessionHints`: tokenizes each turn's prompt again, with the judge's hint in it.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from turngym.agents.judges.judge_settings import UrlJudge
from turngym.agents.judges.judges import WORDS, is_plain, make_judge
from turngym.agents.judges.votes import MORE_THAN
from turngym.agents.proxy.session_tokens import ChatListRenderer
from turngym.agents.proxy.sessions import Feedback, Place
from turngym.agents.proxy.turn_records import ToolCall, Tools, messages_from_json
from turngym.agents.rendering.answer_messages import Message
from turngym.agents.rendering.skills import HINT_HEAD
from turngym.core.background_threads import SupervisedThread
from turngym.core.episode import Episode, Turn
from turngym.core.errors import TurngymError
from turngym.core.protocols import Judge, JudgeRequest, Judgment, Position, Question, joined, judgments, separate
from turngym.trainers.algorithm import Algorithm, PrivilegedText
from turngym.trainers.judged_episodes import HINTING, JudgeError, UnreadVotes, judged, requests
from turngym.trainers.live.proxy_options import LearningProxy
from turngym.trainers.live.sessions import BACKLOG

MARKS = ("[HINT_START]", "[HINT_END]")


def _score_text(feedback: Feedback) -> str:
    quote = f", {feedback.text!r}" if feedback.text else ""
    # the last box counts, whatever the user wrote
    return f"The user's thumb is {'up' if feedback.score > 0 else 'down'}{quote}. \\boxed{{{feedback.score}}}"


def _hint(feedback: Feedback) -> str | None:
    """The user's text in the form of a judge's hint; None if it is no hint."""
    text = feedback.text
    for mark in MARKS:
        text = text.replace(mark, " ")
    text = text.strip()
    if feedback.score > 0 or len(text) <= MORE_THAN:
        return None
    return f"{MARKS[0]}{text}{MARKS[1]} \\boxed{{1}}"


BATCH = 16
"""Turns that a judge in this process is asked about together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionJudge:
    """Asks a judge about turns of a session, and takes in what its users say.

    A user's feedback takes the place of the judge's votes. The thumb is a score. The text with a thumb down is a hint
    if it has more than 10 characters. The judge is asked only for what the feedback leaves open.
    """

    judge: Judge
    kind: Question
    enhance: Callable[[Episode], Episode] | None = None
    workers: int = 1
    """How many threads may ask at a time."""
    batch: int = BATCH
    """Most turns that one of them asks about together."""
    unread: UnreadVotes = field(default_factory=UnreadVotes)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def settles(self, feedback: Feedback) -> bool:
        """Whether a turn of which a user said this needs no votes. With a thumb up there is nothing to hint at."""
        return self.kind == "score" or feedback.score > 0 or _hint(feedback) is not None

    def heard(self, turn: Turn, feedback: Feedback) -> Turn:
        """`turn`, judged or not, with the user's vote. Applying it twice changes nothing."""
        if self.settles(feedback):
            return self._read(turn, (self._vote(feedback),))
        if self.kind == "hint":
            return turn  # a thumb down without words is no hint: the judge's stands
        hints = [separate(vote)[1] for vote in turn.judge_votes or () if vote is not None]
        votes = tuple(joined(_score_text(feedback), hint) for hint in hints)
        return self._read(turn, votes or (self._vote(feedback),))

    def _read(self, turn: Turn, votes: tuple[str | None, ...]) -> Turn:
        bare = replace(turn, hint=None, hint_prompt_ids=None)
        return judged(bare, self.kind, Judgment(votes=votes, cut=turn.judge_cut))

    def _vote(self, feedback: Feedback) -> str:
        hint_text = _hint(feedback) or "The user has nothing to hint at. \\boxed{-1}"
        if self.kind == "score":
            return _score_text(feedback)
        return hint_text if self.kind == "hint" else joined(_score_text(feedback), hint_text) or ""

    def amended(self, episode: Episode, turn: int, feedback: Feedback) -> Episode:
        """A session that was judged already, with later feedback on one of its turns."""
        turns = [self.heard(item, feedback) if item.index == turn else item for item in episode.turns]
        changed = replace(episode, turns=tuple(turns))
        return changed if self.enhance is None else self.enhance(changed)

    def finished(self, episode: Episode) -> Episode:
        """Add hints to prompts. If session after session could not be read, turns without scores stay untrained."""
        with self._lock:
            try:
                self.unread.check([episode], f"session {episode.task.task_id}")
            except JudgeError as error:
                warnings.warn(str(error), stacklevel=2)
                turns = [replace(turn, judge_scores=turn.judge_scores or None) for turn in episode.turns]
                episode = replace(episode, turns=tuple(turns))
        return episode if self.enhance is None else self.enhance(episode)


def make_session_judge(
    config: LearningProxy, algorithm: Algorithm, renderer: ChatListRenderer, max_context: int
) -> SessionJudge | None:
    """The judge that the options name; None for an algorithm that needs none. Raises TurngymError for an unfit one."""
    kind = algorithm.judge
    if kind is None:
        return None
    options = config.part("judge")
    remote = isinstance(options, UrlJudge)
    judge = make_judge(options, kind, WORDS, make_env=_no_env, seed=config.seed, device=config.device)
    hints = SessionHints(
        renderer=renderer,
        max_context=max_context,
        position=(algorithm.privileged or PrivilegedText()).position,
    )
    # a turn costs two questions there
    questions = 2 if kind == "both" else 1
    return SessionJudge(
        judge=judge,
        kind=kind,
        enhance=hints.enhance if kind in HINTING else None,
        # what is behind a url may be asked by several threads, a turn each: no turn waits for another's votes
        workers=max(1, options.judge_parallel // (options.judge_votes * questions)) if remote else 1,
        batch=1 if remote else BATCH,
        unread=UnreadVotes(limit=options.judge_unread),
    )


def _no_env() -> Any:
    raise TurngymError("sessions of a proxy have no environment")


FIRST_WAIT, LONGEST_WAIT = 1.0, 120.0
"""Seconds before a turn whose votes all failed is judged again: doubled each time, up to the longest."""
AFTER_FAILURE = 10.0
"""Seconds until a turn is judged again whose votes could not be written."""
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
    place: Place
    request: JudgeRequest
    due: float
    failures: int = 0
    alone: int = 0
    """Failures while other turns were judged."""
    seen: int = 0
    """Turns that had been judged when it last failed."""


class TurnJudging:
    """A queue of turns in front of a judge. Safe for several threads.

    Args:
        judge: asked about the turns, in as many threads as it has workers.
        on_votes: called with session, turn and judgment before anything else knows of them, for the records.
        on_judged: gets every session that has ended, once all of its turns were judged or given up.
        votes: judgments that an earlier process recorded, by (session, turn); None: none.
        feedback: what users told an earlier process, by (session, turn); None: nothing.
        clock: the time in seconds; only differences count.
    """

    def __init__(
        self,
        judge: SessionJudge,
        *,
        on_votes: Callable[[str, int, Judgment], object],
        on_judged: Callable[[Episode], None],
        votes: Mapping[Place, Judgment] | None = None,
        feedback: Mapping[Place, Feedback] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._judge, self._on_votes, self._on_judged = judge, on_votes, on_judged
        self._clock = clock
        self._known = dict(votes or {})
        self._heard = dict(feedback or {})
        self._changed = threading.Condition()
        self._sessions: dict[str, _Session] = {}
        self._jobs: list[_Job] = []
        self._asking: set[Place] = set()
        self._closed = False
        self.counts: Counter[str] = Counter()
        self.error = ""
        """The judge's last error."""
        self._threads = [SupervisedThread(self._work, f"proxy-judge-{number}") for number in range(judge.workers)]
        for thread in self._threads:
            thread.start()

    def put(self, episode: Episode) -> None:
        """Take in a session that has ended, or (`meta["ended"]` "open") whose last turn but one can be judged now."""
        key = episode.task.task_id
        with self._changed:
            session = self._sessions.setdefault(key, _Session())
            queued = {job.place for job in self._jobs} | self._asking
            for request in requests(episode, self._judge.kind):
                place = (key, request.turn)
                if place in self._known:
                    session.votes[request.turn] = self._known.pop(place)
                elif request.turn not in session.votes and place not in queued and not self._settled(place):
                    # without the episode, which rules and experts read: it would be kept until the votes are there
                    request = replace(request, episode=None)
                    self._jobs.append(_Job(place, request, self._clock(), seen=self.counts["turns_judged"]))
            if episode.meta["ended"] != "open":
                session.episode = episode
                ended = [name for name, other in self._sessions.items() if other.episode is not None]
                for name in ended[:-BACKLOG]:
                    self._forget(name)
                    self.counts["dropped_for_age"] += 1
            self._changed.notify_all()
        self._hand_on_if_judged(key)

    def hear(self, place: Place, feedback: Feedback | None, is_open: bool) -> bool:
        """Take in a user's feedback; None takes it back. Returns False if the session was handed on already."""
        with self._changed:
            if not is_open and place[0] not in self._sessions:
                return False
            if feedback is None:
                self._heard.pop(place, None)
            else:
                self._heard[place] = feedback
                if self._judge.settles(feedback):
                    self._jobs = [job for job in self._jobs if job.place != place]
        self._hand_on_if_judged(place[0])
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

    def _settled(self, place: Place) -> bool:
        """Whether a user's feedback on the turn makes votes needless."""
        return place in self._heard and self._judge.settles(self._heard[place])

    def _work(self) -> None:
        while (jobs := self._next()) is not None:
            try:
                answered = judgments(self._judge.judge.judge([job.request for job in jobs]), len(jobs), JudgeError)
            except Exception as error:  # a judge may be any code and any server: its failure must not end this thread
                answered = [Judgment(votes=(None,), error=f"{type(error).__name__}: {error}") for _ in jobs]
            for index, (job, judgment) in enumerate(zip(jobs, answered, strict=True)):
                try:
                    self._record_or_ask_again(job, judgment)
                except BaseException:
                    # votes that could not be written down are asked for again, once there may be room
                    with self._changed:
                        for late in jobs[index:]:
                            self._asking.discard(late.place)
                            late.due = self._clock() + AFTER_FAILURE
                            self._jobs.append(late)
                    raise

    def _next(self) -> list[_Job] | None:
        """The next turns to ask about, oldest first; None once closed."""
        with self._changed:
            while not self._closed:
                now = self._clock()
                due = [job for job in self._jobs if job.due <= now][: self._judge.batch]
                if due:
                    for job in due:
                        self._jobs.remove(job)
                        self._asking.add(job.place)
                    return due
                wait = min((job.due for job in self._jobs), default=None)
                # ends: `put` and `close` say so. A clock that a test moves says nothing: look again after a moment
                self._changed.wait(None if wait is None else min(max(wait - now, 0.0), 0.5))
        return None

    def _record_or_ask_again(self, job: _Job, judgment: Judgment) -> None:
        key, turn = job.place
        failed = all(vote is None for vote in judgment.votes)
        with self._changed:
            if failed and not self._settled(job.place) and not self._given_up(job, judgment):
                self._asking.discard(job.place)
                self._jobs.append(job)
                self._changed.notify_all()
                return
        self._on_votes(key, turn, judgment)
        with self._changed:
            self._asking.discard(job.place)
            self.counts["turns_judged"] += not failed
            if key in self._sessions:
                self._sessions[key].votes.setdefault(turn, judgment)
            self._changed.notify_all()
        self._hand_on_if_judged(key)

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

    def _hand_on_if_judged(self, key: str) -> None:
        """Hand a session on if it has ended and all of its turns were judged."""
        with self._changed:
            session = self._sessions.get(key)
            waits = any(place[0] == key for place in (*self._asking, *(job.place for job in self._jobs)))
            if session is None or session.episode is None or waits:
                return
            episode = session.episode
            heard = {place[1]: self._heard.pop(place) for place in list(self._heard) if place[0] == key}
            self._forget(key)
        turns = []
        for turn in episode.turns:
            if turn.index in session.votes:
                turn = judged(turn, self._judge.kind, session.votes[turn.index])
            if turn.index in heard:
                turn = self._judge.heard(turn, heard[turn.index])
            turns.append(turn)
        self._on_judged(self._judge.finished(replace(episode, turns=tuple(turns))))

    def _forget(self, key: str) -> None:
        del self._sessions[key]
        self._jobs = [job for job in self._jobs if job.place[0] != key]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionHints:
    """Fills in `Turn.hint_prompt_ids` of a proxy's episodes: the turn's messages with the hint in them, tokenized anew.

    The hint follows the last message of role user (`opening`: the first); where there is none, or with `last_message`,
    the last message; an empty list gets a user message. A hint with control tokens or control characters is refused,
    and one that leaves the answer no room in `max_context`: `hint` stays, `hint_prompt_ids` stays None.
    Source: [openclaw-rl] section 4.2; docs/algorithms.md#hinted-prompt.
    """

    renderer: ChatListRenderer
    max_context: int
    position: Position = "last_user"

    def enhance(self, episode: Episode) -> Episode:
        """`episode` with the prompts of its hints."""
        conversation: list[Message] = [dict(message) for message in episode.meta["before"]]
        tools: Tools = ()
        turns = []
        for turn, entry in zip(episode.turns, episode.meta["chat"], strict=True):
            tools = tuple(entry.get("tools", tools))
            added = [self.renderer.template_message(message) for message in messages_from_json(entry["messages"])]
            conversation = [*conversation[: entry["kept"]], *added]
            plain = turn.hint is not None and is_plain(turn.hint, self.renderer.template.encoder)
            if turn.hint is not None and plain and turn.hint_prompt_ids is None:
                messages = [dict(message) for message in conversation] or [{"role": "user", "content": ""}]
                users = [index for index, message in enumerate(messages) if message["role"] == "user"]
                which = {"opening": 0, "last_user": -1}.get(self.position)
                index = users[which] if users and which is not None else len(messages) - 1
                messages[index]["content"] += HINT_HEAD + turn.hint
                ids = self.renderer.ids(messages, tools)
                if len(ids) + turn.response_length <= self.max_context:
                    turn = replace(turn, hint_prompt_ids=ids)
            turns.append(turn)
            calls = tuple(map(ToolCall.from_json, entry.get("calls", ())))
            conversation.append(self.renderer.answer(episode.response_ids(turn).tolist(), turn.response, calls))
        return replace(episode, turns=tuple(turns))
