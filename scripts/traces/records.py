"""`turngym trace records`: what became of the turns that a proxy served."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro

from turngym.agents.proxy.sessions.records import FILE, read_records
from turngym.envs.core import TurngymError

OPEN, WAITS = "its session goes on", "waits for its judge or its step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """Say of every turn that a proxy served whether it was trained on, at which step, or why it was left out."""

    folder: tyro.conf.Positional[Path]
    """Folder of the proxy's run (its --out)."""
    turns: bool = False
    """Print a line per turn."""


@dataclass(slots=True)
class Fates:
    """What is known of main turns, by session key and index."""

    fate: dict[tuple[str, int], str] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    """Main turns of each session so far."""
    side: int = 0
    feedback: dict[tuple[str, int], int] = field(default_factory=dict)
    steps: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    _step_of: dict[tuple[str, int], int] = field(default_factory=dict)

    def take(self, record: Mapping[str, Any]) -> None:
        kind = record["kind"]
        if kind == "turn":
            self._turn(record)
        elif kind == "end":
            for turn in range(self.counts.get(record["session"], 0)):
                self.fate[record["session"], turn] = WAITS
        elif kind == "feedback":
            self.feedback[record["session"], record["turn"]] = record["score"]
        elif kind in ("trained", "unused"):
            self._used(record)
        elif kind == "resumed":
            # the checkpoint was older than these steps: what they learned is gone
            self.steps = {step: found for step, found in self.steps.items() if step <= record["step"]}
            for place in [place for place, step in self._step_of.items() if step > record["step"]]:
                self.fate[place] = WAITS
                del self._step_of[place]

    def _turn(self, record: Mapping[str, Any]) -> None:
        key = record["session"]
        if not record["main"]:
            self.side += 1
            return
        # an answer that was asked for again takes the place of the one before
        if not (record["retry"] and self.counts.get(key)):
            self.counts[key] = self.counts.get(key, 0) + 1
        self.fate[key, self.counts[key] - 1] = OPEN

    def _used(self, record: Mapping[str, Any]) -> None:
        if record["kind"] == "trained":
            self.steps[record["step"]] = record
        for key in record["sessions"]:
            # records of earlier versions do not say which turns
            known = record.get("turns", {}).get(key)
            trained = range(self.counts.get(key, 0)) if known is None else known["trained"]
            for turn in trained if record["kind"] == "trained" else ():
                self.fate[key, turn] = f"trained on at step {record['step']}"
                self._step_of[key, turn] = record["step"]
            for turn, why in ({} if known is None else known["left_out"]).items():
                self.fate[key, int(turn)] = f"left out: {why}"
                self._step_of[key, int(turn)] = record["step"]


def records(command: Records) -> int:
    """Print it. Raises TurngymError for a folder without records."""
    if not (command.folder / FILE).exists():
        raise TurngymError(f"{command.folder} has no {FILE}; name the folder that `turngym serve proxy` wrote to")
    for line in lines(read_records(command.folder), turns=command.turns):
        print(line)
    return 0


def lines(found: Iterable[Mapping[str, Any]], *, turns: bool) -> list[str]:
    """The report on records in their order."""
    fates = Fates()
    for record in found:
        fates.take(record)
    told = [_turn_line(place, why, fates.feedback.get(place)) for place, why in fates.fate.items()] if turns else []
    told += [_step_line(step, record) for step, record in sorted(fates.steps.items())]
    ends = Counter("trained on" if why.startswith("trained on") else why for why in fates.fate.values())
    sessions = len(fates.counts)
    told.append(f"{len(fates.fate)} main turns of {sessions} sessions, {fates.side} side turns")
    told += [f"{count:6} {why}" for why, count in ends.most_common()]
    if fates.feedback:
        up = sum(score > 0 for score in fates.feedback.values())
        told.append(f"{up:6} thumbs up, {len(fates.feedback) - up} down")
    return told


def _turn_line(place: tuple[str, int], why: str, thumb: int | None) -> str:
    said = "" if thumb is None else f", thumb {'up' if thumb > 0 else 'down'}"
    return f"session {place[0]} turn {place[1]}: {why}{said}"


def _step_line(step: int, record: Mapping[str, Any]) -> str:
    trained = sum(len(one["trained"]) for one in record.get("turns", {}).values())
    text = f"step {step}: {trained} turns of {len(record['sessions'])} sessions"
    if "versions_behind_max" in record:
        text += f", at most {record['versions_behind_max']:g} updates behind"
    return text + (f" and {record['age_s_max']:.0f} s old" if "age_s_max" in record else "")
