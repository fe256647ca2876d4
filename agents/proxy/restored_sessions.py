"""What a proxy takes up after a restart: open sessions go on; ended ones that no step was trained on are returned."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turngym.agents.proxy.session_episode import episode_of
from turngym.agents.proxy.session_tokens import ChatListRenderer
from turngym.agents.proxy.sessions import Feedback, ProxySession
from turngym.agents.proxy.turn_records import (
    RECORDS_FILE,
    RecordProblem,
    TurnRecord,
    iter_records,
    messages_from_json,
    read_records,
)
from turngym.core.episode import Episode
from turngym.core.errors import TurngymError
from turngym.core.protocols import Judgment


@dataclass(slots=True)
class RestoredSessions:
    """Sessions found in the records of earlier processes."""

    open: list[ProxySession] = field(default_factory=list)
    ended: list[Episode] = field(default_factory=list)
    """Sessions that no trainer has used, in the order in which they ended."""
    votes: dict[tuple[str, int], Judgment] = field(default_factory=dict)
    """Judgments of turns of `open` and `ended`, by session and turn."""
    feedback: dict[tuple[str, int], Feedback] = field(default_factory=dict)
    """Users' feedback on turns of `open` and `ended`."""
    serial: int = 0
    """Highest number of a session."""
    damaged: list[RecordProblem] = field(default_factory=list)
    """Lines that cannot be read, and turns that do not fit what was read."""
    set_aside: int = 0
    """Number of sessions left out because their lines are damaged."""


def restore(
    folder: Path, renderer: ChatListRenderer, *, want_ended: bool = False, temperature: float | None = None
) -> RestoredSessions:
    """Read the records twice: first which sessions were trained on, then all turns.

    A damaged line may have been a turn, the end or the use of any session. So all sessions that were open or waiting at
    that line are set aside, with a warning; sessions that began later are complete. Only sessions whose records are
    complete are trained on.

    Args:
        renderer: that of the model which answered; it rebuilds the ids of open sessions.
    """
    reading = _Reading(renderer, temperature, _used(folder) if want_ended else None)
    for record in iter_records(folder):
        if isinstance(record, RecordProblem):
            reading.doubt(record)
        elif record["kind"] in ("turn", "end"):
            try:
                reading.take(record)
            except (LookupError, ValueError, TypeError, AttributeError, TurngymError) as error:
                reason = f"a {record['kind']} of session {record.get('session')} does not fit: {error}"
                reading.doubt(RecordProblem(line=0, reason=reason))
        elif record["kind"] == "judged":
            judgment = Judgment(votes=tuple(record["votes"]), cut=record["cut"])
            reading.restored.votes[record["session"], record["turn"]] = judgment
        elif record["kind"] == "feedback":
            feedback = Feedback(score=record["score"], text=record["text"])
            reading.restored.feedback[record["session"], record["turn"]] = feedback
    restored = reading.restored
    restored.open = list(reading.under_way.values())
    wanted = {*reading.under_way, *(episode.task.task_id for episode in restored.ended)}
    restored.votes = {key: votes for key, votes in restored.votes.items() if key[0] in wanted}
    restored.feedback = {key: feedback for key, feedback in restored.feedback.items() if key[0] in wanted}
    if restored.damaged:
        first = restored.damaged[0]
        where = f"line {first.line}: " if first.line else ""
        warnings.warn(
            f"{folder / RECORDS_FILE}: {len(restored.damaged)} damaged records ({where}{first.reason}); "
            f"{restored.set_aside} sessions that they may belong to are neither continued nor trained on",
            stacklevel=2,
        )
    return restored


@dataclass(slots=True)
class _Reading:
    """The state of a pass through the records."""

    renderer: ChatListRenderer
    temperature: float | None
    used: set[str] | None
    """Sessions that were trained on; None if ended sessions are not wanted."""
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
            # a first turn repeats no messages: if this one does, those before it are in a damaged line
            if self.restored.damaged and key not in self.under_way and turn.kept and key not in self.doubtful:
                self._set_aside([key])
            if key not in self.doubtful:
                session = self.under_way.setdefault(key, ProxySession(key=key, name=key.rpartition("-")[0]))
                if turn.retry:
                    # feedback on the superseded answer is no feedback on this one
                    self.restored.feedback.pop((key, len(session.turns) - 1), None)
                session.apply(self.renderer, turn)

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
        self.restored.serial = max(self.restored.serial, int(key.rpartition("-")[2]))


def _used(folder: Path) -> set[str]:
    """Sessions that need not be handed on: trained on, or with nothing to train on."""
    steps: dict[str, int] = {}
    for record in read_records(folder):
        if record["kind"] in ("trained", "unused"):
            steps.update(dict.fromkeys(record["sessions"], record["step"]))
        elif record["kind"] == "resumed":
            # the checkpoint is older than these steps, whose training is lost
            steps = {key: step for key, step in steps.items() if step <= record["step"]}
    return set(steps)
