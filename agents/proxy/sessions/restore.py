"""Sessions from the records of an earlier process: those still open go on, those that ended can be handed on again."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turngym.agents.proxy.conversation.chat import ChatRenderer
from turngym.agents.proxy.sessions.episodes import episode_of
from turngym.agents.proxy.sessions.records import TurnRecord, messages_from_json, read_records
from turngym.agents.proxy.sessions.session import ProxySession
from turngym.envs.episode import Episode


@dataclass(slots=True)
class Past:
    """What earlier processes left behind."""

    open: list[ProxySession] = field(default_factory=list)
    ended: list[Episode] = field(default_factory=list)
    """Sessions that no trainer has used, in the order in which they ended."""
    serial: int = 0
    """Highest number of a session."""


def restore(
    folder: Path, renderer: ChatRenderer, *, want_ended: bool = False, temperature: float | None = None
) -> Past:
    """Read `folder` twice: who was trained on, then the rest. `want_ended=False` leaves `Past.ended` empty."""
    used = _used(folder)
    past, under_way = Past(), dict[str, ProxySession]()
    for record in read_records(folder):
        key = record.get("session", "")
        if record["kind"] == "turn" and record["main"]:
            session = under_way.setdefault(key, ProxySession(key=key, name=key.rpartition("-")[0]))
            session.apply(renderer, TurnRecord.from_json(record))
            past.serial = max(past.serial, number_of(key))
        elif record["kind"] == "end" and key in under_way:
            session = under_way.pop(key)
            if want_ended and key not in used:
                final = messages_from_json(record["final"])
                past.ended.append(episode_of(session, record["why"], final, temperature=temperature))
            if record["next"]:
                session.begin_part(record["next"])
                under_way[session.key] = session
                past.serial = max(past.serial, number_of(session.key))
    past.open = list(under_way.values())
    return past


def number_of(key: str) -> int:
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


def mark(kind: str, step: int, episodes: Any = ()) -> dict[str, Any]:
    """The record of what happened to sessions: `trained`, `unused`; or `resumed` from the checkpoint of `step`."""
    return {"kind": kind, "step": step, "sessions": [episode.task.task_id for episode in episodes]}
