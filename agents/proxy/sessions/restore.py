"""Restores sessions from the records of an earlier process: open ones continue, unused finished ones are returned."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turngym.agents.proxy.conversation.chat import ChatListRenderer
from turngym.agents.proxy.sessions.episodes import episode_of
from turngym.agents.proxy.sessions.records import TurnRecord, messages_from_json, read_records
from turngym.agents.proxy.sessions.session import ProxySession
from turngym.envs.episode import Episode


@dataclass(slots=True)
class RestoredSessions:
    """Sessions found in the records of earlier processes."""

    open: list[ProxySession] = field(default_factory=list)
    ended: list[Episode] = field(default_factory=list)
    """Sessions that no trainer has used, in the order in which they ended."""
    serial: int = 0
    """Highest number of a session."""


def restore(
    folder: Path, renderer: ChatListRenderer, *, want_ended: bool = False, temperature: float | None = None
) -> RestoredSessions:
    """Read the records twice: first which sessions were trained on, then all turns.

    `want_ended=False` leaves `RestoredSessions.ended` empty.
    """
    used = _used(folder)
    restored, under_way = RestoredSessions(), dict[str, ProxySession]()
    for record in read_records(folder):
        key = record.get("session", "")
        if record["kind"] == "turn" and record["main"]:
            session = under_way.setdefault(key, ProxySession(key=key, name=key.rpartition("-")[0]))
            session.apply(renderer, TurnRecord.from_json(record))
            restored.serial = max(restored.serial, serial_of(key))
        elif record["kind"] == "end" and key in under_way:
            session = under_way.pop(key)
            if want_ended and key not in used:
                final = messages_from_json(record["final"])
                restored.ended.append(episode_of(session, record["why"], final, temperature=temperature))
            if record["next"]:
                session.begin_part(record["next"])
                under_way[session.key] = session
                restored.serial = max(restored.serial, serial_of(session.key))
    restored.open = list(under_way.values())
    return restored


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


def usage_record(kind: str, step: int, episodes: Any = ()) -> dict[str, Any]:
    """The record of what happened to sessions: `trained`, `unused`; or `resumed` from the checkpoint of `step`."""
    return {"kind": kind, "step": step, "sessions": [episode.task.task_id for episode in episodes]}
