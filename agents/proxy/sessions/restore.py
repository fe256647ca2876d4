"""Restores sessions from the records of an earlier process: open ones continue, unused finished ones are returned."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turngym.agents.proxy.conversation.chat import ChatListRenderer
from turngym.agents.proxy.sessions.episodes import episode_of
from turngym.agents.proxy.sessions.feedback import Feedback
from turngym.agents.proxy.sessions.records import (
    FILE,
    RecordProblem,
    TurnRecord,
    iter_records,
    messages_from_json,
    read_records,
)
from turngym.agents.proxy.sessions.session import ProxySession
from turngym.envs.core import TurngymError
from turngym.envs.episode import Episode
from turngym.envs.protocols import Judgment


@dataclass(slots=True)
class RestoredSessions:
    """Sessions found in the records of earlier processes."""

    open: list[ProxySession] = field(default_factory=list)
    ended: list[Episode] = field(default_factory=list)
    """Sessions that no trainer has used, in the order in which they ended."""
    votes: dict[tuple[str, int], Judgment] = field(default_factory=dict)
    """What a judge said about turns of `open` and `ended`, by session and turn."""
    feedback: dict[tuple[str, int], Feedback] = field(default_factory=dict)
    """What users said about turns of `open` and `ended`."""
    serial: int = 0
    """Highest number of a session."""
    damaged: list[RecordProblem] = field(default_factory=list)
    """Lines that cannot be read, and turns that do not fit what was read."""
    set_aside: int = 0
    """Sessions left out because of them."""


def restore(
    folder: Path, renderer: ChatListRenderer, *, want_ended: bool = False, temperature: float | None = None
) -> RestoredSessions:
    """Read the records twice: first which sessions were trained on, then all turns.

    `want_ended=False` leaves `RestoredSessions.ended` empty. A damaged line may have been a turn, an end or the note
    that a session was trained on, of any session: all that were under way or waited there are set aside, with a
    warning, and what began later is whole. Trained on is only what is known to be as it was.
    """
    reading = _Reading(renderer, temperature, _used(folder) if want_ended else None)
    for record in iter_records(folder):
        if isinstance(record, RecordProblem):
            reading.doubt(record)
        elif record["kind"] in ("turn", "end"):
            try:
                reading.take(record)
            except (LookupError, ValueError, TypeError, AttributeError, TurngymError) as error:
                reading.doubt(
                    RecordProblem(
                        line=0, reason=f"a {record['kind']} of session {record.get('session')} does not fit: {error}"
                    )
                )
        elif record["kind"] == "judged":
            reading.judged(record)
        elif record["kind"] == "feedback":
            said = Feedback(score=record["score"], text=record["text"])
            reading.restored.feedback[record["session"], record["turn"]] = said
    restored = reading.restored
    restored.open = list(reading.under_way.values())
    wanted = {*reading.under_way, *(episode.task.task_id for episode in restored.ended)}
    restored.votes = {place: votes for place, votes in restored.votes.items() if place[0] in wanted}
    restored.feedback = {place: said for place, said in restored.feedback.items() if place[0] in wanted}
    if restored.damaged:
        first = restored.damaged[0]
        where = f"line {first.line}: " if first.line else ""
        warnings.warn(
            f"{folder / FILE}: {len(restored.damaged)} damaged records ({where}{first.reason}); {restored.set_aside} "
            "sessions that they may belong to are neither continued nor trained on",
            stacklevel=2,
        )
    return restored


@dataclass(slots=True)
class _Reading:
    """Where a pass through the records is."""

    renderer: ChatListRenderer
    temperature: float | None
    used: set[str] | None
    """None: ended sessions are not asked for."""
    restored: RestoredSessions = field(default_factory=RestoredSessions)
    under_way: dict[str, ProxySession] = field(default_factory=dict)
    doubtful: set[str] = field(default_factory=set)

    def take(self, record: Mapping[str, Any]) -> None:
        key = record["session"]
        if record["kind"] == "end":
            self._end(key, record)
        elif record["main"]:
            turn = TurnRecord.from_json(record)
            self._count(key)
            # a first turn repeats nothing: those before it are in a damaged line
            if self.restored.damaged and key not in self.under_way and turn.kept and key not in self.doubtful:
                self._set_aside([key])
            if key not in self.doubtful:
                session = self.under_way.setdefault(key, ProxySession(key=key, name=key.rpartition("-")[0]))
                if turn.retry:
                    # what was said of the answer before says nothing of this one
                    self.restored.feedback.pop((key, len(session.turns) - 1), None)
                session.apply(self.renderer, turn)

    def judged(self, record: Mapping[str, Any]) -> None:
        votes = tuple(record["votes"])
        self.restored.votes[record["session"], record["turn"]] = Judgment(votes=votes, cut=record["cut"])

    def doubt(self, problem: RecordProblem) -> None:
        self.restored.damaged.append(problem)
        self._set_aside(list(self.under_way))
        self.restored.set_aside += len(self.restored.ended)
        self.under_way.clear()
        self.restored.ended.clear()

    def _end(self, key: str, record: Mapping[str, Any]) -> None:
        following = record["next"]
        if following:
            self._count(following)
        if key not in self.under_way:
            if self.restored.damaged and key not in self.doubtful:
                self._set_aside([key])
            if key in self.doubtful and following:
                self.doubtful.add(following)
            return
        session = self.under_way.pop(key)
        if self.used is not None and key not in self.used:
            final = messages_from_json(record["final"])
            self.restored.ended.append(episode_of(session, record["why"], final, temperature=self.temperature))
        if following:
            session.begin_part(following)
            self.under_way[following] = session

    def _set_aside(self, keys: Sequence[str]) -> None:
        self.doubtful.update(keys)
        self.restored.set_aside += len(keys)

    def _count(self, key: str) -> None:
        self.restored.serial = max(self.restored.serial, serial_of(key))


def serial_of(key: str) -> int:
    """The number in a session's key."""
    return int(key.rpartition("-")[2])


def _used(folder: Path) -> set[str]:
    """Sessions that need not be handed on: trained on, or found to hold nothing to train on."""
    steps: dict[str, int] = {}
    for record in read_records(folder):
        if record["kind"] in ("trained", "unused"):
            steps.update(dict.fromkeys(record["sessions"], record["step"]))
        elif record["kind"] == "resumed":
            # the checkpoint was older than these steps: what they learned is gone
            steps = {key: step for key, step in steps.items() if step <= record["step"]}
    return set(steps)


def votes_record(key: str, turn: int, judgment: Judgment) -> dict[str, Any]:
    """The record of what a judge said about one turn."""
    return {"kind": "judged", "session": key, "turn": turn, "votes": list(judgment.votes), "cut": judgment.cut}


def usage_record(kind: str, step: int, episodes: Any = ()) -> dict[str, Any]:
    """The record of what happened to sessions: `trained`, `unused`; or `resumed` from the checkpoint of `step`."""
    return {"kind": kind, "step": step, "sessions": [episode.task.task_id for episode in episodes]}
