"""What a proxy takes up after a restart: open sessions go on; ended ones that no step was trained on are returned."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from pathlib import Path

from turngym.agents.proxy.session_episode import episode_of
from turngym.agents.proxy.session_tokens import ChatListRenderer
from turngym.agents.proxy.sessions import Feedback, ProxySession
from turngym.agents.proxy.turn_records import RECORDS_FILE, TurnRecord, iter_records, messages_from_json, read_records
from turngym.core.episode import Episode
from turngym.core.errors import TurngymError
from turngym.core.protocols import Judgment
from turngym.core.trace import TraceProblem


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


def restore(
    folder: Path, renderer: ChatListRenderer, *, want_ended: bool = False, temperature: float | None = None
) -> RestoredSessions:
    """Read the records twice: first which sessions were trained on, then all turns.

    A damaged line may have been a turn, the end or the use of any session. So all sessions that were open or waiting at
    that line are left out, with a warning; sessions that began later are complete. Only sessions whose records are
    complete are trained on.

    Args:
        renderer: that of the model which answered; it rebuilds the ids of open sessions.
        want_ended: False leaves `RestoredSessions.ended` empty.
        temperature: the trainer's, as in `episode_of`.
    """
    used = _used(folder) if want_ended else None
    restored, open_sessions, lost, problems = RestoredSessions(), dict[str, ProxySession](), set[str](), list[str]()
    for record in iter_records(folder):
        if isinstance(record, TraceProblem):
            problems.append(str(record))
            lost |= open_sessions.keys()
            open_sessions.clear()
            restored.ended.clear()
            continue
        kind, key, following = record["kind"], record.get("session", ""), record.get("next", "")
        if kind == "judged":
            restored.votes[key, record["turn"]] = Judgment(votes=tuple(record["votes"]), cut=record["cut"])
        elif kind == "feedback":
            restored.feedback[key, record["turn"]] = Feedback(score=record["score"], text=record["text"])
        elif kind == "end" or (kind == "turn" and record["main"]):
            numbers = [int(name.rpartition("-")[2]) for name in (key, following) if name]
            restored.serial = max(restored.serial, *numbers)
        if kind == "turn" and record["main"] and key not in lost:
            session = open_sessions.setdefault(key, ProxySession(key=key, name=key.rpartition("-")[0]))
            try:
                turn = TurnRecord.from_json(record)
                if turn.kept > len(session.history.client_messages):
                    raise ValueError("the turns before it are missing")
                session.apply(renderer, turn)
            # a chat template of another model may refuse what was said
            except (LookupError, ValueError, TypeError, AttributeError, TurngymError) as error:
                problems.append(f"a turn of session {key} does not fit: {error}")
                lost.add(key)
                del open_sessions[key]
                continue
            if turn.retry:
                # feedback on the superseded answer is no feedback on this one
                restored.feedback.pop((key, len(session.turns) - 1), None)
        elif kind == "end" and key in open_sessions:
            session = open_sessions.pop(key)
            if used is not None and key not in used:
                final = messages_from_json(record["final"])
                restored.ended.append(episode_of(session, record["why"], final, temperature=temperature))
            if following:
                session.begin_part(following)
                open_sessions[following] = session
        elif kind == "end" and key in lost and following:
            lost.add(following)
    restored.open = list(open_sessions.values())
    wanted = {*open_sessions, *(episode.task.task_id for episode in restored.ended)}
    restored.votes = {place: votes for place, votes in restored.votes.items() if place[0] in wanted}
    restored.feedback = {place: feedback for place, feedback in restored.feedback.items() if place[0] in wanted}
    if problems:
        warnings.warn(
            f"{folder / RECORDS_FILE}: {len(problems)} records cannot be used ({problems[0]}); sessions that they may "
            "belong to are neither continued nor trained on",
            stacklevel=2,
        )
    return restored


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
