"""What users say about turns: which turn is meant, and what became known of it before."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from turngym.agents.proxy.errors import ApiError
from turngym.agents.proxy.sessions.session import ProxySession, session_name
from turngym.envs.episode import Episode

REMEMBERED = 10_000
"""Sessions and answers that feedback can name; the oldest are forgotten."""
Outcome = Literal["counted", "late", "recorded"]
"""`counted`: it teaches when its turn does; `late`: the turn was trained on, or left out, already; `recorded`: nothing
learns from scores here."""
Place = tuple[str, int]
"""Key of a session, and the index of a turn in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feedback:
    """What a user thinks of one turn."""

    score: int
    """1 or -1."""
    text: str = ""
    """What the user wrote about it."""


class HeardFeedback:
    """Finds the turn that feedback is about, and remembers what was said of it. Safe for several threads.

    Turns are counted as the client sees them: from the start of its conversation, also where that was handed on in
    parts. `on_feedback` gets session key, turn in it, feedback (None: it is taken back, for the turn was answered
    anew), and whether the session is open.
    """

    def __init__(self, on_feedback: Callable[[str, int, Feedback | None, bool], Outcome] | None = None) -> None:
        self._tell = on_feedback
        self._lock = threading.Lock()
        self._parts: OrderedDict[str, list[tuple[int, str, int]]] = OrderedDict()
        self._answers: OrderedDict[str, Place] = OrderedDict()
        self._said: OrderedDict[Place, Feedback] = OrderedDict()

    def restore(self, said: Mapping[Place, Feedback], begun: Sequence[ProxySession], ended: Sequence[Episode]) -> None:
        """What was said to an earlier process, and its sessions: those that go on, and those that have ended."""
        with self._lock:
            self._said.update(said)
            for episode in ended:
                key = episode.task.task_id
                self._note(key.rpartition("-")[0], episode.meta["first"], key, len(episode.turns))
            for session in begun:
                if session.turns:
                    self._note(session.name, session.first, session.key, len(session.turns))

    def note(self, session: ProxySession, answer: str = "", *, again: bool = False) -> None:
        """The session has another turn, the client's `answer`; `again`: in the place of the one before."""
        place = session.key, len(session.turns) - 1
        with self._lock:
            self._note(session.name, session.first, session.key, len(session.turns))
            if answer:
                _keep(self._answers, answer, place)
            taken_back = again and self._said.pop(place, None) is not None
        if taken_back and self._tell is not None:
            self._tell(*place, None, True)

    def place(self, session_id: str | None, turn: int | None, answer: str | None) -> Place:
        """The turn that a client names: by session and number (None: the last one), or by the id of its answer.

        Raises ApiError (404) for one that is not known.
        """
        return self._find(session_name(session_id or ""), turn) if answer is None else self._answered(answer)

    def _find(self, name: str, turn: int | None) -> Place:
        with self._lock:
            parts = self._parts.get(name)
        if not parts:
            raise ApiError(404, "no session of this name has had an answer here", param="session_id", code="not_found")
        last = parts[-1][0] + parts[-1][2] - 1
        wanted = last if turn is None else turn
        for first, key, turns in parts:
            if first <= wanted < first + turns:
                return key, wanted - first
        raise ApiError(404, f"turn is {wanted}; the session has turns 0 to {last}", param="turn", code="not_found")

    def _answered(self, answer: str) -> Place:
        with self._lock:
            place = self._answers.get(answer)
        if place is None:
            text = f"there was no main turn {answer!r} since this server started; name session_id and turn"
            raise ApiError(404, text, param="answer", code="not_found")
        return place

    def say(self, place: Place, feedback: Feedback, *, is_open: bool, write: Callable[[Any], object]) -> Outcome:
        """Take feedback in; the same once more changes nothing, another one takes its place."""
        with self._lock:
            if self._said.get(place) != feedback:
                # before it counts: a restarted server knows what its clients were told
                write(feedback_record(*place, feedback))
                _keep(self._said, place, feedback)
        return "recorded" if self._tell is None else self._tell(*place, feedback, is_open)

    def _note(self, name: str, first: int, key: str, turns: int) -> None:
        parts = [part for part in self._parts.pop(name, []) if part[0] < first and part[1] != key]
        _keep(self._parts, name, [*parts, (first, key, turns)])


def feedback_record(key: str, turn: int, feedback: Feedback) -> dict[str, Any]:
    """The record of what a user said of one turn."""
    return {"kind": "feedback", "session": key, "turn": turn, "score": feedback.score, "text": feedback.text}


def _keep(table: OrderedDict[Any, Any], key: Any, value: Any) -> None:
    table[key] = value
    if len(table) > REMEMBERED:
        table.popitem(last=False)
